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
"""Combinations that contradict each other, as a user would set them: one sentence each, and none for what works."""

import math

import pytest

from jetrl_verl.algorithms.losses import UNTRUNCATED, JetPolicyLossConfig
from jetrl_verl.algorithms.refusals import CALIBRATED_LOSSES, RATIO_LOSSES, clip_rules, correction_rules, loss_rules

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"

QURL = {
    f"{ACTOR}.policy_loss.loss_mode": "qurl_acr",
    f"{ACTOR}.policy_loss._target_": "jetrl_verl.algorithms.losses.JetPolicyLossConfig",
    f"{CORRECTION}.rollout_is": "token",
    f"{CORRECTION}.rollout_is_threshold": 1e9,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    f"{CORRECTION}.bypass_mode": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
}
CALIBRATED = {
    "jetrl.clip": "calibrated",
    "jetrl.train": "fp8",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    "data.train_batch_size": 128,
}
ADAPTIVE = {
    "jetrl.correction": "adaptive",
    "jetrl.precision": "fp8_rollout",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{CORRECTION}.rollout_is": "token",
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    f"{CORRECTION}.bypass_mode": False,
}


def complaints(rules, config: dict) -> list[str]:
    return list(rules(config.get))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({f"{ACTOR}.policy_loss._target_": "verl.workers.config.PolicyLossConfig"}, "policy_loss._target_=jetrl_verl"),
        ({f"{CORRECTION}.rollout_is": None}, "rollout_is=token"),
        ({f"{CORRECTION}.rollout_is": "sequence"}, "rollout_is=token"),
        ({f"{CORRECTION}.rollout_is_threshold": 2.0}, "rollout_is_threshold=2.0; set that to 1e9"),
        ({f"{CORRECTION}.rollout_is_threshold": "0.5_2.0"}, "rollout_is_threshold=0.5_2.0; set that to 1e9"),
        ({f"{CORRECTION}.rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=false"),
        ({f"{CORRECTION}.bypass_mode": True}, "bypass_mode=false"),
        ({"actor_rollout_ref.rollout.calculate_log_probs": False}, "no rollout log-probabilities"),
    ],
)
@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_a_ratio_loss_without_its_ratios_is_refused(loss, change, sentence):
    config = QURL | {f"{ACTOR}.policy_loss.loss_mode": loss} | change
    (complaint,) = complaints(loss_rules, config)
    assert sentence in complaint and loss in complaint


@pytest.mark.parametrize("threshold", [0, -2.0, 0.0, math.inf, math.nan, True, "2"], ids=repr)
@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_weights_are_truncated_at_a_positive_number(loss, threshold):
    """At 0 every weight is 0, and below it every gradient points the other way."""
    key = f"{ACTOR}.policy_loss.is_threshold"
    config = QURL | {f"{ACTOR}.policy_loss.loss_mode": loss}
    (complaint,) = complaints(loss_rules, config | {key: threshold})
    assert f"{key}={threshold} under loss_mode={loss}" in complaint and "such as 2.0" in complaint
    for fine in (1, 0.5, 8.0):
        assert complaints(loss_rules, config | {key: fine}) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({f"{ACTOR}.policy_loss.loss_mode": "gpg"}, "no clip bounds to calibrate under loss_mode=gpg"),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "use one of vanilla"),
        ({"jetrl.train": "bf16"}, "trains in BF16"),
        ({f"{CORRECTION}.bypass_mode": True}, "bypass_mode=false"),
        ({f"{ACTOR}.ppo_mini_batch_size": 128}, "every ratio is 1"),
    ],
)
def test_calibrated_clipping_where_nothing_is_clipped_is_refused(change, sentence):
    (complaint,) = complaints(clip_rules, CALIBRATED | change)
    assert sentence in complaint


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"jetrl.precision": "jet_fp8_exact"}, "nothing is to be corrected"),
        ({f"{ACTOR}.policy_loss.loss_mode": "qurl_decoupled"}, "loss_mode=vanilla"),
        ({f"{CORRECTION}.bypass_mode": True}, "bypass_mode=false"),
        ({f"{CORRECTION}.rollout_is": "sequence"}, "rollout_is=token"),
        ({f"{CORRECTION}.rollout_is_threshold": "0.5_2.0"}, "set one upper bound"),
        ({f"{CORRECTION}.rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=false"),
    ],
)
def test_adaptive_correction_of_nothing_or_with_nothing_is_refused(change, sentence):
    (complaint,) = complaints(correction_rules, ADAPTIVE | change)
    assert sentence in complaint


@pytest.mark.parametrize("precision", ["qurl_fp8", "qurl_int8"])
def test_qurl_under_another_loss_is_refused(precision):
    """The ratios it hands over are not truncated; vanilla would apply them as they are."""
    config = QURL | {"jetrl.precision": precision, f"{ACTOR}.policy_loss.loss_mode": "gspo"}
    (complaint,) = complaints(loss_rules, config)
    assert "loss_mode=gspo contradicts it" in complaint and f"{precision[5:]}_rollout_tis" in complaint
    for loss in RATIO_LOSSES:
        assert complaints(loss_rules, config | {f"{ACTOR}.policy_loss.loss_mode": loss}) == []


def test_what_works_is_not_refused():
    assert complaints(loss_rules, QURL) == []
    assert complaints(loss_rules, QURL | {f"{CORRECTION}.rollout_is_threshold": "1e9"}) == []
    for loss in CALIBRATED_LOSSES:
        assert complaints(clip_rules, CALIBRATED | {f"{ACTOR}.policy_loss.loss_mode": loss}) == []
    one_batch = {f"{ACTOR}.ppo_mini_batch_size": 128, f"{ACTOR}.ppo_epochs": 2}
    assert complaints(clip_rules, CALIBRATED | one_batch) == []
    assert complaints(clip_rules, CALIBRATED | {"jetrl.clip": "fixed", "jetrl.train": "bf16"}) == []
    assert complaints(loss_rules, {f"{ACTOR}.policy_loss.loss_mode": "vanilla"}) == []
    assert complaints(correction_rules, ADAPTIVE) == []
    assert (
        complaints(correction_rules, ADAPTIVE | {"jetrl.correction": "fixed", f"{CORRECTION}.bypass_mode": True}) == []
    )


def test_the_rules_know_what_they_do_not_import():
    """The rules name a class and a bound that importing would cost verl."""
    from jetrl_verl.algorithms import refusals

    assert f"{JetPolicyLossConfig.__module__}.{JetPolicyLossConfig.__qualname__}" == refusals._LOSS_CONFIG
    assert math.isclose(UNTRUNCATED, refusals._UNTRUNCATED, rel_tol=2e-3) and UNTRUNCATED < refusals._UNTRUNCATED


def test_every_calibrated_loss_is_registered():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(CALIBRATED_LOSSES) <= set(POLICY_LOSS_REGISTRY)
