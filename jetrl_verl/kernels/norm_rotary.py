# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""QK norm and rotary in one launch, with the bits of :func:`rms_norm` and :func:`rotary`: one warp per head, which sums
squares in the layout of the norm's kernel (test_fused_for_hopper.py)."""

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl import reference
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.rms_norm import heads_in_place, rms_norm_backward, tile_and_warps
from jetrl_verl.kernels.rotary import check_rotary, reference_rotary, rotate_back
from jetrl_verl.kernels.sizes import HEADS_OF_A_PROGRAM, ceil_div
from jetrl_verl.kernels.views import as_type

__all__ = ["norm_rotary"]

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Heads of queries and keys, BF16, and 1 / RMS of each, FP32."""


@implements("norm_rotary", "reference")
def reference_norm_rotary(q, k, q_weight, k_weight, eps: float, table, positions, unit_offset: bool = False) -> Results:
    """The two operations one after the other."""
    q, q_rstd = reference.rms_norm(q, q_weight, eps, unit_offset)
    k, k_rstd = reference.rms_norm(k, k_weight, eps, unit_offset)
    return *reference_rotary(q, k, table, positions, False), q_rstd, k_rstd


# A head is D / WIDTH groups of WIDTH features, of which the table rotates the first. Groups are rows of the halves.
@jit
def rotated_heads(
    x_ptr, stride, valid, weight_ptr, table_ptr, position, table_rows, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Halves ``[HEADS D / WIDTH, WIDTH / 2]`` BF16 of the ``valid`` heads, ``stride`` apart, normalized and rotated,
    and 1 / RMS.

    A position that the table lacks gives NaN, as in rotary.py.
    """
    GROUPS: tl.constexpr = D // WIDTH
    head, column, half = tl.arange(0, valid.shape[0]), tl.arange(0, D), tl.arange(0, WIDTH // 2)
    # Loaded before position and sum are needed.
    weight = tl.load(weight_ptr + 0 * head[:, None] + column[None, :]).to(tl.float32)  # in each warp
    values = tl.load(x_ptr + head[:, None] * stride + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    position = position.to(tl.int64)
    known = (half >= 0) & (position >= 0) & (position < table_rows)
    angles = table_ptr + position * WIDTH + half
    cos = tl.load(angles, mask=known, other=float("nan")).to(tl.float32)[None, :]
    sin = tl.load(angles + WIDTH // 2, mask=known, other=float("nan")).to(tl.float32)[None, :]
    mean = tl.sum(values * values, axis=1) / D
    rstd = 1.0 / tl.sqrt_rn(mean + eps)
    if UNIT_OFFSET:
        weight += 1.0
    y = (values * rstd[:, None] * weight).to(tl.bfloat16)
    first, second = tl.split(tl.permute(tl.reshape(y, (valid.shape[0] * GROUPS, 2, WIDTH // 2)), (0, 2, 1)))
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    y1, y2 = (x1 * cos - x2 * sin).to(tl.bfloat16), (x2 * cos + x1 * sin).to(tl.bfloat16)
    if GROUPS > 1:
        rotated = (tl.arange(0, valid.shape[0] * GROUPS) % GROUPS == 0)[:, None]
        y1, y2 = tl.where(rotated, y1, first), tl.where(rotated, y2, second)
    return y1, y2, rstd


@jit
def store_halves(first, second, target_ptr, stride, stored, D: tl.constexpr, WIDTH: tl.constexpr):
    """Store the halves of :func:`rotated_heads` to heads ``stride`` apart, where ``stored [HEADS]``."""
    GROUPS: tl.constexpr = D // WIDTH
    row, half = tl.arange(0, stored.shape[0] * GROUPS), tl.arange(0, WIDTH // 2)
    target_ptr += (row // GROUPS * stride + row % GROUPS * WIDTH)[:, None] + half[None, :]
    mask = stored[:, None]
    if GROUPS > 1:
        mask = tl.reshape(tl.broadcast_to(mask, (stored.shape[0], GROUPS)), (stored.shape[0] * GROUPS, 1))
    tl.store(target_ptr, first, mask=mask)
    tl.store(target_ptr + WIDTH // 2, second, mask=mask)


@jit
def _heads(
    x_ptr, stride, valid, weight_ptr, y_ptr, rstd_ptr, table_ptr, position, table_rows, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    first, second, rstd = rotated_heads(
        x_ptr, stride, valid, weight_ptr, table_ptr, position, table_rows, eps, D, WIDTH, UNIT_OFFSET
    )
    store_halves(first, second, y_ptr, D, valid, D, WIDTH)
    tl.store(rstd_ptr + tl.arange(0, valid.shape[0]), rstd, mask=valid)


@jit(do_not_specialize=["table_rows"])
def _norm_rotary_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, table_ptr, positions_ptr, q_out_ptr, k_out_ptr, q_rstd_ptr, k_rstd_ptr,
    eps, table_rows,
    Q_HEADS: tl.constexpr, Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr,
    K_HEADS: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, UNIT_OFFSET: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    q_programs: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    programs: tl.constexpr = q_programs + (K_HEADS + HEADS - 1) // HEADS
    token, head = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs * HEADS
    position = tl.load(positions_ptr + token)
    if head < q_programs * HEADS:
        valid = head + tl.arange(0, HEADS) < Q_HEADS
        source, row = q_ptr + token * Q_TOKEN + head * Q_HEAD, token * Q_HEADS + head
        _heads(
            source, Q_HEAD, valid, q_weight_ptr, q_out_ptr + row * D, q_rstd_ptr + row, table_ptr, position, table_rows,
            eps, D, WIDTH, UNIT_OFFSET,
        )  # fmt: skip
    else:
        head -= q_programs * HEADS
        valid = head + tl.arange(0, HEADS) < K_HEADS
        source, row = k_ptr + token * K_TOKEN + head * K_HEAD, token * K_HEADS + head
        _heads(
            source, K_HEAD, valid, k_weight_ptr, k_out_ptr + row * D, k_rstd_ptr + row, table_ptr, position, table_rows,
            eps, D, WIDTH, UNIT_OFFSET,
        )  # fmt: skip


@implements("norm_rotary", "triton")
def triton_norm_rotary(q, k, q_weight, k_weight, eps: float, table, positions, unit_offset: bool = False) -> Results:
    """As :func:`reference_norm_rotary`; widths of heads and table are powers of two, a position that the table lacks
    gives NaN."""
    q, k = heads_in_place(q), heads_in_place(k)
    tokens, q_heads, width = q.shape
    k_heads = k.shape[1]
    q_out = torch.empty(tokens, q_heads, width, dtype=torch.bfloat16, device=q.device)
    k_out = torch.empty(tokens, k_heads, width, dtype=torch.bfloat16, device=q.device)
    q_rstd = torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device)
    k_rstd = torch.empty(tokens, k_heads, dtype=torch.float32, device=q.device)
    programs = ceil_div(q_heads, HEADS_OF_A_PROGRAM) + ceil_div(k_heads, HEADS_OF_A_PROGRAM)
    if tokens:
        _norm_rotary_kernel[(tokens * programs,)](
            q,
            k,
            q_weight.contiguous(),
            k_weight.contiguous(),
            table.contiguous(),
            positions.contiguous(),
            q_out,
            k_out,
            q_rstd,
            k_rstd,
            eps,
            len(table),
            Q_HEADS=q_heads,
            Q_TOKEN=q.stride(0),
            Q_HEAD=q.stride(1),
            K_HEADS=k_heads,
            K_TOKEN=k.stride(0),
            K_HEAD=k.stride(1),
            D=width,
            WIDTH=table.shape[1],
            UNIT_OFFSET=unit_offset,
            HEADS=HEADS_OF_A_PROGRAM,
            num_warps=HEADS_OF_A_PROGRAM * tile_and_warps(width)[1],
        )
    return q_out, k_out, q_rstd, k_rstd


def _fake(q, k, *_):
    rstds = (x.new_empty(x.shape[:2], dtype=torch.float32) for x in (q, k))
    return q.new_empty(q.shape), k.new_empty(k.shape), *rstds


def check_norm_rotary(operation: str, q, k, q_weight, k_weight, table, positions) -> None:
    """As :func:`check_rotary`, also for weights."""
    check_rotary(operation, q, k, table, positions)
    require_shape(operation, "q_weight", q_weight, q.shape[-1:])
    require_shape(operation, "k_weight", k_weight, k.shape[-1:])


@operator(
    "norm_rotary(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor table, Tensor positions,"
    " bool unit_offset=False) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
)
def _norm_rotary(q, k, q_weight, k_weight, eps: float, table, positions, unit_offset: bool = False) -> Results:
    check_norm_rotary("norm_rotary", q, k, q_weight, k_weight, table, positions)
    return lookup("norm_rotary", q.device)(q, k, q_weight, k_weight, eps, table, positions, unit_offset)


class _NormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, eps: float, table, positions, unit_offset: bool):
        q_out, k_out, q_rstd, k_rstd = _norm_rotary(q, k, q_weight, k_weight, eps, table, positions, unit_offset)
        ctx.save_for_backward(q, k, q_rstd, k_rstd)
        ctx.unit_offset = unit_offset
        keep(ctx, q_weight, k_weight, table, positions)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: torch.Tensor, dk: torch.Tensor):
        q, k, q_rstd, k_rstd = ctx.saved_tensors
        q_weight, k_weight, table, positions = kept(ctx)
        dq, dk = rotate_back(dq, dk, table, positions)
        dq, dq_weight = rms_norm_backward(dq, q, q_weight, q_rstd, ctx.unit_offset)
        dk, dk_weight = rms_norm_backward(dk, k, k_weight, k_rstd, ctx.unit_offset)
        dq_weight, dk_weight = as_type(dq_weight, q_weight.dtype), as_type(dk_weight, k_weight.dtype)
        return dq, dk, dq_weight, dk_weight, None, None, None, None


def norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rotary(rms_norm(q), rms_norm(k))`` in one launch; differentiable in heads and weights.

    Args:
        q: ``[N, Hq, D]`` BF16. k: ``[N, Hk, D]`` BF16. Either may be a part of a wider tensor.
        q_weight, k_weight: ``[D]``. eps: added to the means of squares.
        table: ``[P, R]`` BF16 of :func:`rotary_table`; features from R on are normalized, not rotated. On a GPU D and R
            are powers of two. positions: ``[N]`` int64 or int32, below P, in any order.
        unit_offset: as of :func:`rms_norm`.

    Returns:
        (``[N, Hq, D]``, ``[N, Hk, D]``) BF16, contiguous. On a GPU a position that the table lacks gives NaN.

    Raises:
        TypeError: an operand is not BF16, or positions are not integers. ValueError: shapes that do not fit.
        IndexError: on the CPU, a position that the table lacks.
    """
    require_bf16("norm_rotary", q=q, k=k, table=table)
    if torch.is_grad_enabled():
        return _NormRotary.apply(q, k, q_weight, k_weight, eps, table, positions, unit_offset)
    return _norm_rotary(q, k, q_weight, k_weight, eps, table, positions, unit_offset)[:2]
