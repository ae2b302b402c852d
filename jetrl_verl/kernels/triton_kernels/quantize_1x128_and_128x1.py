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
"""Both quantisations of an output gradient in one read: 1x128 along N for DGrad, its transposed 128x1 twin for WGrad.

Idea: done apart they read dY twice, once against the grain. A 128x128 tile holds 128 whole groups of either kind, so
one program reads a tile, takes the maxima of its rows and of its columns from registers, encodes twice and writes the
second result transposed: 4.06 bytes per element (2 in, 1 + 1 out, two scales for 128) instead of 6. The tile is held as
four tiles of every fourth row, see "Transposition" in _codec.py, and BF16 numbers in words of two, see "Pairs" there.
Other types, odd widths and odd addresses take a second kernel, which holds FP32 numbers.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.results import empty_columns, empty_rows
from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    is_pow2,
    load_four_rows,
    load_rows,
    store_both,
    store_columns,
    store_rows,
    words_of,
)
from jetrl_verl.numerics import BLOCK, BlockQuantized

# 168 registers: three programs a multiprocessor.
_LAUNCH = {"num_warps": 4, "maxnreg": 168}
_LAUNCH_ANY = {"num_warps": 8}


@triton.jit
def _quantize_both_kernel(
    words_ptr,
    row_pairs_ptr,
    row_scales_ptr,
    column_codes_ptr,
    column_scales_ptr,
    rows,
    k,
    words_per_row,
    POW2: tl.constexpr,
    WITH_ROWS: tl.constexpr,
):
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    words_ptr += tile_row.to(tl.int64) * GROUP * (k // 2) + tile_k * (GROUP // 2)
    left, words_left = rows - tile_row * GROUP, k // 2 - tile_k * (GROUP // 2)
    w0, w1, w2, w3 = load_four_rows(words_ptr, k // 2, left, words_left, GROUP // 2)
    store_both(
        w0, w1, w2, w3, row_pairs_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr, tile_row, tile_k, rows, k,
        words_per_row, WITH_ROWS, POW2,
    )  # fmt: skip


@triton.jit
def _quantize_both_of_any_type_kernel(
    x_ptr,
    row_codes_ptr,
    row_scales_ptr,
    column_codes_ptr,
    column_scales_ptr,
    rows,
    k,
    words_per_row,
    POW2: tl.constexpr,
    WITH_ROWS: tl.constexpr,
):
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    row = tile_row * GROUP + 4 * tl.arange(0, GROUP // 4)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    x0 = load_rows(x_ptr, row, column, rows, k).to(tl.float32)
    x1 = load_rows(x_ptr, row + 1, column, rows, k).to(tl.float32)
    x2 = load_rows(x_ptr, row + 2, column, rows, k).to(tl.float32)
    x3 = load_rows(x_ptr, row + 3, column, rows, k).to(tl.float32)
    if WITH_ROWS:
        store_rows(x0, row_codes_ptr, row_scales_ptr, row, column, tile_k, rows, k, POW2)
        store_rows(x1, row_codes_ptr, row_scales_ptr, row + 1, column, tile_k, rows, k, POW2)
        store_rows(x2, row_codes_ptr, row_scales_ptr, row + 2, column, tile_k, rows, k, POW2)
        store_rows(x3, row_codes_ptr, row_scales_ptr, row + 3, column, tile_k, rows, k, POW2)
    store_columns(x0, x1, x2, x3, column_codes_ptr, column_scales_ptr, tile_row, column, k, words_per_row, POW2)


def _launch(x: torch.Tensor, rule: str, with_rows: bool) -> tuple[BlockQuantized | None, BlockQuantized]:
    pow2 = is_pow2(rule)
    rows, k = x.shape
    x = x.contiguous()
    columns, words = empty_columns(rows, k, x.device)
    row = empty_rows(rows, k, x.device) if with_rows else None
    if x.numel():
        # Without row results their pointers are never dereferenced; any tensor will do.
        row_codes, row_scales = row if with_rows else columns
        of_two = words_of(x)
        in_pairs = of_two is not None
        kernel = _quantize_both_kernel if in_pairs else _quantize_both_of_any_type_kernel
        kernel[(triton.cdiv(k, BLOCK), triton.cdiv(rows, BLOCK))](
            of_two if in_pairs else x,
            row_codes.view(torch.int16 if in_pairs and with_rows else torch.uint8),
            row_scales,
            words,
            columns.scales,
            rows,
            k,
            words.shape[1],
            POW2=pow2,
            WITH_ROWS=with_rows,
            **(_LAUNCH if in_pairs else _LAUNCH_ANY),
        )
    return row, columns


def quantize_1x128_and_128x1(x: torch.Tensor, rule: str) -> tuple[BlockQuantized, BlockQuantized]:
    """As :func:`jetrl_verl.numerics.quantize_1x128_and_128x1`; the transposed codes are a view with padded rows."""
    return _launch(x, rule, with_rows=True)


def quantize_128x1(x: torch.Tensor, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.quantize_128x1`; the codes are a view with padded rows."""
    return _launch(x, rule, with_rows=False)[1]
