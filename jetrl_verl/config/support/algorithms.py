# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration about losses, clipping and corrections that contradict each other."""

from functools import partial
from typing import Any

from jetrl_verl.formats.catalog import TRAINED

from ..precision import target_of
from .row import NOT_TRUE, SET, TRUE, Get, Row, Scope, Values, one_of, other_than
from .scopes import (
    ACTOR,
    ADAPTIVE,
    CALIBRATED,
    CALIBRATED_LOSSES,
    CORRECTION,
    EXACT,
    EXACT_COMPUTED,
    LOSS,
    POLICY_LOSS,
    RATIO_LOSS,
    RATIO_LOSSES,
    ROLLOUT,
    ROLLOUT_LOG_PROBS,
)

_UNTRUNCATED = 4.86e8
"""Above the largest ratio that verl passes on, exp(20)."""


def _not_positive(number: Any) -> bool:
    """Whether it is no finite number above 0; a weight of 0 trains nothing, one below 0 the other way."""
    if number is None:
        return False
    return isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf")


def _truncates(threshold: Any) -> bool:
    try:
        return not float(threshold) >= _UNTRUNCATED
    except (TypeError, ValueError):
        return True


def _one_update(get: Get) -> bool:
    one_batch = get(f"{ACTOR}.ppo_mini_batch_size") == get("data.train_batch_size")
    return CALIBRATED.applies(get) and get(f"{ACTOR}.ppo_epochs") == 1 and one_batch


_BYPASS = {f"{CORRECTION}.bypass_mode": TRUE}
_SEQUENCES = {f"{CORRECTION}.rollout_is": other_than("token", required=True)}
_NORMALIZED = {f"{CORRECTION}.rollout_is_batch_normalize": TRUE}

_adaptive, _ratio, _calibrated = (partial(Row, scope=scope) for scope in (ADAPTIVE, RATIO_LOSS, CALIBRATED))

ALGORITHM_ROWS: dict[str, Row] = {
    "correction_of_nothing": Row(
        "a correction of no mismatch",
        "it samples from the policy that it trains, so there is nothing to correct",
        {"jetrl.correction": one_of("adaptive", use="fixed")},
        scope=EXACT,
    ),
    "adaptive_loss": _adaptive(
        "QuRL's losses under the adaptive correction",
        "the loss needs the ratios themselves",
        {LOSS: one_of(*RATIO_LOSSES, use="vanilla")},
    ),
    "adaptive_bypass": _adaptive("bypass mode", "it computes no importance weights before the update", _BYPASS),
    "adaptive_level": _adaptive(
        "importance weights of whole sequences", "weights of single tokens are mixed", _SEQUENCES
    ),
    "adaptive_threshold": _adaptive(
        "importance weights that reject tokens",
        "the mixture would give a part of them back",
        {
            f"{CORRECTION}.rollout_is_threshold": Values(
                "of two bounds", lambda value: isinstance(value, str) and "_" in value, "2.0"
            )
        },
    ),
    "adaptive_normalization": _adaptive(
        "normalized importance weights", "weights are mixed with the 1 of the uncorrected gradient", _NORMALIZED
    ),
    "loss_of_qurl": Row(
        "losses other than QuRL's",
        "only QuRL's losses truncate the ratios",
        {LOSS: other_than(*RATIO_LOSSES, required=True)},
        scope=Scope(
            "precision=qurl_fp8 or qurl_int8",
            lambda get: get("jetrl.precision") in ("qurl_fp8", "qurl_int8"),
            "precision=fp8_rollout_tis or int8_rollout_tis",
            key="jetrl.precision",
        ),
    ),
    "ratio_loss_class": _ratio(
        "another class instead of ours",
        "the flag works through this key",
        {f"{POLICY_LOSS}._target_": other_than(target_of(POLICY_LOSS, "qurl_fp8"), required=True)},
    ),
    "ratio_truncation": _ratio(
        "a truncation at no positive number",
        "it is no finite number above 0",
        {f"{POLICY_LOSS}.is_threshold": Values("that is no finite number above 0", _not_positive, "2.0")},
    ),
    "ratio_bypass": _ratio("bypass mode", "it cannot tell pi_old from pi_rollout", _BYPASS),
    "ratio_log_probs": _ratio(
        "a rollout without log-probabilities",
        "tokens are weighted by the rollout's log-probabilities",
        {f"{ROLLOUT}.calculate_log_probs": NOT_TRUE},
    ),
    "ratio_level": _ratio(
        "importance weights of whole sequences", "each token is weighted by its own ratio", _SEQUENCES
    ),
    "ratio_threshold": _ratio(
        "importance weights truncated before the loss",
        f"the loss truncates, at {POLICY_LOSS}.is_threshold",
        {f"{CORRECTION}.rollout_is_threshold": Values("below 1e9", _truncates, "1e9")},
    ),
    "ratio_normalization": _ratio("normalized importance weights", "the loss needs the ratios themselves", _NORMALIZED),
    "clip_of_another_loss": _calibrated(
        "losses without PPO's clip bounds",
        "it does not clip the ratio of a single token as PPO does",
        {LOSS: other_than(*CALIBRATED_LOSSES, required=True)},
    ),
    "clip_of_bf16": _calibrated(
        "BF16 training",
        "ratios of BF16 training carry no quantization noise",
        {"jetrl.train": other_than(*TRAINED, required=True)},
        instead="Set precision=jet_fp8, or jetrl.clip=fixed",
    ),
    "clip_bypass": _calibrated("bypass mode", "it never runs the policy from before an update", _BYPASS),
    "clip_of_one_update": Row(
        "one update per batch of rollouts",
        "every ratio is 1 and nothing is clipped",
        {
            f"{ACTOR}.ppo_mini_batch_size": Values(
                "equal to the batch of rollouts, with one epoch", lambda value: True, ""
            )
        },
        scope=Scope("jetrl.clip=calibrated", _one_update),
        instead=f"Set a smaller {ACTOR}.ppo_mini_batch_size, or jetrl.clip=fixed",
    ),
    "exact_bypass": Row(
        "bypass mode",
        "the trainer computes no log-probabilities that could be compared before an update",
        _BYPASS,
        scope=EXACT_COMPUTED,
    ),
    "rollout_log_probs_with_correction": Row(
        "a correction of the mismatch",
        "verl computes no weights in bypass mode, and every weight would be 1",
        {f"{CORRECTION}.rollout_is": SET, f"{CORRECTION}.rollout_rs": SET},
        scope=ROLLOUT_LOG_PROBS,
    ),
    "rollout_log_probs_in_a_loss_of_bypass": Row(
        "verl's loss of bypass mode",
        "it corrects a mismatch that is not there",
        {LOSS: one_of("bypass_mode", use="vanilla")},
        scope=ROLLOUT_LOG_PROBS,
    ),
}
