# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantize activations and output gradients in groups of 128: rowwise (1x128), colwise (128x1), or both in one read.

Both at once: a 128x128 tile holds whole groups of either kind, encoded twice from registers. A second kernel is for
types other than BF16, odd widths and odd addresses.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.e4m3 import (
    GROUP,
    is_pow2,
    load_four_rows,
    load_rows,
    quantize_groups,
    store_both,
    store_colwise,
    store_rowwise,
    words_of,
)
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.results import empty_colwise, empty_rowwise, fake_colwise, fake_rowwise
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.kernels.views import as_rows
from jetrl_verl.reference import BLOCK, QuantizedTensor, ScaleRule

__all__ = ["quantize_1x128", "quantize_1x128_and_128x1", "quantize_128x1"]

for _operation in ("quantize_1x128", "quantize_128x1", "quantize_1x128_and_128x1"):
    implements(_operation, "reference")(getattr(reference, _operation))

_GROUPS_PER_PROGRAM = 32
_WARPS = 4


@jit
def _quantize_1x128_kernel(
    x_ptr,
    qdata_ptr,
    scales_ptr,
    groups,
    groups_k,
    k,
    stride_scale_row,
    stride_scale_group,
    POW2: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUPS: tl.constexpr,
):
    launch_dependents()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, GROUP)
    row, group_k = group // groups_k, group % groups_k
    in_range = group < groups
    if EVEN_K:
        offsets = group.to(tl.int64)[:, None] * GROUP + lane[None, :]
        mask = in_range[:, None]
    else:
        column = group_k[:, None] * GROUP + lane[None, :]
        offsets = row.to(tl.int64)[:, None] * k + column
        mask = in_range[:, None] & (column < k)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    qdata, scale = quantize_groups(x, POW2)
    tl.store(qdata_ptr + offsets, qdata, mask=mask)
    scale_offsets = row.to(tl.int64) * stride_scale_row + group_k.to(tl.int64) * stride_scale_group
    tl.store(scales_ptr + scale_offsets, scale, mask=in_range)


@implements("quantize_1x128", "triton")
def triton_quantize_1x128(x: torch.Tensor, rule: str) -> QuantizedTensor:
    """As :func:`jetrl_verl.reference.quantize_1x128`; memory layouts as in results.py."""
    pow2 = is_pow2(rule)
    *lead, k = x.shape
    matrix = as_rows(x).contiguous() if k else x.reshape(x.numel(), 0)
    rows = matrix.shape[0]
    qdata, scales = empty_rowwise(rows, k, x.device)
    groups_k = ceil_div(k, BLOCK)
    groups = rows * groups_k
    if groups:
        _quantize_1x128_kernel[(ceil_div(groups, _GROUPS_PER_PROGRAM),)](
            matrix,
            qdata.view(torch.uint8),
            scales,
            groups,
            groups_k,
            k,
            scales.stride(0),
            scales.stride(1),
            POW2=pow2,
            EVEN_K=k % BLOCK == 0,
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=_WARPS,
        )
    if len(lead) == 1:
        return QuantizedTensor(qdata, scales)
    return QuantizedTensor(qdata.reshape(*lead, k), scales.reshape(*lead, groups_k))


# 168 registers: three programs per multiprocessor.
_LAUNCH_BOTH = {"num_warps": 4, "maxnreg": 168}
_LAUNCH_BOTH_OF_ANY_TYPE = {"num_warps": 8}


@jit
def _quantize_both_kernel(
    words_ptr,
    rowwise_pairs_ptr,
    rowwise_scales_ptr,
    colwise_qdata_ptr,
    colwise_scales_ptr,
    rows,
    k,
    words_per_row,
    POW2: tl.constexpr,
    WITH_ROWWISE: tl.constexpr,
):
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    words_ptr += tile_row.to(tl.int64) * GROUP * (k // 2) + tile_k * (GROUP // 2)
    left, words_left = rows - tile_row * GROUP, k // 2 - tile_k * (GROUP // 2)
    w0, w1, w2, w3 = load_four_rows(words_ptr, k // 2, left, words_left, GROUP // 2)
    store_both(
        w0, w1, w2, w3, rowwise_pairs_ptr, rowwise_scales_ptr, colwise_qdata_ptr, colwise_scales_ptr, tile_row, tile_k,
        rows, k,
        words_per_row, WITH_ROWWISE, POW2,
    )  # fmt: skip


@jit
def _quantize_both_of_any_type_kernel(
    x_ptr,
    rowwise_qdata_ptr,
    rowwise_scales_ptr,
    colwise_qdata_ptr,
    colwise_scales_ptr,
    rows,
    k,
    words_per_row,
    POW2: tl.constexpr,
    WITH_ROWWISE: tl.constexpr,
):
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    row = tile_row * GROUP + 4 * tl.arange(0, GROUP // 4)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    x0 = load_rows(x_ptr, row, column, rows, k).to(tl.float32)
    x1 = load_rows(x_ptr, row + 1, column, rows, k).to(tl.float32)
    x2 = load_rows(x_ptr, row + 2, column, rows, k).to(tl.float32)
    x3 = load_rows(x_ptr, row + 3, column, rows, k).to(tl.float32)
    if WITH_ROWWISE:
        store_rowwise(x0, rowwise_qdata_ptr, rowwise_scales_ptr, row, column, tile_k, rows, k, POW2)
        store_rowwise(x1, rowwise_qdata_ptr, rowwise_scales_ptr, row + 1, column, tile_k, rows, k, POW2)
        store_rowwise(x2, rowwise_qdata_ptr, rowwise_scales_ptr, row + 2, column, tile_k, rows, k, POW2)
        store_rowwise(x3, rowwise_qdata_ptr, rowwise_scales_ptr, row + 3, column, tile_k, rows, k, POW2)
    store_colwise(x0, x1, x2, x3, colwise_qdata_ptr, colwise_scales_ptr, tile_row, column, k, words_per_row, POW2)


def _launch_both(x: torch.Tensor, rule: str, with_rowwise: bool) -> tuple[QuantizedTensor | None, QuantizedTensor]:
    pow2 = is_pow2(rule)
    rows, k = x.shape
    x = x.contiguous()
    colwise, words = empty_colwise(rows, k, x.device)
    rowwise = empty_rowwise(rows, k, x.device) if with_rowwise else None
    if x.numel():
        # Without rowwise results their pointers are never dereferenced.
        rowwise_or_any = rowwise if with_rowwise else colwise
        x_words = words_of(x)
        in_pairs = x_words is not None
        kernel = _quantize_both_kernel if in_pairs else _quantize_both_of_any_type_kernel
        kernel[(ceil_div(k, BLOCK), ceil_div(rows, BLOCK))](
            x_words if in_pairs else x,
            rowwise_or_any.qdata.view(torch.int16 if in_pairs and with_rowwise else torch.uint8),
            rowwise_or_any.scales,
            words,
            colwise.scales,
            rows,
            k,
            words.shape[1],
            POW2=pow2,
            WITH_ROWWISE=with_rowwise,
            **(_LAUNCH_BOTH if in_pairs else _LAUNCH_BOTH_OF_ANY_TYPE),
        )
    return rowwise, colwise


implements("quantize_1x128_and_128x1", "triton")(lambda x, rule: _launch_both(x, rule, with_rowwise=True))
implements("quantize_128x1", "triton")(lambda x, rule: _launch_both(x, rule, with_rowwise=False)[1])


def _fake(x: torch.Tensor, rule: str) -> QuantizedTensor:
    qdata, scales = fake_rowwise(x)
    return QuantizedTensor(qdata.reshape(x.shape), scales.reshape(*x.shape[:-1], scales.shape[1]))


@operator("quantize_1x128(Tensor x, str rule) -> Quantized", fake=_fake)
def quantize_1x128(x: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """See :func:`jetrl_verl.reference.quantize_1x128`."""
    return lookup("quantize_1x128", x.device)(x, rule)


@operator("quantize_128x1(Tensor x, str rule) -> Quantized", fake=lambda x, rule: fake_colwise(x))
def quantize_128x1(x: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """See :func:`jetrl_verl.reference.quantize_128x1`."""
    return lookup("quantize_128x1", x.device)(x, rule)


@operator(
    "quantize_1x128_and_128x1(Tensor x, str rule) -> (Quantized, Quantized)",
    fake=lambda x, rule: (fake_rowwise(x), fake_colwise(x)),
)
def quantize_1x128_and_128x1(x: torch.Tensor, rule: ScaleRule) -> tuple[QuantizedTensor, QuantizedTensor]:
    """See :func:`jetrl_verl.reference.quantize_1x128_and_128x1`; on a GPU ``x`` is read once."""
    return lookup("quantize_1x128_and_128x1", x.device)(x, rule)
