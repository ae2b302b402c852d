# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""E4M3 on the device: scale, encode, decode and transpose, byte-equal to ``reference``, for the quantizer kernels.

A group with an Inf or NaN gets the reciprocal NaN, which makes all its qdata NaN. Quotients need no clamp: they exceed
448 by at most one FP32 step, which rounds to 448. Triton's interpreter converts FP32 to E4M3 wrongly, decodes NaN as
480 and rounds a fused multiply-add twice; there integer operations and divisions give the same results.
"""

import torch
import triton.language as tl

from jetrl_verl.kernels.device.launch import INTERPRETED, jit
from jetrl_verl.reference import BLOCK, check_rule

GROUP: tl.constexpr = tl.constexpr(BLOCK)
INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)
_NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)
_NAN_CODE: tl.constexpr = tl.constexpr(0x7F)
_E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
_E4M3_MAX_RECIPROCAL: tl.constexpr = tl.constexpr((torch.tensor(1.0) / 448.0).item())
_E4M3_MAX_RECIPROCAL_REST: tl.constexpr = tl.constexpr(1 / 448 - _E4M3_MAX_RECIPROCAL.value)
MIN_SCALE: tl.constexpr = tl.constexpr(2.0**-63)
_MIN_SCALE_EXPONENT: tl.constexpr = tl.constexpr(127 - 63)
_CARRY_ABOVE_1_75: tl.constexpr = tl.constexpr(0x7FFFFF - 0x600000)
_HIGH_HALF: tl.constexpr = tl.constexpr(-0x10000)
_FIRST_WITH_PAIRED_MAXIMA = 90  # compute capability: Hopper; Ada's assembler rejects max.u16x2


@jit
def magnitude_bits(x):
    """Bit patterns of ``|x|``: as integers in the order of the values, Inf and NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def largest_bits(x0, x1, x2, x3):
    """Elementwise maximum of four tiles' ``magnitude_bits``."""
    low = tl.maximum(magnitude_bits(x0), magnitude_bits(x1))
    return tl.maximum(low, tl.maximum(magnitude_bits(x2), magnitude_bits(x3)))


@jit
def _larger_magnitude(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@jit
def largest_magnitude(x0, x1, x2, x3, axis: tl.constexpr):
    """Maxima of ``|x|`` over ``axis`` and four tiles. ``max.NaN.f32`` keeps NaN and takes ``|x|`` for free."""
    if INTERPRETED:
        return tl.max(largest_bits(x0, x1, x2, x3), axis=axis).to(tl.float32, bitcast=True)
    else:
        x = _larger_magnitude(_larger_magnitude(x0, x1), _larger_magnitude(x2, x3))
        return tl.reduce(x, axis, _larger_magnitude)


def target_capability(semantic) -> int:
    """Compute capability of the GPU that is compiled for, such as 90."""
    return int(semantic.builder.options.arch.removeprefix("sm"))


@tl.core.extern
def _takes_two_maxima(_semantic=None):
    return tl.constexpr(target_capability(_semantic) >= _FIRST_WITH_PAIRED_MAXIMA)


@jit
def _larger_halves_one_by_one(a, b):
    return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum((a >> 16) & 0xFFFF, (b >> 16) & 0xFFFF) << 16)


@jit
def _larger_halves(a, b):
    if _takes_two_maxima():
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return _larger_halves_one_by_one(a, b)


@jit
def larger_halves(a, b):
    """Maxima of both unsigned 16-bit halves of words."""
    if INTERPRETED:
        return _larger_halves_one_by_one(a, b)
    else:
        return _larger_halves(a, b)


@jit
def largest_halves(words, axis: tl.constexpr):
    """Over ``axis``, the largest magnitude of the BF16 numbers in each half of int32 words.

    Two numbers per word take half the registers, and ``max.u16x2`` (sm_90) two maxima at a time.
    """
    words = words & 0x7FFF7FFF
    if INTERPRETED:
        return tl.max(words & 0xFFFF, axis=axis) | (tl.max(words >> 16, axis=axis) << 16)
    else:
        return tl.reduce(words, axis, _larger_halves)


@jit
def largest_in_columns(w0, w1, w2, w3):
    """:func:`largest_halves` elementwise over four tiles of words and down their columns."""
    m0, m1, m2, m3 = w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF, w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF
    return largest_halves(larger_halves(larger_halves(m0, m1), larger_halves(m2, m3)), 0)


@jit
def largest_of_halves(words):
    """The larger of the two halves of words of magnitudes, FP32."""
    return tl.maximum(words << 16, words & _HIGH_HALF).to(tl.float32, bitcast=True)


@jit
def low_half(words):
    """FP32 value of the BF16 number in the lower half of each int32 word, the left of two neighbors."""
    return (words << 16).to(tl.float32, bitcast=True)


@jit
def high_half(words):
    """As :func:`low_half` for the upper half."""
    return (words & _HIGH_HALF).to(tl.float32, bitcast=True)


@jit
def halves_of(low, high):
    """int32 words of two 16-bit tiles."""
    if INTERPRETED:
        return (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (
            high.to(tl.int16, bitcast=True).to(tl.int32) << 16
        )
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@jit
def _residual_step(quotient, x, divisor, reciprocal):
    # Multiplying by -1 becomes a free operand modifier, and this arrangement of signs keeps -0 a -0.
    return tl.fma(tl.fma(quotient, divisor, x * -1.0), reciprocal * -1.0, quotient)


@jit
def divide(x, divisor, reciprocal):
    """``x / divisor`` rounded once, given the rounded reciprocal: two residual steps (:func:`_quotient`)."""
    if INTERPRETED:
        return tl.div_rn(x, divisor)
    else:
        return _residual_step(_residual_step(x * reciprocal, x, divisor, reciprocal), x, divisor, reciprocal)


@jit
def _quotient(x, scale, reciprocal, POW2: tl.constexpr):
    """A quotient ``x / scale`` whose rounding to E4M3 gives the qdata of the correctly rounded quotient.

    Divisions per element would make these kernels compute-bound. Each group gets one correctly rounded reciprocal ``r =
    1/s``, each element ``q = x r`` and a residual step ``q -= (q s - x) r`` in fused multiply-adds, which before its
    rounding is within 2^-22 units in the last place of ``x/s``. Scales take two steps, which round correctly
    (Markstein's theorem). For qdata one is enough: it could differ only where ``x/s`` is that close to a midpoint of
    two FP32 numbers of which one is a tie between qdata. In all 1424 such pairs of mantissas it does not
    (tests/kernels/test_quotient_on_cpu.py). ``s >= 2^-63`` keeps every residual that matters normal: where ``|x/s| <
    2^-11`` the result is a zero. Under ``pow2`` the reciprocal is exact and ``x r`` is the rounded quotient.
    """
    if POW2:
        return x * reciprocal
    elif INTERPRETED:
        return tl.div_rn(x, scale)
    else:
        return _residual_step(x * reciprocal, x, scale, reciprocal)


@jit
def _power_of_two_above(bits):
    # 2^ceil(log2(amax / 448)) from the bits of amax, at least the smallest scale.
    exponent = tl.maximum(((bits + _CARRY_ABOVE_1_75) >> 23) - 8, _MIN_SCALE_EXPONENT)
    return (exponent << 23).to(tl.float32, bitcast=True)


@jit
def _reciprocal_of_power(power):
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@jit
def scale_of(bits, POW2: tl.constexpr):
    """Scales from maxima ``bits``, as ``reference.scale_from_amax_bits``."""
    if POW2:
        scale = _power_of_two_above(bits)
    else:
        amax = bits.to(tl.float32, bitcast=True)
        scale = tl.maximum(divide(amax, _E4M3_MAX, _E4M3_MAX_RECIPROCAL), MIN_SCALE)
    return tl.where((bits == 0) | (bits >= INF_BITS), 1.0, scale)


@jit
def _reciprocal(scale):
    # rcp.rn without its range check, branch and call: scales are far from the ends of the range. NaN for Inf and NaN.
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 r, e;
        rcp.approx.ftz.f32 r, $1;
        fma.rn.f32 e, r, $1, 0fBF800000;
        neg.f32 e, e;
        fma.rn.f32 $0, r, e, r;
        }""",
        "=f,f",
        [scale],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def reciprocal_of(scale, bits, POW2: tl.constexpr):
    """``1 / scale``, correctly rounded; NaN where the maxima ``bits`` are of an Inf or NaN."""
    if POW2:
        reciprocal = _reciprocal_of_power(scale)
    elif INTERPRETED:
        reciprocal = tl.div_rn(1.0, scale)
    else:
        reciprocal = _reciprocal(scale)
    return tl.where(bits >= INF_BITS, float("nan"), reciprocal)


@jit
def encode(x, scale, reciprocal, POW2: tl.constexpr):
    """uint8 qdata of the FP32 tile ``x``; ``scale`` and ``reciprocal`` have its rank and broadcast against it."""
    quotient = _quotient(x, scale, reciprocal, POW2)
    if INTERPRETED:
        return tl.where(reciprocal == reciprocal, _round_in_integers(quotient), _NAN_CODE).to(tl.uint8)
    else:
        return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@jit
def encode_words(x0, x1, x2, x3, scale, reciprocal, POW2: tl.constexpr):
    """int32 words of four qdata, that of ``x0`` in the lowest byte; operands as in :func:`encode`."""
    if INTERPRETED:
        words = encode(x0, scale, reciprocal, POW2).to(tl.int32)
        words |= encode(x1, scale, reciprocal, POW2).to(tl.int32) << 8
        words |= encode(x2, scale, reciprocal, POW2).to(tl.int32) << 16
        words |= encode(x3, scale, reciprocal, POW2).to(tl.int32) << 24
        return words
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [
                _quotient(x0, scale, reciprocal, POW2),
                _quotient(x1, scale, reciprocal, POW2),
                _quotient(x2, scale, reciprocal, POW2),
                _quotient(x3, scale, reciprocal, POW2),
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@jit
def _divisor_of(amax, POW2: tl.constexpr):
    if POW2:
        return _power_of_two_above(amax.to(tl.int32, bitcast=True))
    else:
        # Two terms of 1/448 divide correctly: no quotient by 7 is near a midpoint of FP32 numbers.
        quotient = tl.fma(amax, _E4M3_MAX_RECIPROCAL, amax * _E4M3_MAX_RECIPROCAL_REST)
        return tl.maximum(quotient, MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)


@jit
def _stored(divisor, amax):
    # 0 and Inf or NaN in one comparison: zero wraps around.
    special = (amax.to(tl.int32, bitcast=True) - 1).to(tl.uint32, bitcast=True) >= INF_BITS - 1
    return tl.where(special, 1.0, divisor)


@jit
def _power_reciprocal(divisor, amax):
    # Adds 0, or NaN where the maximum is not finite.
    return tl.fma(amax, 0.0, _reciprocal_of_power(divisor))


@jit
def scale_and_divisor(amax, POW2: tl.constexpr):
    """(scale to store, scale to divide by, its reciprocal) from FP32 maxima ``amax``.

    :func:`scale_of` and :func:`reciprocal_of` in half the instructions. The divisor differs where no qdata depends on
    it: for zeros it is the smallest scale, for a group with an Inf or NaN arbitrary.
    """
    if INTERPRETED:
        bits = amax.to(tl.int32, bitcast=True)
        scale = scale_of(bits, POW2)
        return scale, scale, reciprocal_of(scale, bits, POW2)
    else:
        divisor = _divisor_of(amax, POW2)
        reciprocal = _power_reciprocal(divisor, amax) if POW2 else _reciprocal(divisor)
        return _stored(divisor, amax), divisor, reciprocal


@jit
def scale_and_terms(amax, POW2: tl.constexpr):
    """(scale to store, first, second term of its reciprocal) from maxima of BF16 numbers, for :func:`encode_two`.

    ``pow2`` does not use the second term; when interpreted it is the scale.
    """
    if INTERPRETED:
        bits = amax.to(tl.int32, bitcast=True)
        scale = scale_of(bits, POW2)
        return scale, reciprocal_of(scale, bits, POW2), scale
    else:
        divisor = _divisor_of(amax, POW2)
        if POW2:
            first = _power_reciprocal(divisor, amax)
            second = first
        else:
            first = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
            )
            # Surely below 1 / divisor. The reciprocal of Inf, 0, becomes NaN.
            first = (first.to(tl.int32, bitcast=True) - 2).to(tl.float32, bitcast=True)
            second = tl.fma(first * -1.0, divisor, 1.0) * first
        return _stored(divisor, amax), first, second


@jit
def _quotient_of_bf16(x, first, second, POW2: tl.constexpr):
    # One instruction less than _quotient. With r <= 1/s and t = (1 - r s) r >= 0, both per group, fma(x, r, x t) gives
    # the same qdata: no BF16 number divided by the scale of a BF16 maximum is close enough to a tie
    # (test_quotient_on_cpu.py tries all; FP32 numbers are). t is never negative: x = -0 would lose its sign.
    return x * first if POW2 else tl.fma(x, first, x * second)


@jit
def encode_two(x0, x1, first, second, POW2: tl.constexpr):
    """int16 pairs of qdata of BF16 numbers in FP32, that of ``x0`` in the lower byte."""
    if INTERPRETED:
        low = encode(x0, second, first, POW2).to(tl.int16)
        return low | (encode(x1, second, first, POW2).to(tl.int16) << 8)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f",
            [_quotient_of_bf16(x0, first, second, POW2), _quotient_of_bf16(x1, first, second, POW2)],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        )


@jit
def load_rows(x_ptr, row, column, rows, k):
    """The tile ``row`` [R] by ``column`` [C] of a contiguous ``[rows, k]``, zero beyond it."""
    mask = (row < rows)[:, None] & (column < k)[None, :]
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * k + column[None, :], mask=mask, other=0)


@jit
def quantize_groups(x, POW2: tl.constexpr):
    """qdata of the groups ``x`` [R, 128] FP32, and their scales [R]."""
    bits = tl.max(magnitude_bits(x), axis=1)
    scale = scale_of(bits, POW2)
    return encode(x, scale[:, None], reciprocal_of(scale, bits, POW2)[:, None], POW2), scale


@jit
def store_rowwise(x, qdata_ptr, scales_ptr, row, column, tile_k, rows, k, POW2: tl.constexpr):
    """Quantize the rows of ``x`` [R, 128] FP32, one group each, and store them at ``row`` [R], ``column`` [128].

    ``qdata_ptr``: ``[rows, k]`` uint8. ``scales_ptr``: ``[groups, rows]``, the memory of a column-major result.
    """
    qdata, scale = quantize_groups(x, POW2)
    mask = (row < rows)[:, None] & (column < k)[None, :]
    tl.store(qdata_ptr + row.to(tl.int64)[:, None] * k + column[None, :], qdata, mask=mask)
    tl.store(scales_ptr + tile_k.to(tl.int64) * rows + row, scale, mask=row < rows)


@jit
def store_colwise(x0, x1, x2, x3, qdata_ptr, scales_ptr, tile_row, column, k, words_per_row, POW2: tl.constexpr):
    """Quantize a 128x128 tile along its columns and store it transposed.

    ``xj`` [32, 128]: rows ``4 i + j`` of the tile, FP32, zero beyond the matrix, so that a word takes the qdata of a
    column in four consecutive rows: a quarter of the accesses to shared memory that bytes would need. ``qdata_ptr``:
    ``[k, words_per_row]`` int32. ``scales_ptr``: ``[row tiles, k]``. ``column`` [128]: the tile's columns, of ``k``.
    """
    bits = tl.max(largest_bits(x0, x1, x2, x3), axis=0)
    scale = scale_of(bits, POW2)
    reciprocal = reciprocal_of(scale, bits, POW2)
    words = tl.trans(encode_words(x0, x1, x2, x3, scale[None, :], reciprocal[None, :], POW2))
    word = tile_row * (GROUP // 4) + tl.arange(0, GROUP // 4)
    tl.store(
        qdata_ptr + column.to(tl.int64)[:, None] * words_per_row + word[None, :], words, mask=(column < k)[:, None]
    )
    tl.store(scales_ptr + tile_row.to(tl.int64) * k + column, scale, mask=column < k)


@jit
def load_four_rows(x_ptr, stride, rows, columns, COLUMNS: tl.constexpr):
    """Tiles ``[32, COLUMNS]`` of the rows 4 i + j, j = 0 to 3, from ``x_ptr``; zero beyond ``rows`` and ``columns``."""
    row, column = 4 * tl.arange(0, GROUP // 4), tl.arange(0, COLUMNS)
    offsets = row[:, None] * stride + column[None, :]
    if (rows >= GROUP) & (columns >= COLUMNS):
        x0 = tl.load(x_ptr + offsets)
        x1 = tl.load(x_ptr + stride + offsets)
        x2 = tl.load(x_ptr + 2 * stride + offsets)
        x3 = tl.load(x_ptr + 3 * stride + offsets)
    else:
        inside = (column < columns)[None, :]
        x0 = tl.load(x_ptr + offsets, mask=inside & (row < rows)[:, None], other=0)
        x1 = tl.load(x_ptr + stride + offsets, mask=inside & (row + 1 < rows)[:, None], other=0)
        x2 = tl.load(x_ptr + 2 * stride + offsets, mask=inside & (row + 2 < rows)[:, None], other=0)
        x3 = tl.load(x_ptr + 3 * stride + offsets, mask=inside & (row + 3 < rows)[:, None], other=0)
    return x0, x1, x2, x3


@jit
def _rowwise_scales(words, scales_ptr, row, rows, POW2: tl.constexpr):
    scale, first, second = scale_and_terms(largest_of_halves(largest_halves(words, 1)), POW2)
    tl.store(scales_ptr + row, scale, mask=row < rows)
    return first[:, None], second[:, None]


@jit
def _colwise_scales(amax, scales_ptr, column, columns, POW2: tl.constexpr):
    scale, first, second = scale_and_terms(amax, POW2)
    tl.store(scales_ptr + column, scale, mask=column < columns)
    return first[None, :], second[None, :]


@jit
def transposed_words(low, high):
    """Words of four qdata ``[128, 32]`` of a tile's columns from those of even (``low``) and odd columns, [32, 64]."""
    return tl.reshape(tl.permute(tl.join(low, high), (1, 2, 0)), (GROUP, GROUP // 4))


@jit
def store_words(words, qdata_ptr, tile_row, tile_k, columns_left, words_per_row, COLUMNS: tl.constexpr):
    """Store the transposed tile ``words`` [COLUMNS, 32]; ``qdata_ptr`` as in :func:`store_colwise`."""
    qdata_ptr += tile_k.to(tl.int64) * COLUMNS * words_per_row + tile_row * (GROUP // 4)
    column = tl.arange(0, COLUMNS)
    places = column[:, None] * words_per_row + tl.arange(0, GROUP // 4)[None, :]
    tl.store(qdata_ptr + places, words, mask=(column < columns_left)[:, None])


@jit
def store_both(
    w0, w1, w2, w3, rowwise_pairs_ptr, rowwise_scales_ptr, colwise_qdata_ptr, colwise_scales_ptr, tile_row, tile_k,
    rows, k, words_per_row, WITH_ROWWISE: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Quantize a 128x128 tile of BF16 numbers along its rows and along its columns, and store the latter transposed.

    ``wj`` [32, 64]: rows ``4 i + j`` of the tile as int32 words of two neighbors, zero beyond the matrix. Pointers as
    in :func:`store_rowwise` and :func:`store_colwise`, but rowwise qdata as int16 pairs; ``k`` is even. All scales come
    first, so that a number is unpacked once for both qdata and takes half a register until then.
    """
    row, word = 4 * tl.arange(0, GROUP // 4), tl.arange(0, GROUP // 2)
    start = tile_row.to(tl.int64) * GROUP
    left, words_left = rows - tile_row * GROUP, k // 2 - tile_k * (GROUP // 2)
    if WITH_ROWWISE:
        rowwise_pairs_ptr += start * (k // 2) + tile_k * (GROUP // 2)
        rowwise_scales_ptr += tile_k.to(tl.int64) * rows + start
        first0, second0 = _rowwise_scales(w0, rowwise_scales_ptr, row, left, POW2)
        first1, second1 = _rowwise_scales(w1, rowwise_scales_ptr + 1, row, left - 1, POW2)
        first2, second2 = _rowwise_scales(w2, rowwise_scales_ptr + 2, row, left - 2, POW2)
        first3, second3 = _rowwise_scales(w3, rowwise_scales_ptr + 3, row, left - 3, POW2)
    largest = largest_in_columns(w0, w1, w2, w3)
    colwise_scales_ptr += tile_row.to(tl.int64) * k + tile_k * GROUP
    columns_left = k - tile_k * GROUP
    low_amax, high_amax = low_half(largest), high_half(largest)
    low_first, low_second = _colwise_scales(low_amax, colwise_scales_ptr, 2 * word, columns_left, POW2)
    high_first, high_second = _colwise_scales(high_amax, colwise_scales_ptr + 1, 2 * word, columns_left, POW2)
    l0, h0, l1, h1 = low_half(w0), high_half(w0), low_half(w1), high_half(w1)
    if WITH_ROWWISE:
        stride = k // 2
        pairs = rowwise_pairs_ptr + (row[:, None] * stride + word[None, :])
        inside = (word < words_left)[None, :]
        tl.store(pairs, encode_two(l0, h0, first0, second0, POW2), mask=inside & (row < left)[:, None])
        tl.store(pairs + stride, encode_two(l1, h1, first1, second1, POW2), mask=inside & (row + 1 < left)[:, None])
    low = encode_two(l0, l1, low_first, low_second, POW2)
    high = encode_two(h0, h1, high_first, high_second, POW2)
    l2, h2, l3, h3 = low_half(w2), high_half(w2), low_half(w3), high_half(w3)
    if WITH_ROWWISE:
        tl.store(pairs + 2 * stride, encode_two(l2, h2, first2, second2, POW2), mask=inside & (row + 2 < left)[:, None])
        tl.store(pairs + 3 * stride, encode_two(l3, h3, first3, second3, POW2), mask=inside & (row + 3 < left)[:, None])
    low = halves_of(low, encode_two(l2, l3, low_first, low_second, POW2))
    high = halves_of(high, encode_two(h2, h3, high_first, high_second, POW2))
    store_words(transposed_words(low, high), colwise_qdata_ptr, tile_row, tile_k, columns_left, words_per_row, GROUP)


@jit
def decode(qdata):
    """FP32 values of loaded uint8 qdata; not for qdata just encoded (use ``round_halves`` of device/halves.py).

    Where anything but a store reads a register that ``cvt.rn.satfinite.e4m3x2`` packed, ptxas 12.8 (Triton 3.6) reads
    the upper half of that register before it is written (tests/kernels/test_triton_for_hopper.py).
    """
    if INTERPRETED:
        # A byte shifted into FP32's fields is 2^-120 of its value, subnormals included.
        value = ((qdata.to(tl.int32) & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        bits = tl.where((qdata & 0x7F) == _NAN_CODE, _NAN_BITS, value.to(tl.int32, bitcast=True))
        return (bits | ((qdata.to(tl.int32) & 0x80) << 24)).to(tl.float32, bitcast=True)
    else:
        return qdata.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@jit
def _round_in_integers(quotient):
    """E4M3 qdata (int32), rounded to nearest even. ``|quotient|`` rounds to 448 at most, or the group is not finite."""
    bits = quotient.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # 2^14 has an FP32 step of 2^-9, E4M3's subnormal step, so this addition rounds to it.
    subnormal = (tl.abs(quotient) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    qdata = tl.where(magnitude < (121 << 23), subnormal, normal)
    return (qdata | ((bits >> 24) & 0x80)) & 0xFF


def is_pow2(rule: str) -> bool:
    """Check ``rule`` and return the kernels' compile-time switch."""
    check_rule(rule)
    return rule == "pow2"


def words_of(x: torch.Tensor) -> torch.Tensor | None:
    """Contiguous BF16 ``x`` [rows, k] as int32 words of two neighbors, in any shape; None for another type, an odd
    width or an odd address."""
    if x.dtype != torch.bfloat16 or x.shape[1] % 2 or x.storage_offset() % 2 or x.data_ptr() % 4:
        return None
    # One row is contiguous whatever its stride, but a view as words checks the stride.
    return (x if x.stride(0) == x.shape[1] else x.reshape(-1)).view(torch.int32)
