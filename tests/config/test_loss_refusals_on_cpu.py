# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Combinations that contradict each other, as a user would set them: one sentence each, and none for what works."""

import math

import pytest

from jetrl_verl.algorithms.losses import UNTRUNCATED, JetPolicyLossConfig
from jetrl_verl.config.precision import target_of
from jetrl_verl.config.support import algorithms
from jetrl_verl.config.support.scopes import ADAPTIVE, CALIBRATED, CALIBRATED_LOSSES, QURL, RATIO_LOSS, RATIO_LOSSES
from jetrl_verl.config.support.table import refusals

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"

QURLS = {
    f"{ACTOR}.policy_loss.loss_mode": "qurl_acr",
    f"{ACTOR}.policy_loss._target_": "jetrl_verl.algorithms.losses.JetPolicyLossConfig",
    f"{CORRECTION}.rollout_is": "token",
    f"{CORRECTION}.rollout_is_threshold": 1e9,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    f"{CORRECTION}.bypass_mode": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
}
CLIPPED = {
    "jetrl.clip": "calibrated",
    "jetrl.train": "fp8",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    "data.train_batch_size": 128,
}
CORRECTED = {
    "jetrl.correction": "adaptive",
    "jetrl.precision": "fp8_rollout",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{CORRECTION}.rollout_is": "token",
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    f"{CORRECTION}.bypass_mode": False,
}


LOSSES = [QURL, RATIO_LOSS]


def complaints(scopes, config: dict) -> list[str]:
    rows = tuple(row for row in algorithms.ALGORITHM_ROWS if row.scope in scopes)
    return list(refusals(config.get, rows))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({f"{ACTOR}.policy_loss._target_": "verl.workers.config.PolicyLossConfig"}, "policy_loss._target_=jetrl_verl"),
        ({f"{CORRECTION}.rollout_is": None}, "rollout_is=token"),
        ({f"{CORRECTION}.rollout_is": "sequence"}, "rollout_is=token"),
        ({f"{CORRECTION}.rollout_is_threshold": 2.0}, "rollout_is_threshold=2.0 is not supported with loss_mode="),
        (
            {f"{CORRECTION}.rollout_is_threshold": "0.5_2.0"},
            "threshold=0.5_2.0 is not supported with loss_mode=",
        ),
        ({f"{CORRECTION}.rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=false"),
        ({f"{CORRECTION}.bypass_mode": True}, "bypass_mode=false"),
        ({"actor_rollout_ref.rollout.calculate_log_probs": False}, "rollout.calculate_log_probs=true"),
    ],
)
@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_a_ratio_loss_without_its_ratios_is_refused(loss, change, sentence):
    config = QURLS | {f"{ACTOR}.policy_loss.loss_mode": loss} | change
    (complaint,) = complaints(LOSSES, config)
    assert sentence in complaint and loss in complaint


@pytest.mark.parametrize("threshold", [0, -2.0, 0.0, math.inf, math.nan, True, "2"], ids=repr)
@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_weights_are_truncated_at_a_positive_number(loss, threshold):
    """At 0 every weight is 0, and below it every gradient points the other way."""
    key = f"{ACTOR}.policy_loss.is_threshold"
    config = QURLS | {f"{ACTOR}.policy_loss.loss_mode": loss}
    (complaint,) = complaints(LOSSES, config | {key: threshold})
    found = str(threshold).lower() if threshold is True else threshold
    assert f"{key}={found} is not supported with loss_mode={loss}" in complaint and "such as 2.0" in complaint
    for fine in (1, 0.5, 8.0):
        assert complaints(LOSSES, config | {key: fine}) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {f"{ACTOR}.policy_loss.loss_mode": "gpg"},
            "loss_mode=gpg is not supported with jetrl.clip=calibrated",
        ),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "to one of vanilla"),
        ({"jetrl.train": "bf16"}, "jetrl.train=bf16 is not supported with jetrl.clip=calibrated"),
        ({f"{CORRECTION}.bypass_mode": True}, "bypass_mode=false"),
        ({f"{ACTOR}.ppo_mini_batch_size": 128}, "every ratio is 1"),
    ],
)
def test_calibrated_clipping_where_nothing_is_clipped_is_refused(change, sentence):
    (complaint,) = complaints([CALIBRATED], CLIPPED | change)
    assert sentence in complaint


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"jetrl.precision": "jet_fp8_exact"}, "nothing is to be corrected"),
        ({f"{ACTOR}.policy_loss.loss_mode": "qurl_decoupled"}, "policy_loss.loss_mode=vanilla"),
        ({f"{CORRECTION}.bypass_mode": True}, "bypass_mode=false"),
        ({f"{CORRECTION}.rollout_is": "sequence"}, "rollout_is=token"),
        ({f"{CORRECTION}.rollout_is_threshold": "0.5_2.0"}, "Set one upper bound"),
        ({f"{CORRECTION}.rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=false"),
    ],
)
def test_adaptive_correction_of_nothing_or_with_nothing_is_refused(change, sentence):
    (complaint,) = complaints([ADAPTIVE], CORRECTED | change)
    assert sentence in complaint


@pytest.mark.parametrize("precision", ["qurl_fp8", "qurl_int8"])
def test_qurl_under_another_loss_is_refused(precision):
    """The ratios it hands over are not truncated; vanilla would apply them as they are."""
    rollout = precision.removeprefix("qurl_")
    config = QURLS | {"jetrl.precision": precision, "jetrl.rollout": rollout, f"{ACTOR}.policy_loss.loss_mode": "gspo"}
    (complaint,) = complaints(LOSSES, config)
    assert (
        f"loss_mode=gspo is not supported with precision={precision}" in complaint
        and f"{precision[5:]}_rollout_tis" in complaint
    )
    for loss in RATIO_LOSSES:
        assert complaints(LOSSES, config | {f"{ACTOR}.policy_loss.loss_mode": loss}) == []


def test_what_works_is_not_refused():
    assert complaints(LOSSES, QURLS) == []
    assert complaints(LOSSES, QURLS | {f"{CORRECTION}.rollout_is_threshold": "1e9"}) == []
    for loss in CALIBRATED_LOSSES:
        assert complaints([CALIBRATED], CLIPPED | {f"{ACTOR}.policy_loss.loss_mode": loss}) == []
    one_batch = {f"{ACTOR}.ppo_mini_batch_size": 128, f"{ACTOR}.ppo_epochs": 2}
    assert complaints([CALIBRATED], CLIPPED | one_batch) == []
    assert complaints([CALIBRATED], CLIPPED | {"jetrl.clip": "fixed", "jetrl.train": "bf16"}) == []
    assert complaints(LOSSES, {f"{ACTOR}.policy_loss.loss_mode": "vanilla"}) == []
    assert complaints([ADAPTIVE], CORRECTED) == []
    assert complaints([ADAPTIVE], CORRECTED | {"jetrl.correction": "fixed", f"{CORRECTION}.bypass_mode": True}) == []


def test_the_rules_know_what_they_do_not_import():
    """The rules name a class and a bound that importing would cost verl."""
    target = target_of(f"{ACTOR}.policy_loss", "qurl_fp8")
    assert f"{JetPolicyLossConfig.__module__}.{JetPolicyLossConfig.__qualname__}" == target
    assert math.isclose(UNTRUNCATED, algorithms._UNTRUNCATED, rel_tol=2e-3) and UNTRUNCATED < algorithms._UNTRUNCATED


def test_every_calibrated_loss_is_registered():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(CALIBRATED_LOSSES) <= set(POLICY_LOSS_REGISTRY)
