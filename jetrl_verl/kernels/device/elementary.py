# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Elementary functions of FP32 tiles and BF16 numbers four to a word, for the kernels of a gated delta net."""

import triton.language as tl

from jetrl_verl.kernels.device.e4m3 import high_half, low_half
from jetrl_verl.kernels.device.launch import jit


@jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def softplus(x, LINEAR: tl.constexpr):
    """``log(1 + exp(x))``, ``x`` above ``LINEAR``; of small powers with their relative accuracy."""
    power = tl.exp(tl.minimum(x, LINEAR))
    sum = 1.0 + power
    # The rounding of the sum cancels in power / (sum - 1).
    return tl.where(x > LINEAR, x, tl.where(sum == 1.0, power, tl.log(sum) * (power / (sum - 1.0))))


@jit
def numbers_of(words):
    """FP32 values of the four BF16 numbers of int64 words, the first in the lowest bits."""
    low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    return low_half(low), high_half(low), low_half(high), high_half(high)
