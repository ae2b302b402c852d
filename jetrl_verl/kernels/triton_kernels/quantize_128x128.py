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
"""Weights in 128x128 blocks, and the transposed copy that DGrad reads, from one read of the weight.

Idea: one program per block, the block in registers between its maximum and its division: 3 bytes per element (2 in, 1
out). The blocks are square, so the transpose has the same codes and scales and costs one more byte: 4 against 5 for
quantising first and transposing the codes later. It is written in words of four codes, see "Transposition" in
_codec.py. BF16 numbers stay in words of two until they are encoded ("Pairs" there), and one quotient serves both
copies; a second kernel, which holds FP32 numbers, takes other types, odd widths and addresses, and transposes heights
that are no multiple of four. Weights that arrive as codes are transposed by the same tile without arithmetic
(:func:`transpose_128x128`, 2 bytes per element): an element-wise strided copy of bytes reaches a fraction of the
bandwidth.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.triton_kernels._codec import (
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
from jetrl_verl.numerics import BLOCK, FP8_DTYPE, BlockQuantized

_LAUNCH = {"num_warps": 4}
_LAUNCH_ANY = {"num_warps": 8}


@triton.jit
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
    """``words_ptr``: BF16 ``[n, k]`` as int32. ``pairs_ptr``: codes ``[n, k]`` as int16, k even.
    ``transposed_words_ptr``: codes ``[k, n]`` as int32, n a multiple of four."""
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


@triton.jit
def _any_128x128_kernel(
    w_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    n,
    k,
    words_per_row,
    POW2: tl.constexpr,
    QUANTISE: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    WHOLE_WORDS: tl.constexpr,
):
    tile_k, tile_n = tl.program_id(0), tl.program_id(1)
    row = tile_n * GROUP + 4 * tl.arange(0, GROUP // 4)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    scale_offset = tile_n * tl.num_programs(0) + tile_k
    if QUANTISE:
        w0 = load_rows(w_ptr, row, column, n, k).to(tl.float32)
        w1 = load_rows(w_ptr, row + 1, column, n, k).to(tl.float32)
        w2 = load_rows(w_ptr, row + 2, column, n, k).to(tl.float32)
        w3 = load_rows(w_ptr, row + 3, column, n, k).to(tl.float32)
        bits = tl.max(tl.max(largest_bits(w0, w1, w2, w3), axis=1), axis=0)
        scale = scale_of(bits, POW2)
        reciprocal = reciprocal_of(scale, bits, POW2)
        _store(codes_ptr, row, column, n, k, encode(w0, scale, reciprocal, POW2))
        _store(codes_ptr, row + 1, column, n, k, encode(w1, scale, reciprocal, POW2))
        _store(codes_ptr, row + 2, column, n, k, encode(w2, scale, reciprocal, POW2))
        _store(codes_ptr, row + 3, column, n, k, encode(w3, scale, reciprocal, POW2))
        tl.store(scales_ptr + scale_offset, scale)
        if TRANSPOSE:
            words = encode_words(w0, w1, w2, w3, scale, reciprocal, POW2)
    else:
        words = load_rows(codes_ptr, row, column, n, k).to(tl.int32)
        words |= load_rows(codes_ptr, row + 1, column, n, k).to(tl.int32) << 8
        words |= load_rows(codes_ptr, row + 2, column, n, k).to(tl.int32) << 16
        words |= load_rows(codes_ptr, row + 3, column, n, k).to(tl.int32) << 24
        scale = tl.load(scales_ptr + scale_offset)
    if TRANSPOSE:
        words = tl.trans(words)
        if WHOLE_WORDS:
            word = tile_n * (GROUP // 4) + tl.arange(0, GROUP // 4)
            _store(codes_t_ptr, column, word, k, words_per_row, words)
        else:
            _store(codes_t_ptr, column, row, k, n, words.to(tl.uint8))
            _store(codes_t_ptr, column, row + 1, k, n, (words >> 8).to(tl.uint8))
            _store(codes_t_ptr, column, row + 2, k, n, (words >> 16).to(tl.uint8))
            _store(codes_t_ptr, column, row + 3, k, n, (words >> 24).to(tl.uint8))
        tl.store(scales_t_ptr + tile_k * tl.num_programs(1) + tile_n, scale)


@triton.jit
def _store(out_ptr, row, column, rows, columns, values):
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], values, mask=mask)


def _empty_blocks(n: int, k: int, device: torch.device) -> BlockQuantized:
    codes = torch.empty((n, k), dtype=FP8_DTYPE, device=device)
    scales = torch.empty((triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK)), dtype=torch.float32, device=device)
    return BlockQuantized(codes, scales)


def _launch(
    w: torch.Tensor, weight: BlockQuantized, transposed: BlockQuantized, pow2: bool, quantise: bool, transpose: bool
) -> None:
    n, k = w.shape
    whole_words = n % 4 == 0
    if not w.numel():
        return
    grid = (triton.cdiv(k, BLOCK), triton.cdiv(n, BLOCK))
    # Without a transpose its pointers are never dereferenced.
    codes_t = transposed.codes.view(torch.int32 if transpose and whole_words else torch.uint8)
    words = words_of(w) if quantise and (whole_words or not transpose) else None
    if words is not None:
        _quantize_128x128_kernel[grid](
            words,
            weight.codes.view(torch.int16),
            weight.scales,
            codes_t,
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
            weight.codes.view(torch.uint8),
            weight.scales,
            codes_t,
            transposed.scales,
            n,
            k,
            n // 4,
            POW2=pow2,
            QUANTISE=quantise,
            TRANSPOSE=transpose,
            WHOLE_WORDS=whole_words,
            **_LAUNCH_ANY,
        )


def quantize_128x128(w: torch.Tensor, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.quantize_128x128`."""
    pow2 = is_pow2(rule)
    weight = _empty_blocks(*w.shape, w.device)
    _launch(w.contiguous(), weight, weight, pow2, quantise=True, transpose=False)
    return weight


def quantize_128x128_and_transpose(w: torch.Tensor, rule: str) -> tuple[BlockQuantized, BlockQuantized]:
    """As :func:`jetrl_verl.numerics.quantize_128x128_and_transpose`."""
    pow2 = is_pow2(rule)
    n, k = w.shape
    weight, transposed = _empty_blocks(n, k, w.device), _empty_blocks(k, n, w.device)
    _launch(w.contiguous(), weight, transposed, pow2, quantise=True, transpose=True)
    return weight, transposed


def transpose_128x128(weight: BlockQuantized) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.transpose_128x128`."""
    n, k = weight.codes.shape
    transposed = _empty_blocks(k, n, weight.codes.device)
    weight = BlockQuantized(weight.codes.contiguous(), weight.scales.contiguous())
    _launch(weight.codes.view(torch.uint8), weight, transposed, pow2=False, quantise=False, transpose=True)
    return transposed
