# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The shared operations as formulas in float64, for autograd: no rounding between input and output."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight if unit_offset else weight)


def rotary(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    parts = (x.split([half, half, x.shape[-1] - 2 * half], -1) for x in (q, k))
    return [torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], -1) for x1, x2, rest in parts]


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (x * gate.sigmoid()).flatten(1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float):
    outputs = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        parts = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def attention_by_formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float):
    """``softmax(q k^T scale) v`` written out, with ``[tokens, heads, features]`` operands and no kernel of torch."""
    outputs = []
    for q_, k_, v_ in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        k_, v_ = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k_, v_))
        later = torch.ones(len(q_), len(q_), dtype=torch.bool, device=q.device).triu_(1)
        scores = torch.einsum("qhd,khd->hqk", q_, k_) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(dim=-1), v_))
    return torch.cat(outputs)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden @ weight.t()


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return (logits / temperature[:, None].double()).log_softmax(-1).gather(1, tokens)
