# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scales of the contract, bit for bit, over the whole range of FP32 maxima."""

import e4m3_oracle
import numpy as np
import pytest
import torch

from jetrl_verl.reference import SCALE_RULES, amax_bits, scale_from_amax_bits

MIN_NORMAL = 2.0**-126


def interesting_maxima() -> torch.Tensor:
    """Every power of two down to the subnormals, every 448 * 2^k, both neighbours, and random bit patterns."""
    powers = [2.0**e for e in range(-149, 128)] + [448.0 * 2.0**e for e in range(-149, 119)]
    exact = torch.tensor(powers, dtype=torch.float64).float()
    up, down = exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(0.0))
    patterns = torch.randint(1, 0x7F800000, (2000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    maxima = torch.cat([exact, up, down, patterns.view(torch.float32)])
    return maxima[torch.isfinite(maxima) & (maxima > 0)]


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_scales_equal_the_oracle_for_every_exponent(rule):
    maxima = interesting_maxima()
    got = scale_from_amax_bits(maxima.view(torch.int32), rule)
    want = np.array([e4m3_oracle.scale(float(a), rule) for a in maxima], dtype=np.float32)
    np.testing.assert_array_equal(got.numpy().view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_reciprocals_and_products_of_scales_stay_normal(rule):
    scales = scale_from_amax_bits(interesting_maxima().view(torch.int32), rule)
    assert scales.min() == 2.0**-63
    assert (scales * scales.min() >= MIN_NORMAL).all()
    assert ((1 / scales >= MIN_NORMAL) & torch.isfinite(1 / scales)).all()


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("special", [0.0, -0.0, torch.inf, -torch.inf, torch.nan])
def test_zero_and_non_finite_groups_have_scale_one(rule, special):
    bits = amax_bits(torch.tensor([[special, 0.0]]))
    assert scale_from_amax_bits(bits, rule).item() == 1.0


def test_the_integer_maximum_keeps_a_nan_at_any_position():
    for position in range(128):
        group = torch.full((128,), 3.0)
        group[position] = -torch.nan
        assert amax_bits(group).item() > 0x7F800000
