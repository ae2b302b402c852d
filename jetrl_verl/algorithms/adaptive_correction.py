# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A correction of the rollout's mismatch whose strength follows the batch, after AIS (``correction=adaptive``).

AIS (arXiv 2605.13907) interpolates between the uncorrected policy gradient and the importance-weighted one by a
coefficient alpha per batch. A gradient is linear in its tokens' weights, so

    (1 - alpha) g_uncorrected + alpha g_weighted  =  gradient with token weights  1 + alpha (w - 1),

which replaces the weights of truncated importance sampling and nothing else. The paper's abstract names three
diagnostics; the definitions below are this project's, since no others are public. With r = pi_old / pi_rollout of a
response token, w = min(r, C) its truncated weight, A its advantage, and means over the batch's response tokens:

    reliability    R = mean(w)^2 / mean(w^2)         effective sample size of the weights, over their number
    severity       S = D / (D + D0),  D = mean(r - 1 - log r)     K3 estimate of KL(pi_rollout || pi_old)
    amplification  V = mean(w^2 A^2) / mean(A^2)     growth of the gradient's second moment, token by token
    alpha          = S * R / max(1, V)

At D = D0 (``jetrl.correction_scale``) the severity is one half.
"""

from typing import Any, NamedTuple

import torch

from jetrl_verl.patches.batch_hooks import register_in_trainer

LOG_RATIO_BOUND = 20.0
"""verl clamps ``log r`` to this bound."""


class Diagnostics(NamedTuple):
    """Diagnostics of a batch: reliability in (0, 1], divergence >= 0 in nats per token, amplification >= 0."""

    reliability: float
    divergence: float
    amplification: float

    def mixing(self, scale: float) -> float:
        """alpha in [0, 1]; ``scale`` is D0, in nats."""
        severity = self.divergence / (self.divergence + scale)
        return severity * self.reliability / max(1.0, self.amplification)


def diagnose(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    weights: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> Diagnostics:
    """The three diagnostics; amplification is 1 without a response token or without an advantage.

    Args:
        old_log_probs, rollout_log_probs: ``[B, T]``, by the trainer before its update and by the rollout.
        weights: ``[B, T]``, truncated r. advantages: ``[B, T]``. mask: ``[B, T]``, true on response tokens.
    """
    chosen = mask.bool()
    log_ratio = (old_log_probs - rollout_log_probs)[chosen].double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    w, a = weights[chosen].double(), advantages[chosen].double()
    if not len(w):
        return Diagnostics(1.0, 0.0, 1.0)
    second_moment, of_advantages = w.square().mean(), a.square().mean()
    reliability = w.mean().square() / second_moment if second_moment > 0 else w.new_zeros(())
    divergence = (torch.expm1(log_ratio) - log_ratio).mean()
    amplification = (w * a).square().mean() / of_advantages if of_advantages > 0 else w.new_ones(())
    return Diagnostics(reliability.item(), divergence.item(), amplification.item())


def adapt(batch: dict[str, torch.Tensor], scale: float) -> dict[str, float]:
    """Replace ``rollout_is_weights`` of verl's batch by ``1 + alpha (w - 1)``, 0 outside of responses.

    Args:
        batch: verl's, with ``old_log_probs``, ``rollout_log_probs``, ``rollout_is_weights``, ``advantages`` and
            ``response_mask``, each ``[B, T]``. scale: D0, in nats.

    Returns:
        Metrics: alpha and the diagnostics under ``rollout_corr/adaptive/``.
    """
    weights, mask = batch["rollout_is_weights"], batch["response_mask"]
    diagnostics = diagnose(batch["old_log_probs"], batch["rollout_log_probs"], weights, batch["advantages"], mask)
    alpha = diagnostics.mixing(scale)
    batch["rollout_is_weights"] = (1 + alpha * (weights - 1)) * mask.to(weights.dtype)
    values = {"mixing": alpha, **diagnostics._asdict()}
    return {f"rollout_corr/adaptive/{name}": value for name, value in values.items()}


def install_in_trainer(scale: float) -> None:
    """Adapt every batch of verl's trainer in the process that runs it; ``scale`` is D0, in nats."""

    def hook(batch: Any, algorithm: Any) -> dict[str, float]:
        return adapt(batch, scale)

    register_in_trainer("AFTER_ADVANTAGES", "adaptive correction", hook)
