# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sum of a token's k rows in the segments of its experts: FP32, slot 0 first, rounded once, no atomics.

Forward it adds the outputs of experts, backward the k terms of a token's gradient. ``combine_of_ranks`` also adds the
rounded sums of tensor-parallel ranks. Few tokens are cut into smaller tiles, to use more multiprocessors.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16
from jetrl_verl.kernels.sizes import ceil_div

__all__ = ["combine", "combine_of_ranks"]

_MANY, _FEW = (1024, 4), (256, 1)
"""Elements of a row and warps of a program."""
_FEW_ELEMENTS = 2**17
"""At most this many elements, 128 programs of 1024, are few."""

implements("combine", "reference")(reference.combine)
implements("combine_of_ranks", "reference")(reference.combine_of_ranks)


@jit
def sum_of_rows(y_ptr, row_ptr, column, mask, columns, K: tl.constexpr):
    """FP32 sum of the rows whose numbers are the K at ``row_ptr``; zeros outside of ``mask``."""
    row = tl.load(row_ptr).to(tl.int64)
    acc = tl.load(y_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, K):
        row = tl.load(row_ptr + slot).to(tl.int64)
        acc += tl.load(y_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    return acc


@jit
def _combine_kernel(
    y_ptr, row_ptr, out_ptr, elements, columns, RANKS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr
):
    """``elements``: of the rows of one rank."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    row_ptr += token * K
    total = sum_of_rows(y_ptr, row_ptr, column, mask, columns, K)
    if RANKS > 1:
        total = total.to(tl.bfloat16).to(tl.float32)
        for _ in tl.static_range(1, RANKS):
            y_ptr += elements
            part = sum_of_rows(y_ptr, row_ptr, column, mask, columns, K)
            total += part.to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + token * columns + column, total.to(tl.bfloat16), mask=mask)


@implements("combine_of_ranks", "triton")
def triton_combine_of_ranks(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.combine_of_ranks`; one read of each row that a token has and one write."""
    (ranks, rows, columns), (tokens, k) = y.shape, row.shape
    out = torch.empty((tokens, columns), dtype=torch.bfloat16, device=y.device)
    if out.numel():
        tile, warps = _FEW if out.numel() <= _FEW_ELEMENTS else _MANY
        _combine_kernel[(tokens, ceil_div(columns, tile))](
            y.contiguous(), row.contiguous(), out, rows * columns, columns, RANKS=ranks, K=k, TILE=tile, num_warps=warps
        )
    return out


implements("combine", "triton")(lambda y, row: triton_combine_of_ranks(y[None], row))


@operator(
    "combine(Tensor y, Tensor row) -> Tensor",
    fake=lambda y, row: y.new_empty(row.shape[0], y.shape[1]),
    mixture_probe=lambda inputs: combine(inputs.terms, inputs.rows),
)
def combine(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Of each token the sum of its rows.

    Args:
        y: ``[R, H]`` BF16. row: ``[T, k]`` int32 (:class:`jetrl_verl.reference.Segments`).

    Returns:
        ``[T, H]`` BF16. No autograd.

    Raises:
        TypeError: ``y`` is not BF16.
    """
    require_bf16("combine", y=y)
    return lookup("combine", y.device)(y, row)


@operator("combine_of_ranks(Tensor y, Tensor row) -> Tensor", fake=lambda y, row: y.new_empty(row.shape[0], y.shape[2]))
def combine_of_ranks(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Of each token the sum over ranks of the rounded sums of its rows.

    Args:
        y: ``[ranks, R, H]`` BF16 (:func:`grouped_gemm_nt_of_ranks`). row: ``[T, k]`` int32.

    Returns:
        ``[T, H]`` BF16. No autograd.

    Raises:
        TypeError: ``y`` is not BF16.
    """
    require_bf16("combine_of_ranks", y=y)
    return lookup("combine_of_ranks", y.device)(y, row)
