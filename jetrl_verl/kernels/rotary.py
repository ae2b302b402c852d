# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, neox style: one BF16 table of cosines and sines, FP32 arithmetic, one rounding.

    y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        x1, x2: first and second half of a head's rotated features

The table's width says how many features are rotated, a head's first ones; the others pass through.
Both sides compute the table on the CPU in float64, in blocks of fixed size, and round it through FP32 to BF16.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16
from jetrl_verl.kernels.sizes import next_power_of_2
from jetrl_verl.kernels.views import as_type, unit_stride

__all__ = ["ROPE_TYPES", "rotary", "rotary_table", "table_of_tokens"]

ROPE_TYPES = ("default", "llama3")
"""The supported ``rope_type`` of ``rope_parameters``."""

_BLOCK = 1024
"""Positions computed at a time."""


def _inverse_frequencies(rotary_dim: int, parameters: Mapping[str, Any]) -> list[float]:
    """``theta^(-2i/d)`` of d rotated features; Llama 3.1 stretches the long wavelengths (its published formula)."""
    theta = float(parameters["rope_theta"])
    frequencies = [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return frequencies
    if kind != "llama3":
        raise ValueError(f"rotary: expected a rope_type of {', '.join(ROPE_TYPES)}, got {kind}")
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(parameters["original_max_position_embeddings"])

    def stretched(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return share * frequency + (1 - share) * frequency / factor

    return [stretched(frequency) for frequency in frequencies]


def rotary_table(rotary_dim: int, positions: int, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Cosines and sines of every position: ``[positions, rotary_dim]`` BF16 on the CPU, cosines in the first half.

    Args:
        rotary_dim: rotated features of a head. positions: number of rows.
        parameters: ``rope_parameters`` of a Hugging Face configuration, with one position per token.

    Raises:
        ValueError: a ``rope_type`` that is not supported.
    """
    with torch.device("cpu"):
        frequencies = torch.tensor(_inverse_frequencies(rotary_dim, parameters), dtype=torch.float64)
        blocks = []
        for start in range(0, positions, _BLOCK):
            angles = torch.arange(start, start + _BLOCK, dtype=torch.float64)[:, None] * frequencies
            blocks.append(torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(torch.bfloat16))
        return torch.cat(blocks)[:positions].contiguous()


def table_of_tokens(
    table: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A table with one row a token for mRoPE, and the tokens' rows in it; text has the angles of its positions.

    Args:
        table: ``[P, R]`` of :func:`rotary_table`. positions: ``[3, N]``, below P.
        rows: ``[R]``, which of the three positions a column's angle is of.

    Returns:
        (``[N, R]``, 0 to N - 1).
    """
    tokens = torch.arange(positions.shape[1], device=positions.device)
    return table.gather(0, positions.index_select(0, rows).T.to(torch.int64)), tokens


@implements("rotary", "reference")
def reference_rotary(q, k, table, positions, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands rotated, BF16; ``inverse`` rotates back (a gradient). IndexError: a position not in the table."""
    if len(positions) and not 0 <= positions.min() <= positions.max() < len(table):
        raise IndexError(
            f"rotary: positions from {int(positions.min())} to {int(positions.max())} leave the table of {len(table)}; "
            "use shorter sequences or a model with a larger max_position_embeddings"
        )
    cos, sin = table.index_select(0, positions).float().unsqueeze(1).chunk(2, dim=-1)
    if inverse:
        sin = -sin

    def rotate(x: torch.Tensor) -> torch.Tensor:
        rotated, rest = x.split([table.shape[1], x.shape[2] - table.shape[1]], dim=-1)
        first, second = rotated.float().chunk(2, dim=-1)
        halves = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(torch.bfloat16)
        return torch.cat([halves, rest], dim=-1)

    return rotate(q), rotate(k)


@jit
def _rotate(
    x_ptr, y_ptr, token, cos, sin, stride_token, stride_head,
    HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr,
):  # fmt: skip
    head, column = tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, HALF)[None, :]
    mask = head < HEADS
    source = x_ptr + token * stride_token + head * stride_head + column
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    row = y_ptr + (token * HEADS + head) * (2 * HALF + REST)
    target = row + column
    tl.store(target, (first * cos - second * sin).to(tl.bfloat16), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(tl.bfloat16), mask=mask)
    if REST:  # features of a head that are not rotated
        column = tl.arange(0, REST_TILE)[None, :]
        mask = (head < HEADS) & (column < REST)
        rest = tl.load(x_ptr + token * stride_token + head * stride_head + 2 * HALF + column, mask=mask)
        tl.store(row + 2 * HALF + column, rest, mask=mask)


@jit(do_not_specialize=["table_rows"])
def _rotary_kernel(
    q_ptr, k_ptr, table_ptr, positions_ptr, q_out_ptr, k_out_ptr, table_rows,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head,
    Q_HEADS: tl.constexpr, Q_TILE: tl.constexpr, K_HEADS: tl.constexpr, K_TILE: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    # A position that the table lacks gives NaN: no memory outside the table is read, and the error shows.
    known = (column >= 0) & (position >= 0) & (position < table_rows)
    angles = table_ptr + position * 2 * HALF + column
    cos = tl.load(angles, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(angles + HALF, mask=known, other=float("nan")).to(tl.float32)
    if INVERSE:
        sin = -sin
    _rotate(q_ptr, q_out_ptr, token, cos, sin, stride_q_token, stride_q_head, Q_HEADS, Q_TILE, HALF, REST, REST_TILE)
    _rotate(k_ptr, k_out_ptr, token, cos, sin, stride_k_token, stride_k_head, K_HEADS, K_TILE, HALF, REST, REST_TILE)


@implements("rotary", "triton")
def triton_rotary(q, k, table, positions, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_rotary`; the table's width is a power of two, a position that the table lacks gives NaN."""
    tokens, width = len(q), table.shape[1]
    rest = q.shape[2] - width
    q, k = unit_stride(q), unit_stride(k)
    rotated = tuple(torch.empty(*x.shape, dtype=torch.bfloat16, device=x.device) for x in (q, k))
    if tokens:
        _rotary_kernel[(tokens,)](
            q,
            k,
            table.contiguous(),
            positions.contiguous(),
            *rotated,
            len(table),
            *q.stride()[:2],
            *k.stride()[:2],
            Q_HEADS=q.shape[1],
            Q_TILE=next_power_of_2(q.shape[1]),
            K_HEADS=k.shape[1],
            K_TILE=next_power_of_2(k.shape[1]),
            HALF=width // 2,
            REST=rest,
            REST_TILE=next_power_of_2(rest) if rest else 1,
            INVERSE=inverse,
        )
    return rotated


def check_rotary(
    operation: str, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> None:
    """Raise TypeError for positions that are no integers, ValueError for shapes that do not fit."""
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{operation}: positions are {positions.dtype}, expected torch.int64 or torch.int32; cast them")
    tokens, width = len(positions), table.shape[1]
    fit = all(x.ndim == 3 and len(x) == tokens and x.shape[2] >= width for x in (q, k)) and q.shape[2] == k.shape[2]
    if positions.ndim != 1 or not fit:
        raise ValueError(
            f"{operation}: q {tuple(q.shape)} and k {tuple(k.shape)} do not fit positions {tuple(positions.shape)} and "
            f"a table of width {width}; pass [N, heads, D], [N] and [P, D] or, to rotate R of D features, [P, R]"
        )


# Checked when it runs, not when it is traced: a comparison of symbolic sizes would become a guard of the compiler.
@operator(
    "rotary(Tensor q, Tensor k, Tensor table, Tensor positions, bool inverse) -> (Tensor, Tensor)",
    fake=lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    probe=lambda inputs: rotary(inputs.q, inputs.k, inputs.table, inputs.positions),
)
def _rotary(q, k, table, positions, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    check_rotary("rotary", q, k, table, positions)
    return lookup("rotary", q.device)(q, k, table, positions, inverse)


def rotate_back(
    dq: torch.Tensor, dk: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of queries and keys, BF16, from those of the rotated ones."""
    return _rotary(as_type(dq, torch.bfloat16), as_type(dk, torch.bfloat16), table, positions, True)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor):
        keep(ctx, table, positions)
        return _rotary(q, k, table, positions, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: torch.Tensor, dk: torch.Tensor):
        return *rotate_back(dq, dk, *kept(ctx)), None, None


def rotary(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by the angles of their positions, in one launch; differentiable in both.

    Args:
        q: ``[N, Hq, D]`` BF16. k: ``[N, Hk, D]`` BF16. Either may be a part of a wider tensor.
        table: ``[P, R]`` BF16 of :func:`rotary_table`; features from R on pass through. On a GPU R is a power of two.
        positions: ``[N]`` int64 or int32, below P, in any order.

    Returns:
        (``[N, Hq, D]``, ``[N, Hk, D]``) BF16, contiguous. On a GPU a position that the table lacks gives NaN.

    Raises:
        TypeError: an operand is not BF16, or positions are not int64 or int32. ValueError: shapes that do not fit.
        IndexError: on the CPU, a position that the table lacks.
    """
    require_bf16("rotary", q=q, k=k, table=table)
    if torch.is_grad_enabled():
        return _Rotary.apply(q, k, table, positions)
    return _rotary(q, k, table, positions, False)
