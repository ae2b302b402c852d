# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A weight and its LoRA term, ``W + scale * B A``, rounded once to BF16.

The product is added in FP32, rank by rank; a product of two BF16 values is exact in FP32, so bits depend neither on the
device nor on the tile, and an export on a CPU has those of a GPU's run.
"""

import torch
import triton.language as tl

from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.sizes import ceil_div

__all__ = ["merge_adapter"]

TILE_N, TILE_K, WARPS = 32, 256, 4


@implements("merge_adapter", "reference")
def reference_merge_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """``[N, K]`` BF16."""
    a, b = a.float(), b.float()
    term = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for column, row in zip(b.t(), a, strict=True):
        term.addcmul_(column[:, None], row)
    # A multiply-add with one rounding to FP32: the product is exact in float64.
    scale = torch.tensor(scale, dtype=torch.float32).double()
    return term.double().mul_(scale).add_(weight).float().to(torch.bfloat16)


@jit
def _merge_kernel(
    weight_ptr, a_ptr, b_ptr, out_ptr, rows, columns, rank, scale, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    row = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    column = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    in_rows, in_columns = row < rows, column < columns
    term = tl.zeros((TILE_N, TILE_K), dtype=tl.float32)
    a_ptrs, b_ptrs = a_ptr + column, b_ptr + row
    for _ in range(rank):
        a = tl.load(a_ptrs, mask=in_columns, other=0.0).to(tl.float32)
        b = tl.load(b_ptrs, mask=in_rows, other=0.0).to(tl.float32)
        term += b[:, None] * a[None, :]
        a_ptrs += columns
        b_ptrs += rows
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    weight = tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    merged = tl.fma(term, tl.full((TILE_N, TILE_K), scale, tl.float32), weight)
    tl.store(out_ptr + offset, merged.to(tl.bfloat16), mask=mask)


@implements("merge_adapter", "triton")
def triton_merge_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """As :func:`reference_merge_adapter`."""
    weight, a, by_rank = weight.contiguous(), a.contiguous(), b.t().contiguous()
    out = torch.empty_like(weight)
    rows, columns = weight.shape
    grid = ceil_div(rows, TILE_N), ceil_div(columns, TILE_K)
    sizes = dict(TILE_N=TILE_N, TILE_K=TILE_K, num_warps=WARPS)
    _merge_kernel[grid](weight, a, by_rank, out, rows, columns, len(a), scale, **sizes)
    return out


@operator(
    "merge_adapter(Tensor weight, Tensor a, Tensor b, float scale) -> Tensor",
    fake=lambda weight, a, b, scale: torch.empty_like(weight),
)
def merge_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """``weight + scale * b a``; no autograd.

    Args:
        weight: ``[N, K]`` BF16. a: ``[r, K]`` BF16. b: ``[N, r]`` BF16.

    Returns:
        ``[N, K]`` BF16. Sums are FP32: of the product in ascending order of r, then one multiply-add.

    Raises:
        TypeError: an operand that is not BF16. ValueError: shapes that do not belong together.
    """
    require_bf16("merge_adapter", weight=weight, a=a, b=b)
    require_shape("merge_adapter", "a", a, (len(a), weight.shape[1]))
    require_shape("merge_adapter", "b", b, (weight.shape[0], len(a)))
    return lookup("merge_adapter", weight.device)(weight, a, b, scale)
