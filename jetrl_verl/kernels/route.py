# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which k experts a token goes to and with what weights, from FP32 router logits.

The k largest logits, largest first, ties by expert number. Weights are the softmax over all experts (Qwen3-MoE's
``norm_topk_prob=false``) or over the k (``true``), in FP32. A logit that is not finite gives weights that are not.
"""

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl import reference
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.reference.reproducible import exp, sum_of_fractions

__all__ = ["route"]

_TERM_BITS = 40
"""Binary places of a term of the softmax denominator over all experts: sums over up to 2^13 experts are exact."""
_TERM_ONE = tl.constexpr(2.0**_TERM_BITS)
_TAKEN = tl.constexpr(-(2**31))
"""Below the sort key of every number, minus infinity included."""
_TOKENS = 4
"""Tokens per program, one warp each: the maximum of 32-bit integers over a warp is one instruction."""


@implements("route", "reference")
def reference_route(logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`route`."""
    experts = reference.top_k(logits, k)
    chosen = logits.gather(1, experts.long()).double()
    terms = exp(chosen - chosen[:, :1])
    over = terms if renormalize else exp(logits.double() - chosen[:, :1])
    weights = terms / sum_of_fractions(over, _TERM_BITS)
    weights.masked_fill_(~logits.isfinite().all(dim=1, keepdim=True), torch.nan)
    return experts, weights.float()


@jit
def choose_experts(
    logits_ptr, token, tokens, experts,
    K: tl.constexpr, K_LANES: tl.constexpr, LANES: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """(experts, weights) ``[N, K_LANES]`` of the tokens ``token [N]``; the first K of a row are valid.

    The bits of a row do not depend on the tile's shape: maxima are integers, the k terms are added slot by slot, and
    the sum over all experts is a sum of integers.
    """
    expert, slot = tl.arange(0, LANES)[None, :], tl.arange(0, K_LANES)[None, :]
    valid = (token < tokens)[:, None] & (expert < experts)
    # Adding zero turns -0 into 0, which it equals.
    x = tl.load(logits_ptr + token.to(tl.int64)[:, None] * experts + expert, mask=valid, other=float("-inf")) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    # Sort keys in the order of the numbers: NaN above all, absent or taken experts below all.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(x != x, 0x7FFFFFFF, order)
    order = tl.where(expert < experts, order, _TAKEN)
    chosen = tl.zeros((token.shape[0], K_LANES), dtype=tl.int32)
    terms = tl.zeros((token.shape[0], K_LANES), dtype=tl.float32)
    for i in tl.static_range(K):
        best = tl.max(order, axis=1)[:, None]
        # Of equal logits the lowest number wins.
        number = tl.min(tl.where(order == best, expert, LANES), axis=1)[:, None]
        logit = tl.where(best < 0, best ^ 0x7FFFFFFF, best).to(tl.float32, bitcast=True)
        if i == 0:
            highest = logit
            term = tl.exp(logit - highest)
            total = term
        else:
            term = tl.exp(logit - highest)
            total += term
        chosen = tl.where(slot == i, number, chosen)
        terms = tl.where(slot == i, term, terms)
        order = tl.where(expert == number, _TAKEN, order)
    if not RENORMALIZE:
        # Minus infinity adds zero; an infinity that won gives NaN.
        fractions = (tl.exp(x - highest) * _TERM_ONE).to(tl.int64)
        total = (tl.sum(fractions, axis=1).to(tl.float32) / _TERM_ONE)[:, None]
    return chosen, tl.div_rn(terms, tl.broadcast_to(total, terms.shape))


@jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits_ptr, experts_ptr, weights_ptr, tokens, experts,
    K: tl.constexpr, K_LANES: tl.constexpr, LANES: tl.constexpr, RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    chosen, weights = choose_experts(logits_ptr, token, tokens, experts, K, K_LANES, LANES, RENORMALIZE)
    slot = tl.arange(0, K_LANES)[None, :]
    place, mask = token.to(tl.int64)[:, None] * K + slot, (token < tokens)[:, None] & (slot < K)
    tl.store(experts_ptr + place, chosen, mask=mask)
    tl.store(weights_ptr + place, weights, mask=mask)


def lanes_of(k: int, experts: int) -> dict[str, int]:
    """Compile-time sizes for :func:`choose_experts`."""
    return {"K": k, "K_LANES": next_power_of_2(k), "LANES": next_power_of_2(experts)}


@implements("route", "triton")
def triton_route(logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`route`."""
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    if tokens:
        _route_kernel[(ceil_div(tokens, _TOKENS),)](
            logits.contiguous(),
            chosen,
            weights,
            tokens,
            experts,
            **lanes_of(k, experts),
            RENORMALIZE=renormalize,
            TOKENS=_TOKENS,
            num_warps=_TOKENS,
        )
    return chosen, weights


def _fake(logits, k, renormalize):
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


@operator(
    "route(Tensor logits, int k, bool renormalize) -> (Tensor, Tensor)",
    fake=_fake,
    mixture_probe=lambda inputs: (*route(inputs.tied, 4, False), *route(inputs.tied, 4, True)),
)
def _route(logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.dtype != torch.float32 or logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(
            f"route: expected [tokens, experts] FP32 and k of the experts, got {tuple(logits.shape)} {logits.dtype} "
            f"and k={k}"
        )
    return lookup("route", logits.device)(logits, k, renormalize)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, k: int, renormalize: bool):
        experts, weights = _route(logits, k, renormalize)
        ctx.renormalize, ctx.experts_in_all = renormalize, logits.shape[1]
        ctx.save_for_backward(experts, weights, *(() if renormalize else (logits,)))
        ctx.mark_non_differentiable(experts)
        return experts, weights

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dweights: torch.Tensor):
        experts, weights, *logits = ctx.saved_tensors
        experts = experts.long()
        # Gradient of a softmax over the k or over all: p_j (dp_j - sum_i p_i dp_i).
        weighted = weights * dweights
        inner = weighted.sum(dim=1, keepdim=True)
        if ctx.renormalize:
            dlogits = weights.new_zeros(len(weights), ctx.experts_in_all)
            return dlogits.scatter_(1, experts, weighted - weights * inner), None, None
        dlogits = logits[0].softmax(dim=1).mul_(-inner)
        return dlogits.scatter_add_(1, experts, weighted), None, None


def route(logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights; the weights are differentiable.

    Args:
        logits: ``[T, E]`` FP32. k: experts per token. renormalize: whether its weights add up to 1.

    Returns:
        experts ``[T, k]`` int32, by descending logit, and weights ``[T, k]`` FP32.

    Raises:
        ValueError: logits of another type or shape, or ``k`` outside 1 to E.
    """
    if torch.is_grad_enabled():
        return _Route.apply(logits, k, renormalize)
    return _route(logits, k, renormalize)
