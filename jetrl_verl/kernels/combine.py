# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The sum of a token's k rows among the experts' segments: FP32, slot 0 first, rounded once, without atomics.

Forward it adds the experts' outputs, which carry the routing weights already; backward it adds the k terms of the
gradient of a token's input.

(2 k + 2) bytes an element and nothing is reused: a thread has a load of 16 bytes for each of the k rows in flight. Few
tokens are cut finer, so that their bytes come through more multiprocessors: at one token of 2048 elements 8 programs
of 4 KB each, not two of 16.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.launch import jit
from jetrl_verl.kernels.operator import operator, require_bf16
from jetrl_verl.kernels.sizes import ceil_div

_MANY, _FEW = (1024, 4), (256, 1)
"""Elements of a row and warps of a program: 8 elements a thread."""
_FEW_ELEMENTS = 2**17
"""At most so many, 128 programs of 1024, are few."""

implements("combine", "reference")(reference.combine)


@jit
def _combine_kernel(y_ptr, row_ptr, out_ptr, columns, K: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    row = tl.load(row_ptr + token * K).to(tl.int64)
    acc = tl.load(y_ptr + row * columns + column, mask=mask).to(tl.float32)
    for slot in tl.static_range(1, K):
        row = tl.load(row_ptr + token * K + slot).to(tl.int64)
        acc += tl.load(y_ptr + row * columns + column, mask=mask).to(tl.float32)
    tl.store(out_ptr + token * columns + column, acc.to(tl.bfloat16), mask=mask)


@implements("combine", "triton")
def triton_combine(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.combine`."""
    tokens, k = row.shape
    out = torch.empty((tokens, y.shape[1]), dtype=torch.bfloat16, device=y.device)
    if out.numel():
        tile, warps = _FEW if out.numel() <= _FEW_ELEMENTS else _MANY
        _combine_kernel[(tokens, ceil_div(y.shape[1], tile))](
            y.contiguous(), row.contiguous(), out, y.shape[1], K=k, TILE=tile, num_warps=warps
        )
    return out


@operator("combine(Tensor y, Tensor row) -> Tensor", fake=lambda y, row: y.new_empty(row.shape[0], y.shape[1]))
def _combine(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    require_bf16("combine", y=y)
    return lookup("combine", y.device)(y, row)


def combine(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Of each token the sum of its rows.

    Args:
        y: ``[R, H]`` BF16. row: ``[T, k]`` int32 (:class:`jetrl_verl.reference.Segments`).

    Returns:
        ``[T, H]`` BF16. No gradient of its own.

    Raises:
        TypeError: ``y`` is not BF16.
    """
    return _combine(y, row)
