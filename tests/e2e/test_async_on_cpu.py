# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous trainers in real jobs: tokens of the current weights are equal in every bit, others are counted."""

import pytest
from jobs import Run, train

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS = 3

SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    # Old log-probabilities of a step's second batch are of restored weights.
    "trainer.v1.separate_async.parameter_sync_step=2",
    "trainer.n_gpus_per_node=2",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.checkpoint_engine.backend=jetrl",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
)


def separate(ranks: int) -> tuple[str, ...]:
    """A rollout of ``ranks`` on GPUs of its own, next to a trainer of two."""
    return (
        *SEPARATE,
        f"{ROLLOUT}.n_gpus_per_node={ranks}",
        f"{ROLLOUT}.tensor_model_parallel_size={ranks}",
        f"ray_kwargs.ray_init.num_gpus={2 + ranks}",
    )


def check(run: Run, syncs: int) -> None:
    """Every step moved the weights, every sync checked the contract, and tokens of each kind were counted."""
    run.check_updates(STEPS)
    assert len(run.syncs) == syncs
    assert run.steps("training/old_log_probs_differing_tokens") == [0] * STEPS
    assert sum(run.steps("training/old_log_probs_checked_tokens")) > 0
    assert set(run.steps("rollout_corr/lag_0/k3_kl")) == {0.0}
    assert all(divergence > 0 for divergence in run.steps("rollout_corr/lag_1/k3_kl"))
    assert run.steps("rollout_corr/lag_1/tokens") and not run.steps("rollout_corr/lag_unknown/tokens")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ("actor_rollout_ref.hybrid_engine=false",)),
        (2, ("actor_rollout_ref.hybrid_engine=false", f"{ACTOR}.strategy=fsdp")),
    ],
    ids=["FSDP2", "FSDP1, TP 2"],
)
def test_a_rollout_on_gpus_of_its_own_is_exact_by_version(policy, tmp_path, ranks, settings):
    check(train(policy, "jet_fp8_exact", tmp_path, STEPS, *separate(ranks), *settings), ranks * (STEPS + 1))


@pytest.mark.slow
def test_a_rollout_that_shares_the_gpus_is_exact_by_version(policy, tmp_path):
    check(train(policy, "jet_fp8_exact", tmp_path, STEPS, "trainer.v1.trainer_mode=colocate_async"), STEPS + 1)
