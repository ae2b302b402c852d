# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""INT8 GEMM for GPUs whose CUTLASS kernels have none (Blackwell), and the yardstick of those that have.

Idea: INT32 accumulation is exact, so neither tile shape nor order can show in a result and one tile serves all sizes.
Rows beyond M or N are read from row ``index % extent``, as in ``gemm_nt``.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.numerics import BlockQuantized
from jetrl_verl.numerics.int8 import check_int8_gemm_shapes

_TILE_M, _TILE_N, _TILE_K, _WARPS, _STAGES = 64, 128, 128, 4, 4


@triton.jit
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


def gemm_int8(
    a: BlockQuantized,
    b: BlockQuantized,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """As :func:`jetrl_verl.numerics.gemm_int8`."""
    check_int8_gemm_shapes(a, b, bias)
    (m, k), n = a.codes.shape, b.codes.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=a.codes.device)
    if m and n:
        _gemm_int8_kernel[(triton.cdiv(m, _TILE_M), triton.cdiv(n, _TILE_N))](
            a.codes.contiguous(),
            b.codes.contiguous(),
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
