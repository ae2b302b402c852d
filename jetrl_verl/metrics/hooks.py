# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reports metrics/mismatch.py through verl's own dictionaries, by the hooks of patches/batch_hooks.py."""

import functools
from typing import Any

from jetrl_verl.metrics.mismatch import by_sign, clipped, prefixed, tail, truncated
from jetrl_verl.patches.batch_hooks import register, register_in_trainer

REACHES = ("verl.workers.utils.losses:ppo_loss",)
"""Calls the policy losses that are wrapped here; scripts/reach.py watches it."""


def install_in_trainer() -> None:
    """Register the trainer's two hooks in the process that runs verl's trainer; idempotent."""
    register_in_trainer("AFTER_ADVANTAGES", "truncated shares", _truncation)
    register_in_trainer("DEBUG_METRICS", "tail", _tail)


def report_exactness(exact: bool, shared: bool) -> None:
    """Add to every step of verl's trainer what the job promises, and whether its operations are shared; idempotent."""
    metrics = {"jetrl/exact": float(exact), "jetrl/shared_operations": float(shared)}
    register_in_trainer("AFTER_ADVANTAGES", "exactness", lambda batch, algorithm: metrics)


def install_in_actor() -> None:
    """Register the hook of the policy losses that verl's ``ppo_loss`` calls, in an actor; idempotent."""
    register("AROUND_POLICY_LOSS", "clipped shares", _with_clipped_shares)


def _tail(data: Any) -> dict[str, float]:
    batch = data.batch
    differences = tail(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
    return {f"training/rollout_log_probs_diff_{name}": value for name, value in differences.items()}


def _truncation(batch: Any, algorithm: Any) -> dict[str, float]:
    """Shares of truncated tokens; empty without importance weights."""
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    correction = algorithm.get("rollout_correction") if algorithm is not None else None
    if "rollout_is_weights" not in batch or not correction or not correction.get("rollout_is"):
        return {}
    upper, lower = _parse_rollout_is_threshold(correction.get("rollout_is_threshold", 2.0))
    mask, advantages = batch["response_mask"], batch["advantages"]
    acted = truncated(
        batch["old_log_probs"],
        batch["rollout_log_probs"],
        mask,
        level=correction["rollout_is"],
        upper=upper,
        lower=lower,
    )
    return prefixed("rollout_corr/truncated", by_sign(acted, advantages, mask))


def _with_clipped_shares(loss_function: Any) -> Any:
    @functools.wraps(loss_function)
    def with_clipped_shares(**kwargs: Any) -> Any:
        loss, metrics = loss_function(**kwargs)
        advantages, mask = kwargs["advantages"], kwargs["response_mask"]
        acted = clipped(loss, kwargs["log_prob"], advantages)
        if acted is not None:
            metrics |= prefixed("actor/jetrl/clipped", by_sign(acted, advantages, mask))
            metrics |= prefixed("actor/jetrl/advantage", by_sign(mask, advantages, mask))
        return loss, metrics

    return with_clipped_shares
