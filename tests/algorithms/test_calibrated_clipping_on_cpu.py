# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Calibrated clip bounds: cases worked out by hand on a coarse grid, then properties on noisy ratios."""

import pytest
import torch

from jetrl_verl.algorithms.calibrated_clipping import LOWER_LIMITS, START, UPPER_LIMITS, CalibratedClip, RatioStatistics


def statistics(tokens, points: int = 5) -> RatioStatistics:
    """Candidates 0.5, 0.6, 0.7, 0.8, 0.9 and 1.2, 1.4, 1.6, 1.8, 2.0; ``tokens`` are (R_fp8, R_bf16, A)."""
    stats = RatioStatistics(points)
    ratio, bf16_ratio, advantages = torch.tensor(tokens).T
    stats.add(ratio, bf16_ratio, advantages, torch.ones(len(tokens), dtype=torch.bool), bf16_lower=0.8)
    return stats


# BF16 clips two negative tokens (0.7 and 0.75 are below 0.8), FP8 at 0.8 would clip four.
NEGATIVE = [(0.55, 0.70, -1.0), (0.65, 0.75, -2.0), (0.72, 0.85, -1.0), (0.78, 0.90, -1.0), (1.10, 1.05, -1.0)]


def test_lower_bound_clips_as_many_negative_tokens_as_bf16_would():
    """Below 0.7 lie two FP8 ratios, below 0.8 four; two are allowed, so L = 0.7. The clipped mass is 1 + 2 = 3."""
    low, _ = statistics(NEGATIVE).bounds()
    assert low == pytest.approx(0.7)


def test_upper_bound_clips_as_much_positive_mass():
    """Mass above 1.2: 7, above 1.4: 4, above 1.6: 2.5; the lower bound clips 3, so H = 1.6."""
    positive = [(1.3, 1.3, 3.0), (1.5, 1.4, 1.5), (1.7, 1.4, 2.0), (1.9, 1.4, 0.5), (0.6, 1.0, 5.0)]
    assert statistics(NEGATIVE + positive).bounds() == pytest.approx((0.7, 1.6))


def test_bounds_stay_within_their_limits():
    clipped_by_all = [(0.1, 0.1, -1.0), (0.2, 0.1, -1.0)]
    none_by_bf16 = [(0.1, 1.0, -1.0), (0.2, 1.0, -1.0)]
    far_up = [(5.0, 1.0, 10.0)]
    close = [(1.1, 1.0, 10.0)]
    assert statistics(clipped_by_all + close).bounds() == pytest.approx((LOWER_LIMITS[1], UPPER_LIMITS[0]))
    assert statistics(none_by_bf16 + far_up).bounds() == pytest.approx((LOWER_LIMITS[0], UPPER_LIMITS[1]))


def test_a_ratio_equal_to_a_bound_is_not_clipped():
    """PPO clips R < L and R > H; with a token on each candidate, no bound may move past it."""
    stats = RatioStatistics(5)
    edges = torch.cat([stats.lower, stats.upper])
    signs = torch.tensor([-1.0] * 5 + [1.0] * 5, dtype=torch.float64)
    stats.add(edges, torch.ones(10), signs, torch.ones(10, dtype=torch.bool), 0.8)
    assert stats.bounds() == (stats.lower[0].item(), stats.upper[-1].item())


def test_a_bound_without_a_token_of_its_sign_stays():
    assert statistics([(1.5, 1.5, 1.0)]).bounds((0.61, 1.7)) == (0.61, 1.7)
    low, high = statistics(NEGATIVE).bounds((0.61, 1.7))
    assert low == pytest.approx(0.7) and high == 1.7
    assert RatioStatistics().bounds() == START


def test_masked_tokens_and_zero_advantages_do_not_count():
    stats = statistics(NEGATIVE)
    expected = stats.bounds()
    ratio = torch.tensor([0.1, 0.1, 0.1])
    stats.add(ratio, ratio, torch.tensor([-1.0, 1.0, 0.0]), torch.tensor([False, False, True]), 0.8)
    assert stats.bounds() == expected and stats.tokens == (5, 0)


@pytest.mark.parametrize("advantage", [-3.0, 3.0])
@pytest.mark.parametrize("lost", ["fp8", "bf16", "both"])
def test_a_token_with_a_nan_ratio_does_not_count(lost, advantage):
    """One NaN among the positive tokens would count as clipped by every candidate, and H would move for it."""
    finite = NEGATIVE + [(1.3, 1.3, 3.0), (1.5, 1.4, 1.5), (1.7, 1.4, 2.0)]
    nan = (float("nan") if lost != "bf16" else 0.55, float("nan") if lost != "fp8" else 0.55, advantage)
    expected, actual = statistics(finite), statistics([*finite[:3], nan, *finite[3:], nan])
    assert actual.bounds() == expected.bounds()
    assert (actual.tokens, actual.bf16_clipped) == (expected.tokens, expected.bf16_clipped)


def noisy(tokens: int = 20000):
    """A policy's change with and without quantization noise, and advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    change = 0.1 * torch.randn(tokens, generator=generator)
    noise = 0.1 * torch.randn(tokens, generator=generator)
    return (change + noise).exp(), change.exp(), torch.randn(tokens, generator=generator)


def test_fp8_clips_as_often_as_bf16_and_both_signs_lose_equal_mass():
    ratio, bf16_ratio, advantages = noisy()
    negative, positive = advantages < 0, advantages > 0
    wanted = (bf16_ratio[negative] < 0.8).sum()
    assert (ratio[negative] < 0.8).sum() > 3 * wanted, "the premise: noise multiplies clipping"
    stats = RatioStatistics()
    stats.add(ratio, bf16_ratio, advantages, torch.ones_like(negative), 0.8)
    low, high = stats.bounds()
    assert 0 <= wanted - (ratio[negative] < low).sum() <= 2
    lost_below = -advantages[negative & (ratio < low)].sum()
    lost_above = advantages[positive & (ratio > high)].sum()
    assert 0 <= lost_below - lost_above <= 0.02 * lost_below


def test_statistics_add_up_over_micro_batches():
    ratio, bf16_ratio, advantages = noisy()
    mask = torch.ones_like(advantages, dtype=torch.bool)
    whole, parts = RatioStatistics(), RatioStatistics()
    whole.add(ratio, bf16_ratio, advantages, mask, 0.8)
    for start in range(0, len(ratio), 5000):
        part = slice(start, start + 5000)
        parts.add(ratio[part], bf16_ratio[part], advantages[part], mask[part], 0.8)
    assert parts.bounds() == whole.bounds() and parts.tokens == whole.tokens


def test_one_step_per_interval_collects_and_moves_the_bounds():
    clip = CalibratedClip(interval=3)
    collected = []
    for step in range(1, 8):
        clip.start_step("cpu")
        collected.append(clip.calibrating)
        assert ((clip.low, clip.high) == START) == (step <= 3), step
        if clip.calibrating:
            ratio, bf16_ratio, advantages = noisy()
            clip.statistics.add(ratio, bf16_ratio, advantages, torch.ones_like(advantages, dtype=torch.bool), 0.8)
    assert collected == [False, False, True, False, False, True, False]


def test_a_resumed_run_keeps_its_bounds_and_its_count():
    clip = CalibratedClip(interval=3)
    clip.start_step("cpu")
    clip.low, clip.high = 0.7, 1.5
    resumed = CalibratedClip(interval=3)
    resumed.load_state_dict(clip.state_dict())
    assert (resumed.low, resumed.high) == (0.7, 1.5)
    resumed.start_step("cpu")
    assert not resumed.calibrating
    resumed.start_step("cpu")
    assert resumed.calibrating


def test_an_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match="an interval of 0 steps"):
        CalibratedClip(0)
