# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A correction of the rollout's mismatch whose strength follows the batch, after AIS (``correction=adaptive``).

AIS (arXiv 2605.13907) interpolates between the uncorrected policy gradient and the importance-weighted one: a mismatch
is harmless or even useful while it is small, and harmful once the policy concentrates. One coefficient alpha per batch
is made of three diagnostics, *weight reliability*, *divergence severity* and *variance amplification*. A gradient is
linear in its tokens' weights, so

    (1 - alpha) g_uncorrected + alpha g_weighted  =  gradient with token weights  1 + alpha (w - 1),

and the correction enters where truncated importance sampling does: it replaces verl's weights and nothing else.

**What is ours.** The paper's abstract names the diagnostics; how it computes and combines them we have not seen. With
r = pi_old / pi_rollout of a response token, w = min(r, C) its truncated weight and A its advantage, means over the
batch's response tokens, this module takes

    reliability    R = mean(w)^2 / mean(w^2)         the effective sample size of the weights, over their number
    severity       S = D / (D + D0),  D = mean(r - 1 - log r)     K3's estimate of KL(pi_rollout || pi_old)
    amplification  V = mean(w^2 A^2) / mean(A^2)     growth of the gradient's second moment, token by token
    alpha          = S * R / max(1, V)

so that nothing is corrected where nothing differs, half of it at D = D0 (``jetrl.correction_scale``), and less where a
few tokens carry the weights. Results belong to this definition and not to AIS.

Alternatives: R taken the other way round, since a falling effective sample size also says that correction is due;
``min`` instead of the product; the alpha of least squared error, which needs the gradients' variance.
"""

from typing import Any, NamedTuple

import torch

from jetrl_verl.patches.batch_hooks import run_after_advantages

LOG_RATIO_BOUND = 20.0
"""verl's bound of ``log r``, beyond which it takes no exponential."""


class Diagnostics(NamedTuple):
    """Of one batch. ``reliability`` in (0, 1], ``divergence`` >= 0 in nats a token, ``amplification`` >= 0."""

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
    """The three diagnostics; a batch without a response token, or without an advantage, has amplification 1.

    Args:
        old_log_probs, rollout_log_probs: ``[B, T]`` of the trainer before its update and of the rollout.
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
    found = diagnose(batch["old_log_probs"], batch["rollout_log_probs"], weights, batch["advantages"], mask)
    alpha = found.mixing(scale)
    batch["rollout_is_weights"] = (1 + alpha * (weights - 1)) * mask.to(weights.dtype)
    return {f"rollout_corr/adaptive/{name}": value for name, value in {"mixing": alpha, **found._asdict()}.items()}


def install_in_trainer(scale: float) -> None:
    """Adapt every batch of verl's trainer, if this process holds it; ``scale`` is D0, in nats."""

    def hook(batch: Any, algorithm: Any) -> dict[str, float]:
        return adapt(batch, scale)

    run_after_advantages("adaptive correction", hook)
