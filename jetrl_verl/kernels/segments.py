# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows for the pairs of tokens and experts, those of an expert next to each other (reference/experts.py). On a GPU
three launches: count the pairs of each expert per piece of 256, add up earlier pieces, give each pair its row."""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.reference import Segments, rows_of_segments

__all__ = ["segments"]

_PIECE = 256
_LANES_AT_ONCE, _TILE = 32, 256
_WARPS = 8

implements("segments", "reference")(reference.segments)


@jit(do_not_specialize=["pairs", "rows", "pieces"])
def _count_kernel(
    experts_ptr, counts_ptr, pair_ptr, pairs, rows, pieces, experts,
    LANES: tl.constexpr, PIECE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    piece, expert, lane = tl.program_id(0), tl.arange(0, LANES), tl.arange(0, PIECE)
    counts = tl.zeros((LANES, AT_ONCE), dtype=tl.int32)
    for first in range(0, PIECE, AT_ONCE):
        pair = piece * PIECE + first + tl.arange(0, AT_ONCE)
        chosen = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1)
        counts += (chosen[None, :] == expert[:, None]).to(tl.int32)
    tl.store(counts_ptr + expert * pieces + piece, tl.sum(counts, axis=1), mask=expert < experts)
    # No row has a pair yet.
    for first in range(piece * PIECE, rows, pieces * PIECE):
        tl.store(pair_ptr + first + lane, tl.full((PIECE,), -1, tl.int32), mask=first + lane < rows)


@jit(do_not_specialize=["pieces"])
def _sum_kernel(counts_ptr, totals_ptr, pieces, TILE: tl.constexpr):
    """Replace each count with the sum of the counts before it."""
    expert, lane = tl.program_id(0), tl.arange(0, TILE)
    total = 0
    for first in range(0, pieces, TILE):
        places, mask = counts_ptr + expert * pieces + first + lane, first + lane < pieces
        counts = tl.load(places, mask=mask, other=0)
        tl.store(places, total + tl.cumsum(counts, axis=0) - counts, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@jit(do_not_specialize=["pairs", "pieces"])
def _place_kernel(
    experts_ptr, before_ptr, totals_ptr, row_ptr, pair_ptr, start_ptr, pairs, pieces, experts, align,
    LANES: tl.constexpr, PIECE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    pair = piece * PIECE + tl.arange(0, PIECE)
    valid = pair < pairs
    own_expert = tl.load(experts_ptr + pair, mask=valid, other=0)
    before = tl.zeros((PIECE, AT_ONCE), dtype=tl.int32)
    for first in range(0, LANES, AT_ONCE):
        expert = first + tl.arange(0, AT_ONCE)
        length = (tl.load(totals_ptr + expert, mask=expert < experts, other=0) + align - 1) // align * align
        before += tl.where(expert[None, :] < own_expert[:, None], length[None, :], 0)
    for first in range(0, PIECE, AT_ONCE):
        other = piece * PIECE + first + tl.arange(0, AT_ONCE)
        chosen = tl.load(experts_ptr + other, mask=other < pairs, other=-1)
        before += ((chosen[None, :] == own_expert[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32)
    row = tl.sum(before, axis=1) + tl.load(before_ptr + own_expert * pieces + piece, mask=valid, other=0)
    tl.store(row_ptr + pair, row, mask=valid)
    tl.store(pair_ptr + row, pair, mask=valid)
    if piece == 0:
        expert = tl.arange(0, LANES)
        length = (tl.load(totals_ptr + expert, mask=expert < experts, other=0) + align - 1) // align * align
        tl.store(start_ptr + expert + 1, tl.cumsum(length, axis=0), mask=expert < experts)
        tl.store(start_ptr, 0)


@implements("segments", "triton")
def triton_segments(experts_of: torch.Tensor, experts: int, align: int) -> Segments:
    """As :func:`jetrl_verl.reference.segments`."""
    device, pairs = experts_of.device, experts_of.numel()
    experts_of = experts_of.contiguous()
    rows, pieces = rows_of_segments(pairs, experts, align), max(1, ceil_div(pairs, _PIECE))
    counts, totals, start, pair = (
        torch.empty(n, dtype=torch.int32, device=device) for n in (experts * pieces, experts, experts + 1, rows)
    )
    row = torch.empty_like(experts_of)
    lanes = max(next_power_of_2(experts), _LANES_AT_ONCE)
    tiles = {"LANES": lanes, "PIECE": _PIECE, "AT_ONCE": _LANES_AT_ONCE, "num_warps": _WARPS}
    _count_kernel[(pieces,)](experts_of, counts, pair, pairs, rows, pieces, experts, **tiles)
    _sum_kernel[(experts,)](counts, totals, pieces, TILE=_TILE, num_warps=1)
    _place_kernel[(pieces,)](experts_of, counts, totals, row, pair, start, pairs, pieces, experts, align, **tiles)
    return Segments(row, pair, start)


def _fake(experts_of, experts, align):
    rows = rows_of_segments(experts_of.numel(), experts, align)
    return experts_of.new_empty(experts_of.shape), experts_of.new_empty(rows), experts_of.new_empty(experts + 1)


@operator("segments(Tensor experts_of, int experts, int align) -> (Tensor, Tensor, Tensor)", fake=_fake)
def _segments(experts_of: torch.Tensor, experts: int, align: int) -> Segments:
    if experts_of.dtype != torch.int32 or experts_of.ndim != 2 or align < 1:
        raise ValueError(
            f"segments: expected [tokens, k] int32 and align of at least 1, got {tuple(experts_of.shape)} "
            f"{experts_of.dtype} and align={align}"
        )
    return lookup("segments", experts_of.device)(experts_of, experts, align)


def segments(experts_of: torch.Tensor, experts: int, align: int) -> Segments:
    """Rows of all pairs (:class:`jetrl_verl.reference.Segments`).

    Args:
        experts_of: ``[T, k]`` int32, the experts of each token. experts: their number E.
        align: segments begin at its multiples; 128 for a backward pass, 1 for forward only.

    Raises:
        ValueError: ``experts_of`` has another type or shape.
    """
    return Segments(*_segments(experts_of, experts, align))
