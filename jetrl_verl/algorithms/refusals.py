# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Combinations of precision, loss and correction that contradict each other, found in the composed config alone.

Rules in the form of ``config/check.py``, which runs them: each yields the rest of a sentence that begins with
``precision=<name>``. Nothing is imported here, so a refusal costs no import of verl or torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

RATIO_LOSSES = ("qurl_decoupled", "qurl_acr")
"""Losses of this package that need pi_old / pi_rollout of every token."""

CALIBRATED_LOSSES = ("vanilla", *RATIO_LOSSES)
"""Losses that clip each token's ratio at ``clip_ratio_low`` and ``clip_ratio_high``, which calibration moves."""

_LOSS_CONFIG = "jetrl_verl.algorithms.losses.JetPolicyLossConfig"
_UNTRUNCATED = 4.86e8

_QURL = {"qurl_fp8": "fp8_rollout_tis", "qurl_int8": "int8_rollout_tis"}
"""Precisions that bring QuRL's loss, and the one for another loss on the same rollout."""

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"

Get = Callable[[str], Any]


def loss_rules(get: Get) -> Iterator[str]:
    """A loss of this package that is not registered, or that would not get the ratios it needs.

    Args:
        get: value at a dotted path of the composed config, None where it is absent.
    """
    loss = get(f"{_ACTOR}.policy_loss.loss_mode")
    precision = get("jetrl.precision")
    if precision in _QURL and loss not in RATIO_LOSSES:
        yield (
            f"weighs tokens by ratios that only QuRL's losses truncate, so loss_mode={loss} contradicts it; use "
            f"{' or '.join(RATIO_LOSSES)}, or precision={_QURL[precision]}"
        )
    if loss not in RATIO_LOSSES:
        return
    if get(f"{_ACTOR}.policy_loss._target_") != _LOSS_CONFIG:
        yield f"finds loss_mode={loss} through {_ACTOR}.policy_loss._target_={_LOSS_CONFIG}; set that key too"
    most = get(f"{_ACTOR}.policy_loss.is_threshold")
    if most is not None and not _is_positive(most):
        yield (
            f"truncates weights at {_ACTOR}.policy_loss.is_threshold={most} under loss_mode={loss}, which is no finite "
            "number above 0; set one, such as 2.0"
        )
    if get(f"{_CORRECTION}.bypass_mode"):
        yield (
            f"cannot tell pi_old from pi_rollout in bypass mode, and loss_mode={loss} weighs tokens by their ratio; "
            f"set {_CORRECTION}.bypass_mode=false"
        )
    if not get("actor_rollout_ref.rollout.calculate_log_probs"):
        yield (
            f"gets no rollout log-probabilities, and loss_mode={loss} weighs tokens by them; "
            "set actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    level = get(f"{_CORRECTION}.rollout_is")
    if level != "token":
        yield f"weighs each token by its own ratio under loss_mode={loss}; set {_CORRECTION}.rollout_is=token"
    threshold = get(f"{_CORRECTION}.rollout_is_threshold")
    if not _truncates_nothing(threshold):
        yield (
            f"truncates in the loss under loss_mode={loss}, at {_ACTOR}.policy_loss.is_threshold, not before it at "
            f"{_CORRECTION}.rollout_is_threshold={threshold}; set that to 1e9"
        )
    if get(f"{_CORRECTION}.rollout_is_batch_normalize"):
        yield (
            f"needs the ratios themselves under loss_mode={loss}, not normalised ones; "
            f"set {_CORRECTION}.rollout_is_batch_normalize=false"
        )


def _is_positive(number: Any) -> bool:
    """Whether it is a finite number above 0; a weight of 0 trains nothing, one below 0 the other way."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < float("inf")


def _truncates_nothing(threshold: Any) -> bool:
    try:
        return float(threshold) >= _UNTRUNCATED
    except (TypeError, ValueError):
        return False


def clip_rules(get: Get) -> Iterator[str]:
    """Calibrated clipping where nothing is clipped, or nothing is to be calibrated. ``get`` as above."""
    if get("jetrl.clip") != "calibrated":
        return
    loss = get(f"{_ACTOR}.policy_loss.loss_mode")
    if loss not in CALIBRATED_LOSSES:
        yield (
            f"has no clip bounds to calibrate under loss_mode={loss}; use one of {', '.join(CALIBRATED_LOSSES)}, or "
            "jetrl.clip=fixed"
        )
    if get("jetrl.train") != "fp8":
        yield (
            "trains in BF16, whose ratios carry no quantisation noise to calibrate away; "
            "use jetrl.clip=fixed or precision=jet_fp8"
        )
    if get(f"{_CORRECTION}.bypass_mode"):
        yield (
            "never runs the policy of before an update in bypass mode, which calibrated clipping compares with; set "
            f"{_CORRECTION}.bypass_mode=false or jetrl.clip=fixed"
        )
    if get(f"{_ACTOR}.ppo_epochs") == 1 and get(f"{_ACTOR}.ppo_mini_batch_size") == get("data.train_batch_size"):
        yield (
            "updates once per batch of rollouts here, so that every ratio is 1 and nothing is clipped; use a smaller "
            f"{_ACTOR}.ppo_mini_batch_size or jetrl.clip=fixed"
        )


def correction_rules(get: Get) -> Iterator[str]:
    """Adaptive correction where there is nothing to correct, or nothing to correct with. ``get`` as above."""
    if get("jetrl.correction") != "adaptive":
        return
    if get("jetrl.precision") == "jet_fp8_exact":
        yield "samples from the very policy that it trains, so nothing is to be corrected; use jetrl.correction=fixed"
    loss = get(f"{_ACTOR}.policy_loss.loss_mode")
    if loss in RATIO_LOSSES:
        yield (
            f"needs the ratios themselves under loss_mode={loss}, not weights whose strength follows the batch; use "
            "jetrl.correction=fixed or loss_mode=vanilla"
        )
        return
    if get(f"{_CORRECTION}.bypass_mode"):
        yield (
            "computes no importance weights before the update in bypass mode, which jetrl.correction=adaptive mixes; "
            f"set {_CORRECTION}.bypass_mode=false"
        )
    if get(f"{_CORRECTION}.rollout_is") != "token":
        yield f"mixes weights of single tokens under jetrl.correction=adaptive; set {_CORRECTION}.rollout_is=token"
    threshold = get(f"{_CORRECTION}.rollout_is_threshold")
    if isinstance(threshold, str) and "_" in threshold:
        yield (
            f"would give back a part of the tokens that {_CORRECTION}.rollout_is_threshold={threshold} rejects; set "
            "one upper bound, such as 2.0"
        )
    if get(f"{_CORRECTION}.rollout_is_batch_normalize"):
        yield (
            "mixes weights with the 1 of the uncorrected gradient under jetrl.correction=adaptive, not normalised "
            f"ones; set {_CORRECTION}.rollout_is_batch_normalize=false"
        )
