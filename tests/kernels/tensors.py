# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs and comparisons of the kernels' tests."""

import torch
import torch.nn.functional as F

from jetrl_verl.reference import dequantize_heads, quantize_heads

SCALES = range(-63, 121)
"""Exponents of all scales that BF16 heads can have."""


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """BF16 normal numbers, drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device=device).bfloat16()


def packed(*lengths: int) -> torch.Tensor:
    """Where packed sequences of these lengths start, and the end: int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def merged_heads(tokens: int, heads: int, kv_heads: int, width: int = 128, device: str = "cpu") -> list[torch.Tensor]:
    """Queries, keys and values of a merged projection; keys and values with zeros, outliers, Inf and NaN."""
    q, k, v = normal(tokens, heads + 2 * kv_heads, width, device=device).split([heads, kv_heads, kv_heads], dim=1)
    for x, numbers in ((k[:, -1], (0.0, 3e4, float("inf"), float("nan"))), (v[:, 0], (float("nan"), 0.0, -3e38))):
        for token, number in enumerate(numbers[:tokens]):
            x[token, 5:] = number
    return [q, k, v]


def same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes, in whatever order they lie in memory."""
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, want)))


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Cut off to BF16, in FP32, as Triton's interpreter does; a GPU rounds."""
    return (x.float().view(torch.int32) & -(2**16)).view(torch.float32)


def of_every_size(x: torch.Tensor) -> torch.Tensor:
    """Tokens' heads times powers of two from 2^-40 to 2^20."""
    return x * 2.0 ** (torch.arange(len(x), device=x.device) % 61 - 40)[:, None, None].to(x.dtype)


def outliers(x: torch.Tensor) -> torch.Tensor:
    """One channel 100 times larger in some tokens."""
    x[::3, :, 9] *= 100
    return x


def different(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many BF16 numbers differ in a bit."""
    return int((got.view(torch.int16) != want.view(torch.int16)).sum())


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
