# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of both sides: FP32 inside, one rounding to BF16. Llama's factor of a normalized row is the weight w;
Qwen3.5's is 1 + w, a sum in FP32 (``unit_offset``), as its module in transformers and vLLM's GemmaRMSNorm have it."""

import torch

from jetrl_verl.reference.reproducible import grid_bits, on_grid


def _factor(weight: torch.Tensor, unit_offset: bool) -> torch.Tensor:
    """What a normalized row is multiplied by, FP32."""
    return weight.float() + 1.0 if unit_offset else weight.float()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """y ``[..., K]`` BF16 and rstd ``[...]`` FP32."""
    k = x.shape[-1]
    squares = on_grid(x, grid_bits(k)).double().square_()
    rstd = (squares.sum(dim=-1, keepdim=True) / k).add_(eps).sqrt_().reciprocal_().float()
    y = x.to(torch.float32, memory_format=torch.contiguous_format).mul_(rstd).mul_(_factor(weight, unit_offset))
    return y.to(torch.bfloat16), rstd.squeeze(-1)


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx ``[..., K]`` BF16 and dw ``[K]`` FP32."""
    rstd = rstd.unsqueeze(-1)
    normalized = x.float() * rstd
    dy = dy.float()
    scaled = dy * _factor(weight, unit_offset)
    dx = rstd * (scaled - normalized * (scaled * normalized).mean(dim=-1, keepdim=True))
    dw = (dy * normalized).reshape(-1, x.shape[-1]).sum(dim=0)
    return dx.to(x.dtype), dw
