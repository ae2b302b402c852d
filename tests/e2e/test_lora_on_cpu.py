# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's LoRA with merged weights in real jobs: equal in every bit at every step, across a resume, in an export."""

import pytest
from jobs import ACTOR, ROLLOUT, Run, train
from test_parallel_on_cpu import TWO_RANKS

from jetrl_verl.checkpoint.export import ExportOptions, export

MODEL, STEPS = "actor_rollout_ref.model", 3

ADAPTERS = (
    f"{MODEL}.lora_rank=16",
    f"{MODEL}.lora_alpha=64",
    f"{ACTOR}.optim.lr=3e-3",
    # As verl's scripts for LoRA set them; the reference is the actor without its adapters.
    f"{ROLLOUT}.load_format=safetensors",
    f"{ROLLOUT}.layered_summon=True",
    f"{ACTOR}.use_kl_loss=True",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
    "data.train_batch_size=8",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
)


def check(run: Run, ranks: int = 1, steps: int = STEPS) -> None:
    """Every step moved the weights, and no bit differed."""
    run.check_updates(steps)
    assert len({digest for *_, digest in run.syncs}) == ranks * (steps + 1)
    for metric in ("rollout_corr/k3_kl", "training/rollout_probs_diff_max", "actor/ppo_kl"):
        assert run.steps(metric) == [0.0] * steps, metric


@pytest.mark.slow
def test_a_resumed_run_agrees_in_every_bit_and_exports_the_rollouts_weights(policy, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    words = (*ADAPTERS, f"trainer.save_freq={STEPS}", f"trainer.default_local_dir={checkpoints}")
    first = train(policy, "jet_fp8_exact", tmp_path / "first", STEPS, *words)
    check(first)
    before, after = first.steps("actor/kl_loss")[0], first.steps("actor/kl_loss")[-1]
    assert before == 0 < after, "the reference is the actor without its adapters"
    (exported,) = export(checkpoints, tmp_path / "fp8", ExportOptions("fp8"))
    assert f"{exported.digest:#018x}" == first.syncs[-1][-1]
    resumed = train(policy, "jet_fp8_exact", tmp_path / "resumed", STEPS + 1, *words, "trainer.resume_mode=auto")
    check(resumed, steps=1)
    assert resumed.syncs[0][-1] == first.syncs[-1][-1]


@pytest.mark.slow
def test_two_ranks_under_fsdp1_agree_in_every_bit(policy, tmp_path):
    words = (
        *TWO_RANKS,
        *ADAPTERS,
        f"{ACTOR}.strategy=fsdp",
        f"{MODEL}.target_modules=[q_proj,v_proj,o_proj,down_proj]",
    )
    check(train(policy, "jet_fp8_exact", tmp_path, STEPS, *words), ranks=2)
