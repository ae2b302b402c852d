# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The adaptive correction: cases worked out by hand, its gradient, and the weights that verl's actor gets."""

import math

import pytest
import torch
from advantages import RATIOS, compute_advantage

from jetrl_verl.algorithms.adaptive_correction import Diagnostics, adapt, diagnose, install_in_trainer


def batch(ratios, advantages, mask=None, bound: float = 2.0) -> dict[str, torch.Tensor]:
    """One response with the tokens' pi_old / pi_rollout and advantages, weights truncated at ``bound``."""
    ratio = torch.tensor([ratios])
    mask = torch.ones_like(ratio) if mask is None else torch.tensor([mask])
    return {
        "old_log_probs": ratio.log() - 3,
        "rollout_log_probs": torch.full_like(ratio, -3.0),
        "rollout_is_weights": ratio.clamp(max=bound) * mask,
        "advantages": torch.tensor([advantages]),
        "response_mask": mask,
    }


def diagnosed(fields: dict[str, torch.Tensor]) -> Diagnostics:
    names = ("old_log_probs", "rollout_log_probs", "rollout_is_weights", "advantages", "response_mask")
    return diagnose(*(fields[name] for name in names))


def test_a_batch_worked_out_by_hand():
    """r = w = 2 and 1/2, A = 1 and -1: R = 1.25^2 / 2.125, D = (2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 2, V = 2.125."""
    fields = batch([2.0, 0.5], [1.0, -1.0])
    diagnostics = diagnosed(fields)
    assert diagnostics == pytest.approx((1.5625 / 2.125, 0.25, 2.125))
    alpha = 0.5 * (1.5625 / 2.125) / 2.125
    assert diagnostics.mixing(0.25) == pytest.approx(alpha)
    metrics = adapt(fields, 0.25)
    assert fields["rollout_is_weights"][0].tolist() == pytest.approx([1 + alpha, 1 - alpha / 2])
    assert metrics == pytest.approx(
        {
            "rollout_corr/adaptive/mixing": alpha,
            "rollout_corr/adaptive/reliability": 1.5625 / 2.125,
            "rollout_corr/adaptive/divergence": 0.25,
            "rollout_corr/adaptive/amplification": 2.125,
        }
    )


def test_only_divergence_uses_the_untruncated_ratios():
    """r = 4 and 1 with C = 2, A = 0 and 1: w = 2 and 1, D = (4 - 1 - ln 4) / 2, R = 1.5^2 / 2.5, V = 1."""
    diagnostics = diagnosed(batch([4.0, 1.0], [0.0, 1.0]))
    assert diagnostics == pytest.approx((2.25 / 2.5, (3 - math.log(4)) / 2, 1.0))


def test_amplification_below_one_counts_as_one():
    """A small weight on the one token with an advantage: V = 1/16."""
    diagnostics = diagnosed(batch([0.25, 1.0], [1.0, 0.0]))
    assert diagnostics.amplification == pytest.approx(1 / 16)
    assert diagnostics.mixing(1e-3) == pytest.approx(
        diagnostics.divergence / (diagnostics.divergence + 1e-3) * diagnostics.reliability
    )


def test_equal_policies_are_not_corrected():
    fields = batch([1.0, 1.0, 1.0], [1.0, -2.0, 0.5])
    assert diagnosed(fields) == (1.0, 0.0, 1.0)
    assert adapt(fields, 1e-3)["rollout_corr/adaptive/mixing"] == 0
    assert torch.equal(fields["rollout_is_weights"], torch.ones(1, 3))


def test_mixing_is_half_at_the_scale_and_at_most_one():
    assert Diagnostics(1.0, 3e-4, 1.0).mixing(3e-4) == pytest.approx(0.5)
    assert Diagnostics(1.0, 1e6, 0.0).mixing(1e-3) == pytest.approx(1.0, abs=1e-8)


def test_masked_tokens_do_not_count():
    within = batch([2.0, 0.5], [1.0, -1.0])
    padded = batch([2.0, 0.5, 1e6], [1.0, -1.0, 50.0], mask=[1.0, 1.0, 0.0])
    assert diagnosed(within) == diagnosed(padded)
    adapt(padded, 0.25)
    assert padded["rollout_is_weights"][0, 2] == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [(batch([2.0], [1.0], mask=[0.0]), (1.0, 0.0, 1.0)), (batch([2.0, 0.5], [0.0, 0.0]), (1.5625 / 2.125, 0.25, 1.0))],
    ids=["no response", "no advantage"],
)
def test_a_batch_without_responses_or_advantages_gives_finite_numbers(fields, expected):
    assert diagnosed(fields) == pytest.approx(expected)
    assert all(math.isfinite(value) for value in adapt(fields, 1e-3).values())


def test_the_gradient_lies_between_the_uncorrected_and_the_weighted_one(cpu_platform):
    """verl's own PPO loss: its gradient under the mixed weights is the interpolation of both gradients."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    generator = torch.Generator().manual_seed(0)
    ratio, advantages = torch.randn(4, 9, generator=generator).exp(), torch.randn(4, 9, generator=generator)
    mask = (torch.rand(4, 9, generator=generator) < 0.8).float()
    old = -torch.rand(4, 9, generator=generator)
    weights = ratio.clamp(max=2.0) * mask
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2)

    def gradient(token_weights: torch.Tensor) -> torch.Tensor:
        log_prob = (old + 0.1).requires_grad_()
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=token_weights,
        )
        loss.backward()
        return log_prob.grad

    fields = {
        "old_log_probs": old,
        "rollout_log_probs": old - ratio.log(),
        "rollout_is_weights": weights,
        "advantages": advantages,
        "response_mask": mask,
    }
    alpha = adapt(fields, 0.3)["rollout_corr/adaptive/mixing"]
    assert 0.05 < alpha < 0.95
    expected = (1 - alpha) * gradient(mask) + alpha * gradient(weights)
    torch.testing.assert_close(gradient(fields["rollout_is_weights"]), expected)


def test_verls_actor_gets_the_mixed_weights(own_trainer, monkeypatch):
    """Through verl's own method, whose metrics stay; installing the hook twice applies it once."""
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    _, plain = compute_advantage(own_trainer, monkeypatch, correction)
    install_in_trainer(0.1)
    install_in_trainer(0.1)
    metrics, mixed = compute_advantage(own_trainer, monkeypatch, correction)
    alpha = metrics["rollout_corr/adaptive/mixing"]
    assert 0 < alpha < 1 and "rollout_corr/k3_kl" in metrics
    for row, ratios in enumerate(RATIOS):
        truncated = torch.tensor(ratios).clamp(max=2.0)
        torch.testing.assert_close(plain["rollout_is_weights"][row], truncated)
        torch.testing.assert_close(mixed["rollout_is_weights"][row], 1 + alpha * (truncated - 1))
        assert torch.equal(mixed["advantages"][row], plain["advantages"][row])
