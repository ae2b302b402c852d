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
"""Rotary position embedding, neox style: one BF16 table of cosines and sines, FP32 arithmetic, one rounding.

    y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        x1, x2: first and second half of a head

The table is made here for both sides, on the CPU, in float64 and rounded through FP32 to BF16, the type that vLLM's own
cache and Hugging Face's own cosines have. It is made in blocks of a fixed number of positions, so that how many of them
a side asks for cannot reach a value.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from jetrl_verl.ops._operator import operator, require_bf16, triton_kernels

_BLOCK = 1024
"""Positions computed in one call."""


def _inverse_frequencies(head_dim: int, parameters: Mapping[str, Any]) -> list[float]:
    """``theta^(-2i/d)``; Llama 3.1 stretches the long wavelengths (its published formula)."""
    theta = float(parameters["rope_theta"])
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return frequencies
    if kind != "llama3":
        raise ValueError(
            f"rotary: rope_type={kind} has no shared implementation, only default and llama3; use precision=jet_fp8"
        )
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(parameters["original_max_position_embeddings"])

    def stretched(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return share * frequency + (1 - share) * frequency / factor

    return [stretched(frequency) for frequency in frequencies]


def rotary_table(head_dim: int, positions: int, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Cosines and sines of every position.

    Args:
        head_dim: width of a head, all of it rotated. positions: number of rows.
        parameters: ``rope_parameters`` of a Hugging Face configuration: ``rope_theta``, ``rope_type`` and, for
            ``llama3``, its four numbers.

    Returns:
        ``[positions, head_dim]`` BF16 on the CPU: ``head_dim / 2`` cosines, then as many sines.

    Raises:
        ValueError: another ``rope_type``, or a part of the head is not rotated.
    """
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rotary: partial_rotary_factor has no shared implementation; use precision=jet_fp8")
    with torch.device("cpu"):
        frequencies = torch.tensor(_inverse_frequencies(head_dim, parameters), dtype=torch.float64)
        blocks = []
        for start in range(0, positions, _BLOCK):
            angles = torch.arange(start, start + _BLOCK, dtype=torch.float64)[:, None] * frequencies
            blocks.append(torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(torch.bfloat16))
        return torch.cat(blocks)[:positions].contiguous()


def _fake(x, cos_sin, inverse):
    return x.new_empty(x.shape)


@operator("rotary(Tensor x, Tensor cos_sin, bool inverse) -> Tensor", fake=_fake)
def _rotary(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    if x.is_cuda:
        return triton_kernels().rotary(x, cos_sin, inverse)
    cos, sin = cos_sin.float().unsqueeze(-2).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(torch.bfloat16)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_sin)
        return _rotary(x, cos_sin, False)

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        (cos_sin,) = ctx.saved_tensors
        return _rotary(dy.to(torch.bfloat16), cos_sin, True), None


def rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads by the angles of their positions; differentiable in ``x``.

    Args:
        x: ``[N, H, D]`` BF16, queries or keys. cos_sin: ``[N, D]`` BF16, rows of :func:`rotary_table`.

    Returns:
        ``[N, H, D]`` BF16.

    Raises:
        TypeError: an operand is not BF16.
    """
    require_bf16("rotary", x=x, cos_sin=cos_sin)
    if torch.is_grad_enabled():
        return _Rotary.apply(x, cos_sin)
    return _rotary(x, cos_sin, False)
