# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The sum of a row-parallel linear: one BF16 tensor per tensor-parallel rank, added in FP32 in rank order, rounded
once. With two ranks every all-reduce that rounds to nearest has these bits."""

from collections.abc import Sequence

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
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


@operator("sum_of_ranks(Tensor[] parts) -> Tensor", fake=lambda parts: parts[0].new_empty(parts[0].shape))
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


_PRODUCTS = ((1, 256), (65, 4096), (160, 4096))
"""Shapes of products that ranks add: vLLM's all-reduces change at 256 KiB, 512 KiB and more, ours at 1 MiB."""


def products_of_ranks(
    device: torch.device, ranks: int, shapes: Sequence[tuple[int, int]] = _PRODUCTS
) -> list[list[torch.Tensor]]:
    """BF16 products of all ranks for each of ``shapes`` (rows, columns), whose sum rounds differently in another order.

    At each element two ranks, which vary, have a number and its negative, so large that FP32 rounds what is added in
    between. Every fourth element, and all of two ranks, have plain numbers, whose sum shows the rounding mode.
    """
    batches = []
    for rows, columns in shapes:
        place = torch.arange(rows * columns, device=device).view(rows, columns)
        # Integers of at most 8 bits times powers of two, the same on every device.
        products = [(place * (2 * rank + 37) % 251 - 125).float() for rank in range(ranks)]
        first = place % ranks
        second = (first + 1 + place // ranks % max(1, ranks - 1)) % ranks
        large = 2.0**20 * (place % 101 + 27)
        cancels = (place % 4 > 0) & (ranks > 2)
        for rank, product in enumerate(products):
            # Exponents apart, so that the sum does not fit into BF16.
            product *= 2.0 ** (3 * (rank % 3))
            for chosen, sign in ((first, 1), (second, -1)):
                product[cancels & (chosen == rank)] = sign * large[cancels & (chosen == rank)]
        batches.append([product.to(torch.bfloat16) for product in products])
    return batches
