# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes end to end: data preparation and scripts run two steps on a CPU, in ``make test-all``.

The policy is random with the recipe's family, so hardly an answer is right; an entropy bonus gives a gradient."""

import copy
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import RAW_RECORDS, RECIPES, ROOT, SETTINGS
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from jetrl_verl.tools.demo.overrides import words_on_a_cpu
from jetrl_verl.tools.demo.policy import build_tokenizer, save_policy
from jetrl_verl.tools.launch import RunPaths, build_environment, quote
from jetrl_verl.tools.process_tree import ProcessTree

STEPS = 2
MAX_RESPONSE = 16

SIZES = (
    "data.train_batch_size=4",
    "data.max_prompt_length=400",
    f"data.max_response_length={MAX_RESPONSE}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    # verl's FSDP2 keeps a reference policy in pinned memory, which needs a GPU driver.
    "actor_rollout_ref.actor.use_kl_loss=False",
    "trainer.val_before_train=False",
    f"trainer.test_freq={STEPS}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=-1",
)


@dataclass(frozen=True)
class Case:
    """A recipe's script and the settings that make it small.

    Attributes:
        family: of the policy. raw: split -> its record in ``RAW_RECORDS``. metric: accuracy that a validation writes.
        settings: variables of the script. words: overrides of this recipe alone.
        data: the recipe that prepares its data, if it is another one.
    """

    script: str
    family: str
    raw: dict[str, str]
    metric: str
    settings: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    data: str = ""

    @property
    def recipe(self) -> str:
        return self.data or self.script.partition("/")[0]


GSM8K_ALONE = {"train": "gsm8k", "test": "gsm8k"}
GSM8K_MATH = {"gsm8k_train": "gsm8k", "math_train": "math", "gsm8k_test": "gsm8k", "math_500": "math_500"}
DAPO = {"dapo_math_17k": "dapo", "aime_2024": "dapo"}
ONE_PROCESS = {"TP": "1", "SP": "1", "OFFLOAD": "False"}
# No answer is right; the overlong penalty makes rewards within a group differ by length.
BY_LENGTH = (
    "actor_rollout_ref.rollout.n=4",
    "algorithm.filter_groups.metric=reward",
    "reward.reward_kwargs.overlong_buffer_cfg.len=8",
)
# `auto` on a Hopper GPU; on a CPU it is stock, which does not support a mixture.
SHARED = ("jetrl.operations=shared",)
SAVED = (f"trainer.save_freq={STEPS}",)
APART = ("ray_kwargs.ray_init.num_gpus=2", "trainer.v1.separate_async.parameter_sync_step=2")
AIME, MATH, GSM8K = "aime_2024", "HuggingFaceH4/MATH-500", "openai/gsm8k"

CASES = {
    "gsm8k": Case("gsm8k/run_qwen3_8b.sh", "qwen3", GSM8K_ALONE, GSM8K),
    "async": Case("async/run_qwen3_8b.sh", "qwen3", GSM8K_ALONE, GSM8K, {"ROLLOUT_GPUS": "1"}, APART, "gsm8k"),
    "dapo-7b": Case("dapo/run_qwen2_5_7b.sh", "qwen2", DAPO, AIME, ONE_PROCESS, BY_LENGTH),
    "dapo-32b": Case("dapo/run_qwen2_5_32b.sh", "qwen2", DAPO, AIME, ONE_PROCESS, BY_LENGTH),
    "deepscaler": Case(
        "deepscaler/run_r1_distill_qwen_1_5b.sh",
        "qwen2",
        {"deepscaler": "deepscaler", "aime_2024": "aime_2024"},
        f"HuggingFaceH4/{AIME}",
        {"STAGE": "8k"},
        SAVED,
    ),
    "qwen3-moe": Case(
        "qwen3_moe/run_qwen3_30b_a3b_base.sh", "qwen3_moe", GSM8K_MATH, MATH, {"OFFLOAD": "False"}, SHARED
    ),
    "qwen3_5-4b": Case("qwen3_5/run_qwen3_5_4b.sh", "qwen3_5", GSM8K_ALONE, GSM8K, words=SHARED),
    "qwen3_5-27b": Case(
        "qwen3_5/run_qwen3_5_27b.sh", "qwen3_5", GSM8K_ALONE, GSM8K, ONE_PROCESS | {"NNODES": "1"}, SHARED
    ),
    "qwen3_5-35b": Case("qwen3_5/run_qwen3_5_35b_a3b.sh", "qwen3_5_moe", GSM8K_ALONE, GSM8K, ONE_PROCESS, SHARED),
    "paper-llama": Case("jetrl_paper/run_llama3_1_8b.sh", "llama", GSM8K_MATH, MATH),
    "paper-qwen2": Case("jetrl_paper/run_qwen2_5_7b.sh", "qwen2", GSM8K_MATH, MATH),
    "paper-qwen3": Case(
        "jetrl_paper/run_qwen3_8b_base.sh",
        "qwen3",
        {"deepmath": "deepmath", "gsm8k_test": "gsm8k", "math_500": "math_500"},
        MATH,
        {"DATASET": "deepmath", "RESPONSE": "16k"},
    ),
}
RUNS = [("gsm8k", "jet_fp8"), ("gsm8k", "bf16"), *((name, "jet_fp8") for name in CASES if name != "gsm8k")]


def varied(record: dict[str, Any], number: int) -> dict[str, Any]:
    """The record with another question, since data preparation drops duplicates."""
    record = copy.deepcopy(record)
    for key in {"question", "problem"} & record.keys():
        record[key] = f"{number}: {record[key]}"
    if "prompt" in record:
        record["prompt"][0]["content"] = record["prompt"][0]["content"].replace("$17", f"${number}")
        record["extra_info"]["index"] += str(number)
    return record


def write_raw(case: Case, folder: Path) -> None:
    folder.mkdir()
    for split, name in case.raw.items():
        records = [varied(RAW_RECORDS[name], i) for i in range(12)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_policy(family: str, folder: Path) -> None:
    """``tiny_model`` with the demo's tokenizer."""
    tokenizer = build_tokenizer()
    sizes = dict(vocab_size=len(tokenizer), intermediate_size=512, max_position_embeddings=512)
    tokens = dict(pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    save_policy(tiny_model(family, 7, **sizes, **tokens), tokenizer, folder)


def run_recipe(case: Case, precision: str, folder: Path) -> tuple[list[dict[str, float]], str]:
    """Prepare the case's data and run its script; the metrics of its steps and its log."""
    raw, data, policy, metrics = (folder / name for name in ("raw", "data", "policy", "metrics.jsonl"))
    write_raw(case, raw)
    prepare = [sys.executable, "-m", f"recipes.{case.recipe}.prepare_data", *case.raw]
    subprocess.run([*prepare, "--local-dir", str(raw), "--out", str(data)], cwd=ROOT, check=True)
    write_policy(case.family, policy)

    paths = RunPaths(folder / "run")
    paths.folder.mkdir()
    environment = build_environment(paths, "cpu")
    for name in (*SETTINGS, "VERL_FILE_LOGGER_PATH"):
        environment.pop(name, None)
    environment |= {
        "PRECISION": precision,
        "PYTHON": sys.executable,
        "DATA": str(data),
        "MODEL_PATH": str(policy),
        "OUT": str(folder / "out"),
        "METRICS": str(metrics),
        "GPUS_PER_NODE": "1",
        "MAX_RESPONSE_LENGTH": str(MAX_RESPONSE),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # vLLM calls ninja by name
        **case.settings,
    }
    words = [*words_on_a_cpu(), f"hydra.run.dir={quote(paths.folder / 'hydra')}", *SIZES, *case.words]
    command = ["bash", str(RECIPES / case.script), *words]
    with ProcessTree(command, environment, paths.log) as tree:
        while (status := tree.poll()) is None:
            time.sleep(0.5)
    log = paths.log.read_text()
    assert status == 0, log[-4000:]
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()], log


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_a_recipe_takes_two_steps_on_a_cpu(name, precision, tmp_path):
    case = CASES[name]
    steps, log = run_recipe(case, precision, tmp_path)
    assert len(steps) == STEPS
    for step in steps:
        assert 0 < step["actor/grad_norm"] < math.inf
        assert math.isfinite(step["rollout_corr/k3_kl"])
        assert -2 <= step["critic/score/mean"] <= 1
    accuracies = [value for key, value in steps[-1].items() if key.startswith(f"val-core/{case.metric}/acc/mean")]
    assert len(accuracies) == 1 and 0 <= accuracies[0] <= 1
    if precision != "bf16":
        digests = re.findall(r"jetrl weight sync: loaded in .* held in .* live digest (0x\w+)", log)
        assert len(digests) == len(set(digests)) == STEPS + 1, "both sides hold the same weights, each step moves them"
    if case.words == SAVED:
        (saved,) = (tmp_path / "out").glob(f"*/*/global_step_{STEPS}/actor/huggingface")
        assert all("jetrl" not in file.read_text() for file in saved.glob("*.json"))
        stage = AutoModelForCausalLM.from_pretrained(saved)
        assert stage.config._attn_implementation == "sdpa" and stage.config.model_type == case.family


def test_every_script_has_a_case():
    scripts = {str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/run_*.sh")}
    assert scripts == {case.script for case in CASES.values()}
