# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Policy losses for a rollout that samples from a quantized policy, registered with verl.

pi_rollout samples a token, pi_old is the trainer's policy at the start of the update, pi_theta the one being updated.
Per token, with advantage A:

    R  = pi_theta / pi_old          PPO clips it
    r0 = pi_old / pi_rollout        mismatch of the quantized rollout

    loss_mode         weight          upper bound
    vanilla           verl's          1 + eps                       verl's own
    qurl_decoupled    r0              1 + eps                       QuRL (arXiv 2602.13953), decoupled PPO
    qurl_acr          min(r0, C)      (1 + eps) max(1, r0 / C)      QuRL, adaptive clipping range

Both are verl's ``vanilla`` with another weight and upper bound; its dual clip (``actor.clip_ratio_c``) stays. verl
passes r0 as ``rollout_is_weights`` under ``algorithm.rollout_correction.rollout_is=token``; a ``rollout_is_threshold``
of ``UNTRUNCATED`` or more leaves it whole. ``qurl_acr`` reports ``actor/jetrl/truncated/{positive,negative}``. Naming
``JetPolicyLossConfig`` as ``_target_`` of ``actor.policy_loss`` registers the losses in a worker.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss
from verl.workers.config import PolicyLossConfig

from jetrl_verl.config.support.scopes import CORRECTION, LOSS
from jetrl_verl.config.support.table import refuse
from jetrl_verl.metrics.mismatch import by_sign, prefixed

UNTRUNCATED = math.exp(20.0)
"""verl's bound of r0; a ``rollout_is_threshold`` of at least this truncates nothing."""

Loss = tuple[torch.Tensor, dict[str, Any]]


@dataclass
class JetPolicyLossConfig(PolicyLossConfig):
    """verl's ``actor.policy_loss`` with the option of these losses."""

    is_threshold: float = 2.0
    """C, the truncation of importance weights; FlashRL uses 2 (GSM8K) and 8 (DAPO-32B)."""


def _loosened(config: Any, factor: torch.Tensor) -> SimpleNamespace:
    """``config`` for verl's loss with its upper bound times ``factor`` ``[batch, response]``."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    # verl clamps with two numbers or with two tensors.
    return SimpleNamespace(
        clip_ratio=config.clip_ratio,
        clip_ratio_low=torch.full_like(factor, low),
        clip_ratio_high=(1 + high) * factor - 1,
        get=config.get,
        global_batch_info=config.global_batch_info,
    )


def _raw_ratio(rollout_is_weights: torch.Tensor | None, loss: str) -> torch.Tensor:
    if rollout_is_weights is None:
        refuse("ratio_level", scope=f"{LOSS}={loss}", key=f"{CORRECTION}.rollout_is", value="null")
    return rollout_is_weights


@register_policy_loss("qurl_decoupled")
def qurl_decoupled(*, rollout_is_weights: torch.Tensor | None = None, **batch: Any) -> Loss:
    """QuRL's decoupled PPO: ``E[ r0 min(R A, clip(R, 1 - eps, 1 + eps) A) ]``, r0 not truncated.

    Args:
        rollout_is_weights: the untruncated r0 ``[batch, response]`` FP32.
        batch: the other arguments of verl's ``compute_policy_loss_vanilla``.

    Returns:
        Scalar loss and metrics.

    Raises:
        UnsupportedConfiguration: no ``rollout_is_weights``.
    """
    return compute_policy_loss_vanilla(rollout_is_weights=_raw_ratio(rollout_is_weights, "qurl_decoupled"), **batch)


@register_policy_loss("qurl_acr")
def qurl_acr(*, rollout_is_weights: torch.Tensor | None = None, config: Any, **batch: Any) -> Loss:
    """QuRL's adaptive clipping range: ``E[ w min(R A, clip(R, 1 - eps, (1 + eps) / r) A) ]``, ``w = min(r0, C)``.

    Descriptions of the paper disagree on r. Here ``r = w / r0 <= 1``: if a weight is truncated, the upper bound loosens
    by the factor that was cut off. Wherever ``r0 <= C`` it equals truncated importance sampling.

    Arguments and results as in :func:`qurl_decoupled`; C is ``config.policy_loss.is_threshold``.

    Raises:
        UnsupportedConfiguration: no ``rollout_is_weights``.
    """
    r0 = _raw_ratio(rollout_is_weights, "qurl_acr")
    threshold = config.policy_loss.is_threshold
    loosened = _loosened(config, (r0 / threshold).clamp(min=1))
    loss, metrics = compute_policy_loss_vanilla(rollout_is_weights=r0.clamp(max=threshold), config=loosened, **batch)
    truncated = by_sign(r0 > threshold, batch["advantages"], batch["response_mask"])
    return loss, metrics | prefixed("actor/jetrl/truncated", truncated)
