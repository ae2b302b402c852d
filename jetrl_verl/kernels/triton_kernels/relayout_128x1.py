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
"""FP8 -> FP8 re-layout of saved activations: 1x128 codes ``[M, K]`` to token-grouped codes ``[K, M]`` for WGrad.

Idea: 2 bytes per element (1 in, 1 out) and one launch, where dequantise, transpose and quantise as separate steps would
move 14. The tile is square in groups: 128 tokens make one group of the result for each of 128 features, and those 128
features are exactly one group of the input, so a tile needs one old scale per token and yields one new scale per
feature. The values pass through FP32 only in registers, and the maximum is a fresh one (numerics/quantize.py says why).
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    decode,
    empty_transposed,
    encode,
    is_pow2,
    magnitude_bits,
    reciprocal_of,
    scale_of,
)
from jetrl_verl.numerics import BLOCK, BlockQuantized

_WARPS = 4


@triton.jit
def _relayout_kernel(
    codes_ptr,
    scales_ptr,
    out_codes_ptr,
    out_scales_ptr,
    rows,
    k,
    rows_padded,
    stride_scale_row,
    stride_scale_group,
    POW2: tl.constexpr,
):
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    row = tile_row * GROUP + tl.arange(0, GROUP)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    mask = (row < rows)[:, None] & (column < k)[None, :]
    codes = tl.load(codes_ptr + row.to(tl.int64)[:, None] * k + column[None, :], mask=mask, other=0)
    scale_offsets = row.to(tl.int64) * stride_scale_row + tile_k.to(tl.int64) * stride_scale_group
    old_scale = tl.load(scales_ptr + scale_offsets, mask=row < rows, other=0.0)
    x = decode(tl.trans(codes)) * old_scale[None, :]

    bits = tl.max(magnitude_bits(x), axis=1)
    scale = scale_of(bits, POW2)
    reciprocal = reciprocal_of(scale, bits, POW2)
    offsets_t = column.to(tl.int64)[:, None] * rows_padded + row[None, :]
    tl.store(
        out_codes_ptr + offsets_t, encode(x, scale[:, None], reciprocal[:, None], POW2), mask=(column < k)[:, None]
    )
    tl.store(out_scales_ptr + tile_row.to(tl.int64) * k + column, scale, mask=column < k)


def relayout_128x1(q: BlockQuantized, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.relayout_128x1`; the codes are a view with padded rows."""
    pow2 = is_pow2(rule)
    rows, k = q.codes.shape
    out, buffer = empty_transposed(rows, k, q.codes.device)
    if q.codes.numel():
        _relayout_kernel[(triton.cdiv(k, BLOCK), triton.cdiv(rows, BLOCK))](
            q.codes.contiguous().view(torch.uint8),
            q.scales,
            buffer.view(torch.uint8),
            out.scales,
            rows,
            k,
            buffer.shape[1],
            q.scales.stride(0),
            q.scales.stride(1),
            POW2=pow2,
            num_warps=_WARPS,
        )
    return out
