# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""INT8 GEMM: exact INT32 sums, one scale per row of both operands, bias added before the one rounding."""

from importlib.util import find_spec

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels import vllm_kernels
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import TRITON, implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.reference.int8 import check_int8_gemm_shapes

__all__ = ["gemm_int8"]

implements("gemm_int8", "reference")(reference.gemm_int8)

_TILE_M, _TILE_N, _TILE_K, _WARPS, _STAGES = 64, 128, 128, 4, 4


@jit
def _gemm_int8_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    WITH_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    read_row, read_column = row % m, column % n
    lane = tl.arange(0, TILE_K)
    a_ptrs = a_ptr + read_row.to(tl.int64)[:, None] * k + lane[None, :]
    b_ptrs = b_ptr + read_column.to(tl.int64)[None, :] * k + lane[:, None]
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.int32)
    for start in range(0, k, TILE_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=lane[None, :] < k - start, other=0)
            b = tl.load(b_ptrs, mask=lane[:, None] < k - start, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        a_ptrs += TILE_K
        b_ptrs += TILE_K
    scaled = tl.load(b_scales_ptr + read_column)[None, :] * acc.to(tl.float32)
    a_scale = tl.broadcast_to(tl.load(a_scales_ptr + read_row)[:, None], (TILE_M, TILE_N))
    if WITH_BIAS:
        bias = tl.load(bias_ptr + read_column).to(tl.float32)[None, :]
        out = tl.fma(a_scale, scaled, tl.broadcast_to(bias, (TILE_M, TILE_N)))
    else:
        out = a_scale * scaled
    out_offsets = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@implements("gemm_int8", "triton")
def triton_gemm_int8(a: QuantizedTensor, b: QuantizedTensor, bias=None, out_dtype=torch.bfloat16) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_int8`."""
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=a.qdata.device)
    if m and n:
        _gemm_int8_kernel[(ceil_div(m, _TILE_M), ceil_div(n, _TILE_N))](
            a.qdata.contiguous(),
            b.qdata.contiguous(),
            a.scales.contiguous(),
            b.scales.contiguous(),
            bias.contiguous() if bias is not None else a.scales,
            out,
            m,
            n,
            k,
            WITH_BIAS=bias is not None,
            EVEN_K=k % _TILE_K == 0,
            TILE_M=_TILE_M,
            TILE_N=_TILE_N,
            TILE_K=_TILE_K,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return out


def cutlass_supports_gemm_int8(a: QuantizedTensor, b: QuantizedTensor, bias=None, out_dtype=torch.bfloat16) -> bool:
    """Whether :func:`cutlass_gemm_int8` accepts this call."""
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    fits = m > 0 and n % 16 == 0 and k % 16 == 0 and a.qdata.is_contiguous() and b.qdata.is_contiguous()
    same_types = out_dtype == torch.bfloat16 and (bias is None or bias.dtype == out_dtype)
    return fits and same_types and torch.cuda.is_available() and find_spec("vllm") is not None


@implements("gemm_int8", "vllm_cutlass_int8", supports=cutlass_supports_gemm_int8)
def cutlass_gemm_int8(a: QuantizedTensor, b: QuantizedTensor, bias=None, out_dtype=torch.bfloat16) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_int8`."""
    return vllm_kernels.cutlass_scaled_mm(a.qdata, b.qdata.t(), a.scales, b.scales, out_dtype, bias)


@operator(
    "gemm_int8(Quantized a, Quantized b, Tensor? bias=None, ScalarType out_dtype=bfloat16) -> Tensor",
    fake=lambda a, b, bias=None, out_dtype=torch.bfloat16: a.qdata.new_empty(
        (a.qdata.shape[0], b.qdata.shape[0]), dtype=out_dtype
    ),
    backends=TRITON | {"sm90": ("vllm_cutlass_int8", "triton")},
)
def gemm_int8(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """See :func:`jetrl_verl.reference.gemm_int8`."""
    check_int8_gemm_shapes(a, b, bias)
    return lookup("gemm_int8", a.qdata.device, a, b, bias, out_dtype)(a, b, bias, out_dtype)
