# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""QK norm and rotary in one launch, with the bits of :func:`rms_norm` and :func:`rotary`: one warp per head, which sums
squares in the layout of the norm's kernel (test_fused_for_hopper.py)."""

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.rms_norm import heads_in_place, reference_rms_norm, rms_norm_backward, tile_and_warps
from jetrl_verl.kernels.rotary import check_rotary, reference_rotary, rotate_back
from jetrl_verl.kernels.sizes import HEADS_OF_A_PROGRAM, ceil_div
from jetrl_verl.kernels.views import as_type

__all__ = ["norm_rotary"]

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Heads of queries and keys, BF16, and 1 / RMS of each, FP32."""


@implements("norm_rotary", "reference")
def reference_norm_rotary(q, k, q_weight, k_weight, eps: float, table, positions) -> Results:
    """The two operations one after the other."""
    (q, q_rstd), (k, k_rstd) = reference_rms_norm(q, q_weight, eps), reference_rms_norm(k, k_weight, eps)
    return *reference_rotary(q, k, table, positions, False), q_rstd, k_rstd


@jit
def rotated_heads(x_ptr, stride, valid, weight_ptr, table_ptr, position, table_rows, eps, D: tl.constexpr):
    """Halves ``[HEADS, D / 2]`` BF16 of the ``valid`` heads, ``stride`` apart, normalized and rotated, and 1 / RMS.

    A position that the table lacks gives NaN, as in rotary.py.
    """
    head, column, half = tl.arange(0, valid.shape[0]), tl.arange(0, D), tl.arange(0, D // 2)
    # Loaded before position and sum are needed.
    weight = tl.load(weight_ptr + 0 * head[:, None] + column[None, :]).to(tl.float32)  # in each warp
    values = tl.load(x_ptr + head[:, None] * stride + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    position = position.to(tl.int64)
    known = (half >= 0) & (position >= 0) & (position < table_rows)
    cos = tl.load(table_ptr + position * D + half, mask=known, other=float("nan")).to(tl.float32)[None, :]
    sin = tl.load(table_ptr + position * D + D // 2 + half, mask=known, other=float("nan")).to(tl.float32)[None, :]
    mean = tl.sum(values * values, axis=1) / D
    rstd = 1.0 / tl.sqrt_rn(mean + eps)
    y = (values * rstd[:, None] * weight).to(tl.bfloat16)
    first, second = tl.split(tl.permute(tl.reshape(y, (valid.shape[0], 2, D // 2)), (0, 2, 1)))
    first, second = first.to(tl.float32), second.to(tl.float32)
    return (first * cos - second * sin).to(tl.bfloat16), (second * cos + first * sin).to(tl.bfloat16), rstd


@jit
def store_halves(first, second, target_ptr, stride, stored, D: tl.constexpr):
    """Store halves of heads to heads ``stride`` apart, where ``stored [HEADS]``."""
    head, half = tl.arange(0, stored.shape[0]), tl.arange(0, D // 2)
    target_ptr += head[:, None] * stride + half[None, :]
    tl.store(target_ptr, first, mask=stored[:, None])
    tl.store(target_ptr + D // 2, second, mask=stored[:, None])


@jit
def _heads(x_ptr, stride, valid, weight_ptr, y_ptr, rstd_ptr, table_ptr, position, table_rows, eps, D: tl.constexpr):
    first, second, rstd = rotated_heads(x_ptr, stride, valid, weight_ptr, table_ptr, position, table_rows, eps, D)
    store_halves(first, second, y_ptr, D, valid, D)
    tl.store(rstd_ptr + tl.arange(0, valid.shape[0]), rstd, mask=valid)


@jit(do_not_specialize=["table_rows"])
def _norm_rotary_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, table_ptr, positions_ptr, q_out_ptr, k_out_ptr, q_rstd_ptr, k_rstd_ptr,
    eps, table_rows,
    Q_HEADS: tl.constexpr, Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr,
    K_HEADS: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
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
            eps, D,
        )  # fmt: skip
    else:
        head -= q_programs * HEADS
        valid = head + tl.arange(0, HEADS) < K_HEADS
        source, row = k_ptr + token * K_TOKEN + head * K_HEAD, token * K_HEADS + head
        _heads(
            source, K_HEAD, valid, k_weight_ptr, k_out_ptr + row * D, k_rstd_ptr + row, table_ptr, position, table_rows,
            eps, D,
        )  # fmt: skip


@implements("norm_rotary", "triton")
def triton_norm_rotary(q, k, q_weight, k_weight, eps: float, table, positions) -> Results:
    """As :func:`reference_norm_rotary`; ``D`` is a power of two, a position that the table lacks gives NaN."""
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
            HEADS=HEADS_OF_A_PROGRAM,
            num_warps=HEADS_OF_A_PROGRAM * tile_and_warps(width)[1],
        )
    return q_out, k_out, q_rstd, k_rstd


def _fake(q, k, q_weight, k_weight, eps, table, positions):
    rstds = (x.new_empty(x.shape[:2], dtype=torch.float32) for x in (q, k))
    return q.new_empty(q.shape), k.new_empty(k.shape), *rstds


def check_norm_rotary(operation: str, q, k, q_weight, k_weight, table, positions) -> None:
    """As :func:`check_rotary`, also for weights."""
    check_rotary(operation, q, k, table, positions)
    require_shape(operation, "q_weight", q_weight, q.shape[-1:])
    require_shape(operation, "k_weight", k_weight, k.shape[-1:])


@operator(
    "norm_rotary(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor table, Tensor positions)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
)
def _norm_rotary(q, k, q_weight, k_weight, eps: float, table, positions) -> Results:
    check_norm_rotary("norm_rotary", q, k, q_weight, k_weight, table, positions)
    return lookup("norm_rotary", q.device)(q, k, q_weight, k_weight, eps, table, positions)


class _NormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, eps: float, table, positions):
        q_out, k_out, q_rstd, k_rstd = _norm_rotary(q, k, q_weight, k_weight, eps, table, positions)
        ctx.save_for_backward(q, k, q_rstd, k_rstd)
        keep(ctx, q_weight, k_weight, table, positions)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: torch.Tensor, dk: torch.Tensor):
        q, k, q_rstd, k_rstd = ctx.saved_tensors
        q_weight, k_weight, table, positions = kept(ctx)
        dq, dk = rotate_back(dq, dk, table, positions)
        dq, dq_weight = rms_norm_backward(dq, q, q_weight, q_rstd)
        dk, dk_weight = rms_norm_backward(dk, k, k_weight, k_rstd)
        dq_weight, dk_weight = as_type(dq_weight, q_weight.dtype), as_type(dk_weight, k_weight.dtype)
        return dq, dk, dq_weight, dk_weight, None, None, None


def norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rotary(rms_norm(q), rms_norm(k))`` in one launch; differentiable in heads and weights.

    Args:
        q: ``[N, Hq, D]`` BF16. k: ``[N, Hk, D]`` BF16. Either may be a part of a wider tensor.
        q_weight, k_weight: ``[D]``. eps: added to the means of squares.
        table: ``[P, D]`` BF16 of :func:`rotary_table`. positions: ``[N]`` int64 or int32, below P, in any order.

    Returns:
        (``[N, Hq, D]``, ``[N, Hk, D]``) BF16, contiguous. On a GPU a position that the table lacks gives NaN.

    Raises:
        TypeError: an operand is not BF16, or positions are not integers. ValueError: shapes that do not fit.
        IndexError: on the CPU, a position that the table lacks.
    """
    require_bf16("norm_rotary", q=q, k=k, table=table)
    if torch.is_grad_enabled():
        return _NormRotary.apply(q, k, q_weight, k_weight, eps, table, positions)
    return _norm_rotary(q, k, q_weight, k_weight, eps, table, positions)[:2]
