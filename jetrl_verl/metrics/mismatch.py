# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Mismatch of rollout and trainer on single tokens, and where a correction or a clip acted; plain tensors.

verl reports ``rollout_corr/*`` and differences of probabilities; this adds the tail of differences of
log-probabilities, which an importance ratio exponentiates. Shares by sign of advantage are shares of all response
tokens, so both signs add up to verl's fractions; divide by ``advantage/{positive,negative}`` for the share within a
sign.
"""

import math
from collections.abc import Mapping

import torch

SIGNS = ("positive", "negative")


def tail(log_probs: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """99.9th percentile and maximum of |difference of log-probabilities| over the response tokens.

    The percentile is the smallest difference that 99.9% of the tokens do not exceed.

    Args:
        log_probs, other: ``[B, T]``. mask: ``[B, T]``, non-zero on response tokens.

    Returns:
        ``{"p999": ..., "max": ...}``, empty without a response token.
    """
    differences = (log_probs - other).abs()[mask.bool()].float()
    if differences.numel() == 0:
        return {}
    # torch.quantile refuses more than 16 million values.
    rank = math.ceil(differences.numel() * 0.999)
    return {"p999": differences.kthvalue(rank).values.item(), "max": differences.max().item()}


def by_lag(
    log_probs: torch.Tensor, other: torch.Tensor, mask: torch.Tensor, lags: torch.Tensor, unknown: int
) -> dict[str, float]:
    """How many tokens there are of each lag, and their divergence by verl's estimator of ``k3_kl``.

    Args:
        log_probs: of the trainer, ``[T]``. other: of the rollout. mask: non-zero on response tokens.
        lags: weight syncs between the weights that sampled a token and the trainer's, int64; ``unknown`` where nothing
            states it.

    Returns:
        ``{"lag_0/tokens": ..., "lag_0/k3_kl": ..., ...}`` with the lags that occur.
    """
    metrics, kept = {}, mask.bool()
    differences, lags = (log_probs - other)[kept].double(), lags[kept]
    divergences = differences.expm1() - differences
    for lag in lags.unique().tolist():
        name = "lag_unknown" if lag == unknown else f"lag_{lag}"
        of_lag = divergences[lags == lag]
        metrics |= {f"{name}/tokens": len(of_lag), f"{name}/k3_kl": of_lag.mean().item()}
    return metrics


def by_sign(acted: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Shares of the response tokens on which something acted, split by the sign of their advantage.

    Args:
        acted, advantages, mask: ``[B, T]``.

    Returns:
        ``{"positive": ..., "negative": ...}``, zero without a response token.
    """
    mask = mask.bool()
    acted = acted.bool() & mask
    counts = torch.stack([(acted & (advantages > 0)).sum(), (acted & (advantages < 0)).sum(), mask.sum()]).tolist()
    return {sign: count / max(counts[2], 1) for sign, count in zip(SIGNS, counts, strict=False)}


def truncated(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: str,
    upper: float,
    lower: float | None,
) -> torch.Tensor:
    """Tokens whose importance weight pi_old / pi_rollout leaves the bounds of verl's rollout correction.

    Args:
        old_log_probs, rollout_log_probs, mask: ``[B, T]``.
        level: ``"token"``, or ``"sequence"``, where the weight is the product over the response.
        upper: weights above are truncated. lower: with a second bound (IcePop), weights outside both are zeroed.

    Returns:
        bool ``[B, T]``, False outside the response.
    """
    mask = mask.bool()
    log_ratio = (old_log_probs - rollout_log_probs).masked_fill(~mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(mask)
    acted = log_ratio > math.log(upper)
    if lower is not None:
        acted = acted | (log_ratio < math.log(lower))
    return acted & mask


def clipped(loss: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor | None:
    """Tokens that a policy loss has clipped: a non-zero advantage and a zero gradient.

    It holds for any loss, whatever its bounds, and counts tokens whose weight was zeroed (IcePop). It costs a backward
    through the loss, not through the model.

    Args:
        loss: scalar. log_probs: ``[B, T]``, from which the loss was computed. advantages: ``[B, T]``.

    Returns:
        bool ``[B, T]``; None if the loss has no graph.
    """
    if not (loss.requires_grad and log_probs.requires_grad):
        return None
    (gradient,) = torch.autograd.grad(loss, log_probs, retain_graph=True, allow_unused=True)
    if gradient is None:
        return None
    return (gradient == 0) & (advantages != 0)


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` under ``<prefix>/``."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
