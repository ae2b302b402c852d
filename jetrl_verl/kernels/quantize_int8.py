# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantize rows to INT8: activations per token, weights per output channel.

One program per row reads it twice, for the maximum and for the qdata.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.e4m3 import INF_BITS, MIN_SCALE, divide, magnitude_bits
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import next_power_of_2
from jetrl_verl.reference import QuantizedTensor

__all__ = ["quantize_int8"]

implements("quantize_int8", "reference")(reference.quantize_int8)

_INT8_MAX: tl.constexpr = tl.constexpr(127.0)
_INT8_MAX_RECIPROCAL: tl.constexpr = tl.constexpr((torch.tensor(1.0) / 127.0).item())
# Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
_TO_INTEGER: tl.constexpr = tl.constexpr(12582912.0)
_TO_INTEGER_BITS: tl.constexpr = tl.constexpr(0x4B400000)
_PIECE = 4096


@jit
def _quantize_int8_kernel(x_ptr, qdata_ptr, scales_ptr, k, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PIECE)
    lane_bits = tl.zeros((PIECE,), dtype=tl.int32)
    for start in range(0, k, PIECE):
        x = tl.load(x_ptr + row * k + start + lane, mask=start + lane < k, other=0.0).to(tl.float32)
        lane_bits = tl.maximum(lane_bits, magnitude_bits(x))
    bits = tl.max(lane_bits, axis=0)
    poisoned = bits >= INF_BITS
    # A row with an Inf or NaN becomes zeros with the scale NaN.
    amax = tl.where(poisoned, 0, bits).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0.0, 1.0, tl.maximum(divide(amax, _INT8_MAX, _INT8_MAX_RECIPROCAL), MIN_SCALE))
    reciprocal = tl.div_rn(1.0, scale)
    for start in range(0, k, PIECE):
        x = tl.load(x_ptr + row * k + start + lane, mask=start + lane < k, other=0.0).to(tl.float32)
        quotient = divide(tl.where(poisoned, 0.0, x), scale, reciprocal)
        qdata = (quotient + _TO_INTEGER).to(tl.int32, bitcast=True) - _TO_INTEGER_BITS
        tl.store(qdata_ptr + row * k + start + lane, qdata.to(tl.int8), mask=start + lane < k)
    tl.store(scales_ptr + row, tl.where(poisoned, float("nan"), scale))


@implements("quantize_int8", "triton")
def triton_quantize_int8(x: torch.Tensor) -> QuantizedTensor:
    """As :func:`jetrl_verl.reference.quantize_int8`."""
    *lead, k = x.shape
    x = x.contiguous()
    qdata = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.ones((*lead, 1), dtype=torch.float32, device=x.device)
    if x.numel():
        piece = min(next_power_of_2(k), _PIECE)
        _quantize_int8_kernel[(scales.numel(),)](x, qdata, scales, k, PIECE=piece, num_warps=max(piece // 512, 1))
    return QuantizedTensor(qdata, scales)


def _fake(x: torch.Tensor) -> QuantizedTensor:
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return QuantizedTensor(x.new_empty(x.shape, dtype=torch.int8), scales)


@operator("quantize_int8(Tensor x) -> Quantized", fake=_fake)
def quantize_int8(x: torch.Tensor) -> QuantizedTensor:
    """See :func:`jetrl_verl.reference.quantize_int8`."""
    return lookup("quantize_int8", x.device)(x)
