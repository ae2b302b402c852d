# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract's quantizers written again in numpy float64, independent of jetrl_verl.reference.

Rounding searches all 256 bit patterns for the nearest finite value, ties to even; ``pow2`` tries exponents in exact
fractions.
"""

from fractions import Fraction

import numpy as np
import torch


def _value_of_code(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


CODE_VALUES = np.array([_value_of_code(code) for code in range(256)])
"""Value of every E4M3 bit pattern."""

_MAGNITUDES = CODE_VALUES[:127]


def nearest_qdata(values: np.ndarray) -> np.ndarray:
    """uint8 bit patterns nearest to float64 ``values``, ties to even, saturating at 448."""
    flat = np.abs(values).reshape(-1)
    out = np.empty(flat.size, dtype=np.uint8)
    for start in range(0, flat.size, 1 << 14):
        part = flat[start : start + (1 << 14)]
        distance = np.abs(part[:, None] - _MAGNITUDES[None, :])
        lower = distance.argmin(axis=1)
        upper = np.minimum(lower + 1, 126)
        rows = np.arange(part.size)
        tie = (distance[rows, lower] == distance[rows, upper]) & (lower % 2 == 1)
        out[start : start + (1 << 14)] = np.where(tie, upper, lower)
    return (out | np.where(np.signbit(values).reshape(-1), 0x80, 0).astype(np.uint8)).reshape(values.shape)


def pow2_scale(amax: float) -> float:
    """``2^ceil(log2(amax / 448))`` by exact comparison of fractions."""
    exponent = -200
    while Fraction(2) ** exponent * 448 < Fraction(amax):
        exponent += 1
    return 2.0**exponent


def scale(amax: float, rule: str) -> np.float32:
    """Scale of a group with finite maximum ``amax``."""
    if amax == 0:
        return np.float32(1)
    # Rounding a float64 quotient of two float32 numbers to float32 is the correctly rounded quotient (53 >= 2*24 + 2).
    exact = amax / 448.0 if rule == "fp32" else pow2_scale(amax)
    return max(np.float32(exact), np.float32(2.0**-63))


def quantize_group(values: np.ndarray, rule: str) -> tuple[np.ndarray, np.float32]:
    """Bit patterns and scale of one group of float32 ``values``."""
    wide = values.astype(np.float64)
    if not np.isfinite(wide).all():  # Inf or NaN anywhere
        return np.full(values.shape, 0x7F, dtype=np.uint8), np.float32(1)
    s = scale(float(np.abs(wide).max()), rule)
    quotients = (wide / np.float64(s)).astype(np.float32).astype(np.float64)
    return nearest_qdata(quotients), s


def quantize(x: torch.Tensor, block: tuple[int, int], rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Bit patterns ``[M, K]`` and scales of ``x [M, K]`` in blocks of ``block`` (rows, columns), edges shorter."""
    values = x.float().numpy()
    (m, k), (bm, bk) = values.shape, block
    qdata = np.zeros((m, k), dtype=np.uint8)
    scales = np.zeros((-(-m // bm), -(-k // bk)), dtype=np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            window = np.s_[i * bm : (i + 1) * bm, j * bk : (j + 1) * bk]
            qdata[window], scales[i, j] = quantize_group(values[window], rule)
    return qdata, scales
