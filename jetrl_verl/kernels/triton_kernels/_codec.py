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
"""Scale, encode and decode on the device: the lines of ``numerics`` that every quantiser kernel shares.

Everything is byte-equal with ``numerics`` by construction: maxima over bit patterns, powers of two assembled from
exponent bits, correctly rounded quotients, and one round-to-nearest-even into E4M3.

Quotients. A division instruction per element (a reciprocal on the quarter-rate unit, a range check, a call) would make
these kernels wait for arithmetic instead of memory. The divisor is the same for 128 elements, so each group gets one
correctly rounded reciprocal ``r = 1/s`` and each element ``q = x r`` with residual steps ``q -= (q s - x) r`` in fused
multiply-adds. Before it is rounded, the first step is within 2^-22 units in the last place of ``x/s``: a second one
makes a correctly rounded quotient of it (Markstein's theorem), which is how scales are made. For codes one step is
enough. It could round to the other side only where ``x/s`` lies within that distance of a midpoint of two FP32 numbers,
and change a code only where one of the two is a tie between codes; there are 1424 such pairs of mantissas, and in each
the rounding is the division's (tests/kernels/test_quotient_on_cpu.py looks at all of them). ``s >= 2^-63`` keeps every
residual that matters normal; where ``|x/s| < 2^-11`` only the sign is used, the code is a zero. Under ``pow2`` the
reciprocal is exact and ``x r`` is already the rounded quotient.

Transposition. Codes along tokens are written transposed, a byte at a time if one is careless: 64 byte-wide loads from
shared memory a thread. So a 128x128 tile is held as four ``[32, 128]`` tiles, the rows 4 i + j for j = 0 to 3, and one
32-bit word takes the codes of a column in four consecutive rows. The hardware's conversion makes two codes of any two
registers, so packing down the rows costs what packing along them does, and what is exchanged through shared memory is
words: a quarter of the accesses, none of them byte-wide (:func:`store_columns`).

Poison. A group with an Inf or NaN gets the reciprocal NaN, which turns all its codes into NaN without a further look.

``numerics`` clamps the quotient to +-448 and this file does not: ``x / s`` exceeds 448 by one FP32 step at most (where
the scale was rounded down), and that rounds to 448.

Triton's interpreter, which the CPU tests run under, converts FP32 to E4M3 wrongly (113 of 4096 normal values; NaN
becomes finite), decodes NaN codes as 480 and rounds a fused multiply-add twice. There the same results come from
integer operations and divisions; a GPU takes the hardware's conversion, one instruction for two elements instead of
about ten for one.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.numerics import BLOCK, FP8_DTYPE, BlockQuantized, check_rule

GROUP: tl.constexpr = tl.constexpr(BLOCK)
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)
_NAN_CODE: tl.constexpr = tl.constexpr(0x7F)
_E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
_E4M3_MAX_RECIPROCAL: tl.constexpr = tl.constexpr((torch.tensor(1.0) / 448.0).item())
_MIN_SCALE: tl.constexpr = tl.constexpr(2.0**-63)
_MIN_SCALE_EXPONENT: tl.constexpr = tl.constexpr(127 - 63)
_CARRY_ABOVE_1_75: tl.constexpr = tl.constexpr(0x7FFFFF - 0x600000)


@triton.jit
def magnitude_bits(x):
    """Bit patterns of ``|x|``, whose integer maximum orders like the values and puts Inf and NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_bits(x0, x1, x2, x3):
    """Elementwise maximum of four tiles' ``magnitude_bits``."""
    low = tl.maximum(magnitude_bits(x0), magnitude_bits(x1))
    return tl.maximum(low, tl.maximum(magnitude_bits(x2), magnitude_bits(x3)))


@triton.jit
def _residual_step(quotient, x, divisor, reciprocal):
    # Multiplying by -1 becomes a free operand modifier, and this arrangement of signs keeps -0 a -0.
    return tl.fma(tl.fma(quotient, divisor, x * -1.0), reciprocal * -1.0, quotient)


@triton.jit
def _divide(x, divisor, reciprocal):
    """``x / divisor`` rounded once, given the rounded reciprocal; see "Quotients" above for the range it holds in."""
    if _INTERPRETED:
        return tl.div_rn(x, divisor)
    else:
        return _residual_step(_residual_step(x * reciprocal, x, divisor, reciprocal), x, divisor, reciprocal)


@triton.jit
def _quotient(x, scale, reciprocal, POW2: tl.constexpr):
    """``x / scale`` as E4M3 sees it: rounding it gives the code of the correctly rounded quotient ("Quotients")."""
    if POW2:
        return x * reciprocal
    elif _INTERPRETED:
        return tl.div_rn(x, scale)
    else:
        return _residual_step(x * reciprocal, x, scale, reciprocal)


@triton.jit
def scale_of(bits, POW2: tl.constexpr):
    """Scales from maxima ``bits``, as ``numerics.scale_from_amax_bits``."""
    if POW2:
        exponent = tl.maximum(((bits + _CARRY_ABOVE_1_75) >> 23) - 8, _MIN_SCALE_EXPONENT)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        amax = bits.to(tl.float32, bitcast=True)
        scale = tl.maximum(_divide(amax, _E4M3_MAX, _E4M3_MAX_RECIPROCAL), _MIN_SCALE)
    return tl.where((bits == 0) | (bits >= _INF_BITS), 1.0, scale)


@triton.jit
def reciprocal_of(scale, bits, POW2: tl.constexpr):
    """``1 / scale``, correctly rounded; NaN where the maxima ``bits`` say that the group holds an Inf or NaN."""
    if POW2:
        reciprocal = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    elif _INTERPRETED:
        reciprocal = tl.div_rn(1.0, scale)
    else:
        # rcp.rn without its range check, branch and call: scales are far from both ends of the range.
        reciprocal = tl.inline_asm_elementwise(
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
    return tl.where(bits >= _INF_BITS, float("nan"), reciprocal)


@triton.jit
def encode(x, scale, reciprocal, POW2: tl.constexpr):
    """uint8 codes of the FP32 tile ``x``; ``scale`` and ``reciprocal`` have its rank and broadcast against it."""
    quotient = _quotient(x, scale, reciprocal, POW2)
    if _INTERPRETED:
        return tl.where(reciprocal == reciprocal, _round_in_integers(quotient), _NAN_CODE).to(tl.uint8)
    else:
        return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def encode_words(x0, x1, x2, x3, scale, reciprocal, POW2: tl.constexpr):
    """int32 words of four codes each, that of ``x0`` in the lowest byte; operands as in :func:`encode`."""
    if _INTERPRETED:
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


@triton.jit
def load_rows(x_ptr, row, column, rows, k):
    """The tile ``row`` [R] by ``column`` [C] of a contiguous ``[rows, k]``, zero beyond it."""
    mask = (row < rows)[:, None] & (column < k)[None, :]
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * k + column[None, :], mask=mask, other=0)


@triton.jit
def store_rows(x, codes_ptr, scales_ptr, row, column, tile_k, rows, k, POW2: tl.constexpr):
    """Quantise the rows of ``x`` [R, 128] FP32, one group each, and store them at ``row`` [R], ``column`` [128].

    ``codes_ptr``: ``[rows, k]`` uint8. ``scales_ptr``: ``[groups, rows]``, the memory of a column-major result.
    """
    bits = tl.max(magnitude_bits(x), axis=1)
    scale = scale_of(bits, POW2)
    codes = encode(x, scale[:, None], reciprocal_of(scale, bits, POW2)[:, None], POW2)
    mask = (row < rows)[:, None] & (column < k)[None, :]
    tl.store(codes_ptr + row.to(tl.int64)[:, None] * k + column[None, :], codes, mask=mask)
    tl.store(scales_ptr + tile_k.to(tl.int64) * rows + row, scale, mask=row < rows)


@triton.jit
def store_columns(x0, x1, x2, x3, codes_ptr, scales_ptr, tile_row, column, k, words_per_row, POW2: tl.constexpr):
    """Quantise a 128x128 tile along its columns and store it transposed.

    ``xj`` [32, 128]: rows ``4 i + j`` of the tile, FP32, zero beyond the matrix. ``codes_ptr``: ``[k, words_per_row]``
    int32, four codes a word. ``scales_ptr``: ``[row tiles, k]``. ``column`` [128]: the tile's columns, of ``k``.
    """
    bits = tl.max(largest_bits(x0, x1, x2, x3), axis=0)
    scale = scale_of(bits, POW2)
    reciprocal = reciprocal_of(scale, bits, POW2)
    words = tl.trans(encode_words(x0, x1, x2, x3, scale[None, :], reciprocal[None, :], POW2))
    word = tile_row * (GROUP // 4) + tl.arange(0, GROUP // 4)
    tl.store(
        codes_ptr + column.to(tl.int64)[:, None] * words_per_row + word[None, :], words, mask=(column < k)[:, None]
    )
    tl.store(scales_ptr + tile_row.to(tl.int64) * k + column, scale, mask=column < k)


@triton.jit
def decode(codes):
    """FP32 values of uint8 codes."""
    if _INTERPRETED:
        # Shifted into FP32's fields the code is 2^-120 of its value, subnormals included.
        value = ((codes.to(tl.int32) & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        bits = tl.where((codes & 0x7F) == _NAN_CODE, 0x7FC00000, value.to(tl.int32, bitcast=True))
        return (bits | ((codes.to(tl.int32) & 0x80) << 24)).to(tl.float32, bitcast=True)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _round_in_integers(quotient):
    """E4M3 codes (int32), round to nearest even. ``|quotient|`` rounds to 448 at most, or its group is poisoned."""
    bits = quotient.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # 2^14 has an FP32 step of 2^-9, E4M3's subnormal step, so this addition rounds to it.
    subnormal = (tl.abs(quotient) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(magnitude < (121 << 23), subnormal, normal)
    return (codes | ((bits >> 24) & 0x80)) & 0xFF


def is_pow2(rule: str) -> bool:
    """Validate ``rule`` and turn it into the kernels' compile-time switch."""
    check_rule(rule)
    return rule == "pow2"


def empty_rows(rows: int, k: int, device: torch.device) -> BlockQuantized:
    """Uninitialised 1x128 result: codes ``[rows, k]``, scales ``[rows, ceil(k/128)]`` stored column-major."""
    codes = torch.empty((rows, k), dtype=FP8_DTYPE, device=device)
    scales = torch.empty((triton.cdiv(k, BLOCK), rows), dtype=torch.float32, device=device).t()
    return BlockQuantized(codes, scales)


def empty_columns(rows: int, k: int, device: torch.device) -> tuple[BlockQuantized, torch.Tensor]:
    """Uninitialised 128x1 result ``[k, rows]`` and the buffer that its codes are a view of, as words of four codes:
    ``[k, rows rounded up to 128, / 4]``. GEMMs load 16 bytes at a time along tokens, whose number is arbitrary: rows of
    a padded buffer start aligned, and zeros after their end add nothing to a sum."""
    words = torch.empty((k, triton.cdiv(rows, BLOCK) * BLOCK // 4), dtype=torch.int32, device=device)
    scales = torch.empty((triton.cdiv(rows, BLOCK), k), dtype=torch.float32, device=device).t()
    codes = words.view(FP8_DTYPE) if words.numel() else torch.empty((k, 0), dtype=FP8_DTYPE, device=device)
    return BlockQuantized(codes[:, :rows], scales), words
