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
second result transposed: 4 bytes per element (2 in, 1 + 1 out) instead of 6. Triton turns ``tl.trans`` before the store
into one exchange through shared memory, after which both stores are coalesced.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    empty_rows,
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
def _quantize_both_kernel(
    x_ptr,
    row_codes_ptr,
    row_scales_ptr,
    column_codes_ptr,
    column_scales_ptr,
    rows,
    k,
    rows_padded,
    POW2: tl.constexpr,
    WITH_ROWS: tl.constexpr,
):
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    row = tile_row * GROUP + tl.arange(0, GROUP)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    mask = (row < rows)[:, None] & (column < k)[None, :]
    offsets = row.to(tl.int64)[:, None] * k + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)

    if WITH_ROWS:
        x_rows = x.to(tl.float32)
        bits = tl.max(magnitude_bits(x_rows), axis=1)
        scale = scale_of(bits, POW2)
        reciprocal = reciprocal_of(scale, bits, POW2)
        tl.store(row_codes_ptr + offsets, encode(x_rows, scale[:, None], reciprocal[:, None], POW2), mask=mask)
        tl.store(row_scales_ptr + tile_k.to(tl.int64) * rows + row, scale, mask=row < rows)

    x_columns = tl.trans(x).to(tl.float32)
    bits = tl.max(magnitude_bits(x_columns), axis=1)
    scale = scale_of(bits, POW2)
    reciprocal = reciprocal_of(scale, bits, POW2)
    offsets_t = column.to(tl.int64)[:, None] * rows_padded + row[None, :]
    codes_t = encode(x_columns, scale[:, None], reciprocal[:, None], POW2)
    tl.store(column_codes_ptr + offsets_t, codes_t, mask=(column < k)[:, None])
    tl.store(column_scales_ptr + tile_row.to(tl.int64) * k + column, scale, mask=column < k)


def _launch(x: torch.Tensor, rule: str, with_rows: bool) -> tuple[BlockQuantized | None, BlockQuantized]:
    pow2 = is_pow2(rule)
    rows, k = x.shape
    x = x.contiguous()
    transposed, buffer = empty_transposed(rows, k, x.device)
    row = empty_rows(rows, k, x.device) if with_rows else None
    if x.numel():
        # Without row results their pointers are never dereferenced; any tensor will do.
        row_codes, row_scales = row if with_rows else transposed
        _quantize_both_kernel[(triton.cdiv(k, BLOCK), triton.cdiv(rows, BLOCK))](
            x,
            row_codes.view(torch.uint8),
            row_scales,
            buffer.view(torch.uint8),
            transposed.scales,
            rows,
            k,
            buffer.shape[1],
            POW2=pow2,
            WITH_ROWS=with_rows,
            num_warps=_WARPS,
        )
    return row, transposed


def quantize_1x128_and_128x1(x: torch.Tensor, rule: str) -> tuple[BlockQuantized, BlockQuantized]:
    """As :func:`jetrl_verl.numerics.quantize_1x128_and_128x1`; the transposed codes are a view with padded rows."""
    row, transposed = _launch(x, rule, with_rows=True)
    return row, transposed


def quantize_128x1(x: torch.Tensor, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.quantize_128x1`; the codes are a view with padded rows."""
    return _launch(x, rule, with_rows=False)[1]
