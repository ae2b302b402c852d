# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration about losses, clipping and corrections that contradict each other."""

from typing import Any

from jetrl_verl.formats.catalog import FLOW

from .general import target_row
from .row import IS_NOT_TRUE, IS_SET, IS_TRUE, Get, Row, Wrong, equal, other_than
from .scopes import (
    ACTOR,
    ADAPTIVE,
    CALIBRATED,
    CALIBRATED_LOSSES,
    CORRECTION,
    LOSS,
    POLICY_LOSS,
    QURL,
    RATIO_LOSS,
    RATIO_LOSSES,
    ROLLOUT,
    ROLLOUT_LOG_PROBS,
    TENSOR_PARALLEL,
)

_UNTRUNCATED = 4.86e8
"""Above the largest ratio that verl passes on, exp(20)."""


def _positive(number: Any) -> bool:
    """Whether it is a finite number above 0; a weight of 0 trains nothing, one below 0 the other way."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < float("inf")


def _truncates(threshold: Any, get: Get) -> bool:
    try:
        return not float(threshold) >= _UNTRUNCATED
    except (TypeError, ValueError):
        return True


def _one_update(value: Any, get: Get) -> bool:
    return get(f"{ACTOR}.ppo_epochs") == 1 and value == get("data.train_batch_size")


_TOKEN = {f"{CORRECTION}.rollout_is": other_than("token", example="sequence", required=True)}
_NORMALIZED = {f"{CORRECTION}.rollout_is_batch_normalize": IS_TRUE}
_BYPASS = {f"{CORRECTION}.bypass_mode": IS_TRUE}
_OR_FIXED_CLIP = ", or jetrl.clip=fixed"
_OR_COMPUTE = ", or jetrl.old_log_probs=compute"

ALGORITHM_ROWS: tuple[Row, ...] = (
    Row(
        "correction_of_nothing",
        "a correction of no mismatch",
        ADAPTIVE,
        "it samples from the policy that it trains, so there is nothing to correct",
        {"jetrl.precision": equal("jet_fp8_exact")},
        "Set jetrl.correction=fixed",
        needs={"jetrl.train": FLOW, "jetrl.operations": "shared", TENSOR_PARALLEL: 1},
    ),
    Row(
        "adaptive_loss",
        "QuRL's losses under the adaptive correction",
        ADAPTIVE,
        "the loss needs the ratios themselves",
        {LOSS: equal(*RATIO_LOSSES, use="vanilla")},
        ", or jetrl.correction=fixed",
    ),
    Row("adaptive_bypass", "bypass mode", ADAPTIVE, "it computes no importance weights before the update", _BYPASS),
    Row(
        "adaptive_level",
        "importance weights of whole sequences",
        ADAPTIVE,
        "weights of single tokens are mixed",
        _TOKEN,
    ),
    Row(
        "adaptive_threshold",
        "importance weights that reject tokens",
        ADAPTIVE,
        "the mixture would give a part of them back",
        {
            f"{CORRECTION}.rollout_is_threshold": Wrong(
                "two bounds", lambda value, get: isinstance(value, str) and "_" in value, "2.0", "0.5_2.0"
            )
        },
        " or another upper bound",
    ),
    Row(
        "adaptive_normalization",
        "normalized importance weights",
        ADAPTIVE,
        "weights are mixed with the 1 of the uncorrected gradient",
        _NORMALIZED,
    ),
    Row(
        "loss_of_qurl",
        "losses other than QuRL's",
        QURL,
        "only QuRL's losses truncate the ratios",
        {LOSS: other_than(*RATIO_LOSSES, example="gspo", use=" or ".join(RATIO_LOSSES), required=True)},
        ", or precision=fp8_rollout_tis or int8_rollout_tis",
    ),
    target_row(POLICY_LOSS, "qurl_fp8", RATIO_LOSS),
    Row(
        "ratio_truncation",
        "a truncation at no positive number",
        RATIO_LOSS,
        "it is no finite number above 0",
        {
            f"{POLICY_LOSS}.is_threshold": Wrong(
                "no finite number above 0", lambda value, get: value is not None and not _positive(value), "2.0", 0
            )
        },
        " or another positive number",
    ),
    Row("ratio_bypass", "bypass mode", RATIO_LOSS, "it cannot tell pi_old from pi_rollout", _BYPASS),
    Row(
        "ratio_log_probs",
        "a rollout without log-probabilities",
        RATIO_LOSS,
        "tokens are weighted by the rollout's log-probabilities",
        {f"{ROLLOUT}.calculate_log_probs": IS_NOT_TRUE},
        needs={f"{CORRECTION}.rollout_is": None},
    ),
    Row(
        "ratio_level",
        "importance weights of whole sequences",
        RATIO_LOSS,
        "each token is weighted by its own ratio",
        _TOKEN,
    ),
    Row(
        "ratio_threshold",
        "importance weights truncated before the loss",
        RATIO_LOSS,
        f"the loss truncates, at {POLICY_LOSS}.is_threshold",
        {f"{CORRECTION}.rollout_is_threshold": Wrong("below 1e9", _truncates, "1e9", 2.0)},
    ),
    Row(
        "ratio_normalization",
        "normalized importance weights",
        RATIO_LOSS,
        "the loss needs the ratios themselves",
        _NORMALIZED,
    ),
    Row(
        "clip_of_another_loss",
        "losses without PPO's clip bounds",
        CALIBRATED,
        "it has no clip bounds to calibrate",
        {LOSS: other_than(*CALIBRATED_LOSSES, example="gspo", use=" or ".join(CALIBRATED_LOSSES), required=True)},
        _OR_FIXED_CLIP,
    ),
    Row(
        "clip_of_bf16",
        "BF16 training",
        CALIBRATED,
        "ratios of BF16 training carry no quantization noise",
        {"jetrl.train": Wrong("`bf16`", lambda value, get: value != FLOW, example="bf16")},
        f"Set precision=jet_fp8{_OR_FIXED_CLIP}",
        needs={"jetrl.precision": "fp8_rollout"},
    ),
    Row(
        "clip_bypass",
        "bypass mode",
        CALIBRATED,
        "it never runs the policy from before an update",
        _BYPASS,
        _OR_FIXED_CLIP,
    ),
    Row(
        "clip_of_one_update",
        "one update per batch of rollouts",
        CALIBRATED,
        "every ratio is 1 and nothing is clipped",
        {f"{ACTOR}.ppo_mini_batch_size": Wrong("the batch of rollouts, with one epoch", _one_update, example=1024)},
        f"Set a smaller {ACTOR}.ppo_mini_batch_size{_OR_FIXED_CLIP}",
    ),
    Row(
        "rollout_log_probs_with_correction",
        "a correction of the mismatch",
        ROLLOUT_LOG_PROBS,
        "verl computes no weights in bypass mode, and every weight would be 1",
        dict.fromkeys((f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"), IS_SET),
        _OR_COMPUTE,
    ),
    Row(
        "rollout_log_probs_in_a_loss_of_bypass",
        "verl's loss of bypass mode",
        ROLLOUT_LOG_PROBS,
        "it corrects a mismatch that is not there",
        {LOSS: equal("bypass_mode", use="vanilla")},
        _OR_COMPUTE,
    ),
    Row(
        "rollout_log_probs_of_agent_loops",
        "agent loops of your own",
        ROLLOUT_LOG_PROBS,
        "a request with its own top_p or temperature has log-probabilities that the trainer does not compute",
        {
            f"{ROLLOUT}.agent.agent_loop_config_path": IS_SET,
            f"{ROLLOUT}.agent.agent_loop_manager_class": IS_SET,
            f"{ROLLOUT}.agent.default_agent_loop": other_than("single_turn_agent", "tool_agent", example="my_agent"),
        },
        _OR_COMPUTE,
    ),
    Row(
        "rollout_log_probs_of_kept_rollouts",
        "rollouts read from a folder",
        ROLLOUT_LOG_PROBS,
        "another policy sampled them",
        {f"skip.{name}.enable": IS_TRUE for name in ("rollout", "rollout_tq", "async_rollout")},
        _OR_COMPUTE,
    ),
    Row(
        "rollout_log_probs_of_several_updates",
        "several batches per weight sync",
        ROLLOUT_LOG_PROBS,
        "all but the first were sampled before an update",
        {"trainer.v1.sync.parameter_sync_step": other_than(1, example=2)},
        _OR_COMPUTE,
    ),
)
