# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tail of the mismatch and shares by sign of advantage: worked by hand, and through verl's own functions."""

import math

import pytest
import torch
from advantages import compute_advantage

from jetrl_verl.metrics.mismatch import by_sign, clipped, tail, truncated

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0, 1.0], [-2.0, -2.0, -2.0, -2.0]])


def test_tail_of_a_thousand_and_one_tokens_by_hand():
    """ceil(0.999 * 1001) = 1000: the second largest of 1001 differences 0, 1, ..., 1000; padding does not count."""
    differences = torch.arange(1001.0)[torch.randperm(1001, generator=torch.Generator().manual_seed(0))]
    log_probs = torch.cat([differences, torch.tensor([1e6])])[None]
    mask = torch.ones_like(log_probs)
    mask[0, -1] = 0
    assert tail(-log_probs, torch.zeros_like(log_probs), mask) == {"p999": 999.0, "max": 1000.0}


def test_tail_of_few_tokens_is_their_maximum_and_of_none_is_nothing():
    assert tail(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]]), torch.ones(1, 2)) == {"p999": 3.0, "max": 3.0}
    assert tail(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)) == {}


def test_a_nan_log_probability_shows_in_the_tail():
    metrics = tail(torch.tensor([[float("nan"), 0.0]]), torch.zeros(1, 2), torch.ones(1, 2))
    assert math.isnan(metrics["max"]) and math.isnan(metrics["p999"])


def test_shares_by_sign_are_of_all_response_tokens():
    """Five response tokens; of those acted on, one has a positive advantage and two a negative one."""
    acted = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]])
    assert by_sign(acted, ADVANTAGES, MASK) == {"positive": 1 / 5, "negative": 2 / 5}
    assert by_sign(acted, ADVANTAGES, torch.zeros_like(MASK)) == {"positive": 0.0, "negative": 0.0}


def test_token_weights_outside_the_bounds_by_hand():
    """Weights 1, 2.2, 1.8, - and 0.4, 1.9, -, -: above 2 only the second; below 0.5 the fourth."""
    old = torch.log(torch.tensor([[1.0, 2.2, 1.8, 9.0], [0.4, 1.9, 9.0, 9.0]]))
    above = truncated(old, torch.zeros_like(old), MASK, level="token", upper=2.0, lower=None)
    assert above.tolist() == [[False, True, False, False], [False] * 4]
    outside = truncated(old, torch.zeros_like(old), MASK, level="token", upper=2.0, lower=0.5)
    assert outside.tolist() == [[False, True, False, False], [True, False, False, False]]


def test_sequence_weights_are_products_over_the_response():
    """1 * 2.2 * 1.8 = 3.96 and 0.4 * 1.9 = 0.76, padding left out."""
    old = torch.log(torch.tensor([[1.0, 2.2, 1.8, 9.0], [0.4, 1.9, 9.0, 9.0]]))
    above = truncated(old, torch.zeros_like(old), MASK, level="sequence", upper=3.9, lower=None)
    assert above.tolist() == [[True, True, True, False], [False] * 4]


def ppo(log_probs, old, advantages, mask, low=0.2, high=0.28):
    ratio = torch.exp(log_probs - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return -(surrogate * mask).sum() / mask.sum()


def test_clipped_tokens_are_those_without_a_gradient():
    """PPO with bounds 0.8 and 1.28 clips a positive advantage above, a negative one below, and nothing else."""
    old = torch.zeros(2, 4)
    log_probs = torch.log(torch.tensor([[1.3, 1.27, 0.5, 1.0], [0.79, 1.5, 1.0, 1.0]])).requires_grad_()
    loss = ppo(log_probs, old, ADVANTAGES, MASK)
    acted = clipped(loss, log_probs, ADVANTAGES) & MASK.bool()
    assert acted.tolist() == [[True, False, False, False], [True, False, False, False]]
    loss.backward()  # the graph is still there
    assert torch.equal((log_probs.grad == 0) & MASK.bool(), acted)


def test_zero_advantages_are_not_clipped_and_a_forward_has_no_shares():
    log_probs = torch.zeros(1, 4).requires_grad_()
    zero = torch.zeros(1, 4)
    assert not clipped(ppo(log_probs, zero, zero, torch.ones(1, 4)), log_probs, zero).any()
    with torch.no_grad():
        assert clipped(ppo(log_probs, zero, zero, torch.ones(1, 4)), log_probs, zero) is None


# From here on through verl.


@pytest.fixture
def trainer(own_trainer):
    """verl's trainer module with our metrics installed, restored afterwards."""
    from jetrl_verl.metrics import hooks

    hooks.install_in_trainer()
    once = own_trainer.PPOTrainer._compute_advantage
    hooks.install_in_trainer()
    assert own_trainer.PPOTrainer._compute_advantage is once, "installing twice wraps once"
    return own_trainer


def test_verls_mismatch_metrics_include_the_tail(trainer):
    from verl.protocol import DataProto

    old, rollout = torch.log(torch.tensor([[0.5, 0.5, 0.5]])), torch.log(torch.tensor([[0.5, 0.25, 0.125]]))
    fields = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": torch.tensor([[1, 1, 0]])}
    data = DataProto.from_single_dict(fields | {"responses": torch.zeros(1, 3, dtype=torch.long)})
    metrics = trainer.calculate_debug_metrics(data)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(math.log(2))
    assert metrics["training/rollout_log_probs_diff_p999"] == pytest.approx(math.log(2))


@pytest.mark.parametrize(("rollout_is", "expected"), [("token", (1 / 5, 1 / 5)), (None, None)])
def test_truncated_shares_reach_verls_metrics(trainer, monkeypatch, rollout_is, expected):
    """One token of five in either sign has a ratio above 2."""
    metrics, _ = compute_advantage(trainer, monkeypatch, {"rollout_is": rollout_is, "rollout_is_threshold": 2.0})
    shares = [metrics.get(f"rollout_corr/truncated/{sign}") for sign in ("positive", "negative")]
    assert shares == ([None, None] if expected is None else pytest.approx(expected))
    assert "rollout_corr/k3_kl" in metrics, "verl's own metrics are still there"


CLIPPED_TOKENS = {
    "vanilla": (1, 2),
    "bypass_mode": (1, 2),
    "clip_cov": (1, 1),  # no dual clip
    "geo_mean": (0, 1),  # bounds of the log-ratio: log 1.3 is inside
    "gspo": (0, 0),  # ratios of sequences, 1.14 and 1.61
    "dppo_tv": (0, 0),  # probabilities of 0.05 hardly move
    "dppo_kl": (0, 0),
    "cispo": (0, 0),  # these bound a weight or nothing, and every token has a gradient
    "dro": (0, 0),
    "gpg": (0, 0),
    "kl_cov": (0, 0),
    "sapo": (0, 0),
}
"""Tokens of the batch below, with a positive and a negative advantage."""


def test_the_table_has_every_policy_loss_of_verl():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(CLIPPED_TOKENS) == {name for name in POLICY_LOSS_REGISTRY if not name.startswith("qurl_")}


@pytest.mark.parametrize("loss_mode", CLIPPED_TOKENS)
def test_every_policy_loss_of_verl_reports_what_it_clipped(cpu_platform, monkeypatch, loss_mode):
    from verl.workers.utils import losses

    from jetrl_verl.metrics import hooks
    from jetrl_verl.patches import batch_hooks

    monkeypatch.setitem(batch_hooks.AROUND_POLICY_LOSS, "clipped shares", None)  # removed after the test
    hooks.install_in_actor()
    once = losses.get_policy_loss_fn
    hooks.install_in_actor()
    assert losses.get_policy_loss_fn is once

    from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig

    config = FSDPActorConfig(
        strategy="fsdp2",
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        policy_loss=PolicyLossConfig(dro_beta=0.1),
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
    )
    assert isinstance(config, ActorConfig)
    # Ratios 1.3 and 1.0 of a good response; 0.79, 1.5 and, past verl's dual clip of 3, 3.5 of a bad one.
    old = torch.full((2, 3), -3.0)
    log_probs = (old + torch.log(torch.tensor([[1.3, 1.0, 1.0], [0.79, 1.5, 3.5]]))).requires_grad_()
    arguments = dict(
        old_log_prob=old,
        log_prob=log_probs,
        advantages=torch.tensor([[1.0] * 3, [-1.0] * 3]),
        response_mask=torch.tensor([[True, True, False], [True, True, True]]),
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=None,
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=5, global_batch_size=2, loss_scale_factor=None)
    loss, metrics = losses.get_policy_loss_fn(loss_mode)(**arguments)
    positive, negative = CLIPPED_TOKENS[loss_mode]
    assert metrics["actor/jetrl/clipped/positive"] == positive / 5
    assert metrics["actor/jetrl/clipped/negative"] == negative / 5
    assert metrics["actor/jetrl/advantage/positive"] == 2 / 5 and metrics["actor/jetrl/advantage/negative"] == 3 / 5
    if loss_mode == "vanilla":
        assert metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"] == pytest.approx(3 / 5)
    loss.backward()
    assert log_probs.grad[0, 1] != 0
