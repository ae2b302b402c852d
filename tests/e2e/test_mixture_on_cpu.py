# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in a real job on this machine's CPU: trainer and rollout choose the same experts for every token
and agree in every bit, in steps that move the weights.

The policy is random: hardly an answer is right, so an entropy bonus gives the steps a gradient.
"""

import math

import pytest
from jobs import Run, train

from jetrl_verl.tools.demo.policy import POLICIES, build_model, build_tokenizer, save_policy

# Sampled by tests/rollout/test_exact_rollout_on_cpu.py and tests/nn/test_experts_on_cpu.py.
pytestmark = pytest.mark.slow

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS = 3
QUANTIZED, PLAIN = 2 * (4 + 2), 2 * 5 + 3
"""Tensors of two layers: q, k, v, o and both parameters of the experts; four norms and the router, and what is around
the layers."""


@pytest.fixture(scope="module")
def exact(policy, tmp_path_factory) -> Run:
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), build_tokenizer()
    save_policy(build_model(POLICIES["moe"], tokenizer), tokenizer, folder)
    return train(
        policy,
        "jet_fp8_exact",
        tmp_path_factory.mktemp("exact"),
        STEPS,
        f"actor_rollout_ref.model.path={folder}",
        f"{ACTOR}.entropy_coeff=0.1",
        # One optimiser step a batch, so that every ratio is the first mini-batch's; micro-batches of other sizes than
        # the old log-probabilities were computed in, and a rollout that mixes prompts and single tokens.
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
        f"{ROLLOUT}.max_num_batched_tokens=256",
        f"{ROLLOUT}.max_num_seqs=48",
    )


@pytest.mark.parametrize(
    "metric",
    [
        "rollout_corr/k3_kl",
        "rollout_corr/kl",
        "training/rollout_probs_diff_max",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
    ],
)
def test_trainer_and_rollout_agree_in_every_bit_at_every_step(exact, metric):
    assert exact.steps(metric) == [0.0] * STEPS


def test_every_sync_held_the_contract_and_changed_the_rollouts_weights(exact):
    assert {(int(sync[1]), int(sync[2])) for sync in exact.syncs} == {(QUANTIZED, PLAIN)}
    assert len({digest for *_, digest in exact.syncs}) == len(exact.syncs) == STEPS + 1
    assert all(0 < norm < math.inf for norm in exact.steps("actor/grad_norm"))


def test_experts_travel_as_a_layers_two_tensors_in_a_quarter_of_the_bytes(exact):
    assert exact.mean("actor/jetrl/sync_megabytes") < 0.3 * exact.mean("actor/jetrl/sync_stock_megabytes")
