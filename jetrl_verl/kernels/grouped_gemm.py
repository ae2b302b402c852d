# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled GEMMs of a mixture of experts: one product per expert in one launch, row ranges read on the device.

``grouped_gemm_nt`` (FProp, DGrad): a row has the bits of ``gemm_nt``. ``grouped_gemm_nt_of_ranks``: each slice of K
separately, as tensor-parallel ranks do. ``grouped_wgrad``: contracts the rows of each expert. A tile belongs to one
expert and has at least 64 rows (gemm_nt.py). The grid is that of the worst case, so the host never waits.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels import native
from jetrl_verl.kernels.device.e4m3 import GROUP
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import NATIVE, implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.reference import BLOCK, FP8_DTYPE, QuantizedTensor
from jetrl_verl.reference.gemm import check_k_slices

__all__ = ["grouped_gemm_nt", "grouped_gemm_nt_of_ranks", "grouped_wgrad"]

implements("grouped_gemm_nt", "reference")(lambda a, b, start, *_: reference.grouped_gemm_nt(a, b, start))
implements("grouped_gemm_nt_of_ranks", "reference")(
    lambda a, b, start, ranks, *_: reference.grouped_gemm_nt_of_ranks(a, b, start, ranks)
)
implements("grouped_wgrad", "reference")(reference.grouped_wgrad)

# (BLOCK_M, BLOCK_N, warps, stages)
_MANY, _FEW = (128, 128, 8, 4), (64, 64, 4, 6)
_WGRAD = (128, 128, 8, 4)


@jit
def _expert_of(tile, start_ptr, experts, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile; after the last tile the expert is ``experts``."""
    lane = tl.arange(0, LANES)
    valid = lane < experts
    start = tl.load(start_ptr + lane, mask=valid, other=0)
    stop = tl.load(start_ptr + lane + 1, mask=valid, other=0)
    tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, axis=0)
    expert = tl.sum((valid & (before <= tile)).to(tl.int32), axis=0)
    is_expert = lane == expert
    first = tl.sum(tl.where(is_expert, start + (tile - before + tiles) * BLOCK_M, 0), axis=0)
    return expert, first, tl.sum(tl.where(is_expert, stop, 0), axis=0)


@jit
def _grouped_gemm_kernel(
    a_ptr, b_ptr, a_scales_ptr, b_scales_ptr, start_ptr, out_ptr, experts, rows, n, k,
    stride_am, stride_be, stride_bn, stride_bk, stride_as_m, stride_as_k, stride_bs_e, stride_bs_n, stride_bs_k,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    expert, first, stop = _expert_of(tl.program_id(1), start_ptr, experts, LANES, BLOCK_M)
    if expert >= experts:
        return
    # k is that of a slice; each slice has its rows of the result.
    tile_n, rank = tl.program_id(0), tl.program_id(2)
    a_ptr += rank * k
    b_ptr += rank * k * stride_bk
    a_scales_ptr += rank * (k // GROUP) * stride_as_k
    b_scales_ptr += rank * (k // GROUP) * stride_bs_k
    out_ptr += rank.to(tl.int64) * rows * n
    row = first + tl.arange(0, BLOCK_M)
    valid = row < stop
    read_row = tl.minimum(row, stop - 1).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    read_column = (column % n).to(tl.int64)
    lane = tl.arange(0, GROUP)
    a_ptrs = a_ptr + read_row[:, None] * stride_am + lane[None, :]
    b_ptrs = b_ptr + expert.to(tl.int64) * stride_be + read_column[None, :] * stride_bn + lane[:, None] * stride_bk
    a_scale_ptrs = a_scales_ptr + read_row * stride_as_m
    b_scale_ptrs = b_scales_ptr + expert.to(tl.int64) * stride_bs_e + (tile_n * BLOCK_N // GROUP) * stride_bs_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, k // GROUP):
        partial = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), out_dtype=tl.float32)
        scale = (tl.load(a_scale_ptrs) * tl.load(b_scale_ptrs))[:, None]
        acc = tl.fma(partial, tl.broadcast_to(scale, (BLOCK_M, BLOCK_N)), acc)
        a_ptrs += GROUP
        b_ptrs += GROUP * stride_bk
        a_scale_ptrs += stride_as_k
        b_scale_ptrs += stride_bs_k
    out = out_ptr + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out, acc.to(tl.bfloat16), mask=valid[:, None] & (column < n)[None, :])


@implements("grouped_gemm_nt_of_ranks", "triton")
def triton_grouped_gemm_nt_of_ranks(a: QuantizedTensor, b: QuantizedTensor, start, ranks: int, *_) -> torch.Tensor:
    """See :func:`grouped_gemm_nt_of_ranks`; rows after the last segment are not written."""
    (rows, k), (experts, n, _) = a.qdata.shape, b.qdata.shape
    out = torch.empty((ranks, rows, n), dtype=torch.bfloat16, device=a.qdata.device)
    if out.numel():
        block_m, block_n, warps, stages = _MANY if rows >= experts * _MANY[0] else _FEW
        # Each expert with rows may leave one tile that is not full.
        tiles = ceil_div(rows, block_m) + min(experts, rows)
        _grouped_gemm_kernel[(ceil_div(n, block_n), tiles, ranks)](
            a.qdata,
            b.qdata,
            a.scales,
            b.scales,
            start,
            out,
            experts,
            rows,
            n,
            k // ranks,
            a.qdata.stride(0),
            *b.qdata.stride(),
            *a.scales.stride(),
            *b.scales.stride(),
            LANES=next_power_of_2(experts),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
            num_stages=stages,
        )
    return out


@implements("grouped_gemm_nt", "triton")
def triton_grouped_gemm_nt(a: QuantizedTensor, b: QuantizedTensor, start: torch.Tensor, *_) -> torch.Tensor:
    """See :func:`grouped_gemm_nt`; rows after the last segment are not written."""
    return triton_grouped_gemm_nt_of_ranks(a, b, start, 1)[0]


@jit
def _grouped_wgrad_kernel(
    dy_ptr, x_ptr, dy_scales_ptr, x_scales_ptr, start_ptr, out_ptr, n, k,
    stride_dy, stride_x, stride_dys_n, stride_dys_m, stride_xs_k, stride_xs_m,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    first, stop = tl.load(start_ptr + expert), tl.load(start_ptr + expert + 1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    read_row, read_column = (row % n).to(tl.int64), (column % k).to(tl.int64)
    token = first + tl.arange(0, GROUP)
    dy_ptrs = dy_ptr + read_row[:, None] * stride_dy + token[None, :]
    x_ptrs = x_ptr + read_column[None, :] * stride_x + token[:, None]
    group = first // GROUP
    dy_scale_ptrs = dy_scales_ptr + read_row * stride_dys_n + group * stride_dys_m
    x_scale_ptrs = x_scales_ptr + read_column * stride_xs_k + group * stride_xs_m
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for _ in range(first, stop, GROUP):
        partial = tl.dot(tl.load(dy_ptrs), tl.load(x_ptrs), out_dtype=tl.float32)
        acc = tl.fma(partial, tl.load(dy_scale_ptrs)[:, None] * tl.load(x_scale_ptrs)[None, :], acc)
        dy_ptrs += GROUP
        x_ptrs += GROUP
        dy_scale_ptrs += stride_dys_m
        x_scale_ptrs += stride_xs_m
    out = out_ptr + (expert.to(tl.int64) * n + row.to(tl.int64)[:, None]) * k + column[None, :]
    tl.store(out, acc.to(tl.bfloat16), mask=(row < n)[:, None] & (column < k)[None, :])


@implements("grouped_wgrad", "triton")
def triton_grouped_wgrad(dy: QuantizedTensor, x: QuantizedTensor, start: torch.Tensor) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.grouped_wgrad`."""
    experts, n, k = len(start) - 1, dy.qdata.shape[0], x.qdata.shape[0]
    out = torch.empty((experts, n, k), dtype=torch.bfloat16, device=start.device)
    if out.numel():
        block_n, block_k, warps, stages = _WGRAD
        _grouped_wgrad_kernel[(ceil_div(n, block_n), ceil_div(k, block_k), experts)](
            dy.qdata,
            x.qdata,
            dy.scales,
            x.scales,
            start,
            out,
            n,
            k,
            dy.qdata.stride(0),
            x.qdata.stride(0),
            *dy.scales.stride(),
            *x.scales.stride(),
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            num_stages=stages,
        )
    return out


def _experts_in_one_matrix(b: torch.Tensor) -> bool:
    """Whether ``b [E, N, K]`` is one matrix with experts below or next to each other (``expert_operand`` of
    csrc/gemm.h)."""
    (experts, n, k), (of_expert, of_row, of_column) = b.shape, b.stride()
    if of_column != 1 or of_row < k or of_row % native.ALIGNMENT or b.data_ptr() % native.ALIGNMENT:
        return False
    if experts == 1:
        return True
    below = of_expert % of_row == 0 and of_expert // of_row >= n
    return below or (of_expert >= k and (experts - 1) * of_expert + k <= of_row)


def native_supports_grouped_gemm_nt(a: QuantizedTensor, b: QuantizedTensor, start: torch.Tensor, *_) -> bool:
    """Whether :func:`native_grouped_gemm_nt` supports this call: rows of qdata start on 16 bytes, and the experts are
    parts of one matrix."""
    (experts, n, k), rows = b.qdata.shape, a.qdata.shape[0]
    if min(rows, experts, n, k) == 0 or not start.is_contiguous():
        return False
    longest = experts * max(b.qdata.stride(0) // max(b.qdata.stride(1), 1), n, k)
    fits = max(rows, longest) <= native.MOST
    return fits and native.aligned(a.qdata) and _experts_in_one_matrix(b.qdata) and native.unavailable() is None


def native_supports_grouped_gemm_nt_of_ranks(
    a: QuantizedTensor, b: QuantizedTensor, start: torch.Tensor, ranks: int, *_
) -> bool:
    """Whether :func:`native_grouped_gemm_nt_of_ranks` supports this call."""
    return ranks * a.qdata.shape[0] <= native.MOST and native_supports_grouped_gemm_nt(a, b, start)


@implements("grouped_gemm_nt_of_ranks", "native", supports=native_supports_grouped_gemm_nt_of_ranks)
def native_grouped_gemm_nt_of_ranks(
    a: QuantizedTensor,
    b: QuantizedTensor,
    start: torch.Tensor,
    ranks: int,
    align: int = 1,
    static_weight: bool = False,
    static_segments: bool = False,
    *,
    plan: native.Plan = native.DEFAULT_PLAN,
) -> torch.Tensor:
    """See :func:`grouped_gemm_nt_of_ranks`; rows after the last segment are not written.

    Args:
        static_weight: as in ``kernels.gemm_nt``; the decode kernel waits before it reads ``start``.
        static_segments: with it the previous kernel does not write ``start``, and copies of ``b`` may start early too.
        plan: instead of the choice by shape; for tests and benchmarks.
    """
    rows, (experts, n, _) = a.qdata.shape[0], b.qdata.shape
    out = torch.empty((ranks, rows, n), dtype=torch.bfloat16, device=a.qdata.device)
    few = plan.kernel == "decode" if plan.kernel else rows <= native.FEW_ROWS_OF_EXPERT * experts
    aligned = align % native.ALIGNED_ROWS == 0
    call = a.qdata, a.scales, b.qdata, b.scales, start, aligned, ranks, out.view(ranks * rows, n), *plan[1:]
    if few:
        native.operators().grouped_decode(*call, static_weight, static_segments)
    else:
        native.operators().grouped_fprop(*call)
    return out


@implements("grouped_gemm_nt", "native", supports=native_supports_grouped_gemm_nt)
def native_grouped_gemm_nt(
    a: QuantizedTensor, b: QuantizedTensor, start: torch.Tensor, *others, plan: native.Plan = native.DEFAULT_PLAN
) -> torch.Tensor:
    """See :func:`grouped_gemm_nt`; :func:`native_grouped_gemm_nt_of_ranks` for one rank."""
    return native_grouped_gemm_nt_of_ranks(a, b, start, 1, *others, plan=plan)[0]


def _scales_in_columns(scales: torch.Tensor) -> bool:
    """Whether TMA can read the scales of a group (``scales_suit_tma`` of csrc/gemm.h)."""
    rows = scales.shape[0]
    adjacent = scales.stride(0) == 1 or rows == 1
    laid_out = scales.stride(1) >= rows and scales.stride(1) % native.ALIGNED_ROWS == 0
    return adjacent and laid_out and scales.data_ptr() % native.ALIGNMENT == 0


def native_supports_grouped_wgrad(dy: QuantizedTensor, x: QuantizedTensor, start: torch.Tensor) -> bool:
    """Whether :func:`native_grouped_wgrad` supports this call: rows of qdata start on 16 bytes, scales of a group are
    adjacent, tokens are whole groups."""
    (n, tokens), k, experts = dy.qdata.shape, x.qdata.shape[0], len(start) - 1
    if min(n, k, tokens, experts) <= 0 or tokens % BLOCK or x.qdata.shape[1] != tokens or k % 8:
        return False
    if experts > native.MOST_EXPERTS or max(experts * n, tokens) > native.MOST or not start.is_contiguous():
        return False
    laid_out = all(native.aligned(q.qdata) and _scales_in_columns(q.scales) for q in (dy, x))
    return laid_out and native.unavailable() is None


@implements("grouped_wgrad", "native", supports=native_supports_grouped_wgrad)
def native_grouped_wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, start: torch.Tensor, *, plan: native.Plan = native.DEFAULT_PLAN
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.grouped_wgrad`; ``plan`` as in :func:`native_grouped_gemm_nt_of_ranks`."""
    shape = len(start) - 1, dy.qdata.shape[0], x.qdata.shape[0]
    out = torch.empty(shape, dtype=torch.bfloat16, device=start.device)
    native.operators().grouped_wgrad(dy.qdata, dy.scales, x.qdata, x.scales, start, out, plan.block, plan.cluster)
    return out


def _check(a: QuantizedTensor, b: QuantizedTensor, start: torch.Tensor) -> None:
    (rows, k), (experts, n, k_of_b) = a.qdata.shape, b.qdata.shape
    whole = k % BLOCK == 0 and n % BLOCK == 0 and k_of_b == k and start.shape == (experts + 1,)
    scales = tuple(a.scales.shape) == (rows, k // BLOCK) and tuple(b.scales.shape) == (experts, n // BLOCK, k // BLOCK)
    if not (whole and scales) or {a.qdata.dtype, b.qdata.dtype} != {FP8_DTYPE} or start.dtype != torch.int32:
        raise ValueError(
            f"grouped_gemm_nt: A {tuple(a.qdata.shape)} scales {tuple(a.scales.shape)}, B {tuple(b.qdata.shape)} "
            f"scales {tuple(b.scales.shape)} and starts {tuple(start.shape)} {start.dtype} do not fit; expected E4M3 "
            f"[R, K] and [E, N, K], N and K multiples of {BLOCK}, and [E + 1] int32"
        )


@operator(
    "grouped_gemm_nt(Quantized a, Quantized b, Tensor start, int align=1, bool static_weight=False,"
    " bool static_segments=False) -> Tensor",
    fake=lambda a, b, *others: a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[1]), dtype=torch.bfloat16),
    backends=NATIVE,
)
def grouped_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    start: torch.Tensor,
    align: int = 1,
    static_weight: bool = False,
    static_segments: bool = False,
) -> torch.Tensor:
    """Each expert's rows of A times its matrix of B; FProp, and with B transposed DGrad.

    Args:
        a: qdata ``[R, K]`` E4M3, scales ``[R, K/128]``. b: qdata ``[E, N, K]`` E4M3 of any strides, scales
            ``[E, N/128, K/128]``. start: ``[E + 1]`` int32 (:class:`jetrl_verl.reference.Segments`).
        align: alignment of the segments, not checked: ``start`` stays on the device.
        static_weight, static_segments: as in :func:`native_grouped_gemm_nt_of_ranks`; other backends ignore them.

    Returns:
        ``[R, N]`` BF16. Rows after the last segment are undefined. No autograd.

    Raises:
        ValueError: operands that do not fit.
    """
    _check(a, b, start)
    call = a, b, start, align, static_weight, static_segments
    return lookup("grouped_gemm_nt", start.device, *call)(*call)


@operator(
    "grouped_gemm_nt_of_ranks(Quantized a, Quantized b, Tensor start, int ranks, int align=1) -> Tensor",
    fake=lambda a, b, start, ranks, *_: a.qdata.new_empty(
        (ranks, a.qdata.shape[0], b.qdata.shape[1]), dtype=torch.bfloat16
    ),
    backends=NATIVE,
)
def grouped_gemm_nt_of_ranks(
    a: QuantizedTensor, b: QuantizedTensor, start: torch.Tensor, ranks: int, align: int = 1
) -> torch.Tensor:
    """:func:`grouped_gemm_nt` of each of ``ranks`` equal slices of K.

    Returns:
        ``[ranks, R, N]`` BF16, rank 0 with the first slice. Rows after the last segment are undefined.

    Raises:
        ValueError: operands that do not fit, or slices of K that are no multiples of 128.
    """
    _check(a, b, start)
    check_k_slices(a.qdata.shape[1], ranks)
    call = a, b, start, ranks, align
    return lookup("grouped_gemm_nt_of_ranks", start.device, *call)(*call)


def _fake_wgrad(dy: QuantizedTensor, x: QuantizedTensor, start: torch.Tensor) -> torch.Tensor:
    shape = start.shape[0] - 1, dy.qdata.shape[0], x.qdata.shape[0]
    return dy.qdata.new_empty(shape, dtype=torch.bfloat16)


@operator("grouped_wgrad(Quantized dy, Quantized x, Tensor start) -> Tensor", fake=_fake_wgrad, backends=NATIVE)
def grouped_wgrad(dy: QuantizedTensor, x: QuantizedTensor, start: torch.Tensor) -> torch.Tensor:
    """Weight gradients of all experts.

    Args:
        dy: colwise qdata ``[N, R]`` E4M3, scales ``[N, R/128]``. x: colwise qdata ``[K, R]``.
        start: ``[E + 1]`` int32 of segments that begin at multiples of 128.

    Returns:
        ``[E, N, K]`` BF16; zeros for an expert without tokens.
    """
    return lookup("grouped_wgrad", start.device, dy, x, start)(dy, x, start)
