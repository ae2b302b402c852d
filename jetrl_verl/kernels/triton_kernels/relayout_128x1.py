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
as separate steps would move 14. A tile of 128 tokens makes one group of the result for each of its features; these lie
in one group of the input, so it needs one old scale per token and yields one new scale per feature. The values pass
through FP32 only in registers, and the maximum is a fresh one (numerics/quantize.py says why). What moves between
threads is words of four new codes, see "Transposition" in _codec.py.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.results import empty_columns
from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    decode,
    encode_words,
    is_pow2,
    largest_magnitude,
    scale_and_divisor,
    store_words,
)
from jetrl_verl.numerics import BLOCK, BlockQuantized

# One warp and 32 features a tile, 128 numbers a thread: no barrier stands between maxima and codes, and while one
# program computes others load. 73 to 75% of a copy on an H200; tiles of 128 features by four warps reach 63 to 65%. The
# kernel of csrc/, which Hopper takes, reaches 84 to 93%.
_LAUNCH = {"COLUMNS": 32, "num_warps": 1}


@triton.jit
def _load(codes_ptr, scales_ptr, k, stride, row, rows, column, columns):
    scale = tl.load(scales_ptr + row * stride, mask=row < rows, other=0.0)
    offsets = row[:, None] * k + column[None, :]
    codes = tl.load(codes_ptr + offsets, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0)
    return decode(codes) * scale[:, None]


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
    COLUMNS: tl.constexpr,
):
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    start, row = tile_row.to(tl.int64) * GROUP, 4 * tl.arange(0, GROUP // 4)
    left, columns_left = rows - tile_row * GROUP, k - tile_k * COLUMNS
    codes_ptr += start * k + tile_k * COLUMNS
    scales_ptr += (tile_k * COLUMNS // GROUP).to(tl.int64) * stride_scale_group + start * stride_scale_row
    column = tl.arange(0, COLUMNS)
    x0 = _load(codes_ptr, scales_ptr, k, stride_scale_row, row, left, column, columns_left)
    x1 = _load(codes_ptr, scales_ptr, k, stride_scale_row, row + 1, left, column, columns_left)
    x2 = _load(codes_ptr, scales_ptr, k, stride_scale_row, row + 2, left, column, columns_left)
    x3 = _load(codes_ptr, scales_ptr, k, stride_scale_row, row + 3, left, column, columns_left)
    amax = largest_magnitude(x0, x1, x2, x3, 0)
    scale, divisor, reciprocal = scale_and_divisor(amax, POW2)
    out_scales_ptr += tile_row.to(tl.int64) * k + tile_k * COLUMNS
    tl.store(out_scales_ptr + column, scale, mask=column < columns_left)
    words = encode_words(x0, x1, x2, x3, divisor[None, :], reciprocal[None, :], POW2)
    store_words(tl.trans(words), out_codes_ptr, tile_row, tile_k, columns_left, words_per_row, COLUMNS)


def relayout_128x1(q: BlockQuantized, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.relayout_128x1`; the codes are a view with padded rows."""
    pow2 = is_pow2(rule)
    rows, k = q.codes.shape
    out, words = empty_columns(rows, k, q.codes.device)
    if q.codes.numel():
        _relayout_kernel[(triton.cdiv(k, _LAUNCH["COLUMNS"]), triton.cdiv(rows, BLOCK))](
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
