# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The sum of a row-parallel linear: one BF16 tensor per tensor-parallel rank, added in FP32 in rank order, rounded
once. With two ranks every all-reduce that rounds to nearest has these bits."""

from collections.abc import Sequence

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import TRITON, implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.sizes import ceil_div

__all__ = ["sum_of_ranks"]

TILE, WARPS = 4096, 8

implements("sum_of_ranks", "reference")(reference.sum_of_ranks)


@jit
def _sum_kernel(parts, out_ptr, elements, RANKS: tl.constexpr, TILE: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offset < elements
    acc = tl.load(parts[0] + offset, mask=mask).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        acc += tl.load(parts[rank] + offset, mask=mask).to(tl.float32)
    tl.store(out_ptr + offset, acc.to(tl.bfloat16), mask=mask)


@implements("sum_of_ranks", "triton")
def triton_sum_of_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.sum_of_ranks`."""
    parts = tuple(part.contiguous() for part in parts)
    out = torch.empty_like(parts[0])
    if out.numel():
        grid = (ceil_div(out.numel(), TILE),)
        _sum_kernel[grid](parts, out, out.numel(), RANKS=len(parts), TILE=TILE, num_warps=WARPS)
    return out


def _fake(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].new_empty(parts[0].shape)


@operator("sum_of_ranks(Tensor[] parts) -> Tensor", fake=_fake, backends=TRITON)
def sum_of_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``((p_0 + p_1) + p_2) + ...`` in FP32, rounded to BF16 once.

    Args:
        parts: one BF16 tensor per rank, in rank order, all of one shape.

    Returns:
        BF16, of that shape. No autograd.

    Raises:
        TypeError: a part that is not BF16. ValueError: parts of different shapes.
    """
    for rank, part in enumerate(parts):
        require_bf16("sum_of_ranks", **{f"parts[{rank}]": part})
        require_shape("sum_of_ranks", f"parts[{rank}]", part, parts[0].shape)
    return lookup("sum_of_ranks", parts[0].device)(parts)
