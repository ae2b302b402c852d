# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FProp and DGrad, ``Y = A W^T`` with 128x128 scales on W, and the Triton kernel of all block-scaled GEMMs.

Each 128-wide K block is one chain of FP8 matrix instructions from zero, promoted in FP32 by ``acc = fma(partial,
s_a * s_b, acc)``, K blocks in ascending order (docs/architecture.md). K is not split and every tile has at least 64
rows, so a row has the same bits in every batch and tile (test_gemm_on_gpu.py). Backends read a ``GemmCall``.
"""

from functools import cache

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels import native, vllm_kernels
from jetrl_verl.kernels.device.e4m3 import GROUP
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import NATIVE, backend_needs, implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div, multiprocessors
from jetrl_verl.reference import BLOCK, GemmCall, QuantizedTensor

__all__ = ["gemm_nt"]

implements("gemm_nt", "reference")(reference.multiply)

# (BLOCK_M, BLOCK_N, warps, stages), from most arithmetic per byte to most programs. BLOCK_N divides 128, so a tile has
# one scale of a block-scaled B per K block.
TILES = ((128, 128, 8, 4), (64, 128, 4, 4), (64, 64, 4, 6), (64, 32, 4, 8))
_TILES_PER_GROUP = 8


@jit
def _gemm_nt_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    rank_blocks,
    stride_am,
    stride_bn,
    stride_as_m,
    stride_as_k,
    stride_bs_n,
    stride_bs_k,
    B_BLOCK_SCALED: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    OF_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_GROUP: tl.constexpr,
):
    # Programs go down groups of TILES_PER_GROUP tile rows, so neighbors share tiles of A and B in L2.
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    group = program // (TILES_PER_GROUP * tiles_n)
    group_rows = tl.minimum(tiles_m - group * TILES_PER_GROUP, TILES_PER_GROUP)
    in_group = program % (TILES_PER_GROUP * tiles_n)
    tile_m = group * TILES_PER_GROUP + in_group % group_rows
    tile_n = in_group // group_rows

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    read_row, read_column = row % m, column % n
    lane = tl.arange(0, GROUP)
    a_ptrs = a_ptr + read_row.to(tl.int64)[:, None] * stride_am + lane[None, :]
    b_ptrs = b_ptr + read_column.to(tl.int64)[None, :] * stride_bn + lane[:, None]
    a_scale_ptrs = a_scales_ptr + read_row.to(tl.int64) * stride_as_m
    if B_BLOCK_SCALED:
        b_scale_ptrs = b_scales_ptr + (tile_n * BLOCK_N // GROUP).to(tl.int64) * stride_bs_n
    else:
        b_scale_ptrs = b_scales_ptr + read_column.to(tl.int64) * stride_bs_n

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if OF_RANKS:
        # -0 + x keeps the sign of x, even of a zero.
        total = tl.full((BLOCK_M, BLOCK_N), -0.0, dtype=tl.float32)
    for block in range(0, tl.cdiv(k, GROUP)):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            left = k - block * GROUP
            a = tl.load(a_ptrs, mask=lane[None, :] < left, other=0.0)
            b = tl.load(b_ptrs, mask=lane[:, None] < left, other=0.0)
        a_scale = tl.load(a_scale_ptrs)
        b_scale = tl.load(b_scale_ptrs)
        partial = tl.dot(a, b, out_dtype=tl.float32)
        scale = (a_scale * b_scale)[:, None] if B_BLOCK_SCALED else a_scale[:, None] * b_scale[None, :]
        acc = tl.fma(partial, tl.broadcast_to(scale, (BLOCK_M, BLOCK_N)), acc)
        a_ptrs += GROUP
        b_ptrs += GROUP
        a_scale_ptrs += stride_as_k
        b_scale_ptrs += stride_bs_k
        if OF_RANKS:
            ends_a_slice = (block + 1) % rank_blocks == 0
            if ends_a_slice:
                if WITH_BIAS:
                    is_first_rank = block < rank_blocks
                    if is_first_rank:
                        acc += tl.load(bias_ptr + read_column).to(tl.float32)[None, :]
                total += acc.to(tl.bfloat16).to(tl.float32)
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    if OF_RANKS:
        acc = total
    elif WITH_BIAS:
        acc += tl.load(bias_ptr + read_column).to(tl.float32)[None, :]
    out_offsets = row.to(tl.int64)[:, None] * n + column[None, :]
    mask = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 1 << 20


def choose_tile(m: int, n: int, programs: int) -> tuple[int, int, int, int]:
    """The largest of ``TILES`` that gives at least this many programs, else the smallest."""
    for tile in TILES:
        if ceil_div(m, tile[0]) * ceil_div(n, tile[1]) >= programs:
            return tile
    return TILES[-1]


@implements("gemm_nt", "triton")
def triton_gemm(call: GemmCall, *, tile: tuple[int, int, int, int] | None = None) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.multiply`. qdata may have any row stride.

    Args:
        tile: ``(BLOCK_M, BLOCK_N, warps, stages)`` instead of the choice by size; for tests and benchmarks.
    """
    a, b, m, n, k, b_scale_rows, bias, out_dtype, ranks, _ = call
    out = torch.empty(m, n, dtype=out_dtype, device=a.qdata.device)
    if m == 0 or n == 0:
        return out
    a_qdata = a.qdata if a.qdata.stride(1) == 1 else a.qdata.contiguous()
    b_qdata = b.qdata if b.qdata.stride(1) == 1 else b.qdata.contiguous()
    block_m, block_n, warps, stages = tile or choose_tile(m, n, multiprocessors(out.device))
    # A stage is one K block of both operands. Other GPUs have less than half of Hopper's shared memory.
    stages = min(stages, _shared_memory(out.device) // ((block_m + block_n) * BLOCK))
    _gemm_nt_kernel[(ceil_div(m, block_m) * ceil_div(n, block_n),)](
        a_qdata,
        b_qdata,
        a.scales,
        b.scales,
        bias.contiguous() if bias is not None else a.scales,
        out,
        m,
        n,
        k,
        k // ranks // BLOCK if ranks > 1 else 0,
        a_qdata.stride(0),
        b_qdata.stride(0),
        a.scales.stride(0),
        a.scales.stride(1),
        b.scales.stride(0),
        b.scales.stride(1),
        B_BLOCK_SCALED=b_scale_rows == BLOCK,
        WITH_BIAS=bias is not None,
        EVEN_K=k % BLOCK == 0,
        OF_RANKS=ranks > 1,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TILES_PER_GROUP=_TILES_PER_GROUP,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def native_supports_operands(call: GemmCall) -> bool:
    """Whether rows of qdata start on 16 bytes and rows of the output are multiples of 16 bytes."""
    if min(call.m, call.n, call.k) == 0 or (call.n * call.out_dtype.itemsize) % native.ALIGNMENT != 0:
        return False
    return native.aligned(call.a.qdata) and native.aligned(call.b.qdata) and native.unavailable() is None


def native_supports_gemm_nt(call: GemmCall) -> bool:
    """:func:`native_supports_operands`, BF16 out, a contiguous bias of BF16 or FP32."""
    bias = call.bias
    fits = bias is None or (bias.dtype in (torch.bfloat16, torch.float32) and bias.is_contiguous())
    return fits and call.out_dtype == torch.bfloat16 and native_supports_operands(call)


@implements("gemm_nt", "native", supports=native_supports_gemm_nt)
def native_gemm_nt(
    call: GemmCall, *, out: torch.Tensor | None = None, plan: native.Plan = native.DEFAULT_PLAN
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.multiply`; scales may have any strides.

    Args:
        out: ``[M, N]`` BF16 to write to, rows start on 16 bytes; None allocates it.
        plan: instead of the choice by shape; for tests and benchmarks.
    """
    a, b, m = call.a, call.b, call.m
    if out is None:
        out = torch.empty(m, call.n, dtype=torch.bfloat16, device=a.qdata.device)
    operands = a.qdata, a.scales, b.qdata, b.scales, call.bias, out
    kernel, block, cluster = plan
    if kernel == "decode" or (not kernel and m <= native.FEW_ROWS):
        native.operators().decode(*operands, block, cluster, call.static_weight)
    else:
        native.operators().fprop(*operands, block, cluster)
    return out


def _vllm_cutlass_supports(call: GemmCall) -> bool:
    # K > 128: with one K block and one N block vLLM's dispatcher would read the scales as per-row scales.
    shapes_fit = call.m > 0 and call.m % 4 == 0 and call.n % 16 == 0 and call.k % BLOCK == 0 and call.k > BLOCK
    plain = call.bias is None and call.out_dtype == torch.bfloat16
    contiguous = call.a.qdata.is_contiguous() and call.b.qdata.is_contiguous()
    return plain and shapes_fit and contiguous and vllm_kernels.no_block_fp8_gemm() is None


@implements("gemm_nt", "vllm_cutlass", supports=_vllm_cutlass_supports)
def vllm_cutlass_gemm_nt(call: GemmCall) -> torch.Tensor:
    """vLLM's CUTLASS kernel, for Hopper without the native library."""
    (a, a_scales), (b, b_scales) = call.a, call.b
    a_scales = a_scales if a_scales.stride() == (1, len(a_scales)) else a_scales.t().contiguous().t()
    scales = {"scale_a": a_scales, "scale_b": b_scales.contiguous().t()}
    return vllm_kernels.cutlass_scaled_mm(a, b.t(), out_dtype=call.out_dtype, **scales)


backend_needs("vllm_cutlass", vllm_kernels.no_block_fp8_gemm)


@operator(
    "gemm_nt(Quantized a, Quantized weight, Tensor? bias=None, ScalarType out_dtype=bfloat16,"
    " bool static_weight=False) -> Tensor",
    fake=lambda a, weight, bias=None, out_dtype=torch.bfloat16, *_: a.qdata.new_empty(
        (a.qdata.shape[0], weight.qdata.shape[0]), dtype=out_dtype
    ),
    backends=NATIVE | {"sm90": ("native", "vllm_cutlass", "triton")},
)
def gemm_nt(
    a: QuantizedTensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    static_weight: bool = False,
) -> torch.Tensor:
    """See :func:`jetrl_verl.reference.gemm_nt`.

    Args:
        static_weight: the native decode kernel may copy ``weight`` while the previous kernel in the stream still runs
            (programmatic dependent launch, device/dependents.py), without effect on the result. The previous kernel
            must write neither ``weight`` nor ``bias`` and must be launched without programmatic dependent launch, or
            wait before it lets others start. True in a rollout: a quantizer comes before every linear, and weights
            change in a sync only. A trainer, which quantizes weights just before the product, must not set it.
    """
    call = GemmCall.by_weight(a, weight, bias, out_dtype, static_weight)
    return lookup("gemm_nt", a.qdata.device, call)(call)
