# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous trainers in real jobs: tokens of the current weights are equal in every bit, others are counted."""

import pytest
from jobs import ACTOR, ROLLOUT, Run, train
from test_hybrid_on_cpu import run_of
from test_lora_on_cpu import ADAPTERS

from jetrl_verl.config.options import PRECISIONS

STEPS = 3


def separate(trainer: int, rollout: int, *, hybrid: bool = False, ahead: float = 0.5) -> tuple[str, ...]:
    """A trainer of some ranks, and a rollout on GPUs of its own.

    ``hybrid``: the trainer's GPUs sample, too. ``ahead``: batches that the rollout has before the first step. With half
    of one each step trains on tokens of its weights and of the ones before.
    """
    return (
        "trainer.v1.trainer_mode=separate_async",
        f"trainer.v1.separate_async.num_warmup_batches={ahead}",
        # Old log-probabilities of a step's second batch are of restored weights.
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"trainer.n_gpus_per_node={trainer}",
        f"actor_rollout_ref.hybrid_engine={hybrid}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node={rollout}",
        f"{ROLLOUT}.tensor_model_parallel_size={rollout}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        f"{ROLLOUT}.checkpoint_engine.backend=jetrl",
        f"ray_kwargs.ray_init.num_gpus={trainer + rollout}",
    )


def check(run: Run, steps: int, syncs: int, stale: bool = True) -> None:
    """Every step moved the weights, every sync checked the contract, and tokens of each lag were counted."""
    run.check_updates(steps)
    assert len(run.syncs) == syncs
    assert run.steps("training/old_log_probs_differing_tokens") == [0] * steps
    assert [tokens > 0 for tokens in run.steps("training/old_log_probs_checked_tokens")] == [True] * steps
    assert run.steps("rollout_corr/lag_0/k3_kl") == [0.0] * steps
    divergences = run.steps("rollout_corr/lag_1/k3_kl")
    assert all(divergence > 0 for divergence in divergences) and len(divergences) == (steps - 1 if stale else 0)
    assert not run.steps("rollout_corr/lag_unknown/tokens")


def test_a_rollout_on_gpus_of_its_own_is_exact_by_version(policy, tmp_path):
    check(train(policy, "jet_fp8_exact", tmp_path, 2, *separate(1, 1)), 2, 3)


@pytest.mark.slow
def test_fsdp1_and_a_tensor_parallel_rollout_are_exact_by_version(policy, tmp_path):
    words = (*separate(2, 2), f"{ACTOR}.strategy=fsdp")
    check(train(policy, "jet_fp8_exact", tmp_path, STEPS, *words), STEPS, 2 * (STEPS + 1))


@pytest.mark.slow
def test_a_trainer_that_samples_too_is_exact_by_version(policy, tmp_path):
    # Its own rollout gets the first weights, and sleeps from the first step on.
    check(train(policy, "jet_fp8_exact", tmp_path, STEPS, *separate(1, 1, hybrid=True)), STEPS, STEPS + 2)


@pytest.mark.slow
def test_bypass_mode_compares_what_the_current_weights_sampled(policy, tmp_path):
    words = (*separate(2, 1, ahead=0), "jetrl.old_log_probs=rollout")
    check(train(policy, "jet_fp8_exact", tmp_path, STEPS, *words), STEPS, STEPS + 1, stale=False)


@pytest.mark.slow
def test_a_rollout_that_shares_the_gpus_is_exact_by_version(policy, tmp_path):
    words = ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0.5")
    check(train(policy, "jet_fp8_exact", tmp_path, STEPS, *words), STEPS, STEPS + 1)


# Batches of 32 sequences, of which a trainer's batch is a half.
HALVES = (f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16")


@pytest.mark.slow
def test_a_hybrid_mixture_is_exact_by_version(policy, tmp_path):
    check(run_of(policy, tmp_path, "qwen3_5_moe", *separate(1, 1), *HALVES), STEPS, STEPS + 1)


@pytest.mark.slow
def test_adapters_and_an_fp8_cache_are_exact_by_version(policy, tmp_path):
    words = (*separate(1, 1), *ADAPTERS, *HALVES, "jetrl.kv_cache=fp8")
    check(train(policy, "jet_fp8_exact", tmp_path, 2, *words), 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p.startswith(("fp8", "int8", "qurl"))])
def test_a_baseline_counts_its_mismatch_by_lag(policy, precision, tmp_path):
    run = train(policy, precision, tmp_path, 2, *separate(1, 1))
    run.check_updates(2)
    current, (stale,) = (run.steps(f"rollout_corr/lag_{lag}/k3_kl") for lag in range(2))
    assert len(run.syncs) == 3 and 0 < min(current) < max(current) < stale, "staleness exceeds rounding"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16_shared", "jet_fp8"])
def test_others_run_over_the_backend(policy, precision, tmp_path):
    train(policy, precision, tmp_path, 2, *separate(1, 1)).check_updates(2)
