# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration about losses, clipping and corrections that contradict each other."""

from typing import Any

from jetrl_verl.formats.catalog import FLOW

from .row import IS_SET, IS_TRUE, Get, Row, Wrong, other_than
from .scopes import (
    ACTOR,
    ADAPTIVE,
    CALIBRATED,
    CALIBRATED_LOSSES,
    CORRECTION,
    LOSS,
    QURL,
    RATIO_LOSS,
    RATIO_LOSSES,
    ROLLOUT,
    ROLLOUT_LOG_PROBS,
)
from .target import target_row

_UNTRUNCATED = 4.86e8
"""Above the largest ratio that verl passes on, exp(20)."""
_POLICY_LOSS = f"{ACTOR}.policy_loss"


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


_TOKEN = other_than("token", absent=False)
_FIXED_CORRECTION = "Set jetrl.correction=fixed"
_FIXED_CLIP = ", or jetrl.clip=fixed"
_COMPUTED = ", or jetrl.old_log_probs=compute"

ALGORITHM_ROWS: tuple[Row, ...] = (
    Row(
        "correction_of_nothing",
        "a correction of no mismatch",
        ADAPTIVE,
        "it samples from the policy that it trains, so nothing is to be corrected",
        _FIXED_CORRECTION,
        ("jetrl.precision",),
        Wrong("`jet_fp8_exact`", lambda value, get: value == "jet_fp8_exact"),
        what="precision={value}",
        example="jet_fp8_exact",
        beside={
            "jetrl.train": FLOW,
            "jetrl.operations": "shared",
            f"{ROLLOUT}.tensor_model_parallel_size": 1,
        },
    ),
    Row(
        "adaptive_loss",
        "QuRL's losses under the adaptive correction",
        ADAPTIVE,
        "the loss needs the ratios themselves",
        f"{_FIXED_CORRECTION}, or {{key}}=vanilla",
        (LOSS,),
        Wrong(" or ".join(f"`{loss}`" for loss in RATIO_LOSSES), lambda value, get: value in RATIO_LOSSES),
        what="loss_mode={value}",
        example="qurl_acr",
    ),
    Row(
        "adaptive_bypass",
        "bypass mode",
        ADAPTIVE,
        "it computes no importance weights before the update",
        "Set {key}=false",
        (f"{CORRECTION}.bypass_mode",),
        IS_TRUE,
        example=True,
    ),
    Row(
        "adaptive_level",
        "importance weights of whole sequences",
        ADAPTIVE,
        "weights of single tokens are mixed",
        "Set {key}=token",
        (f"{CORRECTION}.rollout_is",),
        _TOKEN,
        example="sequence",
    ),
    Row(
        "adaptive_threshold",
        "importance weights that reject tokens",
        ADAPTIVE,
        "the mixture would give a part of them back",
        "Set one upper bound, as {key}=2.0",
        (f"{CORRECTION}.rollout_is_threshold",),
        Wrong("two bounds", lambda value, get: isinstance(value, str) and "_" in value),
        example="0.5_2.0",
    ),
    Row(
        "adaptive_normalization",
        "normalized importance weights",
        ADAPTIVE,
        "weights are mixed with the 1 of the uncorrected gradient",
        "Set {key}=false",
        (f"{CORRECTION}.rollout_is_batch_normalize",),
        IS_TRUE,
        example=True,
    ),
    Row(
        "loss_of_qurl",
        "losses other than QuRL's",
        QURL,
        "only QuRL's losses truncate the ratios",
        f"Set {{key}}={' or '.join(RATIO_LOSSES)}, or precision={{jetrl.rollout}}_rollout_tis",
        (LOSS,),
        other_than(*RATIO_LOSSES, absent=False),
        example="gspo",
    ),
    target_row(_POLICY_LOSS, "qurl_fp8", RATIO_LOSS),
    Row(
        "ratio_truncation",
        "a truncation at no positive number",
        RATIO_LOSS,
        "it is no finite number above 0",
        "Set {key} to a positive number, such as 2.0",
        (f"{_POLICY_LOSS}.is_threshold",),
        Wrong("no finite number above 0", lambda value, get: value is not None and not _positive(value)),
        example=0,
        listed=False,
    ),
    Row(
        "ratio_bypass",
        "bypass mode",
        RATIO_LOSS,
        "it cannot tell pi_old from pi_rollout",
        "Set {key}=false",
        (f"{CORRECTION}.bypass_mode",),
        IS_TRUE,
        example=True,
    ),
    Row(
        "ratio_log_probs",
        "a rollout without log-probabilities",
        RATIO_LOSS,
        "tokens are weighed by the rollout's log-probabilities",
        "Set {key}=true",
        (f"{ROLLOUT}.calculate_log_probs",),
        Wrong("`false`", lambda value, get: not value),
        example=False,
        beside={f"{CORRECTION}.rollout_is": None},
    ),
    Row(
        "ratio_level",
        "importance weights of whole sequences",
        RATIO_LOSS,
        "each token is weighed by its own ratio",
        "Set {key}=token",
        (f"{CORRECTION}.rollout_is",),
        _TOKEN,
        example="sequence",
    ),
    Row(
        "ratio_threshold",
        "importance weights truncated before the loss",
        RATIO_LOSS,
        f"the loss truncates, at {_POLICY_LOSS}.is_threshold",
        "Set {key}=1e9",
        (f"{CORRECTION}.rollout_is_threshold",),
        Wrong("below 1e9", _truncates),
        example=2.0,
    ),
    Row(
        "ratio_normalization",
        "normalized importance weights",
        RATIO_LOSS,
        "the loss needs the ratios themselves",
        "Set {key}=false",
        (f"{CORRECTION}.rollout_is_batch_normalize",),
        IS_TRUE,
        example=True,
    ),
    Row(
        "clip_of_another_loss",
        "losses without PPO's clip bounds",
        CALIBRATED,
        "it has no clip bounds to calibrate",
        f"Set {{key}} to one of {', '.join(CALIBRATED_LOSSES)}{_FIXED_CLIP}",
        (LOSS,),
        other_than(*CALIBRATED_LOSSES, absent=False),
        what="loss_mode={value}",
        example="gspo",
    ),
    Row(
        "clip_of_bf16",
        "BF16 training",
        CALIBRATED,
        "ratios of BF16 training carry no quantization noise",
        "Set precision=jet_fp8, or jetrl.clip=fixed",
        ("jetrl.train",),
        other_than(FLOW, absent=False),
        example="bf16",
        beside={"jetrl.precision": "fp8_rollout"},
    ),
    Row(
        "clip_bypass",
        "bypass mode",
        CALIBRATED,
        "it never runs the policy of before an update",
        f"Set {{key}}=false{_FIXED_CLIP}",
        (f"{CORRECTION}.bypass_mode",),
        IS_TRUE,
        example=True,
    ),
    Row(
        "clip_of_one_update",
        "one update per batch of rollouts",
        CALIBRATED,
        "every ratio is 1 and nothing is clipped",
        f"Set a smaller {{key}}{_FIXED_CLIP}",
        (f"{ACTOR}.ppo_mini_batch_size",),
        Wrong("the batch of rollouts, with one epoch", _one_update),
        example=1024,
    ),
    Row(
        "rollout_log_probs_with_correction",
        "a correction of the mismatch",
        ROLLOUT_LOG_PROBS,
        "verl computes no weights in bypass mode, and every weight would be 1",
        f"Set {{key}}=null{_COMPUTED}",
        (f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"),
        IS_SET,
        example="token",
    ),
    Row(
        "rollout_log_probs_in_a_loss_of_bypass",
        "verl's loss of bypass mode",
        ROLLOUT_LOG_PROBS,
        "it corrects a mismatch that is not there",
        f"Set {{key}}=vanilla{_COMPUTED}",
        (LOSS,),
        Wrong("`bypass_mode`", lambda value, get: value == "bypass_mode"),
        what="loss_mode={value}",
        example="bypass_mode",
    ),
    Row(
        "rollout_log_probs_of_agent_loops",
        "agent loops of your own",
        ROLLOUT_LOG_PROBS,
        "a request with its own top_p or temperature has log-probabilities that the trainer does not compute",
        f"Set {{key}}=null{_COMPUTED}",
        (f"{ROLLOUT}.agent.agent_loop_config_path", f"{ROLLOUT}.agent.agent_loop_manager_class"),
        IS_SET,
        example="loops.yaml",
    ),
    Row(
        "rollout_log_probs_of_another_agent_loop",
        "agent loops of your own",
        ROLLOUT_LOG_PROBS,
        "a request with its own top_p or temperature has log-probabilities that the trainer does not compute",
        f"Set {{key}}=single_turn_agent{_COMPUTED}",
        (f"{ROLLOUT}.agent.default_agent_loop",),
        other_than("single_turn_agent", "tool_agent"),
        example="my_agent",
    ),
    Row(
        "rollout_log_probs_of_kept_rollouts",
        "rollouts read from a folder",
        ROLLOUT_LOG_PROBS,
        "another policy sampled them",
        f"Set {{key}}=false{_COMPUTED}",
        ("skip.rollout.enable", "skip.rollout_tq.enable", "skip.async_rollout.enable"),
        IS_TRUE,
        example=True,
    ),
    Row(
        "rollout_log_probs_of_several_updates",
        "several batches per weight sync",
        ROLLOUT_LOG_PROBS,
        "all but the first were sampled before an update",
        f"Set {{key}}=1{_COMPUTED}",
        ("trainer.v1.sync.parameter_sync_step",),
        other_than(1),
        example=2,
    ),
)
