# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Re-layout of tokens' rowwise qdata ``[T, K]`` to colwise qdata in the segments of their experts, for WGrad.

A tile is read through its pairs and re-laid out in registers (relayout_128x1.py). Groups of 128 rows without a pair are
not written.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.e4m3 import (
    GROUP,
    decode,
    encode_words,
    is_pow2,
    largest_magnitude,
    scale_and_divisor,
    store_words,
)
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.results import empty_colwise, fake_colwise, require_groups, require_groups_of_rows
from jetrl_verl.reference import BLOCK, QuantizedTensor

__all__ = ["gather_relayout_128x1"]

# As in relayout_128x1.py: 32 bytes of a row are the smallest access to memory, wherever the row lies.
_LAUNCH = {"COLUMNS": 32, "num_warps": 1}


@implements("gather_relayout_128x1", "reference")
def reference_gather_relayout(x: QuantizedTensor, pair: torch.Tensor, k: int, rule: str) -> QuantizedTensor:
    """See :func:`gather_relayout_128x1`."""
    return reference.relayout_128x1(reference.gather_quantized(x, pair, k), rule)


@jit
def _load_rows_of_pairs(qdata_ptr, scales_ptr, pair, k, columns, stride_scale_row, column):
    token, valid = (tl.maximum(pair, 0) // k).to(tl.int64), pair >= 0
    scale = tl.load(scales_ptr + token * stride_scale_row, mask=valid, other=0.0)
    qdata = tl.load(qdata_ptr + token[:, None] * columns + column[None, :], mask=valid[:, None], other=0)
    return decode(qdata) * scale[:, None]


@jit
def _gather_relayout_kernel(
    qdata_ptr, scales_ptr, pair_ptr, out_qdata_ptr, out_scales_ptr, columns, words_per_row, stride_scale_row,
    stride_scale_group, K: tl.constexpr, POW2: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    pair_ptr += tile_row * GROUP + 4 * tl.arange(0, GROUP // 4)
    p0, p1, p2, p3 = tl.load(pair_ptr), tl.load(pair_ptr + 1), tl.load(pair_ptr + 2), tl.load(pair_ptr + 3)
    if tl.max(tl.maximum(tl.maximum(p0, p1), tl.maximum(p2, p3)), axis=0) >= 0:
        column = tl.arange(0, COLUMNS)
        qdata_ptr += tile_k * COLUMNS
        scales_ptr += (tile_k * COLUMNS // GROUP).to(tl.int64) * stride_scale_group
        x0 = _load_rows_of_pairs(qdata_ptr, scales_ptr, p0, K, columns, stride_scale_row, column)
        x1 = _load_rows_of_pairs(qdata_ptr, scales_ptr, p1, K, columns, stride_scale_row, column)
        x2 = _load_rows_of_pairs(qdata_ptr, scales_ptr, p2, K, columns, stride_scale_row, column)
        x3 = _load_rows_of_pairs(qdata_ptr, scales_ptr, p3, K, columns, stride_scale_row, column)
        scale, divisor, reciprocal = scale_and_divisor(largest_magnitude(x0, x1, x2, x3, 0), POW2)
        tl.store(out_scales_ptr + tile_row.to(tl.int64) * columns + tile_k * COLUMNS + column, scale)
        words = encode_words(x0, x1, x2, x3, divisor[None, :], reciprocal[None, :], POW2)
        store_words(tl.trans(words), out_qdata_ptr, tile_row, tile_k, COLUMNS, words_per_row, COLUMNS)


@implements("gather_relayout_128x1", "triton")
def triton_gather_relayout(x: QuantizedTensor, pair: torch.Tensor, k: int, rule: str) -> QuantizedTensor:
    """As :func:`reference_gather_relayout`; qdata is a view of padded rows."""
    pow2, rows, columns = is_pow2(rule), len(pair), x.qdata.shape[1]
    out, words = empty_colwise(rows, columns, x.qdata.device)
    if rows:
        _gather_relayout_kernel[(columns // _LAUNCH["COLUMNS"], rows // BLOCK)](
            x.qdata.contiguous().view(torch.uint8),
            x.scales,
            pair,
            words,
            out.scales,
            columns,
            words.shape[1],
            x.scales.stride(0),
            x.scales.stride(1),
            K=k,
            POW2=pow2,
            **_LAUNCH,
        )
    return out


@operator(
    "gather_relayout_128x1(Quantized x, Tensor pair, int k, str rule) -> Quantized",
    fake=lambda x, pair, k, rule: fake_colwise(x.qdata.new_empty((pair.shape[0], x.qdata.shape[1]))),
)
def gather_relayout_128x1(x: QuantizedTensor, pair: torch.Tensor, k: int, rule: str) -> QuantizedTensor:
    """``kernels.relayout_128x1`` of the tokens' rows in segments.

    Args:
        x: rowwise qdata ``[T, K]`` and scales ``[T, K/128]``, K a multiple of 128.
        pair: ``[R]`` int32 of segments that begin at multiples of 128 (:class:`jetrl_verl.reference.Segments`).
        k: experts of a token. rule: scale rule, ``"fp32"`` or ``"pow2"``.

    Returns:
        Colwise ``[K, R]``. A row without a pair is zero; rows after the last segment are undefined. No autograd.

    Raises:
        ValueError: K or R is no multiple of 128, an unknown rule.
    """
    require_groups("gather_relayout_128x1", x.qdata)
    require_groups_of_rows("gather_relayout_128x1", pair)
    return lookup("gather_relayout_128x1", x.qdata.device)(x, pair, k, rule)
