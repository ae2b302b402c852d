# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled GEMM ``Y = A B^T``: FProp and DGrad (128x128 scales on B) and WGrad (1x128 scales on both).

Each 128-wide K block is one chain of FP8 matrix instructions from zero, promoted in FP32 by ``acc = fma(partial,
s_a * s_b, acc)``, K blocks in ascending order (docs/architecture.md). K is not split and every tile has at least 64
rows, so a row has the same bits in every batch and tile (test_gemm_on_gpu.py).
"""

from functools import cache

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels import native, vllm_kernels
from jetrl_verl.kernels.device.e4m3 import GROUP
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import NATIVE, backend_needs, choose, implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div, multiprocessors
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.reference.gemm import check_gemm_shapes

__all__ = ["gemm_nt"]

for _operation in ("gemm_nt_128x128", "gemm_nt_1x128"):
    implements(_operation, "reference")(reference.gemm_nt)

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


@implements("gemm_nt_128x128", "triton")
@implements("gemm_nt_1x128", "triton")
def triton_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    ranks: int = 1,
    tile: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_nt`, without its checks. qdata may have any row stride.

    Args:
        ranks: above 1, as :func:`jetrl_verl.reference.gemm_nt_of_ranks`.
        tile: ``(BLOCK_M, BLOCK_N, warps, stages)`` instead of the choice by size; for tests and benchmarks.
    """
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
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
        B_BLOCK_SCALED=b_block_scaled,
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


def native_supports_gemm_nt(
    a: QuantizedTensor, b: QuantizedTensor, *, b_block_scaled: bool, bias=None, out_dtype=torch.bfloat16
) -> bool:
    """Whether :func:`native_gemm_nt` supports this call: rows of qdata start on 16 bytes, rows of the output are
    multiples of 16 bytes; with 128x128 scales BF16 out, with 1x128 scales no bias."""
    n = b.qdata.shape[0]
    if min(*a.qdata.shape, n) == 0 or (n * out_dtype.itemsize) % native.ALIGNMENT != 0:
        return False
    fits = out_dtype == torch.bfloat16 if b_block_scaled else bias is None
    bias_fits = bias is None or (bias.dtype in (torch.bfloat16, torch.float32) and bias.is_contiguous())
    return fits and bias_fits and native.aligned(a.qdata) and native.aligned(b.qdata) and native.unavailable() is None


def _launch_native(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    plan: native.Plan | None = None,
    static_weight: bool = False,
) -> torch.Tensor:
    """:func:`native_gemm_nt` without checks."""
    m = a.qdata.shape[0]
    if out is None:
        out = torch.empty(m, b.qdata.shape[0], dtype=out_dtype, device=a.qdata.device)
    operands = a.qdata, a.scales, b.qdata, b.scales
    kernel, block, cluster = plan or _DEFAULT_PLAN
    if not b_block_scaled:
        native.operators().wgrad(*operands, out, block, cluster)
    elif kernel == "decode" or (not kernel and m <= native.FEW_ROWS):
        native.operators().decode(*operands, bias, out, block, cluster, static_weight)
    else:
        native.operators().fprop(*operands, bias, out, block, cluster)
    return out


_DEFAULT_PLAN = native.Plan()


@implements("gemm_nt_128x128", "native", supports=native_supports_gemm_nt, unchecked=_launch_native)
@implements("gemm_nt_1x128", "native", supports=native_supports_gemm_nt, unchecked=_launch_native)
def native_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    plan: native.Plan | None = None,
    static_weight: bool = False,
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_nt`; scales may have any strides.

    Args:
        out: ``[M, N]`` of ``out_dtype`` to write to, rows start on 16 bytes; None allocates it.
        plan: instead of the choice by shape; for tests and benchmarks.
        static_weight: the decode kernel may copy ``b`` while the previous kernel in the stream still runs (programmatic
            dependent launch, device/dependents.py), without effect on the result. The previous kernel must write
            neither ``b`` nor ``bias`` and must be launched without programmatic dependent launch, or wait before it
            lets others start. True in a rollout: a quantizer comes before every linear, and weights change in a sync
            only. A trainer, which quantizes weights just before the product, must not set it.

    Raises:
        ValueError: shapes that do not fit, or a call that :func:`native_supports_gemm_nt` rejects.
    """
    check_gemm_shapes(a, b, b_block_scaled, bias)
    call = {"b_block_scaled": b_block_scaled, "bias": bias, "out_dtype": out_dtype}
    if not native_supports_gemm_nt(a, b, **call):
        raise ValueError(_refusal("native", a, b, **call) + f"{native.why()}; use backend triton.")
    if out is not None and out.dtype != out_dtype:
        raise ValueError(f"native: out is {out.dtype} and out_dtype {out_dtype}; they must be the same.")
    return _launch_native(a, b, **call, out=out, plan=plan, static_weight=static_weight)


def _refusal(name: str, a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool, bias, out_dtype) -> str:
    return (
        f"{name} does not support A {tuple(a.qdata.shape)} strides {a.qdata.stride()}, B {tuple(b.qdata.shape)} "
        f"strides {b.qdata.stride()} with {'128x128' if b_block_scaled else '1x128'} scales on B, "
        f"{'a' if bias is not None else 'no'} bias and {out_dtype} out"
    )


def _vllm_cutlass_supports(
    a: QuantizedTensor, b: QuantizedTensor, *, b_block_scaled: bool, bias=None, out_dtype=torch.bfloat16
) -> bool:
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    # K > 128: with one K block and one N block vLLM's dispatcher would read the scales as per-row scales.
    shapes_fit = m > 0 and m % 4 == 0 and n % 16 == 0 and k % BLOCK == 0 and k > BLOCK
    plain = b_block_scaled and bias is None and out_dtype == torch.bfloat16
    contiguous = a.qdata.is_contiguous() and b.qdata.is_contiguous()
    return plain and shapes_fit and contiguous and vllm_kernels.no_block_fp8_gemm() is None


@implements("gemm_nt_128x128", "vllm_cutlass", supports=_vllm_cutlass_supports)
def vllm_cutlass_gemm_nt(
    a: QuantizedTensor, b: QuantizedTensor, *, b_block_scaled: bool, bias=None, out_dtype=torch.bfloat16
) -> torch.Tensor:
    """vLLM's CUTLASS kernel, for Hopper without the native library.

    Raises:
        ValueError: a bias, FP32 out, or M, N or K that it does not support.
    """
    call = {"b_block_scaled": b_block_scaled, "bias": bias, "out_dtype": out_dtype}
    if not _vllm_cutlass_supports(a, b, **call):
        why = vllm_kernels.no_block_fp8_gemm()
        raise ValueError(_refusal("vllm_cutlass", a, b, **call) + f"{f' ({why})' if why else ''}; use backend triton.")
    scales_a = a.scales if a.scales.stride() == (1, len(a.scales)) else a.scales.t().contiguous().t()
    scales_b = b.scales.contiguous().t()
    return vllm_kernels.cutlass_scaled_mm(a.qdata, b.qdata.t(), out_dtype=out_dtype, scale_a=scales_a, scale_b=scales_b)


backend_needs("vllm_cutlass", vllm_kernels.no_block_fp8_gemm)


def _fake(a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, *_):
    return a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=out_dtype)


@operator(
    "gemm_nt_128x128(Quantized a, Quantized b, Tensor? bias, ScalarType out_dtype, bool static_weight) -> Tensor",
    fake=_fake,
    backends=NATIVE | {"sm90": ("native", "vllm_cutlass", "triton")},
)
def _gemm_nt_128x128(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, static_weight: bool
) -> torch.Tensor:
    check_gemm_shapes(a, b, True, bias)
    call = {"b_block_scaled": True, "bias": bias, "out_dtype": out_dtype}
    backend, run = choose("gemm_nt_128x128", a.qdata.device, a, b, **call)
    if backend == "native":
        call["static_weight"] = static_weight
    return run(a, b, **call)


@operator(
    "gemm_nt_1x128(Quantized a, Quantized b, Tensor? bias, ScalarType out_dtype) -> Tensor", fake=_fake, backends=NATIVE
)
def _gemm_nt_1x128(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    check_gemm_shapes(a, b, False, bias)
    call = {"b_block_scaled": False, "bias": bias, "out_dtype": out_dtype}
    return lookup("gemm_nt_1x128", a.qdata.device, a, b, **call)(a, b, **call)


def gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    static_weight: bool = False,
) -> torch.Tensor:
    """See :func:`jetrl_verl.reference.gemm_nt`; ``static_weight`` (:func:`native_gemm_nt`) changes no bits."""
    if b_block_scaled:
        return _gemm_nt_128x128(a, b, bias, out_dtype, static_weight)
    return _gemm_nt_1x128(a, b, bias, out_dtype)
