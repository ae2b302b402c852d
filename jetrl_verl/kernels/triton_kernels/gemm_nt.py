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
"""Block-scaled GEMM to the letter of the contract: any M, N and K, both kinds of B scales, bias, BF16 or FP32 out.

Idea, two-level accumulation: a Hopper FP8 matrix instruction adds into its FP32 registers with about 14 bits, so the
partial sum of one 128-wide K block starts from zero in registers of its own (``partial``), and is then promoted by
ordinary FP32 arithmetic: ``acc = fma(partial, s_a * s_b, acc)``, K blocks ascending, one program per output tile, no
split of K. BLOCK_N divides 128, so a tile has a single B scale per K block when B is block-scaled. Bias joins the
accumulator before the one rounding.

A row's bits must not depend on how many rows travel with it, or decoding one token and training on the whole sequence
would disagree. Every tile shape below has at least 64 rows and 128-wide K blocks, so each output element is the same
chain of matrix instructions whatever shape serves it: the choice by size moves work, not bits (test_gemm_on_gpu.py).

Rows beyond M or N are read from row ``index % extent`` instead of being masked: their results are never stored, and
loads without a mask stay wide and asynchronous.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.triton_kernels._codec import GROUP
from jetrl_verl.numerics import BLOCK, BlockQuantized
from jetrl_verl.numerics.gemm import check_add_to, check_gemm_shapes

# (BLOCK_M, BLOCK_N, warps, stages), from the most arithmetic per byte to the most programs for a small problem.
TILES = ((128, 128, 8, 4), (64, 128, 4, 4), (64, 64, 4, 6), (64, 32, 4, 8))
_TILES_PER_GROUP = 8


@triton.jit
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
    stride_am,
    stride_bn,
    stride_as_m,
    stride_as_k,
    stride_bs_n,
    stride_bs_k,
    B_BLOCK_SCALED: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_GROUP: tl.constexpr,
):
    # Programs walk down groups of TILES_PER_GROUP tile rows, so that neighbours share A and B tiles in L2.
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

    if WITH_BIAS:
        acc += tl.load(bias_ptr + read_column).to(tl.float32)[None, :]
    out_offsets = row.to(tl.int64)[:, None] * n + column[None, :]
    mask = (row < m)[:, None] & (column < n)[None, :]
    if ADD:
        acc += tl.load(out_ptr + out_offsets, mask=mask)
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@cache
def _multiprocessors_and_shared_memory(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 1, 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def choose_tile(m: int, n: int, multiprocessors: int) -> tuple[int, int, int, int]:
    """Largest tile of ``TILES`` that still gives every multiprocessor a program, else the smallest."""
    for tile in TILES:
        if triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]) >= multiprocessors:
            return tile
    return TILES[-1]


def gemm_nt(
    a: BlockQuantized,
    b: BlockQuantized,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    add_to: torch.Tensor | None = None,
    tile: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """As :func:`jetrl_verl.numerics.gemm_nt`. Codes may have any row stride.

    Args:
        tile: ``(BLOCK_M, BLOCK_N, warps, stages)`` instead of the choice by size; for tests and benchmarks.
    """
    check_gemm_shapes(a, b, b_block_scaled, bias)
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if add_to is not None:
        check_add_to(add_to, m, n, b_block_scaled, out_dtype)
    out = add_to if add_to is not None else torch.empty((m, n), dtype=out_dtype, device=a.codes.device)
    if m == 0 or n == 0:
        return out
    a_codes = a.codes if a.codes.stride(1) == 1 else a.codes.contiguous()
    b_codes = b.codes if b.codes.stride(1) == 1 else b.codes.contiguous()
    multiprocessors, shared_memory = _multiprocessors_and_shared_memory(a.codes.device)
    block_m, block_n, warps, stages = tile or choose_tile(m, n, multiprocessors)
    # A stage holds one K block of both operands; Ada and consumer Blackwell have under half of Hopper's shared memory.
    stages = min(stages, shared_memory // ((block_m + block_n) * BLOCK))
    _gemm_nt_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        a_codes,
        b_codes,
        a.scales,
        b.scales,
        bias.contiguous() if bias is not None else a.scales,
        out,
        m,
        n,
        k,
        a_codes.stride(0),
        b_codes.stride(0),
        a.scales.stride(0),
        a.scales.stride(1),
        b.scales.stride(0),
        b.scales.stride(1),
        B_BLOCK_SCALED=b_block_scaled,
        WITH_BIAS=bias is not None,
        EVEN_K=k % BLOCK == 0,
        ADD=add_to is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TILES_PER_GROUP=_TILES_PER_GROUP,
        num_warps=warps,
        num_stages=stages,
    )
    return out
