# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""CPU arithmetic whose result depends on the operands of a row alone, not on batch, BLAS, threads or vector width.

Sums are exact in float64 in any order, of rows rounded to a grid (:func:`on_grid`) with ``bits_a + bits_b + ceil(log2
K) <= 53``. Elementary functions are polynomials of operations that IEEE 754 rounds correctly.
"""

import math

import torch

MANTISSA_BITS = 53  # of float64

_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 21 trailing zero bits, so its product with an exponent is exact.
_LN2_HIGH = 0.6931471803691238
_LN2_LOW = 1.9082149292705877e-10
_EXP_COEFFICIENTS = [1.0 / math.factorial(n) for n in range(11)]
_LOG_COEFFICIENTS = [1.0 / (2 * n + 1) for n in range(11)]


def grid_bits(contracted: int, operands: int = 2) -> int:
    """Bits that ``operands`` rows on a grid may have so that the sum of ``contracted`` products is exact."""
    return (MANTISSA_BITS - math.ceil(math.log2(max(contracted, 1)))) // operands


def exponent_of(magnitude: torch.Tensor) -> torch.Tensor:
    """The smallest ``e`` in [-100, 128] with ``magnitude < 2^e``, int32; -100 for 0, arbitrary for Inf and NaN."""
    return torch.frexp(magnitude.float()).exponent.masked_fill_(magnitude == 0, -100).clamp_(-100, 128)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2^exponent`` in float64, from integer bits; ``exponent`` within [-1022, 1023]."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def on_grid(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round each row to multiples of ``2^(e - bits)``, ``2^e`` the power of two above the row's largest magnitude.

    Args:
        x: ``[..., K]`` BF16. bits: between 8 and 26.

    Returns:
        ``[..., K]`` BF16: rounding to a coarser grid never adds significant bits. A row with Inf or NaN keeps them.
    """
    values = x.float()
    exponent = exponent_of(values.abs().amax(dim=-1, keepdim=True))
    up = ((bits - exponent + 127) << 23).view(torch.float32)
    down = ((exponent - bits + 127) << 23).view(torch.float32)
    return values.mul_(up).round_().mul_(down).to(torch.bfloat16)


def exp(x: torch.Tensor) -> torch.Tensor:
    """``e^x`` in float64, relative error below 2^-41; results below e^-700 and above e^700 stay there."""
    x = x.clamp(-700.0, 700.0)
    k = (x * _LOG2_E).round_()
    r = x.sub_(k * _LN2_HIGH).sub_(k * _LN2_LOW)
    result = torch.full_like(r, _EXP_COEFFICIENTS[-1])
    for coefficient in reversed(_EXP_COEFFICIENTS[:-1]):
        result.mul_(r).add_(coefficient)
    return result.mul_(power_of_two(k))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + e^-x)`` in FP32, rounded once."""
    return exp(-x.double()).add_(1).reciprocal_().float()


def log(x: torch.Tensor) -> torch.Tensor:
    """``ln x`` in float64 for normal ``x > 0``, error a few units in the last place; NaN stays NaN."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    exponent = (exponent - small.to(exponent.dtype)).double()
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    result = torch.full_like(s, _LOG_COEFFICIENTS[-1])
    for coefficient in reversed(_LOG_COEFFICIENTS[:-1]):
        result.mul_(square).add_(coefficient)
    return result.mul_(s).mul_(2) + (exponent * _LN2_LOW + exponent * _LN2_HIGH)


def log1p(x: torch.Tensor) -> torch.Tensor:
    """``ln(1 + x)`` in float64 for ``x >= 0``; relative error below 2^-41, of tiny ``x`` too."""
    total = x + 1
    return log(total) + (x - (total - 1)) / total


def sum_of_fractions(x: torch.Tensor, bits: int) -> torch.Tensor:
    """``[..., 1]`` float64: exact sum over the last dimension of numbers in [0, 1], each rounded to ``bits`` places.

    ``x``: ``[..., K]`` float64 with ``K <= 2^(53 - bits)``.
    """
    return (x * 2.0**bits).round_().sum(dim=-1, keepdim=True).mul_(2.0**-bits)
