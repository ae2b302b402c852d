# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The policy losses against values worked out by hand, finite differences, and verl's own loss."""

import math

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

from jetrl_verl.algorithms.losses import UNTRUNCATED, JetPolicyLossConfig

# One row of tokens: R, A, r0 and, per loss, what the token contributes to the objective; eps = 0.2 on both sides, dual
# clip at 3, C = 2. "vanilla" is truncated importance sampling with w = min(r0, 2).
#   1  R A = 1.5 above the bound: 1.2
#   2  R A = -1.0, clipped value 0.8 * -2 = -1.6 is smaller: -1.6
#   3  inside the bounds, weight 4, or 2 where truncated: 4 * 1.1 = 4.4, 2 * 1.1 = 2.2
#   4  decoupled 4 * 1.2 = 4.8. ACR: the bound is 1.2 * 4 / 2 = 2.4, so nothing is clipped: 2 * 1.5 = 3.0. TIS 2 * 1.2
#   5  decoupled 4 * 1.2 = 4.8. ACR 2 * 2.4 = 4.8: clipped at the loosened bound. TIS 2 * 1.2 = 2.4
#   6  A < 0 and R above the dual clip: 0.5 * 3 * -1 = -1.5
#   7  A < 0 knows no upper bound: 8 * 2 * -1 = -16, truncated 2 * 2 * -1 = -4
#   8  masked out, as verl passes it: r0 = 0
RATIO = [1.5, 0.5, 1.1, 1.5, 3.0, 4.0, 2.0, 7.0]
ADVANTAGE = [1.0, -2.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0]
R0 = [1.0, 1.0, 4.0, 4.0, 4.0, 0.5, 8.0, 0.0]
MASK = [1, 1, 1, 1, 1, 1, 1, 0]
OBJECTIVE = {
    "qurl_decoupled": [1.2, -1.6, 4.4, 4.8, 4.8, -1.5, -16.0],
    "qurl_acr": [1.2, -1.6, 2.2, 3.0, 4.8, -1.5, -4.0],
    "vanilla": [1.2, -1.6, 2.2, 2.4, 2.4, -1.5, -4.0],
}
# d objective / d log pi_theta = w R A where the token is not clipped, 0 where it is.
GRADIENT = {
    "qurl_decoupled": [0, 0, 4.4, 0, 0, 0, -16.0, 0],
    "qurl_acr": [0, 0, 2.2, 3.0, 0, 0, -4.0, 0],
    "vanilla": [0, 0, 2.2, 0, 0, 0, -4.0, 0],
}
LOSSES = list(OBJECTIVE)


def actor_config(**changes) -> FSDPActorConfig:
    fields = dict(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=JetPolicyLossConfig(is_threshold=2.0)
    )
    return FSDPActorConfig(**(fields | changes))


def batch(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    old = torch.linspace(-3, -1, len(RATIO), dtype=dtype)[None]
    return dict(
        old_log_prob=old,
        log_prob=(old + torch.tensor([RATIO], dtype=dtype).log()).requires_grad_(),
        advantages=torch.tensor([ADVANTAGE], dtype=dtype),
        response_mask=torch.tensor([MASK], dtype=torch.bool),
    )


def weights_for(loss: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    r0 = torch.tensor([R0], dtype=dtype)
    return r0.clamp(max=2.0) if loss == "vanilla" else r0


@pytest.mark.parametrize("loss", LOSSES)
def test_objective_by_hand(loss):
    value, _ = get_policy_loss_fn(loss)(**batch(), config=actor_config(), rollout_is_weights=weights_for(loss))
    assert value.item() == pytest.approx(-sum(OBJECTIVE[loss]) / 7, rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_lower_bound_may_differ_from_the_upper(loss):
    """Token 2 alone has A < 0 and R below 1: clipped at 1 - 0.4 it contributes 0.6 * -2 = -1.2, and not -1.6."""
    config = actor_config(clip_ratio_low=0.4)
    value, _ = get_policy_loss_fn(loss)(**batch(), config=config, rollout_is_weights=weights_for(loss))
    assert value.item() == pytest.approx(-(sum(OBJECTIVE[loss]) + 1.6 - 1.2) / 7, rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_by_hand(loss):
    data = batch()
    get_policy_loss_fn(loss)(**data, config=actor_config(), rollout_is_weights=weights_for(loss))[0].backward()
    expected = -torch.tensor([GRADIENT[loss]]) / 7
    torch.testing.assert_close(data["log_prob"].grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_is_that_of_the_objective(loss):
    """Against finite differences in float64; every token lies away from the kinks at its bounds."""
    data = batch(torch.float64)
    log_prob = data.pop("log_prob")
    function, weights = get_policy_loss_fn(loss), weights_for(loss, torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: function(log_prob=x, **data, config=actor_config(), rollout_is_weights=weights)[0], log_prob
    )


@pytest.mark.parametrize(("loss", "high"), [("qurl_decoupled", 0.2), ("qurl_acr", 0.28), ("vanilla", 0.28)])
def test_without_mismatch_every_loss_equals_verls(loss, high):
    """r0 = 1 everywhere: the same bits as ``vanilla`` without a correction, under any clip range and mean."""
    config = actor_config(clip_ratio_high=high, loss_agg_mode="seq-mean-token-mean")
    arguments = dict(config=config, loss_agg_mode=config.loss_agg_mode)
    expected, metrics = get_policy_loss_fn("vanilla")(**batch(), **arguments)
    value, more = get_policy_loss_fn(loss)(**batch(), **arguments, rollout_is_weights=torch.ones(1, 8))
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics.items() <= more.items()


def test_acr_without_truncation_equals_truncated_importance_sampling():
    r0 = torch.tensor([R0]).clamp(max=2.0)
    tis, _ = get_policy_loss_fn("vanilla")(**batch(), config=actor_config(), rollout_is_weights=r0)
    acr, _ = get_policy_loss_fn("qurl_acr")(**batch(), config=actor_config(), rollout_is_weights=r0)
    assert acr.item() == pytest.approx(tis.item(), rel=1e-6)


def test_the_threshold_is_an_option():
    """C = 4: tokens 3 to 5 are not truncated and token 7 weighs 4, so the sum is -1.9 + 4.4 + 4.8 + 4.8 - 8."""
    config = actor_config(policy_loss=JetPolicyLossConfig(is_threshold=4.0))
    value, _ = get_policy_loss_fn("qurl_acr")(**batch(), config=config, rollout_is_weights=torch.tensor([R0]))
    assert value.item() == pytest.approx(-4.1 / 7, rel=1e-6)


def test_truncated_shares_are_reported_by_sign_of_the_advantage():
    """Shares of seven tokens: 3, 4 and 5 with a positive advantage, 7 with a negative one; 8 is masked out."""
    data, r0 = dict(**batch(), config=actor_config()), torch.tensor([R0])
    _, metrics = get_policy_loss_fn("qurl_acr")(**data, rollout_is_weights=r0)
    shares = {name: value for name, value in metrics.items() if "jetrl" in name}
    assert shares == {"actor/jetrl/truncated/positive": 3 / 7, "actor/jetrl/truncated/negative": 1 / 7}
    _, metrics = get_policy_loss_fn("qurl_decoupled")(**data, rollout_is_weights=r0)
    assert not any("jetrl" in name for name in metrics), "nothing is truncated"


@pytest.mark.parametrize(
    ("loss", "positive", "negative"), [("qurl_decoupled", 3 / 7, 2 / 7), ("qurl_acr", 2 / 7, 2 / 7)]
)
def test_clipped_shares_are_reported(monkeypatch, loss, positive, negative):
    """Tokens 1, 4 and 5, but ACR's loosened bound lets 4 through; 2 and, by the dual clip, 6."""
    from verl.workers.utils import losses

    from jetrl_verl.metrics import hooks
    from jetrl_verl.patches import batch_hooks

    monkeypatch.setitem(batch_hooks.AROUND_POLICY_LOSS, "clipped shares", None)  # removed after the test
    hooks.install_in_actor()
    arguments = dict(**batch(), config=actor_config(), rollout_is_weights=torch.tensor([R0]))
    _, metrics = losses.get_policy_loss_fn(loss)(**arguments)
    assert (metrics["actor/jetrl/clipped/positive"], metrics["actor/jetrl/clipped/negative"]) == (positive, negative)


def test_masked_tokens_change_nothing():
    for loss in LOSSES:
        data, weights = batch(), weights_for(loss)
        function = get_policy_loss_fn(loss)
        before, _ = function(**data, config=actor_config(), rollout_is_weights=weights)
        data["advantages"][0, -1], data["old_log_prob"][0, -1] = -50.0, 5.0
        after, _ = function(**data, config=actor_config(), rollout_is_weights=weights)
        assert before.item() == after.item()


@pytest.mark.parametrize("loss", ["qurl_decoupled", "qurl_acr"])
def test_a_loss_without_the_rollouts_ratio_is_refused(loss):
    with pytest.raises(
        ValueError, match=f"rollout_is=null is not supported with .*loss_mode={loss}: .*rollout_is=token"
    ):
        get_policy_loss_fn(loss)(**batch(), config=actor_config())


def test_verl_does_not_truncate_below_the_threshold_of_1e9():
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    log_ratio = torch.tensor([[0.0, 3.0, 25.0]])
    weights, _ = compute_rollout_correction_weights(
        log_ratio, torch.ones(1, 3), rollout_is="token", rollout_is_threshold=1e9
    )
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(3), UNTRUNCATED]]))
