# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The three rules of CPU arithmetic: exact sums, functions without vector tails, grids that stay BF16."""

import pytest
import torch

from jetrl_verl.reference import BLOCK
from jetrl_verl.reference.reproducible import exp, grid_bits, log, on_grid, sum_of_fractions


def wide_rows(rows: int, columns: int) -> torch.Tensor:
    """BF16 values over some 60 binades, zeros among them."""
    generator = torch.Generator().manual_seed(rows * 8191 + columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-40, 20, x.shape, generator=generator).float())
    return x.masked_fill_(torch.rand(x.shape, generator=generator) < 0.05, 0).bfloat16()


def test_exp_and_log_are_accurate():
    x = torch.cat([-torch.rand(20000, dtype=torch.float64) * 600, -torch.logspace(-18, 2, 2000, dtype=torch.float64)])
    assert ((exp(x) - x.exp()) / x.exp()).abs().max() < 2**-41
    assert exp(torch.tensor([0.0, -torch.inf], dtype=torch.float64)).tolist()[0] == 1.0
    assert exp(torch.tensor([-torch.inf], dtype=torch.float64)).item() < 1e-300
    y = torch.cat(
        [torch.rand(20000, dtype=torch.float64) * 1e6 + 1e-6, 1 + torch.rand(2000, dtype=torch.float64) / 1e6]
    )
    assert ((log(y) - y.log()).abs() <= 2**-51 * (1 + y.log().abs())).all()
    for function in (exp, log):
        assert function(torch.tensor([torch.nan], dtype=torch.float64)).isnan().all()


@pytest.mark.parametrize("function", [exp, log])
def test_elementary_functions_do_not_depend_on_position(function):
    """Every length up to 70 and some large ones, every offset of a vector register: tails are scalar code."""
    values = torch.rand(4097, dtype=torch.float64) * 30 + 1e-3
    values = -values if function is exp else values
    whole = function(values)
    for length in [*range(1, 71), 127, 1000, 4096]:
        for offset in (0, 1, 3, 8):
            part = slice(offset, min(offset + length, len(values)))
            assert torch.equal(function(values[part].clone()), whole[part])


@pytest.mark.parametrize("bits", [16, 21, 25])
def test_a_grid_keeps_bf16_and_drops_only_smaller_bits(bits):
    x = wide_rows(64, 257)
    placed = on_grid(x, bits)
    assert placed.dtype == torch.bfloat16
    assert torch.equal(on_grid(placed, bits), placed)
    step = torch.exp2(torch.frexp(x.float().abs().amax(-1, keepdim=True)).exponent.double() - bits)
    assert ((placed.double() / step) % 1 == 0).all()
    assert ((placed.double() - x.double()).abs() <= step / 2).all()
    near = x.double().abs() >= step * 2**8
    assert torch.equal(placed[near], x[near])


def test_a_grid_keeps_inf_and_nan():
    x = torch.randn(3, 16).bfloat16()
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    placed = on_grid(x, 21)
    assert placed[0, 3].isnan() and placed[1, 4].isinf() and placed[2].isfinite().all()
    assert torch.equal(on_grid(torch.zeros(2, 5).bfloat16(), 21), torch.zeros(2, 5).bfloat16())


@pytest.mark.parametrize("k", [1, BLOCK, 1000, 8192])
def test_products_on_their_grids_sum_exactly_in_any_order(k):
    bits = grid_bits(k)
    a, b = on_grid(wide_rows(3, k), bits).double(), on_grid(wide_rows(5, k), bits).double()
    whole = a @ b.t()
    order = torch.randperm(k)
    assert torch.equal(a[:, order] @ b[:, order].t(), whole)
    assert torch.equal((a[:, None] * b[None]).flip(-1).cumsum(-1)[..., -1], whole)


def test_fractions_sum_exactly_in_any_order():
    x = torch.rand(4, 5000, dtype=torch.float64)
    assert torch.equal(sum_of_fractions(x.flip(-1), 32), sum_of_fractions(x, 32))
    assert (sum_of_fractions(x, 32) - x.sum(-1, keepdim=True)).abs().max() < 5000 * 2**-33
