# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantize weights in 128x128 blocks, with the transposed copy for DGrad, and transpose quantized weights.

One program per block, which stays in registers. A second kernel is for types other than BF16, odd widths and addresses,
and transposes with a number of rows that is no multiple of four.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels import native
from jetrl_verl.kernels.device.e4m3 import (
    GROUP,
    encode,
    encode_two,
    encode_words,
    halves_of,
    high_half,
    is_pow2,
    largest_bits,
    largest_halves,
    largest_in_columns,
    largest_of_halves,
    load_four_rows,
    load_rows,
    low_half,
    reciprocal_of,
    scale_and_terms,
    scale_of,
    transposed_words,
    words_of,
)
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import NATIVE, implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.reference import BLOCK, FP8_DTYPE, QuantizedTensor, ScaleRule

__all__ = ["quantize_128x128", "quantize_128x128_and_transpose", "transpose_128x128"]

for _operation in ("quantize_128x128", "quantize_128x128_and_transpose", "transpose_128x128"):
    implements(_operation, "reference")(getattr(reference, _operation))

_LAUNCH = {"num_warps": 4}
_LAUNCH_ANY = {"num_warps": 8}


@jit
def _quantize_128x128_kernel(
    words_ptr,
    pairs_ptr,
    scales_ptr,
    transposed_words_ptr,
    scales_t_ptr,
    n,
    k,
    POW2: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):
    """``words_ptr``: BF16 ``[n, k]`` as int32. ``pairs_ptr``: qdata ``[n, k]`` as int16, k even.
    ``transposed_words_ptr``: qdata ``[k, n]`` as int32, n a multiple of four."""
    tile_k, tile_n = tl.program_id(0), tl.program_id(1)
    row, word = 4 * tl.arange(0, GROUP // 4), tl.arange(0, GROUP // 2)
    start, stride = tile_n.to(tl.int64) * GROUP, k // 2
    left, words_left = n - tile_n * GROUP, stride - tile_k * (GROUP // 2)
    place = start * stride + tile_k * (GROUP // 2)
    w0, w1, w2, w3 = load_four_rows(words_ptr + place, stride, left, words_left, GROUP // 2)
    largest = largest_halves(largest_in_columns(w0, w1, w2, w3), 0)
    scale, first, second = scale_and_terms(largest_of_halves(largest), POW2)
    tl.store(scales_ptr + tile_n * tl.num_programs(0) + tile_k, scale)

    l0, h0, l1, h1 = low_half(w0), high_half(w0), low_half(w1), high_half(w1)
    l2, h2, l3, h3 = low_half(w2), high_half(w2), low_half(w3), high_half(w3)
    pairs = pairs_ptr + place + (row[:, None] * stride + word[None, :])
    inside = (word < words_left)[None, :]
    tl.store(pairs, encode_two(l0, h0, first, second, POW2), mask=inside & (row < left)[:, None])
    tl.store(pairs + stride, encode_two(l1, h1, first, second, POW2), mask=inside & (row + 1 < left)[:, None])
    tl.store(pairs + 2 * stride, encode_two(l2, h2, first, second, POW2), mask=inside & (row + 2 < left)[:, None])
    tl.store(pairs + 3 * stride, encode_two(l3, h3, first, second, POW2), mask=inside & (row + 3 < left)[:, None])
    if TRANSPOSE:
        low = halves_of(encode_two(l0, l1, first, second, POW2), encode_two(l2, l3, first, second, POW2))
        high = halves_of(encode_two(h0, h1, first, second, POW2), encode_two(h2, h3, first, second, POW2))
        column, word = tile_k * GROUP + tl.arange(0, GROUP), tile_n * (GROUP // 4) + tl.arange(0, GROUP // 4)
        _store(transposed_words_ptr, column, word, k, n // 4, transposed_words(low, high))
        tl.store(scales_t_ptr + tile_k * tl.num_programs(1) + tile_n, scale)


@jit
def _any_128x128_kernel(
    w_ptr,
    qdata_ptr,
    scales_ptr,
    qdata_t_ptr,
    scales_t_ptr,
    n,
    k,
    words_per_row,
    POW2: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    WHOLE_WORDS: tl.constexpr,
):
    tile_k, tile_n = tl.program_id(0), tl.program_id(1)
    row = tile_n * GROUP + 4 * tl.arange(0, GROUP // 4)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    scale_offset = tile_n * tl.num_programs(0) + tile_k
    if QUANTIZE:
        w0 = load_rows(w_ptr, row, column, n, k).to(tl.float32)
        w1 = load_rows(w_ptr, row + 1, column, n, k).to(tl.float32)
        w2 = load_rows(w_ptr, row + 2, column, n, k).to(tl.float32)
        w3 = load_rows(w_ptr, row + 3, column, n, k).to(tl.float32)
        bits = tl.max(tl.max(largest_bits(w0, w1, w2, w3), axis=1), axis=0)
        scale = scale_of(bits, POW2)
        reciprocal = reciprocal_of(scale, bits, POW2)
        _store(qdata_ptr, row, column, n, k, encode(w0, scale, reciprocal, POW2))
        _store(qdata_ptr, row + 1, column, n, k, encode(w1, scale, reciprocal, POW2))
        _store(qdata_ptr, row + 2, column, n, k, encode(w2, scale, reciprocal, POW2))
        _store(qdata_ptr, row + 3, column, n, k, encode(w3, scale, reciprocal, POW2))
        tl.store(scales_ptr + scale_offset, scale)
        if TRANSPOSE:
            words = encode_words(w0, w1, w2, w3, scale, reciprocal, POW2)
    else:
        words = load_rows(qdata_ptr, row, column, n, k).to(tl.int32)
        words |= load_rows(qdata_ptr, row + 1, column, n, k).to(tl.int32) << 8
        words |= load_rows(qdata_ptr, row + 2, column, n, k).to(tl.int32) << 16
        words |= load_rows(qdata_ptr, row + 3, column, n, k).to(tl.int32) << 24
        scale = tl.load(scales_ptr + scale_offset)
    if TRANSPOSE:
        words = tl.trans(words)
        if WHOLE_WORDS:
            word = tile_n * (GROUP // 4) + tl.arange(0, GROUP // 4)
            _store(qdata_t_ptr, column, word, k, words_per_row, words)
        else:
            _store(qdata_t_ptr, column, row, k, n, words.to(tl.uint8))
            _store(qdata_t_ptr, column, row + 1, k, n, (words >> 8).to(tl.uint8))
            _store(qdata_t_ptr, column, row + 2, k, n, (words >> 16).to(tl.uint8))
            _store(qdata_t_ptr, column, row + 3, k, n, (words >> 24).to(tl.uint8))
        tl.store(scales_t_ptr + tile_k * tl.num_programs(1) + tile_n, scale)


@jit
def _store(out_ptr, row, column, rows, columns, values):
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], values, mask=mask)


def _empty_blocks(n: int, k: int, device: torch.device) -> QuantizedTensor:
    qdata = torch.empty(n, k, dtype=FP8_DTYPE, device=device)
    scales = torch.empty(ceil_div(n, BLOCK), ceil_div(k, BLOCK), dtype=torch.float32, device=device)
    return QuantizedTensor(qdata, scales)


def _launch(
    w: torch.Tensor, weight: QuantizedTensor, transposed: QuantizedTensor, pow2: bool, quantize: bool, transpose: bool
) -> None:
    n, k = w.shape
    whole_words = n % 4 == 0
    if not w.numel():
        return
    grid = (ceil_div(k, BLOCK), ceil_div(n, BLOCK))
    words = words_of(w) if quantize and (whole_words or not transpose) else None
    # Without a transpose its pointers are never dereferenced.
    if words is not None:
        pairs = weight.qdata.view(torch.int16)
        _quantize_128x128_kernel[grid](
            words,
            pairs,
            weight.scales,
            transposed.qdata.view(torch.int32) if transpose else pairs,
            transposed.scales,
            n,
            k,
            POW2=pow2,
            TRANSPOSE=transpose,
            **_LAUNCH,
        )
    else:
        _any_128x128_kernel[grid](
            w,
            weight.qdata.view(torch.uint8),
            weight.scales,
            transposed.qdata.view(torch.int32 if transpose and whole_words else torch.uint8),
            transposed.scales,
            n,
            k,
            n // 4,
            POW2=pow2,
            QUANTIZE=quantize,
            TRANSPOSE=transpose,
            WHOLE_WORDS=whole_words,
            **_LAUNCH_ANY,
        )


@implements("quantize_128x128", "triton")
def triton_quantize_128x128(w: torch.Tensor, rule: str) -> QuantizedTensor:
    """As :func:`jetrl_verl.reference.quantize_128x128`."""
    pow2 = is_pow2(rule)
    weight = _empty_blocks(*w.shape, w.device)
    _launch(w.contiguous(), weight, weight, pow2, quantize=True, transpose=False)
    return weight


@implements("quantize_128x128_and_transpose", "triton")
def triton_quantize_128x128_and_transpose(w: torch.Tensor, rule: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    """As :func:`jetrl_verl.reference.quantize_128x128_and_transpose`."""
    pow2 = is_pow2(rule)
    n, k = w.shape
    weight, transposed = _empty_blocks(n, k, w.device), _empty_blocks(k, n, w.device)
    _launch(w.contiguous(), weight, transposed, pow2, quantize=True, transpose=True)
    return weight, transposed


@implements("transpose_128x128", "triton")
def triton_transpose_128x128(weight: QuantizedTensor) -> QuantizedTensor:
    """As :func:`jetrl_verl.reference.transpose_128x128`."""
    n, k = weight.qdata.shape
    transposed = _empty_blocks(k, n, weight.qdata.device)
    weight = QuantizedTensor(weight.qdata.contiguous(), weight.scales.contiguous())
    _launch(weight.qdata.view(torch.uint8), weight, transposed, pow2=False, quantize=False, transpose=True)
    return transposed


def native_supports_transpose_128x128(weight: QuantizedTensor) -> bool:
    """Whether :func:`native_transpose_128x128` accepts ``weight``: sizes in multiples of 16, rows on 16 bytes."""
    return native.supports_qdata(weight, in_sixteens=weight.qdata.shape[0] | weight.qdata.shape[1])


@implements("transpose_128x128", "native", supports=native_supports_transpose_128x128)
def native_transpose_128x128(weight: QuantizedTensor) -> QuantizedTensor:
    """As :func:`jetrl_verl.reference.transpose_128x128`."""
    transposed = QuantizedTensor(
        *(torch.empty(part.t().shape, dtype=part.dtype, device=part.device) for part in (weight.qdata, weight.scales))
    )
    native.operators().transpose(weight.qdata, weight.scales, transposed.qdata.view(torch.uint8), transposed.scales)
    return transposed


@operator("quantize_128x128(Tensor w, str rule) -> Quantized", fake=lambda w, rule: _empty_blocks(*w.shape, w.device))
def quantize_128x128(w: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """See :func:`jetrl_verl.reference.quantize_128x128`."""
    return lookup("quantize_128x128", w.device)(w, rule)


@operator(
    "quantize_128x128_and_transpose(Tensor w, str rule) -> (Quantized, Quantized)",
    fake=lambda w, rule: (_empty_blocks(*w.shape, w.device), _empty_blocks(*w.shape[::-1], w.device)),
)
def quantize_128x128_and_transpose(w: torch.Tensor, rule: ScaleRule) -> tuple[QuantizedTensor, QuantizedTensor]:
    """See :func:`jetrl_verl.reference.quantize_128x128_and_transpose`; on a GPU ``w`` is read once."""
    return lookup("quantize_128x128_and_transpose", w.device)(w, rule)


@operator(
    "transpose_128x128(Quantized weight) -> Quantized",
    fake=lambda weight: _empty_blocks(*weight.qdata.shape[::-1], weight.qdata.device),
    backends=NATIVE,
)
def transpose_128x128(weight: QuantizedTensor) -> QuantizedTensor:
    """See :func:`jetrl_verl.reference.transpose_128x128`."""
    return lookup("transpose_128x128", weight.qdata.device, weight)(weight)
