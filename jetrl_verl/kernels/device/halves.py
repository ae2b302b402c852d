# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Round BF16 numbers to E4M3's steps, two per word: keys and values as attention reads them (kernels/kv_cache.py)."""

import triton.language as tl

from jetrl_verl.kernels.device.e4m3 import INF_BITS, high_half, larger_halves, low_half
from jetrl_verl.kernels.device.launch import INTERPRETED, jit

_NAN_HALF: tl.constexpr = tl.constexpr(0x7FC0)
_TO_SMALLEST_NORMAL: tl.constexpr = tl.constexpr(6 << 23)
# One BF16 number in both halves of a word.
_SIGNS: tl.constexpr = tl.constexpr(-0x7FFF8000)
_SIXTEENTHS: tl.constexpr = tl.constexpr(0x3D803D80)
_MINUS_ONES: tl.constexpr = tl.constexpr(-0x407F4080)
_MINUS_SIXTEENS: tl.constexpr = tl.constexpr(-0x3E7F3E80)


@jit
def _fma_in_floats(a, b, c):
    # Bits of a sum rounded once: FP32 holds the product exactly, and where the sum is rounded twice, the smaller
    # summand is so small that neither rounding is near a tie.
    bits = (a * b + c).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > INF_BITS, _NAN_HALF, rounded) & 0xFFFF


@jit
def _fma_of_halves(a, FACTORS: tl.constexpr, c):
    # On the BF16 numbers in both halves of words; FACTORS are powers of two.
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
    """``least`` of :func:`round_halves` from power-of-two FP32 scales (at least 2^-63) and int32 bits of the maxima."""
    half = ((scale.to(tl.int32, bitcast=True) - _TO_SMALLEST_NORMAL) >> 16) | 0x40
    half = tl.where(bits >= INF_BITS, _NAN_HALF, half)
    return half | (half << 16)


@jit
def round_halves(words, least):
    """``s decode(encode(x))`` for the BF16 numbers x in both halves of int32 words, s a power of two, |x| <= 448 s.

    E4M3 has steps of 2^(e - 3) from |x| = 2^e on, constant steps below 2^-6 s. BF16 has steps of 2^(e - 7) around the
    anchor 1.5 * 2^e. So anchor + x / 16, rounded once to nearest even, is the anchor and a sixteenth of the result;
    subtracting the anchor and multiplying by 16 are exact. Anchors of x itself would leave BF16's range.

    ``least``: int32 that broadcasts against ``words``, the anchor of 2^-6 s; NaN, which makes the group NaN, where it
    has an Inf or NaN. What rounds to 2^128 is Inf.
    """
    anchor = larger_halves((words & 0x7F807F80) | 0x00400040, least)
    rest = _fma_of_halves(_fma_of_halves(words, _SIXTEENTHS, anchor), _MINUS_ONES, anchor)
    # A rest of zero is +0 and its product -0: adding a zero of x's sign gives that zero.
    return _fma_of_halves(rest, _MINUS_SIXTEENS, words & _SIGNS)
