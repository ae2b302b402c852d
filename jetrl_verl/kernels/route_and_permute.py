# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``route``, ``segments`` without padding and ``gather_quantized`` for the few tokens of a decode step, in one launch
(up to 8 tokens) or two.

The row of a pair is the number of pairs before it in the order (expert, token, slot), which each program counts itself.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.gather_quantized import triton_gather_quantized
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.results import empty_rowwise, fake_rowwise, require_groups
from jetrl_verl.kernels.route import choose_experts, lanes_of, reference_route, triton_route
from jetrl_verl.kernels.segments import triton_segments
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.reference import QuantizedTensor, Segments

__all__ = ["route_and_permute"]

Permuted = tuple[torch.Tensor, Segments, QuantizedTensor]

_TOKENS_CHOSEN_BY_ALL = 8
_MOST_TOKENS = 512
_PAIRS, _TILE, _WARPS = 512, 512, 4
"""Pairs compared and 32-bit words copied at a time; warps. A program chooses for at least as many tokens as it has
warps, so that no row of logits is spread over two."""
_LAST = tl.constexpr(2**31 - 1)


@implements("route_and_permute", "reference")
def reference_route_and_permute(logits: torch.Tensor, x: QuantizedTensor, k: int, renormalize: bool) -> Permuted:
    """See :func:`route_and_permute`."""
    experts_of, weights = reference_route(logits, k, renormalize)
    segments = reference.segments(experts_of, logits.shape[1], 1)
    return weights, segments, reference.gather_quantized(x, segments.pair, k)


@jit(do_not_specialize=["tokens", "stride_scale_group"])
def _permute_kernel(
    logits_ptr, experts_ptr, weights_ptr, source_ptr, scales_ptr, row_ptr, pair_ptr, start_ptr, out_ptr, out_scales_ptr,
    tokens, experts, words, groups, stride_scale_row, stride_scale_group,
    CHOOSES: tl.constexpr, RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, K_LANES: tl.constexpr,
    LANES: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    launch_dependents()
    token, slot, pairs = tl.program_id(0), tl.arange(0, K_LANES), tokens * K
    # After the programs of the tokens come those of the experts, K_LANES experts each.
    expert = (token - tokens) * K_LANES + slot
    # Sort key of a pair, or the smallest key that a pair of this expert could have.
    if CHOOSES:
        any_token = tl.arange(0, TOKENS)
        chosen, weights = choose_experts(logits_ptr, any_token, tokens, experts, K, K_LANES, LANES, RENORMALIZE)
        pair = any_token[:, None] * K + slot[None, :]
        own = (any_token == token)[:, None] & (slot < K)[None, :]
        tl.store(weights_ptr + pair, weights, mask=own & (token < tokens))
        valid = (any_token < tokens)[:, None] & (slot < K)[None, :]
        keys = tl.where(valid, chosen * pairs + pair, _LAST)
        key = tl.sum(tl.where(own, keys, 0), axis=0)
        key = tl.where(token < tokens, key, expert * pairs)
        keys = tl.reshape(keys, (TOKENS * K_LANES,))
        row = tl.sum((keys[None, :] < key[:, None]).to(tl.int32), axis=1)
    else:
        own_pair = token * K + slot
        key = tl.load(experts_ptr + own_pair, mask=(slot < K) & (token < tokens), other=0) * pairs + own_pair
        key = tl.where(token < tokens, key, expert * pairs)
        before = tl.zeros((K_LANES, PAIRS), dtype=tl.int32)
        for first in range(0, pairs, PAIRS):
            pair = first + tl.arange(0, PAIRS)
            keys = tl.load(experts_ptr + pair, mask=pair < pairs, other=experts) * pairs + pair
            before += (keys[None, :] < key[:, None]).to(tl.int32)
        row = tl.sum(before, axis=1)
    if token < tokens:
        tl.store(row_ptr + token * K + slot, row, mask=slot < K)
        tl.store(pair_ptr + row, token * K + slot, mask=slot < K)
        target = out_ptr + row.to(tl.int64)[:, None] * words
        for first in range(0, words, TILE):
            word = first + tl.arange(0, TILE)
            x = tl.load(source_ptr + token.to(tl.int64) * words + word, mask=word < words, other=0)
            mask = (slot < K)[:, None] & (word < words)[None, :]
            tl.store(target + word[None, :], tl.broadcast_to(x[None, :], (K_LANES, TILE)), mask=mask)
        group = tl.arange(0, GROUPS)
        source = scales_ptr + token.to(tl.int64) * stride_scale_row + group.to(tl.int64) * stride_scale_group
        scale = tl.load(source, mask=group < groups, other=1.0)
        mask = (slot < K)[:, None] & (group < groups)[None, :]
        offsets = group.to(tl.int64)[None, :] * pairs + row[:, None]
        tl.store(out_scales_ptr + offsets, tl.broadcast_to(scale[None, :], (K_LANES, GROUPS)), mask=mask)
    else:
        tl.store(start_ptr + expert, row, mask=expert <= experts)


@implements("route_and_permute", "triton")
def triton_route_and_permute(logits: torch.Tensor, x: QuantizedTensor, k: int, renormalize: bool) -> Permuted:
    """See :func:`route_and_permute`."""
    (tokens, experts), device = logits.shape, logits.device
    if tokens > _MOST_TOKENS:
        experts_of, weights = triton_route(logits, k, renormalize)
        segments = triton_segments(experts_of, experts, 1)
        return weights, segments, triton_gather_quantized(x, segments.pair, k)
    chooses = tokens <= _TOKENS_CHOSEN_BY_ALL
    if chooses:
        experts_of, weights = logits, torch.empty((tokens, k), dtype=torch.float32, device=device)
    else:
        experts_of, weights = triton_route(logits, k, renormalize)
    row, pair, start = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in ((tokens, k), tokens * k, experts + 1)
    )
    out = empty_rowwise(tokens * k, x.qdata.shape[1], device)
    lanes, groups = lanes_of(k, experts), x.scales.shape[1]
    source = x.qdata.contiguous().view(torch.int32)
    _permute_kernel[(tokens + ceil_div(experts + 1, lanes["K_LANES"]),)](
        logits.contiguous(),
        experts_of,  # not read if CHOOSES
        weights,
        source,
        x.scales,
        row,
        pair,
        start,
        out.qdata.view(torch.int32),
        out.scales,
        tokens,
        experts,
        source.shape[1],
        groups,
        x.scales.stride(0),
        x.scales.stride(1),
        CHOOSES=chooses,
        RENORMALIZE=renormalize,
        TOKENS=next_power_of_2(max(tokens, _WARPS)) if chooses else 1,
        **lanes,
        PAIRS=_PAIRS,
        TILE=min(_TILE, next_power_of_2(source.shape[1])),
        GROUPS=next_power_of_2(groups),
        num_warps=_WARPS,
    )
    return weights, Segments(row, pair, start), out


def _fake(logits, x, k, renormalize):
    tokens, experts = logits.shape
    segments = (logits.new_empty(shape, dtype=torch.int32) for shape in ((tokens, k), (tokens * k,), (experts + 1,)))
    return logits.new_empty((tokens, k)), *segments, fake_rowwise(x.qdata.new_empty((tokens * k, x.qdata.shape[1])))


@operator(
    "route_and_permute(Tensor logits, Quantized x, int k, bool renormalize)"
    " -> (Tensor, Tensor, Tensor, Tensor, Quantized)",
    fake=_fake,
)
def _route_and_permute(
    logits: torch.Tensor, x: QuantizedTensor, k: int, renormalize: bool
) -> tuple[torch.Tensor | QuantizedTensor, ...]:
    if logits.dtype != torch.float32 or logits.shape[:1] != x.qdata.shape[:1] or not 1 <= k <= logits.shape[1]:
        raise ValueError(
            "route_and_permute: expected [tokens, experts] FP32, [tokens, K] and k of the experts, got "
            f"{tuple(logits.shape)} {logits.dtype}, {tuple(x.qdata.shape)} and k={k}"
        )
    weights, segments, rows = lookup("route_and_permute", logits.device)(logits, x, k, renormalize)
    return weights, *segments, rows


def route_and_permute(logits: torch.Tensor, x: QuantizedTensor, k: int, renormalize: bool) -> Permuted:
    """``route``, ``segments`` with ``align`` 1 and ``gather_quantized`` of their pairs.

    Args:
        logits: ``[T, E]`` FP32. x: rowwise qdata ``[T, K]`` and scales ``[T, K/128]``, K a multiple of 128.
        k: experts per token. renormalize: whether its weights add up to 1.

    Returns:
        (weights ``[T, k]`` FP32, :class:`jetrl_verl.reference.Segments`, the rows of the pairs: qdata ``[T k, K]`` and
        scales ``[T k, K/128]``). No autograd.

    Raises:
        ValueError: logits of another type or shape, ``k`` outside 1 to E, or K no multiple of 128.
    """
    require_groups("route_and_permute", x.qdata)
    weights, row, pair, start, rows = _route_and_permute(logits, x, k, renormalize)
    return weights, Segments(row, pair, start), rows
