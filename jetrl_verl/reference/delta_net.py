# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of a gated delta net's operations (Qwen3.5; Yang et al., arXiv 2412.06464): conv, rule, gated norm.

    y_t  = silu(x_{t-3} w_0 + x_{t-2} w_1 + x_{t-1} w_2 + x_t w_3), oldest tap first -> BF16, split into q | k | v
    q, k = q / |q| / sqrt(128), k / |k|      g = -exp(A_log) softplus(a + dt_bias)      beta = sigmoid(b)
    S    = exp(g) S      d = beta (v - S^T k)      S = S + k d^T      o = S^T q -> BF16
    n    = o / rms(o) * w * silu(z) -> BF16

FP32 inside, rounded where "-> BF16" stands and nowhere else. The recurrence has one step per token, in a prompt, in a
decode and in training alike. Sums over a head's 128 features add halves (:func:`tree_sum`), elementary functions are
those of reproducible.py, and no product is fused with an addition: a token's bits depend on its own sequence alone.
"""

import torch

from jetrl_verl.reference.reproducible import exp, log1p, sigmoid

HEAD = 128
"""Features of a head of queries, keys and values."""
TAPS = 4
"""Inputs of the convolution, the token's own among them."""
L2_EPS = 1e-6
"""Added to sums of squares of queries and keys."""
LINEAR_SOFTPLUS = 20.0
"""Where softplus becomes the identity."""


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over ``dim``, a power of two of elements, by halves: i with i + n/2, then i with i + n/4, ..."""
    while (size := x.shape[dim]) > 1:
        x = x.narrow(dim, 0, size // 2) + x.narrow(dim, size // 2, size // 2)
    return x.squeeze(dim)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x sigmoid(x)`` of FP32 ``x``."""
    return x * sigmoid(x)


def places(cu_seqlens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence of each token and its place in it, int64 ``[T]``; tokens after the last sequence belong to the last."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True).clamp_(max=max(len(cu_seqlens) - 2, 0))
    return sequence, token - cu_seqlens.long()[sequence]


# --- convolution ------------------------------------------------------------------------------------------------------


def _inputs_before(x: torch.Tensor, distance: int, cu_seqlens: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """``[T, C]``: the input ``distance`` tokens before each token of its sequence, from ``past`` before the first."""
    sequence, place = places(cu_seqlens, len(x))
    earlier = past[sequence, (place - distance).clamp(-TAPS + 1, -1)]
    return torch.where((place >= distance)[:, None], x.roll(distance, 0), earlier)


def convolve(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """The convolution before its SiLU.

    Args:
        x: ``[T, C]`` BF16, sequences packed. weight: ``[C, 4]``, oldest tap first, taken at its BF16 value.
        cu_seqlens: ``[B + 1]``, first tokens of the sequences and the number of tokens.
        past: ``[B, 3, C]`` BF16, the inputs before each sequence's first token in ``x``, oldest first.

    Returns:
        ``[T, C]`` FP32.
    """
    taps = weight.to(torch.bfloat16).float().unbind(1)
    y = _inputs_before(x, TAPS - 1, cu_seqlens, past) * taps[0]
    for tap in range(1, TAPS):
        y = y + _inputs_before(x, TAPS - 1 - tap, cu_seqlens, past) * taps[tap]
    return y


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor, past: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU of :func:`convolve`, ``[T, C]`` BF16, and the ``past`` of the sequences' next tokens, ``[B, 3, C]`` BF16."""
    y = silu(convolve(x, weight, cu_seqlens, past)).to(torch.bfloat16)
    before_end = torch.arange(1 - TAPS, 0, device=x.device)
    end = cu_seqlens[1:].long()[:, None]
    place = cu_seqlens.diff().long()[:, None] + before_end
    numbers = torch.arange(len(past), device=x.device)[:, None]
    rows = x[(end + before_end).clamp(min=0)] if len(x) else past
    return y, torch.where((place >= 0)[..., None], rows, past[numbers, place.clamp(1 - TAPS, -1)])


# --- rule -------------------------------------------------------------------------------------------------------------


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """``x / |x|`` over the last dimension of FP32 ``x``."""
    return x * (tree_sum(x * x, -1) + L2_EPS).sqrt_().reciprocal_().unsqueeze(-1)


def gates(
    b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of a token's decay and its writing strength, each FP32 ``[T, HV]``.

    Args:
        b, a: ``[T, HV]`` FP32. a_log, dt_bias: ``[HV]``, taken at their BF16 values.
    """
    x = (a + dt_bias.to(torch.bfloat16).float()).double()
    softplus = torch.where(x > LINEAR_SOFTPLUS, x, log1p(exp(x))).float()
    return -exp(a_log.to(torch.bfloat16).double()).float() * softplus, sigmoid(b)


def heads_of(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys ``[T, HK, 128]`` and values ``[T, HV, 128]`` in ``qkv [T, C]``, ``HV = heads``; views."""
    keys = (qkv.shape[1] - HEAD * heads) // 2
    return tuple(x.unflatten(1, (-1, HEAD)) for x in qkv.split([keys, keys, HEAD * heads], dim=1))


def delta_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token of R sequences, all FP32.

    Args:
        state: ``[R, HV, K, V]``, updated in place. q, k: ``[R, HV, K]``, normed and scaled. v: ``[R, HV, V]``.
        decay, beta: ``[R, HV]``.

    Returns:
        o ``[R, HV, V]``.
    """
    state.mul_(decay[..., None, None])
    k = k.unsqueeze(-1)
    delta = (v - tree_sum(state * k, -2)) * beta.unsqueeze(-1)
    state.add_(k * delta.unsqueeze(-2))
    return tree_sum(state * q.unsqueeze(-1), -2)


def gated_delta_rule(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over packed sequences.

    Args:
        qkv: ``[T, C]`` BF16 of :func:`causal_conv1d`. b, a, a_log, dt_bias: of :func:`gates`.
        cu_seqlens: ``[B + 1]``. state: ``[B, HV, 128, 128]`` FP32 before each sequence's first token in ``qkv``.

    Returns:
        o ``[T, HV, 128]`` BF16, zero after the last sequence, and the states after the sequences.
    """
    heads = b.shape[1]
    q, k, v = (x.float() for x in heads_of(qkv, heads))
    q, k = (l2norm(x).repeat_interleave(heads // q.shape[1], dim=1) for x in (q, k))
    q = q * HEAD**-0.5
    g, beta = gates(b, a, a_log, dt_bias)
    decay = exp(g.double()).float()
    o = torch.zeros_like(v)
    # Sequences advance together, the longest first, so that those that go on are the first ones.
    lengths, order = cu_seqlens.diff().sort(descending=True, stable=True)
    first, advanced = cu_seqlens[order].long(), state[order]
    for step in range(int(lengths[0]) if len(lengths) else 0):
        live = int((lengths > step).sum())
        at = first[:live] + step
        o[at] = delta_step(advanced[:live], q[at], k[at], v[at], decay[at], beta[at])
    return o.to(torch.bfloat16), torch.empty_like(advanced).index_copy_(0, order, advanced)


# --- gated norm -------------------------------------------------------------------------------------------------------


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``o / rms(o) * w * silu(z)`` of each head.

    Args:
        o, z: ``[T, HV, 128]`` BF16. weight: ``[128]``. eps: added to the mean of squares.

    Returns:
        ``[T, HV * 128]`` BF16.
    """
    o, z = o.float(), z.float()
    rstd = (tree_sum(o * o, -1) / o.shape[-1] + eps).sqrt_().reciprocal_().unsqueeze(-1)
    return (o * rstd * weight.float() * silu(z)).to(torch.bfloat16).flatten(1)
