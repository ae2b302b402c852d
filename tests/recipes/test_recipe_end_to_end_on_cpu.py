# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A recipe for real: GSM8K's data preparation and GSM8K's script take two steps on this machine's CPU under jet_fp8.

The policy is a random one of a million parameters, so no answer is right; an entropy bonus gives the steps a gradient.
What else the test overrides is a size, what the demo overrides on a CPU, and the reference policy, which needs a GPU.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recipe_cases import RECIPES, ROOT, SETTINGS

from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.demo.policy import PolicyConfig, build_model, build_tokenizer, save_policy
from jetrl_verl.tools.launch import RunPaths, build_environment
from jetrl_verl.tools.process_tree import ProcessTree

STEPS = 2

ON_A_CPU = (
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.checkpoint_engine.",
    "actor_rollout_ref.rollout.enable_sleep_mode",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine",
    "data.dataloader_num_workers",
    "hydra.run.dir",
    "ray_kwargs.ray_init.",
    "reward.num_workers",
    "trainer.v1.sampler.",
    "transfer_queue.",
)
"""Keys whose values are taken from the demo: how few processes, how small buffers, nothing that a CPU lacks."""

SIZES = (
    "data.train_batch_size=4",
    "data.max_prompt_length=128",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.n=2",
    # verl's FSDP2 keeps a reference policy in pinned memory, which takes a GPU driver.
    "actor_rollout_ref.actor.use_kl_loss=False",
    "trainer.val_before_train=False",
    f"trainer.test_freq={STEPS}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=-1",
)


def write_raw(folder: Path) -> None:
    folder.mkdir()
    for split, count in (("train", 12), ("test", 3)):
        records = [
            {"question": f"What is {i}+7?", "answer": f"{i}+7=<<{i}+7={i + 7}>>\n#### {i + 7}"} for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.timeout(1200)
def test_gsm8k_takes_two_steps_on_a_cpu(tmp_path):
    raw, data, policy, metrics = (tmp_path / name for name in ("raw", "data", "policy", "metrics.jsonl"))
    write_raw(raw)
    prepare = [sys.executable, "-m", "recipes.gsm8k.prepare_data", "--local-dir", str(raw), "--out", str(data)]
    subprocess.run(prepare, cwd=ROOT, check=True)
    tokenizer = build_tokenizer()
    save_policy(build_model(PolicyConfig(), tokenizer), tokenizer, policy)

    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    demo = build_overrides("jet_fp8", Prepared(tmp_path, {}), paths, "cpu", STEPS)
    environment = build_environment(paths, "cpu")
    for name in (*SETTINGS, "VERL_FILE_LOGGER_PATH"):
        environment.pop(name, None)
    environment |= {
        "PRECISION": "jet_fp8",
        "ATTENTION": "sdpa",
        "PYTHON": sys.executable,
        "DATA": str(data),
        "MODEL_PATH": str(policy),
        "OUT": str(tmp_path / "out"),
        "METRICS": str(metrics),
        "GPUS_PER_NODE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # vLLM calls ninja by name
    }
    on_a_cpu = [word for word in demo if word.lstrip("+").startswith(ON_A_CPU)]
    command = ["bash", str(RECIPES / "gsm8k/run_qwen3_8b.sh"), *on_a_cpu, *SIZES]
    with ProcessTree(command, environment, paths.log) as tree:
        while (status := tree.poll()) is None:
            time.sleep(0.5)
    log = paths.log.read_text()
    assert status == 0, log[-4000:]

    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    assert len(steps) == STEPS
    for step in steps:
        assert 0 < step["actor/grad_norm"] < math.inf
        assert math.isfinite(step["rollout_corr/k3_kl"])
        assert 0 <= step["critic/score/mean"] <= 1
    assert 0 <= steps[-1]["val-core/openai/gsm8k/acc/mean@1"] <= 1
    digests = re.findall(r"jetrl weight sync: loaded in .* held in .* live digest (0x\w+)", log)
    assert len(digests) == len(set(digests)) == STEPS + 1, "both sides held the same weights, and each step moved them"
