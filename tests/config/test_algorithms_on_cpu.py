# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What rollout-only baselines, ``clip=calibrated`` and ``correction=adaptive`` compose to."""

import pytest
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.config import omega_conf_to_dataclass

from jetrl_verl.config import Job, UnsupportedConfiguration
from jetrl_verl.config.composition import parse

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
SIZES = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{ROLLOUT}.name=vllm"]


@pytest.mark.parametrize(
    ("precision", "rollout", "level", "threshold", "loss", "scaling"),
    [
        ("int8_rollout", "int8", None, 2.0, "vanilla", 1.0),
        ("int8_rollout_tis", "int8", "token", 2.0, "vanilla", 1.0),
        ("qurl_fp8", "fp8", "token", 1e9, "qurl_acr", 1.5),
        ("qurl_int8", "int8", "token", 1e9, "qurl_acr", 1.5),
    ],
)
def test_options_that_each_baseline_sets(compose, precision, rollout, level, threshold, loss, scaling):
    config = compose(f"precision={precision}", *SIZES)
    job = Job.of(config.jetrl)
    options = job.options
    assert (options.train, options.rollout, options.invariant_scaling) == ("bf16", rollout, scaling)
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == (level, threshold)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == loss and loss in POLICY_LOSS_REGISTRY
    assert actor.engine.jetrl == job
    vllm = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]
    assert vllm["quantization"] == f"jetrl_{rollout}"
    assert vllm["hf_overrides"]["quantization_config"]["quant_method"] == f"jetrl_{rollout}"


def test_old_log_probs_of_the_rollout_use_verls_bypass_mode_and_a_check(compose, own_trainer):
    from jetrl_verl.patches.batch_hooks import AFTER_OLD_LOG_PROBS

    exact = ["precision=jet_fp8_exact", *SIZES, f"{ROLLOUT}.tensor_model_parallel_size=1"]
    computed, reused = compose(*exact), compose(*exact, "jetrl.old_log_probs=rollout")
    assert (computed.algorithm.rollout_correction.bypass_mode, computed.jetrl.old_log_probs) == (False, "compute")
    assert reused.algorithm.rollout_correction.bypass_mode is True
    hooks = vars(own_trainer).get("AFTER_OLD_LOG_PROBS", AFTER_OLD_LOG_PROBS)
    stock = compose("precision=jet_fp8", *SIZES, "jetrl.operations=stock")
    for config, jobs in ((stock, []), (computed, ["compute"]), (reused, ["rollout"])):
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        assert [hook.__self__.job.options.old_log_probs for hook in hooks.values()] == jobs
    reused.algorithm.rollout_correction.bypass_mode, reused.jetrl.old_log_probs = False, "compute"
    assert reused == computed


def test_fixed_clipping_is_the_default(compose):
    assert compose("precision=jet_fp8") == compose("precision=jet_fp8", "clip=fixed")
    assert compose("clip=fixed") == compose()


@pytest.mark.parametrize("precision", ["jet_fp8", "jet_fp8_exact"])
def test_calibrated_clipping_composes_in_either_order(compose, precision):
    config = compose(f"precision={precision}", "clip=calibrated", *SIZES)
    assert config == compose("clip=calibrated", f"precision={precision}", *SIZES)
    assert (config.jetrl.clip, config.jetrl.clip_interval) == ("calibrated", 20)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == "vanilla"
    assert actor.engine.jetrl.options.clip == "calibrated"


@pytest.mark.parametrize("precision", ["fp8_rollout_tis", "jet_fp8"])
def test_adaptive_correction_sets_truncated_importance_sampling(compose, precision):
    config = compose(f"precision={precision}", "correction=adaptive", "jetrl.correction_scale=0.01", *SIZES)
    assert config == compose("correction=adaptive", f"precision={precision}", "jetrl.correction_scale=0.01", *SIZES)
    assert (config.jetrl.correction, config.jetrl.correction_scale) == ("adaptive", 0.01)
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.0)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).jetrl.options.correction == "adaptive"
    assert compose(f"precision={precision}") == compose(f"precision={precision}", "correction=fixed")


@pytest.mark.parametrize("value", [True, float("inf"), float("nan"), "1.5", None])
def test_an_invalid_number_is_refused(value):
    with pytest.raises(UnsupportedConfiguration, match="jetrl.invariant_scaling="):
        parse({"precision": "qurl_fp8", "train": "bf16", "rollout": "fp8", "invariant_scaling": value})
