# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows for the pairs of tokens and experts, an expert's rows next to each other (reference/experts.py).

On a GPU two launches and no wait: one program an expert counts its pairs; then one program an expert adds up what lies
in front of it, and gives its pairs their rows in the tokens' order. Memory is that of the worst case.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.launch import jit
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import next_power_of_2
from jetrl_verl.reference import Segments, rows_of_segments

_TILE, _WARPS = 1024, 4

implements("segments", "reference")(reference.segments)


@jit(do_not_specialize=["pairs"])
def _count_kernel(experts_ptr, counts_ptr, pairs, TILE: tl.constexpr):
    expert, lane = tl.program_id(0), tl.arange(0, TILE)
    found = tl.zeros((TILE,), dtype=tl.int32)
    for first in range(0, pairs, TILE):
        of = tl.load(experts_ptr + first + lane, mask=first + lane < pairs, other=-1)
        found += (of == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, axis=0))


@jit(do_not_specialize=["pairs", "rows"])
def _place_kernel(
    experts_ptr, counts_ptr, row_ptr, pair_ptr, start_ptr, pairs, rows, experts, align,
    LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    expert, lane, each = tl.program_id(0), tl.arange(0, TILE), tl.arange(0, LANES)
    # Program number `experts` has no pairs; it writes the end and what lies behind it.
    counts = tl.load(counts_ptr + each, mask=each < experts, other=0)
    lengths = (counts + align - 1) // align * align
    start = tl.sum(tl.where(each < expert, lengths, 0), axis=0)
    count = tl.sum(tl.where(each == expert, counts, 0), axis=0)
    length = tl.sum(tl.where(each == expert, lengths, 0), axis=0)
    last = tl.where(expert == experts, rows, start + length)
    tl.store(start_ptr + expert, start)
    placed = 0
    if count > 0:
        for first in range(0, pairs, TILE):
            pair = first + lane
            ours = (tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
            row = start + placed + tl.cumsum(ours, axis=0) - 1
            tl.store(row_ptr + pair, row, mask=ours > 0)
            tl.store(pair_ptr + row, pair, mask=ours > 0)
            placed += tl.sum(ours, axis=0)
    for first in range(start + count, last, TILE):
        tl.store(pair_ptr + first + lane, tl.full((TILE,), -1, tl.int32), mask=first + lane < last)


@implements("segments", "triton")
def triton_segments(experts_of: torch.Tensor, experts: int, align: int) -> Segments:
    """As :func:`jetrl_verl.reference.segments`."""
    device, pairs = experts_of.device, experts_of.numel()
    experts_of = experts_of.contiguous()
    rows = rows_of_segments(pairs, experts, align)
    counts, start, pair = (torch.empty(n, dtype=torch.int32, device=device) for n in (experts, experts + 1, rows))
    row = torch.empty_like(experts_of)
    lanes = next_power_of_2(experts)
    _count_kernel[(experts,)](experts_of, counts, pairs, TILE=_TILE, num_warps=_WARPS)
    _place_kernel[(experts + 1,)](
        *(experts_of, counts, row, pair, start, pairs, rows, experts, align), LANES=lanes, TILE=_TILE, num_warps=_WARPS
    )
    return Segments(row, pair, start)


def _fake(experts_of, experts, align):
    rows = rows_of_segments(experts_of.numel(), experts, align)
    return experts_of.new_empty(experts_of.shape), experts_of.new_empty(rows), experts_of.new_empty(experts + 1)


@operator("segments(Tensor experts_of, int experts, int align) -> (Tensor, Tensor, Tensor)", fake=_fake)
def _segments(experts_of: torch.Tensor, experts: int, align: int) -> Segments:
    if experts_of.dtype != torch.int32 or experts_of.ndim != 2 or align < 1:
        raise ValueError(
            f"segments: experts {tuple(experts_of.shape)} {experts_of.dtype} and align={align} are not supported; "
            "expected [tokens, k] int32 and at least 1"
        )
    return lookup("segments", experts_of.device)(experts_of, experts, align)


def segments(experts_of: torch.Tensor, experts: int, align: int) -> Segments:
    """Rows of all pairs (:class:`jetrl_verl.reference.Segments`).

    Args:
        experts_of: ``[T, k]`` int32, the experts of each token. experts: E, how many there are.
        align: segments begin at multiples of it; 128 for a backward pass, 1 for a forward alone.

    Raises:
        ValueError: another type or shape of ``experts_of``.
    """
    return Segments(*_segments(experts_of, experts, align))
