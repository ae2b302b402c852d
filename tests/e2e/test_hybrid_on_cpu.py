# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Text in models with a vision tower, dense or hybrid, in real CPU jobs: trainer and rollout agree in every bit.

The policy is random and hardly ever right, so an entropy bonus gives the steps a gradient.
"""

from pathlib import Path

import pyarrow.parquet
import pytest
from jobs import ACTOR, ROLLOUT, Run, train
from test_parallel_on_cpu import TWO_RANKS
from tiny_models import HYBRIDS, WITH_TOWER, save_policy

STEPS = 3
TEMPLATE = "{{ messages[0]['content'] }}"


def write_data(train: Path, folder: Path) -> Path:
    """The demo's problems; every third prompt is one token, the others begin with the same block of 64 tokens."""
    rows = pyarrow.parquet.read_table(train).slice(0, 64).to_pylist()
    for number, row in enumerate(rows):
        (message,) = row["prompt"]
        message["content"] = message["content"][0] if number % 3 == 0 else 10 * "12+34=46\n" + message["content"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def run_of(policy, folder: Path, family: str, *words: str, **changes: int) -> Run:
    """Three steps of a model of :func:`tiny_models.tiny_config`."""
    if family not in HYBRIDS:
        pytest.importorskip("torchvision", reason="verl needs the processor of these families, whose class needs it")
    save_policy(folder / "policy", family, max_position_embeddings=256, **changes)
    (folder / "policy" / "chat_template.jinja").write_text(TEMPLATE)
    return train(
        policy,
        "jet_fp8_exact",
        folder / "run",
        STEPS,
        f"actor_rollout_ref.model.path={folder / 'policy'}",
        f"data.train_files={write_data(policy.train, folder)}",
        "data.max_prompt_length=128",
        "data.train_batch_size=8",
        f"{ROLLOUT}.n=4",
        f"{ACTOR}.entropy_coeff=0.1",
        # Pages of 64 tokens; steps mix decodes with parts of prompts.
        f"+{ROLLOUT}.engine_kwargs.vllm.block_size=64",
        f"{ROLLOUT}.max_model_len=192",
        f"{ROLLOUT}.max_num_batched_tokens=64",
        f"{ROLLOUT}.max_num_seqs=48",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        *words,
    )


def check(policy, folder: Path, family: str, *words: str, **changes: int) -> None:
    """Each step moved the weights, each sync sent them, and no bit differed."""
    run = run_of(policy, folder, family, *words, **changes)
    run.check_exact(STEPS)
    assert len({sync[-1] for sync in run.syncs}) == len(run.syncs), "each sync moved the weights"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3_5")) for name in WITH_TOWER]
)
def test_one_rank_agrees_in_every_bit_at_every_step(policy, family, tmp_path):
    check(policy, tmp_path, family, f"{ACTOR}.ppo_micro_batch_size_per_gpu=16", "jetrl.gathered=batch")


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_TOWER)
def test_two_ranks_of_each_side_agree_in_every_bit_at_every_step(policy, family, tmp_path):
    ranks = (*TWO_RANKS, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    sizes = (
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
    )
    widths = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 512)
    heads = dict(linear_num_key_heads=2) if family in HYBRIDS else dict(num_attention_heads=4, num_key_value_heads=2)
    if family == "qwen2_5_vl":  # heads of 128 without a head_dim of its own
        heads |= dict(hidden_size=512)
    check(policy, tmp_path, family, *ranks, *sizes, **heads, **widths)
