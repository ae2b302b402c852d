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

from jetrl_verl.kernels.results import empty_columns, empty_rows
from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    encode,
    halves_of,
    high_half,
    is_pow2,
    load_four_rows,
    low_half,
    magnitude_bits,
    reciprocal_of,
    scale_of,
    store_both,
)
from jetrl_verl.kernels.triton_kernels._dependents import launch_dependents
from jetrl_verl.numerics import BLOCK, BlockQuantized
from jetrl_verl.ops.triton_kernels.silu_mul import gradients_of, product_of, rows_of

_GROUPS_PER_PROGRAM = 32
_WARPS = 4
# Two programs a multiprocessor, of twice the warps: 86% of a copy; three of four warps with 168 registers are 80%.
_LAUNCH_BOTH = {"num_warps": 8, "maxnreg": 128}
# Two programs, and 344 bytes a thread that spill.
_LAUNCH_BACKWARD = {"num_warps": 8, "maxnreg": 128}


@triton.jit
def _silu_mul_quantize_kernel(
    gate_ptr, up_ptr, y_ptr, codes_ptr, scales_ptr, rows, groups_k, stride_gate, stride_up,
    WITH_Y: tl.constexpr, POW2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    launch_dependents()
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
def _words(low, high):
    return halves_of(low.to(tl.int16, bitcast=True), high.to(tl.int16, bitcast=True))


@triton.jit
def _product_words(gate, up):
    """``silu(gate) * up`` of words of two BF16 numbers."""
    return _words(product_of(low_half(gate), low_half(up)), product_of(high_half(gate), high_half(up)))


@triton.jit
def _silu_mul_quantize_both_kernel(
    gate_words_ptr, up_words_ptr, y_words_ptr, row_pairs_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr,
    rows, k, words_per_row, stride_gate, stride_up, WITH_Y: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    start, left = tile_row.to(tl.int64) * GROUP, rows - tile_row * GROUP
    gate_words_ptr += start * stride_gate + tile_k * (GROUP // 2)
    up_words_ptr += start * stride_up + tile_k * (GROUP // 2)
    g0, g1, g2, g3 = load_four_rows(gate_words_ptr, stride_gate, left, GROUP // 2, GROUP // 2)
    u0, u1, u2, u3 = load_four_rows(up_words_ptr, stride_up, left, GROUP // 2, GROUP // 2)
    y0, y1, y2, y3 = _product_words(g0, u0), _product_words(g1, u1), _product_words(g2, u2), _product_words(g3, u3)
    if WITH_Y:
        row, word, stride = 4 * tl.arange(0, GROUP // 4)[:, None], tl.arange(0, GROUP // 2)[None, :], k // 2
        y_words_ptr += start * stride + tile_k * (GROUP // 2) + (row * stride + word)
        tl.store(y_words_ptr, y0, mask=row < left)
        tl.store(y_words_ptr + stride, y1, mask=row + 1 < left)
        tl.store(y_words_ptr + 2 * stride, y2, mask=row + 2 < left)
        tl.store(y_words_ptr + 3 * stride, y3, mask=row + 3 < left)
    store_both(
        y0, y1, y2, y3, row_pairs_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr, tile_row, tile_k, rows, k,
        words_per_row, True, POW2,
    )  # fmt: skip


@triton.jit
def _gradient_words(dy, gate, up):
    """Words of the gradients of gate and up."""
    dgate_low, dup_low = gradients_of(low_half(dy), low_half(gate), low_half(up))
    dgate_high, dup_high = gradients_of(high_half(dy), high_half(gate), high_half(up))
    return _words(dgate_low, dgate_high), _words(dup_low, dup_high)


@triton.jit
def _silu_mul_backward_quantize_kernel(
    dy_words_ptr, gate_words_ptr, up_words_ptr,
    dgate_pairs_ptr, dgate_scales_ptr, dgate_column_codes_ptr, dgate_column_scales_ptr,
    dup_pairs_ptr, dup_scales_ptr, dup_column_codes_ptr, dup_column_scales_ptr,
    rows, k, words_per_row, stride_dy, stride_gate, stride_up, POW2: tl.constexpr,
):  # fmt: skip
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    start, left = tile_row.to(tl.int64) * GROUP, rows - tile_row * GROUP
    dy_words_ptr += start * stride_dy + tile_k * (GROUP // 2)
    gate_words_ptr += start * stride_gate + tile_k * (GROUP // 2)
    up_words_ptr += start * stride_up + tile_k * (GROUP // 2)
    dy0, dy1, dy2, dy3 = load_four_rows(dy_words_ptr, stride_dy, left, GROUP // 2, GROUP // 2)
    gate0, gate1, gate2, gate3 = load_four_rows(gate_words_ptr, stride_gate, left, GROUP // 2, GROUP // 2)
    up0, up1, up2, up3 = load_four_rows(up_words_ptr, stride_up, left, GROUP // 2, GROUP // 2)
    dgate0, dup0 = _gradient_words(dy0, gate0, up0)
    dgate1, dup1 = _gradient_words(dy1, gate1, up1)
    dgate2, dup2 = _gradient_words(dy2, gate2, up2)
    dgate3, dup3 = _gradient_words(dy3, gate3, up3)
    store_both(
        dgate0, dgate1, dgate2, dgate3, dgate_pairs_ptr, dgate_scales_ptr, dgate_column_codes_ptr,
        dgate_column_scales_ptr, tile_row, tile_k, rows, k, words_per_row, True, POW2,
    )  # fmt: skip
    store_both(
        dup0, dup1, dup2, dup3, dup_pairs_ptr, dup_scales_ptr, dup_column_codes_ptr, dup_column_scales_ptr,
        tile_row, tile_k, rows, k, words_per_row, True, POW2,
    )  # fmt: skip


def _words_of(rows: torch.Tensor) -> torch.Tensor:
    """int32 words of two neighbours, of BF16 rows; a copy only where they do not start at even places."""
    if rows.stride(0) % 2 or rows.storage_offset() % 2 or rows.data_ptr() % 4:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int32)


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
    if count and with_columns:
        gate_words, up_words = _words_of(gate_rows), _words_of(up_rows)
        _silu_mul_quantize_both_kernel[(k // BLOCK, triton.cdiv(count, BLOCK))](
            gate_words,
            up_words,
            # The pointer of an absent product is never dereferenced.
            y.view(torch.int32) if with_product else gate_words,
            rows.codes.view(torch.int16),
            rows.scales,
            words,
            columns.scales,
            count,
            k,
            words.shape[1],
            gate_words.stride(0),
            up_words.stride(0),
            WITH_Y=with_product,
            POW2=pow2,
            **_LAUNCH_BOTH,
        )
    elif count:
        _silu_mul_quantize_kernel[(triton.cdiv(count * (k // BLOCK), _GROUPS_PER_PROGRAM),)](
            gate_rows,
            up_rows,
            y if with_product else gate_rows,
            rows.codes.view(torch.uint8),
            rows.scales,
            count,
            k // BLOCK,
            gate_rows.stride(0),
            up_rows.stride(0),
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
    count, k = rows_of(gate).shape
    results, arguments = [], []
    for _ in range(2):
        rows, (columns, words) = empty_rows(count, k, gate.device), empty_columns(count, k, gate.device)
        results += [rows, columns]
        arguments += [rows.codes.view(torch.int16), rows.scales, words, columns.scales]
    if count:
        dy_words, gate_words, up_words = (_words_of(rows_of(x)) for x in (dy, gate, up))
        _silu_mul_backward_quantize_kernel[(k // BLOCK, triton.cdiv(count, BLOCK))](
            dy_words,
            gate_words,
            up_words,
            *arguments,
            count,
            k,
            words.shape[1],
            dy_words.stride(0),
            gate_words.stride(0),
            up_words.stride(0),
            POW2=pow2,
            **_LAUNCH_BACKWARD,
        )
    return tuple(results)
