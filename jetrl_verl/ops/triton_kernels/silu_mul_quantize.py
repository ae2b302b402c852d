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
"""SiLU-mul that quantises what it writes, and its gradient that does, for the FP8 linears on either side of it.

Forward, bytes per element: apart 4 in, 2 out, then 2 in, 1 out; here 4 in and 1 out for the codes of down's input, 2
more where the product is wanted in BF16, 1 more for the token-grouped twin. 5.03 to 8.06 instead of 9 to 14. Without
the twin it is a copy that computes, on a list of groups as in kernels/triton_kernels/quantize_1x128.py.

Backward, bytes per element: apart 6 in and 4 out, then twice 2 in and 1 + 1 out; here 6 in and 4 out: 10.1 instead of
18. A 128x128 tile of dY, gate and up yields whole groups of both gradients in both directions; the gradients themselves
never reach memory. See "Transposition" in kernels/triton_kernels/_codec.py.

Bits: values are rounded to BF16 before they are quantised, and come from the device functions of silu_mul.py.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    empty_columns,
    empty_rows,
    encode,
    is_pow2,
    magnitude_bits,
    reciprocal_of,
    scale_of,
    store_columns,
    store_rows,
)
from jetrl_verl.numerics import BLOCK, BlockQuantized
from jetrl_verl.ops.triton_kernels.silu_mul import gradients_of, product_of, rows_of

_GROUPS_PER_PROGRAM = 32
_WARPS = 4
# 128 registers leave room for two programs a multiprocessor, one computing while the other loads.
_LAUNCH_BOTH = {"num_warps": 8, "maxnreg": 128}
_LAUNCH_BACKWARD = {"num_warps": 16}


@triton.jit
def _silu_mul_quantize_kernel(
    gate_ptr, up_ptr, y_ptr, codes_ptr, scales_ptr, rows, groups_k, stride_gate, stride_up,
    WITH_Y: tl.constexpr, POW2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group_k = (group // groups_k).to(tl.int64), group % groups_k
    column = group_k[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_range = row < rows
    gate = tl.load(gate_ptr + row[:, None] * stride_gate + column, mask=in_range[:, None], other=0.0)
    up = tl.load(up_ptr + row[:, None] * stride_up + column, mask=in_range[:, None], other=0.0)
    y = product_of(gate, up)
    offsets = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if WITH_Y:
        tl.store(y_ptr + offsets, y, mask=in_range[:, None])
    values = y.to(tl.float32)
    bits = tl.max(magnitude_bits(values), axis=1)
    scale = scale_of(bits, POW2)
    codes = encode(values, scale[:, None], reciprocal_of(scale, bits, POW2)[:, None], POW2)
    tl.store(codes_ptr + offsets, codes, mask=in_range[:, None])
    tl.store(scales_ptr + group_k.to(tl.int64) * rows + row, scale, mask=in_range)


@triton.jit
def _load(ptr, row, column, rows, stride):
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=(row < rows)[:, None], other=0.0)


@triton.jit
def _product(
    gate_ptr, up_ptr, y_ptr, row_codes_ptr, row_scales_ptr, row, column, tile_k, rows, k, stride_gate, stride_up,
    WITH_Y: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    gate = _load(gate_ptr, row, column, rows, stride_gate)
    y = product_of(gate, _load(up_ptr, row, column, rows, stride_up))
    if WITH_Y:
        tl.store(y_ptr + row.to(tl.int64)[:, None] * k + column[None, :], y, mask=(row < rows)[:, None])
    values = y.to(tl.float32)
    store_rows(values, row_codes_ptr, row_scales_ptr, row, column, tile_k, rows, k, POW2)
    return values


@triton.jit
def _silu_mul_quantize_both_kernel(
    gate_ptr, up_ptr, y_ptr, row_codes_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr,
    rows, k, words_per_row, stride_gate, stride_up, WITH_Y: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    row = tile_row * GROUP + 4 * tl.arange(0, GROUP // 4)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    y0 = _product(
        gate_ptr, up_ptr, y_ptr, row_codes_ptr, row_scales_ptr, row, column, tile_k, rows, k, stride_gate, stride_up,
        WITH_Y, POW2,
    )  # fmt: skip
    y1 = _product(
        gate_ptr, up_ptr, y_ptr, row_codes_ptr, row_scales_ptr, row + 1, column, tile_k, rows, k, stride_gate,
        stride_up, WITH_Y, POW2,
    )  # fmt: skip
    y2 = _product(
        gate_ptr, up_ptr, y_ptr, row_codes_ptr, row_scales_ptr, row + 2, column, tile_k, rows, k, stride_gate,
        stride_up, WITH_Y, POW2,
    )  # fmt: skip
    y3 = _product(
        gate_ptr, up_ptr, y_ptr, row_codes_ptr, row_scales_ptr, row + 3, column, tile_k, rows, k, stride_gate,
        stride_up, WITH_Y, POW2,
    )  # fmt: skip
    store_columns(y0, y1, y2, y3, column_codes_ptr, column_scales_ptr, tile_row, column, k, words_per_row, POW2)


@triton.jit
def _gradients(
    dy_ptr, gate_ptr, up_ptr, dgate_codes_ptr, dgate_scales_ptr, dup_codes_ptr, dup_scales_ptr,
    row, column, tile_k, rows, k, stride_dy, stride_gate, stride_up, POW2: tl.constexpr,
):  # fmt: skip
    """BF16 gradients of a tile, stored as 1x128 codes on the way."""
    dy = _load(dy_ptr, row, column, rows, stride_dy)
    gate = _load(gate_ptr, row, column, rows, stride_gate)
    dgate, dup = gradients_of(dy, gate, _load(up_ptr, row, column, rows, stride_up))
    store_rows(dgate.to(tl.float32), dgate_codes_ptr, dgate_scales_ptr, row, column, tile_k, rows, k, POW2)
    store_rows(dup.to(tl.float32), dup_codes_ptr, dup_scales_ptr, row, column, tile_k, rows, k, POW2)
    return dgate, dup


@triton.jit
def _silu_mul_backward_quantize_kernel(
    dy_ptr, gate_ptr, up_ptr,
    dgate_codes_ptr, dgate_scales_ptr, dgate_column_codes_ptr, dgate_column_scales_ptr,
    dup_codes_ptr, dup_scales_ptr, dup_column_codes_ptr, dup_column_scales_ptr,
    rows, k, words_per_row, stride_dy, stride_gate, stride_up, POW2: tl.constexpr,
):  # fmt: skip
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    row = tile_row * GROUP + 4 * tl.arange(0, GROUP // 4)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    dgate0, dup0 = _gradients(
        dy_ptr, gate_ptr, up_ptr, dgate_codes_ptr, dgate_scales_ptr, dup_codes_ptr, dup_scales_ptr,
        row, column, tile_k, rows, k, stride_dy, stride_gate, stride_up, POW2,
    )  # fmt: skip
    dgate1, dup1 = _gradients(
        dy_ptr, gate_ptr, up_ptr, dgate_codes_ptr, dgate_scales_ptr, dup_codes_ptr, dup_scales_ptr,
        row + 1, column, tile_k, rows, k, stride_dy, stride_gate, stride_up, POW2,
    )  # fmt: skip
    dgate2, dup2 = _gradients(
        dy_ptr, gate_ptr, up_ptr, dgate_codes_ptr, dgate_scales_ptr, dup_codes_ptr, dup_scales_ptr,
        row + 2, column, tile_k, rows, k, stride_dy, stride_gate, stride_up, POW2,
    )  # fmt: skip
    dgate3, dup3 = _gradients(
        dy_ptr, gate_ptr, up_ptr, dgate_codes_ptr, dgate_scales_ptr, dup_codes_ptr, dup_scales_ptr,
        row + 3, column, tile_k, rows, k, stride_dy, stride_gate, stride_up, POW2,
    )  # fmt: skip
    store_columns(
        dgate0.to(tl.float32), dgate1.to(tl.float32), dgate2.to(tl.float32), dgate3.to(tl.float32),
        dgate_column_codes_ptr, dgate_column_scales_ptr, tile_row, column, k, words_per_row, POW2,
    )  # fmt: skip
    store_columns(
        dup0.to(tl.float32), dup1.to(tl.float32), dup2.to(tl.float32), dup3.to(tl.float32),
        dup_column_codes_ptr, dup_column_scales_ptr, tile_row, column, k, words_per_row, POW2,
    )  # fmt: skip


def silu_mul_quantize(
    gate: torch.Tensor, up: torch.Tensor, rule: str, with_product: bool, with_columns: bool
) -> tuple[torch.Tensor | None, BlockQuantized, BlockQuantized | None]:
    """(product or None, its 1x128 codes, its 128x1 codes or None); see :mod:`jetrl_verl.ops.silu_mul`."""
    pow2 = is_pow2(rule)
    gate_rows, up_rows = rows_of(gate), rows_of(up)
    count, k = gate_rows.shape
    y = torch.empty((count, k), dtype=torch.bfloat16, device=gate.device) if with_product else None
    rows = empty_rows(count, k, gate.device)
    columns, words = empty_columns(count, k, gate.device) if with_columns else (None, None)
    # The pointer of an absent product is never dereferenced.
    results = (y if with_product else gate_rows, rows.codes.view(torch.uint8), rows.scales)
    strides = (gate_rows.stride(0), up_rows.stride(0))
    if count and with_columns:
        _silu_mul_quantize_both_kernel[(k // BLOCK, triton.cdiv(count, BLOCK))](
            gate_rows,
            up_rows,
            *results,
            words,
            columns.scales,
            count,
            k,
            words.shape[1],
            *strides,
            WITH_Y=with_product,
            POW2=pow2,
            **_LAUNCH_BOTH,
        )
    elif count:
        _silu_mul_quantize_kernel[(triton.cdiv(count * (k // BLOCK), _GROUPS_PER_PROGRAM),)](
            gate_rows,
            up_rows,
            *results,
            count,
            k // BLOCK,
            *strides,
            WITH_Y=with_product,
            POW2=pow2,
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=_WARPS,
        )
    return y.view(gate.shape) if with_product else None, rows, columns


def silu_mul_backward_quantize(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str
) -> tuple[BlockQuantized, BlockQuantized, BlockQuantized, BlockQuantized]:
    """1x128 and 128x1 codes of the gradient of gate, then of up; see :mod:`jetrl_verl.ops.silu_mul`."""
    pow2 = is_pow2(rule)
    dy_rows, gate_rows, up_rows = rows_of(dy), rows_of(gate), rows_of(up)
    count, k = gate_rows.shape
    results, arguments = [], []
    for _ in range(2):
        rows, (columns, words) = empty_rows(count, k, gate.device), empty_columns(count, k, gate.device)
        results += [rows, columns]
        arguments += [rows.codes.view(torch.uint8), rows.scales, words, columns.scales]
    if count:
        _silu_mul_backward_quantize_kernel[(k // BLOCK, triton.cdiv(count, BLOCK))](
            dy_rows,
            gate_rows,
            up_rows,
            *arguments,
            count,
            k,
            words.shape[1],
            dy_rows.stride(0),
            gate_rows.stride(0),
            up_rows.stride(0),
            POW2=pow2,
            **_LAUNCH_BACKWARD,
        )
    return tuple(results)
