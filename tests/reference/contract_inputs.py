# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs for tests of quantizers: ``case(m, k)`` is a BF16 or FP32 tensor on the CPU."""

import e4m3_oracle
import torch

from jetrl_verl.reference import BLOCK


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=generator()).bfloat16()


def heavy_tailed(m: int, k: int) -> torch.Tensor:
    """Ratio of Gaussians (Cauchy): a few elements dominate every group."""
    return (torch.randn(m, k, generator=generator(1)) / torch.randn(m, k, generator=generator(2))).bfloat16()


def one_outlier_per_group(m: int, k: int) -> torch.Tensor:
    x = torch.randn(m, k, generator=generator(3))
    x[:, ::BLOCK] = 3e4 * (1 + torch.rand(x[:, ::BLOCK].shape, generator=generator(4)))
    return x


def subnormal(m: int, k: int) -> torch.Tensor:
    return torch.randint(-(2**22), 2**22, (m, k), generator=generator(5)).float() * 2.0**-149


def powers_of_two(m: int, k: int) -> torch.Tensor:
    exponents = torch.randint(-140, 127, (m, k), generator=generator(6)).double()
    return torch.ldexp(torch.tensor(1.0, dtype=torch.float64), exponents).float()


def any_finite_bits(m: int, k: int) -> torch.Tensor:
    bits = torch.randint(-(2**31), 2**31 - 1, (m, k), generator=generator(7), dtype=torch.int64).int()
    x = bits.view(torch.float32)
    return torch.where(torch.isfinite(x), x, torch.zeros(()))


def ties_and_their_neighbours(m: int, k: int) -> torch.Tensor:
    """Midpoints of adjacent qdata, one FP32 step below and above them, in groups whose scale is exactly 1."""
    magnitudes = torch.tensor(e4m3_oracle.CODE_VALUES[:127]).float()
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = torch.cat([midpoints, midpoints.nextafter(torch.tensor(500.0)), midpoints.nextafter(torch.tensor(0.0))])
    values = torch.cat([values, -values])
    x = values[torch.arange(m * k) % values.numel()].reshape(m, k)
    x[:, ::BLOCK] = 448.0
    return x


def edges_of_448(m: int, k: int) -> torch.Tensor:
    """Maxima at, just below and just above 448 * 2^e, where a rounded scale pushes the quotient above 448."""
    top = torch.ldexp(torch.tensor(448.0), torch.arange(m).remainder(40) - 20.0)
    x = top[:, None] * torch.linspace(-1, 1, k)
    x[::3] = x[::3].nextafter(torch.tensor(torch.inf))
    x[1::3] = x[1::3].nextafter(torch.tensor(0.0))
    return x


def inf_and_nan(m: int, k: int) -> torch.Tensor:
    """Gaussian, with an Inf, a -Inf and a NaN in three groups."""
    x = gaussian(m, k)
    x[0, 0], x[m // 2, k // 2], x[-1, -1] = torch.inf, -torch.inf, torch.nan
    return x


def masked_rows(m: int, k: int) -> torch.Tensor:
    """Every other row zero (one of them -0), the rest tiny, as the gradient of a batch with masked tokens."""
    x = gaussian(m, k) * 1e-6
    x[::2] = 0
    x[0] = -0.0
    return x


CASES = [
    gaussian,
    heavy_tailed,
    one_outlier_per_group,
    subnormal,
    powers_of_two,
    any_finite_bits,
    ties_and_their_neighbours,
    edges_of_448,
    inf_and_nan,
    masked_rows,
]
