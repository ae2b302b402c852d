# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The shared operations as formulas in float64, for autograd: no rounding between input and output."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tensors import normal

from jetrl_verl import kernels

EPS = 1e-6
ROUNDING = 2**-8
"""Relative spacing of BF16; a rounding is off by half of it."""


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


Case = tuple[Callable, Callable, tuple[torch.Tensor, ...]]
"""An operation, its formula, BF16 or FP32 inputs."""


def cases(device: str) -> dict[str, Case]:
    """Operations of rows, by name."""
    tokens, temperature = torch.arange(66, device=device).view(33, 2), torch.linspace(0.5, 2, 33, device=device)

    def norm(unit_offset: bool) -> Case:
        functions = (kernels.rms_norm, rms_norm)
        return *((lambda x, w, f=f: f(x, w, EPS, unit_offset)) for f in functions), (normal(33, 256), normal(256))

    def heads(width: int, rotated: int) -> Case:
        table = kernels.rotary_table(rotated, 64, {"rope_theta": 1e4}).to(device)
        positions, functions = torch.arange(33, device=device) * 7 % 64, (kernels.rotary, rotary)
        turned = ((lambda q, k, f=f: torch.cat(list(f(q, k, table, positions)), dim=1)) for f in functions)
        return *turned, (normal(33, 3, width), normal(33, 2, width))

    return {
        "norm": norm(False),
        "norm with unit offset": norm(True),
        **{
            f"{rotated} features of {width}": heads(width, rotated)
            for width, rotated in ((128, 128), (64, 64), (256, 64))
        },
        "silu_mul": (kernels.silu_mul, silu_mul, (normal(33, 131).mul(4), normal(33, 131, seed=2))),
        "sigmoid_mul": (kernels.sigmoid_mul, sigmoid_mul, (normal(33, 3, 256), normal(33, 3, 256, seed=2).mul(4))),
        "logits": (kernels.logits, logits, (normal(33, 256), normal(99, 256, seed=1))),
        "log_probs": (
            lambda x: kernels.log_probs(x, tokens, temperature),
            lambda x: log_probs(x, tokens, temperature),
            (normal(33, 300).float() * 5,),
        ),
    }


def check_gradient(case: Case, device: str = "cpu", roundings: int = 1) -> None:
    """Value and gradients against float64 autograd through the formula, off by so many roundings and twice as many."""
    shared, formula, inputs = case
    leaves = [x.to(device, copy=True).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    y, expected = shared(*leaves), formula(*exact)
    assert (y.double() - expected).norm() <= roundings * ROUNDING / 2 * expected.norm()
    gradient = normal(*y.shape, seed=9).to(device, y.dtype)
    y.backward(gradient)
    expected.backward(gradient.double())
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.double() - exact_leaf.grad).norm() <= roundings * ROUNDING * exact_leaf.grad.norm()
