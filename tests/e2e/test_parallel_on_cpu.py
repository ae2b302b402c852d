# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout of two ranks and a trainer of two in one real job: log-probabilities are equal in every bit."""

from dataclasses import replace

import pytest
from jobs import ACTOR, ROLLOUT, Run, train

from jetrl_verl.reference import BLOCK
from jetrl_verl.tools.demo.policy import POLICIES, build_model, build_tokenizer, save_policy

STEPS = 3

TWO_RANKS = (
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    # Sizes per rank; an update's micro-batches differ from those of the old log-probabilities.
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
)


def check(run: Run) -> None:
    """Each sync checked the contract on both ranks, and no bit differed."""
    run.check_exact(STEPS)
    assert len({digest for *_, digest in run.syncs}) == 2 * (STEPS + 1), "one digest per rank"


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        (f"{ACTOR}.ulysses_sequence_parallel_size=2",),
        (f"{ACTOR}.fsdp_config.fsdp_size=1", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", "jetrl.gathered=batch"),
    ],
    ids=["FSDP2 and Ulysses, packed", "HSDP, two replicas of one, packed, weights gathered once"],
)
def test_two_ranks_agree_in_every_bit_at_every_step(policy, tmp_path, trainer):
    check(train(policy, "jet_fp8_exact", tmp_path, STEPS, *TWO_RANKS, *trainer))


@pytest.mark.slow
def test_a_mixture_on_two_ranks_agrees_in_every_bit_at_every_step(policy, tmp_path):
    """Each rollout rank has a slice of every expert, each FSDP2 rank four of a layer's eight experts.

    The policy is random, as in test_mixture_on_cpu.py.
    """
    folder, tokenizer = tmp_path / "mixture", build_tokenizer()
    save_policy(build_model(replace(POLICIES["moe"], intermediate_size=2 * BLOCK), tokenizer), tokenizer, folder)
    words = (f"actor_rollout_ref.model.path={folder}", f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.entropy_coeff=0.1")
    run = train(policy, "jet_fp8_exact", tmp_path / "run", STEPS, *TWO_RANKS, *words)
    check(run)
    assert {(int(sync[1]), int(sync[2])) for sync in run.syncs} == {(2 * (4 + 2), 2 * 5 + 3)}
