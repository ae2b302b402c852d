# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""BF16 numbers rounded to E4M3's steps, two in a word at a time: what attention sees of keys and values
(kernels/kv_cache.py)."""

import triton.language as tl

from jetrl_verl.kernels.device.e4m3 import INF_BITS, high_half, larger_halves, low_half
from jetrl_verl.kernels.device.launch import INTERPRETED, jit

_NAN_HALF: tl.constexpr = tl.constexpr(0x7FC0)
_TO_SMALLEST_NORMAL: tl.constexpr = tl.constexpr(6 << 23)
# BF16 numbers in both halves of a word.
_SIGNS: tl.constexpr = tl.constexpr(-0x7FFF8000)
_SIXTEENTHS: tl.constexpr = tl.constexpr(0x3D803D80)
_MINUS_ONES: tl.constexpr = tl.constexpr(-0x407F4080)
_MINUS_SIXTEENS: tl.constexpr = tl.constexpr(-0x3E7F3E80)


@jit
def _fma_in_floats(a, b, c):
    # Bits of one rounded sum. FP32 holds such products whole, and where the sum is rounded twice, the smaller summand
    # is so small that neither rounding is near a tie.
    bits = (a * b + c).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > INF_BITS, _NAN_HALF, rounded) & 0xFFFF


@jit
def _fma_of_halves(a, FACTORS: tl.constexpr, c):
    # Of the BF16 numbers in either half of words, as round_halves needs it: ``FACTORS`` are powers of two.
    if INTERPRETED:
        b = tl.full([], FACTORS, tl.int32)
        low = _fma_in_floats(low_half(a), low_half(b), low_half(c))
        return low | (_fma_in_floats(high_half(a), high_half(b), high_half(c)) << 16)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, FACTORS, c], dtype=tl.int32, is_pure=True, pack=1
        )


@jit
def least_anchor(scale, bits):
    """For :func:`round_halves`, int32: from power-of-two FP32 scales of at least 2^-63 and the bits (int32) of the
    maxima that they were made of."""
    half = ((scale.to(tl.int32, bitcast=True) - _TO_SMALLEST_NORMAL) >> 16) | 0x40
    half = tl.where(bits >= INF_BITS, _NAN_HALF, half)
    return half | (half << 16)


@jit
def round_halves(words, least):
    """The BF16 numbers in either half of int32 words rounded to E4M3 at a power-of-two scale s: s times what
    ``decode(encode(x))`` is, without qdata, for |x| of at most 448 s. What rounds to 2^128 is Inf.

    From |x| = 2^e on E4M3 has steps of 2^(e - 3), and below 2^-6 s those that it has there. Around 1.5 * 2^e, the
    anchor of x, BF16 has steps of 2^(e - 7). So anchor + x / 16, rounded once to nearest even, ends at the sixteenth of
    the result, and subtracting the anchor and multiplying by 16 are exact. An anchor for x instead of x / 16 would
    leave BF16's range for the largest numbers.

    ``least``: int32 that broadcasts against ``words``, the anchor of 2^-6 s; NaN for a group with an Inf or NaN, which
    turns all of it into NaN.
    """
    anchor = larger_halves((words & 0x7F807F80) | 0x00400040, least)
    rest = _fma_of_halves(_fma_of_halves(words, _SIXTEENTHS, anchor), _MINUS_ONES, anchor)
    # A rest of zero is +0 and its product -0: adding the zero of the number's sign gives that zero.
    return _fma_of_halves(rest, _MINUS_SIXTEENS, words & _SIGNS)
