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
"""Weights in 128x128 blocks, and the transposed copy that DGrad reads, from one read of the weight.

Idea: one program per block, the block in registers between its maximum and its division. The blocks are square, so the
transpose has the same codes and scales and costs one more byte per element: 4 (2 in, 1 + 1 out) against 5 for
quantising first and transposing the codes later. Weights that arrive as codes are transposed by the same tile without
arithmetic (:func:`transpose_128x128`): an element-wise strided copy of bytes reaches a fraction of the bandwidth.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.triton_kernels._codec import GROUP, encode, is_pow2, magnitude_bits, reciprocal_of, scale_of
from jetrl_verl.numerics import BLOCK, FP8_DTYPE, BlockQuantized

_WARPS = 8


@triton.jit
def _quantize_128x128_kernel(
    w_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    n,
    k,
    POW2: tl.constexpr,
    QUANTISE: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):
    tile_k, tile_n = tl.program_id(0), tl.program_id(1)
    row = tile_n * GROUP + tl.arange(0, GROUP)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    mask = (row < n)[:, None] & (column < k)[None, :]
    offsets = row.to(tl.int64)[:, None] * k + column[None, :]
    scale_offset = tile_n * tl.num_programs(0) + tile_k
    if QUANTISE:
        w = tl.load(w_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        bits = tl.max(tl.max(magnitude_bits(w), axis=1), axis=0)
        scale = scale_of(bits, POW2)
        codes = encode(w, scale, reciprocal_of(scale, bits, POW2), POW2)
        tl.store(codes_ptr + offsets, codes, mask=mask)
        tl.store(scales_ptr + scale_offset, scale)
    else:
        codes = tl.load(codes_ptr + offsets, mask=mask, other=0)
        scale = tl.load(scales_ptr + scale_offset)
    if TRANSPOSE:
        offsets_t = column.to(tl.int64)[:, None] * n + row[None, :]
        tl.store(codes_t_ptr + offsets_t, tl.trans(codes), mask=(column < k)[:, None] & (row < n)[None, :])
        tl.store(scales_t_ptr + tile_k * tl.num_programs(1) + tile_n, scale)


def _empty_blocks(n: int, k: int, device: torch.device) -> BlockQuantized:
    codes = torch.empty((n, k), dtype=FP8_DTYPE, device=device)
    scales = torch.empty((triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK)), dtype=torch.float32, device=device)
    return BlockQuantized(codes, scales)


def _launch(
    w: torch.Tensor, weight: BlockQuantized, transposed: BlockQuantized, pow2: bool, quantise: bool, transpose: bool
) -> None:
    n, k = w.shape
    if w.numel():
        _quantize_128x128_kernel[(triton.cdiv(k, BLOCK), triton.cdiv(n, BLOCK))](
            w,
            weight.codes.view(torch.uint8),
            weight.scales,
            transposed.codes.view(torch.uint8),
            transposed.scales,
            n,
            k,
            POW2=pow2,
            QUANTISE=quantise,
            TRANSPOSE=transpose,
            num_warps=_WARPS,
        )


def quantize_128x128(w: torch.Tensor, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.quantize_128x128`."""
    pow2 = is_pow2(rule)
    weight = _empty_blocks(*w.shape, w.device)
    _launch(w.contiguous(), weight, weight, pow2, quantise=True, transpose=False)
    return weight


def quantize_128x128_and_transpose(w: torch.Tensor, rule: str) -> tuple[BlockQuantized, BlockQuantized]:
    """As :func:`jetrl_verl.numerics.quantize_128x128_and_transpose`."""
    pow2 = is_pow2(rule)
    n, k = w.shape
    weight, transposed = _empty_blocks(n, k, w.device), _empty_blocks(k, n, w.device)
    _launch(w.contiguous(), weight, transposed, pow2, quantise=True, transpose=True)
    return weight, transposed


def transpose_128x128(weight: BlockQuantized) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.transpose_128x128`."""
    n, k = weight.codes.shape
    transposed = _empty_blocks(k, n, weight.codes.device)
    weight = BlockQuantized(weight.codes.contiguous(), weight.scales.contiguous())
    _launch(weight.codes.view(torch.uint8), weight, transposed, pow2=False, quantise=False, transpose=True)
    return transposed
