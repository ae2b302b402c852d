# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantize gradients of tokens' outputs rowwise (DGrad) and colwise (WGrad) in the segments of their experts.

A 128-row tile is read through its pairs and quantized as in quantize_1x128.py: 4 bytes per element of a pair, 8 with a
BF16 copy in segments. Groups of 128 rows without a pair lie after the last segment and are not written.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.e4m3 import GROUP, is_pow2, store_both, words_of
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16
from jetrl_verl.kernels.results import (
    empty_colwise,
    empty_rowwise,
    fake_colwise,
    fake_rowwise,
    require_groups,
    require_groups_of_rows,
)
from jetrl_verl.reference import BLOCK, QuantizedTensor

__all__ = ["gather_quantize_1x128_and_128x1"]

# As in quantize_1x128.py.
_LAUNCH = {"num_warps": 4, "maxnreg": 168}


@implements("gather_quantize_1x128_and_128x1", "reference")
def reference_gather_quantize(x, pair, k: int, rule: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    """See :func:`gather_quantize_1x128_and_128x1`."""
    return reference.quantize_1x128_and_128x1(reference.gather_rows(x, pair, k), rule)


@jit
def _load_rows_of_pairs(words_ptr, pair, k, words, word):
    token = (tl.maximum(pair, 0) // k).to(tl.int64)
    return tl.load(words_ptr + token[:, None] * words + word[None, :], mask=(pair >= 0)[:, None], other=0)


@jit
def _gather_quantize_kernel(
    words_ptr, pair_ptr, rowwise_pairs_ptr, rowwise_scales_ptr, colwise_qdata_ptr, colwise_scales_ptr, rows, columns,
    words_per_row, K: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    pair_ptr += tile_row * GROUP + 4 * tl.arange(0, GROUP // 4)
    p0, p1, p2, p3 = tl.load(pair_ptr), tl.load(pair_ptr + 1), tl.load(pair_ptr + 2), tl.load(pair_ptr + 3)
    if tl.max(tl.maximum(tl.maximum(p0, p1), tl.maximum(p2, p3)), axis=0) >= 0:
        words = columns // 2
        word = tile_k * (GROUP // 2) + tl.arange(0, GROUP // 2)
        w0 = _load_rows_of_pairs(words_ptr, p0, K, words, word)
        w1 = _load_rows_of_pairs(words_ptr, p1, K, words, word)
        w2 = _load_rows_of_pairs(words_ptr, p2, K, words, word)
        w3 = _load_rows_of_pairs(words_ptr, p3, K, words, word)
        store_both(
            w0, w1, w2, w3, rowwise_pairs_ptr, rowwise_scales_ptr, colwise_qdata_ptr, colwise_scales_ptr, tile_row,
            tile_k, rows, columns, words_per_row, True, POW2,
        )  # fmt: skip


@implements("gather_quantize_1x128_and_128x1", "triton")
def triton_gather_quantize(x, pair, k: int, rule: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    """As :func:`reference_gather_quantize`; memory layouts as in results.py."""
    pow2, rows, columns = is_pow2(rule), len(pair), x.shape[1]
    rowwise = empty_rowwise(rows, columns, x.device)
    colwise, words = empty_colwise(rows, columns, x.device)
    if rows:
        x = x.contiguous()
        x_words = words_of(x)
        _gather_quantize_kernel[(columns // BLOCK, rows // BLOCK)](
            words_of(x.clone()) if x_words is None else x_words,
            pair,
            rowwise.qdata.view(torch.int16),
            rowwise.scales,
            words,
            colwise.scales,
            rows,
            columns,
            words.shape[1],
            K=k,
            POW2=pow2,
            **_LAUNCH,
        )
    return rowwise, colwise


def _fake(x, pair, k, rule):
    rows = x.new_empty((pair.shape[0], x.shape[1]))
    return fake_rowwise(rows), fake_colwise(rows)


@operator(
    "gather_quantize_1x128_and_128x1(Tensor x, Tensor pair, int k, str rule) -> (Quantized, Quantized)", fake=_fake
)
def gather_quantize_1x128_and_128x1(
    x: torch.Tensor, pair: torch.Tensor, k: int, rule: str
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """``kernels.quantize_1x128_and_128x1`` of the tokens' rows in segments.

    Args:
        x: ``[T, C]`` BF16, C a multiple of 128.
        pair: ``[R]`` int32 of segments that begin at multiples of 128 (:class:`jetrl_verl.reference.Segments`).
        k: experts of a token. rule: scale rule, ``"fp32"`` or ``"pow2"``.

    Returns:
        (rowwise ``[R, C]``, colwise ``[C, R]``). A row without a pair is zero and has scale 1; rows after the
        last segment are undefined. No autograd.

    Raises:
        TypeError: ``x`` is not BF16. ValueError: C or R is no multiple of 128, an unknown rule.
    """
    require_bf16("gather_quantize_1x128_and_128x1", x=x)
    require_groups("gather_quantize_1x128_and_128x1", x)
    require_groups_of_rows("gather_quantize_1x128_and_128x1", pair)
    return lookup("gather_quantize_1x128_and_128x1", x.device)(x, pair, k, rule)
