# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Heads for tests of the FP8 KV cache's quantizer, on any device."""

import torch
import torch.nn.functional as F

from jetrl_verl.reference import dequantize_heads, quantize_heads

SCALES = range(-63, 121)
"""Exponents of all scales that BF16 heads can have."""


def every_number(exponent: int) -> torch.Tensor:
    """``[N, 1, 128]`` heads of scale 2^exponent with all non-negative BF16 numbers up to 448 times the scale, or to the
    largest, which rounds to 2^128."""
    numbers = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    fitting = numbers[numbers.double() <= 448 * 2.0**exponent]
    others = F.pad(fitting, (0, -len(fitting) % 127)).view(-1, 127)
    heads = torch.cat([fitting[-1:].expand(len(others), 1), others], dim=1)[:, None]
    assert (quantize_heads(heads).scales == exponent + 127).all()
    return heads


def every_maximum() -> torch.Tensor:
    """``[32768, 1, 128]`` heads: zero, Inf and each NaN among their maxima."""
    maxima = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    noise = torch.randn(1 << 15, 128, generator=torch.Generator().manual_seed(0)) * 2.0**-5
    heads = noise.clamp(-1, 1).bfloat16() * maxima.nan_to_num(1, 1)[:, None]
    heads[:, 77] = maxima
    return heads[:, None]


def assert_seen(got: torch.Tensor, heads: torch.Tensor) -> None:
    """``got`` is ``heads`` quantized and dequantized, bitwise, signs of zeros too; all NaN are equal."""
    pair = got.cpu(), dequantize_heads(quantize_heads(heads))
    actual, desired = (x.view(torch.int16).masked_fill(x.isnan(), 0x7FC0) for x in pair)
    assert actual.shape == desired.shape and torch.equal(actual, desired)
