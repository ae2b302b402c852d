# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The proof of `_quotient` in kernels/device/e4m3.py: both ways to all qdata of the division.

One residual step.

With r = rn(1/s), q0 = rn(x r), e = rn(q0 s - x) and q1 = rn(q0 - e r), where rn rounds to FP32 and each line is one
instruction, let u be the unit in the last place of x/s. |r s - 1| <= 2^-24, so q0 is within 2 u of x/s, e within one
unit of s times u of its exact value, and what is rounded into q1 within 2^-22 u of x/s. So q1 differs from rn(x/s) only
if x/s is within 2^-22 u of a midpoint of two FP32 neighbours, and their qdata only if one of the two is a tie between
E4M3 qdata, a number T of five significant bits (fewer for subnormal qdata).

In integers, with 24-bit mantissas X of x and S of s, a 25-bit odd M for the midpoint and n = 23 or 24, that is

    |X 2^(n + 1) - M S| <= 2 S 2^-22 < 8        M = 2 T +- 1 in units of half a u

which for each of the few M and all 2^23 mantissas S says what X must be. Scaling x or s by a power of two changes no
step, since nothing leaves the normal range, so this is every FP32 quotient there is.

Two terms. r is the reciprocal unit's result, off by one unit in the last place at most, less two steps, so that
r <= 1/s and e = rn(1 - r s) >= 0; q = rn(x r + rn(x rn(e r))). It rounds once what is within 2^-42 of x/s, relatively.
That is not enough for FP32 numbers: x = s + 1 with mantissas near 2 is 2^-48 above a midpoint, and some fall below it.
BF16 numbers divided by the scales of BF16 maxima are never so near, even where e r is subnormal: all are tried.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch

from jetrl_verl.reference import FP8_DTYPE

MARGIN = 64
"""Where the bound above says 8."""


def rounded(value: Fraction) -> Fraction:
    """To 24 significant bits, nearest, ties to even."""
    magnitude = abs(value)
    if magnitude == 0:
        return value
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    unit = Fraction(2) ** (exponent - 23)
    return (1 if value > 0 else -1) * round(magnitude / unit) * unit


def one_step(x: int, s: int) -> Fraction:
    r = rounded(Fraction(1, s))
    q = rounded(x * r)
    return rounded(q - rounded(q * s - x) * r)


def two_terms(x: int, s: int, off: int) -> Fraction:
    """With a reciprocal ``off`` steps from the rounded one."""
    r = np.float32(rounded(Fraction(1, s))).view(np.int32) + np.int32(off - 2)
    r = Fraction(float(r.view(np.float32)))
    rest = rounded(rounded(1 - r * s) * r)
    assert rest >= 0, "x may be -0, and the sum must stay -0"
    return rounded(x * r + rounded(x * rest))


def midpoints() -> list[int]:
    """25-bit M of the two midpoints next to each tie between qdata, for any exponent of the tie."""
    ties = [t << 19 for t in range(16, 32)]
    assert all(2**23 <= t < 2**24 for t in ties)
    # Below a power of two the neighbours are half as far: its lower midpoint is the last one of the binade below.
    return [2 * t + side if (t, side) != (2**23, -1) else 2**25 - 1 for t in ties for side in (1, -1)]


def hard_quotients() -> list[tuple[int, int]]:
    """Mantissas (X, S) whose quotient lies within the margin of such a midpoint."""
    pairs = []
    s = np.arange(2**23, 2**24, dtype=np.int64)
    for m in midpoints():
        products = s * m
        for n in (23, 24):
            near = np.nonzero(((products + MARGIN) & ((1 << (n + 1)) - 1)) <= 2 * MARGIN)[0]
            pairs += [(int((products[i] + MARGIN) >> (n + 1)), int(s[i])) for i in near]
    return [(x, s) for x, s in pairs if 2**23 <= x < 2**24]


def test_ties_between_qdata_have_five_significant_bits():
    qdata = torch.arange(127, dtype=torch.uint8).view(FP8_DTYPE).double()
    for tie in ((qdata[1:] + qdata[:-1]) / 2).tolist():
        numerator = Fraction(tie).numerator
        odd_part = numerator // (numerator & -numerator)
        assert odd_part.bit_length() <= 5


@pytest.mark.timeout(120)
def test_one_residual_step_rounds_as_the_division_in_every_hard_case():
    cases = hard_quotients()
    assert len(cases) == 1424
    assert any(x % 2**16 == 0 for x, _ in cases), "BF16 numbers among them"
    for x, s in cases:
        assert one_step(x, s) == rounded(Fraction(x, s)), (x, s)


def test_some_hard_cases_need_the_residual_step():
    cases = hard_quotients()[:200]
    assert any(rounded(x * rounded(Fraction(1, s))) != rounded(Fraction(x, s)) for x, s in cases)


def test_two_terms_are_not_enough_for_fp32():
    x, s = 2**24 - 1, 2**24 - 2
    assert one_step(x, s) == rounded(Fraction(x, s))
    assert any(two_terms(x, s, off) != rounded(Fraction(x, s)) for off in (-1, 0, 1))


def qdata(quotients: torch.Tensor) -> torch.Tensor:
    return quotients.clamp(-448, 448).to(FP8_DTYPE).view(torch.uint8)


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("exponent", [-54, -30, 0, 60, 96, 100, 104, 107, 110, 112, 114, 116, 118, 119, 120])
def test_two_terms_give_the_code_of_every_bf16_number_under_every_bf16_maximum(exponent, off):
    """Maxima up to the largest, whose second term has lost bits; numbers down to those whose qdata are zero."""
    mantissas = torch.arange(128, 256).double()
    amax = torch.ldexp(mantissas, torch.tensor(float(exponent)))
    x = torch.ldexp(mantissas[:, None], torch.tensor(exponent) - torch.arange(24.0)).flatten()
    scale = (amax.float() / torch.full((128,), 448.0)).clamp_min(2.0**-63)[:, None]
    r = ((1 / scale.double()).float().view(torch.int32) + (off - 2)).view(torch.float32).double()
    # Exact in float64 up to each rounding: 32 bits, and 46 for the sum.
    rest = (((1 - r * scale.double()).float().double()) * r).float().double()
    got = (x * r + (x * rest).float().double()).float()
    inside = x <= amax[:, None]
    assert inside.any()
    assert (rest >= 0).all()
    assert torch.equal(qdata(got)[inside], qdata(x.float() / scale)[inside])


def test_a_scale_is_the_division_by_448_for_every_maximum():
    """By two terms of 1/448. All 2^23 mantissas at one exponent: nothing that matters leaves the normal range."""
    amax = torch.arange(127 << 23, 128 << 23, dtype=torch.int32).view(torch.float32)
    high = torch.tensor(1.0) / 448.0
    low = torch.tensor(1 / 448 - high.double().item())
    # Exact in float64 where it matters: the product has 48 bits, and the sum is nowhere near a midpoint.
    got = (amax.double() * high.double() + (amax * low).double()).float()
    assert torch.equal(got, amax / torch.full_like(amax, 448.0))
