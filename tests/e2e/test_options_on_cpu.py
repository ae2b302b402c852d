# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Options that the main job (test_training_on_cpu.py) leaves at their defaults, in real jobs of two steps.

Several share a job if separate metrics judge them: k3_kl, gradient norm, the critic's and the reference's metrics.
"""

import math

import pytest
import torch
from jobs import ACTOR, Run, train

from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools.demo.policy import POLICIES, build_model, build_tokenizer, save_policy

REF = "actor_rollout_ref.ref"
STEPS = 2
LINEARS = 14
"""In the demo's policy: 7 in each of 2 layers."""

KL_TO_A_REFERENCE = (
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_coef=0.001",
    f"{REF}.log_prob_micro_batch_size_per_gpu=128",
)


def check(run: Run, quantized: int) -> None:
    """Every step moved the weights, and every sync checked the contract of ``quantized`` linear layers."""
    run.check_updates(STEPS)
    assert len({digest for *_, digest in run.syncs}) == len(run.syncs) == STEPS + 1
    assert {int(sync[1]) for sync in run.syncs} == {quantized}


def test_fsdp1_powers_of_two_a_bf16_backward_and_a_reference_in_fp8_keep_zero_mismatch(policy, tmp_path):
    """The one job here that is not slow: the most options, and the demo's baseline."""
    run = train(
        policy,
        "jet_fp8_exact",
        tmp_path,
        STEPS,
        f"{ACTOR}.strategy=fsdp",
        "jetrl.scale_rule=pow2",
        "jetrl.backward=bf16",
        "jetrl.ref=fp8",
        f"{REF}.strategy=fsdp2",  # FSDP1 offloads a reference to pinned memory, which needs a GPU driver
        *KL_TO_A_REFERENCE,
        f"{ACTOR}.ppo_mini_batch_size=16",
        "~actor_rollout_ref.model.override_config.attn_implementation",  # so that the driver chooses
        baseline=True,
    )
    check(run, LINEARS)
    assert "jetrl_verl: note: flash-attn runs on no CPU, so the plugin sets actor_rollout_ref.model." in run.log
    assert "jetrl_verl: exact: " in run.log and "exactness is OFF" not in run.log
    assert list(run.baseline) == [1, 2] and all(0 < k3_kl < 0.01 for k3_kl in run.baseline.values())
    assert "14 linear layers of the actor quantized (scale rule pow2, backward bf16)" in run.log
    assert "14 linear layers of the ref quantized" in run.log
    for metric in ("rollout_corr/k3_kl", "training/rollout_probs_diff_max", "actor/ppo_kl"):
        assert run.steps(metric) == [0.0] * STEPS, metric
    # The reference is the initial actor with stock operations between the linear layers, so the first KL is small.
    first, second = run.steps("actor/kl_loss")
    assert 0 <= first < 1e-3 < second


@pytest.fixture(scope="module")
def unfit(tmp_path_factory) -> str:
    """A policy like the demo's whose MLP does not fit blocks of 128."""
    folder, tokenizer = tmp_path_factory.mktemp("unfit"), build_tokenizer()
    model = build_model(POLICIES["dense"], tokenizer)
    model.config.intermediate_size = 576
    torch.manual_seed(7)
    save_policy(type(model)(model.config), tokenizer, folder)
    return str(folder)


PADDED = ("critic.model.use_remove_padding=False", "++critic.model.override_config.attn_implementation=sdpa")
PACKED = (
    "critic.model.use_remove_padding=True",
    f"++critic.model.override_config.attn_implementation={JETRL_ATTENTION}",
)


@pytest.mark.slow
@pytest.mark.parametrize("critic", [PACKED, PADDED], ids=["packed", "padded"])
def test_ppo_with_a_critic_and_a_reference_in_fp8_where_some_layers_do_not_fit(policy, unfit, tmp_path, critic):
    run = train(
        policy,
        "jet_fp8",
        tmp_path,
        STEPS,
        f"actor_rollout_ref.model.path={unfit}",
        "jetrl.unfit_layers=skip",
        "jetrl.critic=fp8",
        "jetrl.ref=fp8",
        *KL_TO_A_REFERENCE,
        "algorithm.adv_estimator=gae",
        f"critic.model.path={unfit}",
        *critic,
        "critic.strategy=fsdp2",
        "critic.ppo_micro_batch_size_per_gpu=64",
        "critic.optim.lr=1e-3",
    )
    check(run, 8)  # q, k, v, o
    for role in ("actor", "critic", "ref"):
        assert f"8 linear layers of the {role} quantized" in run.log
    assert all(0 < k3 < 0.1 for k3 in run.steps("rollout_corr/k3_kl"))
    assert all(0 < norm < math.inf for norm in run.steps("critic/grad_norm"))
    assert all(math.isfinite(loss) for loss in run.steps("critic/vf_loss"))
    assert len(run.steps("actor/kl_loss")) == STEPS


@pytest.mark.slow
def test_bf16_linears_under_shared_operations(policy, tmp_path):
    run = train(policy, "bf16_shared", tmp_path, STEPS)
    check(run, 0)
    assert all(0 <= k3 < 1e-3 for k3 in run.steps("rollout_corr/k3_kl"))
    # The wire has BF16 instead of verl's FP32, plus the sums of a small model's short rows.
    assert run.mean("actor/jetrl/sync_megabytes") == pytest.approx(
        0.5 * run.mean("actor/jetrl/sync_stock_megabytes"), rel=0.05
    )
    assert not any("qdata_changed" in name or "snr_db" in name for step in run.metrics for name in step)


@pytest.mark.slow
def test_qurl_in_fp8_with_a_reference_in_fp8(policy, tmp_path):
    run = train(policy, "qurl_fp8", tmp_path, STEPS, "jetrl.ref=fp8", *KL_TO_A_REFERENCE)
    check(run, LINEARS)
    assert "14 linear layers of the ref quantized" in run.log
    assert all(0 < k3 < 0.1 for k3 in run.steps("rollout_corr/k3_kl"))
    # Only the reference rounds to FP8, so they differ before the first update.
    assert run.steps("actor/kl_loss")[0] > 0


@pytest.mark.slow
def test_an_fp8_kv_cache_keeps_zero_mismatch(policy, tmp_path):
    eps = "++actor_rollout_ref.model.override_config.rms_norm_eps=1e-5"  # which vLLM gets as well
    words = ("jetrl.kv_cache=fp8", f"{ACTOR}.ppo_mini_batch_size=16", eps)
    run = train(policy, "jet_fp8_exact", tmp_path, STEPS, *words)
    check(run, LINEARS)
    for metric in ("rollout_corr/k3_kl", "training/rollout_probs_diff_max", "actor/ppo_kl"):
        assert run.steps(metric) == [0.0] * STEPS, metric
    for tensor in ("K", "V"):
        for place in (tensor, f"{tensor}/layer_0", f"{tensor}/layer_1"):
            assert run.steps(f"actor/jetrl/kv_cache/{place}/saturated") == [0.0] * STEPS
            assert all(0 <= share < 0.1 for share in run.steps(f"actor/jetrl/kv_cache/{place}/underflow"))
            assert all(20 < snr < 45 for snr in run.steps(f"actor/jetrl/kv_cache/{place}/snr_db"))


@pytest.mark.slow
def test_an_fp8_kv_cache_in_the_rollout_only_is_a_mismatch(policy, tmp_path):
    run = train(policy, "fp8_rollout", tmp_path, STEPS, "jetrl.kv_cache=fp8")
    check(run, LINEARS)
    assert not any("kv_cache" in name for step in run.metrics for name in step)
    assert all(0 < k3 < 0.1 for k3 in run.steps("rollout_corr/k3_kl"))


LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"
KL_IN_REWARD = ("algorithm.use_kl_in_reward=True", f"{REF}.log_prob_micro_batch_size_per_gpu=128")
LOSSES = {
    "cispo": ("rloo", f"{ACTOR}.clip_ratio_low=10", *KL_IN_REWARD),
    "clip_cov": ("grpo_vectorized", f"{LOSS}.clip_cov_lb=0.1", "clip=calibrated", "jetrl.clip_interval=1"),
    "dppo_kl": ("rloo_vectorized", f"{ACTOR}.clip_ratio_low=0.05", f"{ACTOR}.clip_ratio_high=0.05"),
    "dppo_tv": ("grpo_passk", f"{ACTOR}.clip_ratio_low=0.15", f"{ACTOR}.clip_ratio_high=0.15"),
    "dro": ("grpo", f"{LOSS}.dro_beta=0.1"),
    "geo_mean": ("opo", f"{ACTOR}.clip_ratio_low=0.4", f"{ACTOR}.clip_ratio_high=0.4"),
    "gpg": ("gpg",),
    "gspo": ("reinforce_plus_plus", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.clip_ratio_low=3e-4"),
    "kl_cov": ("grpo", f"{LOSS}.kl_cov_ratio=0.02"),
    "sapo": ("reinforce_plus_plus_baseline", f"{ACTOR}.tau_pos=1.1"),
}
"""Losses of verl, with an advantage estimator of verl and further words."""


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_verls_losses_and_advantage_estimators_keep_zero_mismatch(policy, tmp_path, loss):
    """Two updates a step, so that ratios leave 1, and importance weights, which are all 1."""
    estimator, *words = LOSSES[loss]
    words += [f"{LOSS}.loss_mode={loss}", f"algorithm.adv_estimator={estimator}", f"{CORRECTION}.rollout_is=token"]
    run = train(policy, "jet_fp8_exact", tmp_path, STEPS, *words)
    check(run, LINEARS)
    for sign in ("positive", "negative"):
        assert run.steps(f"rollout_corr/truncated/{sign}") == [0.0] * STEPS
        assert all(0 <= share < 0.5 for share in run.steps(f"actor/jetrl/clipped/{sign}"))
    assert run.steps("rollout_corr/k3_kl") == [0.0] * STEPS
