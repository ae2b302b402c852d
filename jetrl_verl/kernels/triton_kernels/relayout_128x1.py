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

Idea: 2.06 bytes per element (1 in, 1 out, two scales for 128) and one launch, where dequantise, transpose and quantise
as separate steps would move 14. The tile is square in groups: 128 tokens make one group of the result for each of 128
features, and those 128 features are exactly one group of the input, so a tile needs one old scale per token and yields
one new scale per feature. The values pass through FP32 only in registers, and the maximum is a fresh one
(numerics/quantize.py says why). What moves between threads is words of four new codes, see "Transposition" in
_codec.py.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    decode,
    empty_columns,
    is_pow2,
    load_rows,
    store_columns,
)
from jetrl_verl.numerics import BLOCK, BlockQuantized

_LAUNCH = {"num_warps": 8}


@triton.jit
def _load(codes_ptr, scales_ptr, row, column, rows, k, stride_scale_row):
    scale = tl.load(scales_ptr + row.to(tl.int64) * stride_scale_row, mask=row < rows, other=0.0)
    return decode(load_rows(codes_ptr, row, column, rows, k)) * scale[:, None]


@triton.jit
def _relayout_kernel(
    codes_ptr,
    scales_ptr,
    out_codes_ptr,
    out_scales_ptr,
    rows,
    k,
    words_per_row,
    stride_scale_row,
    stride_scale_group,
    POW2: tl.constexpr,
):
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    row = tile_row * GROUP + 4 * tl.arange(0, GROUP // 4)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    scales_ptr += tile_k.to(tl.int64) * stride_scale_group
    x0 = _load(codes_ptr, scales_ptr, row, column, rows, k, stride_scale_row)
    x1 = _load(codes_ptr, scales_ptr, row + 1, column, rows, k, stride_scale_row)
    x2 = _load(codes_ptr, scales_ptr, row + 2, column, rows, k, stride_scale_row)
    x3 = _load(codes_ptr, scales_ptr, row + 3, column, rows, k, stride_scale_row)
    store_columns(x0, x1, x2, x3, out_codes_ptr, out_scales_ptr, tile_row, column, k, words_per_row, POW2)


def relayout_128x1(q: BlockQuantized, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.relayout_128x1`; the codes are a view with padded rows."""
    pow2 = is_pow2(rule)
    rows, k = q.codes.shape
    out, words = empty_columns(rows, k, q.codes.device)
    if q.codes.numel():
        _relayout_kernel[(triton.cdiv(k, BLOCK), triton.cdiv(rows, BLOCK))](
            q.codes.contiguous().view(torch.uint8),
            q.scales,
            words,
            out.scales,
            rows,
            k,
            words.shape[1],
            q.scales.stride(0),
            q.scales.stride(1),
            POW2=pow2,
            **_LAUNCH,
        )
    return out
