# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Samples with and without an image in real CPU jobs of each family with a vision tower: text agrees in every bit."""

import io
from importlib.util import find_spec
from pathlib import Path

import numpy
import pyarrow.parquet
import pytest
from jobs import ACTOR, ROLLOUT, Run, train
from PIL import Image
from test_overrides_of_scripts_on_cpu import words_of_sizes
from test_parallel_on_cpu import TWO_RANKS
from tiny_models import WITH_TOWER, save_policy
from verl_overrides import SCRIPTS, WITH_IMAGES, script_words

from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.tools.demo import task
from jetrl_verl.tools.demo.overrides import words_on_a_cpu

pytest.importorskip("torchvision", reason="transformers' processors of images and videos need it")

STEPS, PROMPTS, GROUP = 2, 8, 4


def write_data(train: Path, folder: Path) -> Path:
    """The demo's problems in the published format, every other one after an image."""
    rows, chance = pyarrow.parquet.read_table(train).slice(0, 64).to_pylist(), numpy.random.RandomState(0)
    for number, row in enumerate(rows):
        row["images"] = []
        if number % 2:
            file, pixels = io.BytesIO(), chance.randint(0, 255, (64, 96 + 32 * (number % 3), 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(file, "PNG")
            row["images"] = [{"bytes": file.getvalue(), "path": None}]
            row["prompt"][0]["content"] = f"<image>{row['prompt'][0]['content']}"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def check(policy, folder: Path, monkeypatch, family: str, *words: str, **changes: int) -> Run:
    """Two steps of a model of :func:`tiny_models.tiny_config`, with a checkpoint of the second."""
    if find_spec("qwen_vl_utils") is None:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "stand_ins"), prepend=":")
    save_policy(folder / "policy", family, max_position_embeddings=256, **changes)
    vllm = f"+{ROLLOUT}.engine_kwargs.vllm"
    run = train(
        policy,
        "jet_fp8",
        folder / "run",
        STEPS,
        *words,
        "jetrl.operations=shared",
        f"actor_rollout_ref.model.path={folder / 'policy'}",
        f"data.train_files={write_data(policy.train, folder)}",
        "data.max_prompt_length=128",
        f"{ROLLOUT}.prompt_length=128",
        f"data.train_batch_size={PROMPTS}",
        f"{ROLLOUT}.n={GROUP}",
        f"{ACTOR}.entropy_coeff=0.1",
        f"{vllm}.block_size=64",
        f"{vllm}.limit_mm_per_prompt={{image:1,video:0}}",
        f"{ROLLOUT}.max_model_len=192",
        f"{ROLLOUT}.max_num_batched_tokens=64",
        f"{ROLLOUT}.max_num_seqs=48",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    )
    assert "exactness is OFF: the column images of" in run.log
    run.check_updates(STEPS)
    assert len({sync[-1] for sync in run.syncs}) == len(run.syncs), "each sync moved the weights"
    counted = "training/old_log_probs"
    with_image, text = (run.steps(f"{counted}_{name}_sequences") for name in ("image", "checked"))
    assert [sum(both) for both in zip(with_image, text, strict=True)] == [PROMPTS * GROUP] * STEPS
    assert all(with_image) and all(text)
    assert run.steps(f"{counted}_differing_tokens") == [0] * STEPS, "text differs"
    assert all(run.steps(f"{counted}_differing_image_tokens")), "the two towers round alike"
    assert max(run.steps("rollout_corr/k3_kl")) < 0.01
    return run


REWARD = f"reward.custom_reward_function.path={task.__file__}"  # one script names a file of verl's checkout
ONE_CPU = (*words_of_sizes(STEPS), *words_on_a_cpu(), "data.val_max_samples=8", REWARD)
PUBLISHED_WITH_IMAGES = (*WITH_IMAGES, "run_qwen3_5_2b_openr1_fsdp", "run_qwen3_5_27b_fsdp")
CASES = {name: (name,) for name in WITH_TOWER} | {
    script: (SCRIPTS[script][0], *script_words(script), *ONE_CPU) for script in PUBLISHED_WITH_IMAGES
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "qwen3_vl")) for c in CASES])
def test_text_is_exact_in_batches_with_images(policy, tmp_path, monkeypatch, case):
    run = check(policy, tmp_path, monkeypatch, *CASES[case], f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    (exported,) = export(tmp_path / "checkpoints", tmp_path / "fp8", ExportOptions("fp8"))
    assert f"{exported.image_digest:#018x}" == run.syncs[-1][-1]


@pytest.mark.slow
def test_two_ranks_of_each_side_run_with_images(policy, tmp_path, monkeypatch):
    """The tower's layers are split over the rollout's ranks; a trainer's rank may have no image."""
    heads = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
    sizes = (f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    check(policy, tmp_path, monkeypatch, "qwen3_vl", *TWO_RANKS, *sizes, **heads)
