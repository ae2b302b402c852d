# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Causal attention with grouped queries, ``softmax(q k^T scale) v``; a query has the same bits in any batch and chunk.

:func:`attention` has packed sequences (training), :func:`paged_attention` new tokens and a paged cache (rollout). On a
GPU both are FlashAttention 3 of the vLLM wheel with ``num_splits=1``: one thread block reads a query's keys in order.
On the CPU every sum is exact (:func:`_attend`).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl import reference
from jetrl_verl.kernels import vllm_kernels
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.dispatch import CPU_ALONE, Backends, implements, lookup
from jetrl_verl.kernels.kv_cache import QuantizedKV, dequantize_kv, quantize_dequantize_kv, quantize_kv
from jetrl_verl.kernels.operator import dispatched, operator, require_bf16
from jetrl_verl.kernels.recomputation import computed_once
from jetrl_verl.kernels.views import as_type
from jetrl_verl.reference.kv_cache import HEAD_DIM
from jetrl_verl.reference.reproducible import (
    MANTISSA_BITS,
    exp,
    exponent_of,
    grid_bits,
    on_grid,
    power_of_two,
    sum_of_fractions,
)

__all__ = [
    "HEAD_DIMS",
    "attention",
    "attention_fp8",
    "cache_form",
    "paged_attention",
    "paged_attention_fp8",
    "write_pages",
]

HEAD_DIMS = (64, 128, 256)
"""Head dimensions for which decode, chunked prefill and whole sequences agree in every bit."""

FLASH_ATTENTION: Backends = {"cpu": ("reference",), "sm90": ("flash_attention_3",)}

_VALUE_BITS = 21
_KEYS = 1024
_WEIGHT_BITS = MANTISSA_BITS - _VALUE_BITS - int(math.log2(_KEYS))
_DENOMINATOR_BITS = 30
_SCORES = 2**17
"""Scores computed at a time (1 MiB in float64), so that passes over them stay in the cache."""


def check_head_dim(head_dim: int, supported: Sequence[int] = HEAD_DIMS) -> None:
    """Raise ``ValueError`` unless this head dimension is one of ``supported``."""
    if head_dim not in supported:
        raise ValueError(f"attention: expected heads of {' or '.join(map(str, supported))}, got heads of {head_dim}")


def cache_form(x: torch.Tensor) -> torch.Tensor:
    """Keys or values ``[..., D]`` BF16 as attention reads them and a rollout's cache must store them; BF16."""
    return x if x.is_cuda else on_grid(x, _VALUE_BITS)


def write_pages(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store tokens in a BF16 cache, in place and in cache form.

    Args:
        k, v: ``[T, H, D]``, at least as many tokens as slots. keys, values: ``[pages, block size, H, D]``, any strides.
        slots: ``[T]``, page times block size plus place; negative: the token is not stored. On a GPU, where only the
            contract check calls this, none may be negative.
    """
    k, v = k[: len(slots)], v[: len(slots)]
    if not slots.is_cuda:
        tokens = (slots >= 0).nonzero().squeeze(1)
        k, v, slots = k[tokens], v[tokens], slots[tokens]
    page, place = slots // keys.shape[1], slots % keys.shape[1]
    for x, cache in ((k, keys), (v, values)):
        cache[page, place] = cache_form(x)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """CPU attention of padded sequences.

    Queries, keys and values are on grids per token and head, so scores are exact in float64. The
    denominator sums ``p = exp(s - max s)`` in steps of 2^-30. In the numerator a value row ``v_j < 2^e_j`` has its own
    grid, so ``p_j 2^e_j`` is rounded to a grid per query, and

        o = sum_j round(p_j 2^e_j) (v_j 2^-e_j) / sum_j p_j

    is exact over ``_KEYS`` keys; blocks of that many keys, counted from the sequence's first, are added in order.

    Args:
        q: ``[B, Tq, H, D]`` BF16. k, v: ``[B, Tk, Hkv, D]`` in cache form, arbitrary beyond a sequence.
        positions: ``[B, Tq]`` position of each query in its sequence: it attends to keys up to that one.
        lengths: ``[B]`` keys of each sequence, at least 1.

    Returns:
        ``[B, Tq, H, D]`` BF16; rows of queries beyond a sequence are undefined.
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    q = on_grid(q, grid_bits(head_dim, 1) - _VALUE_BITS).double()
    q = q.reshape(batch, queries, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * queries, head_dim)
    k = k.transpose(1, 2).double()
    valid = torch.arange(keys) < lengths[:, None]
    v = v.masked_fill(~valid[:, :, None, None], 0).transpose(1, 2)
    value_exponents = exponent_of(v.abs().amax(dim=-1))[:, :, None, :]
    v = v.double()

    hidden = torch.arange(keys) > positions[:, :, None]
    hidden = (hidden | ~valid[:, None, :]).repeat(1, group, 1)[:, None]
    scores = (q @ k.transpose(-1, -2)).mul_(scale).masked_fill_(hidden, -torch.inf)
    p = exp(scores.sub_(scores.amax(dim=-1, keepdim=True)))
    denominator = sum_of_fractions(p, _DENOMINATOR_BITS)
    p.mul_(power_of_two(value_exponents))
    steps = exponent_of(p.amax(dim=-1, keepdim=True)) - _WEIGHT_BITS
    p.mul_(power_of_two(-steps)).round_().mul_(power_of_two(steps))
    # The product below is with v itself, so the weight loses v's power of two again.
    p.mul_(power_of_two(-value_exponents))
    out = p[..., :_KEYS] @ v[..., :_KEYS, :]
    for start in range(_KEYS, keys, _KEYS):
        out += p[..., start : start + _KEYS] @ v[..., start : start + _KEYS, :]
    out = out.div_(denominator).view(batch, kv_heads, group, queries, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, head_dim).to(torch.bfloat16)


def _attend_in_pieces(q, k, v, positions, lengths, scale) -> torch.Tensor:
    """:func:`_attend` of a few sequences at a time."""
    per_sequence = q.shape[1] * q.shape[2] * k.shape[1]
    step = max(1, _SCORES // max(per_sequence, 1))
    pieces = (slice(start, start + step) for start in range(0, len(q), step))
    return torch.cat([_attend(q[i], k[i], v[i], positions[i], lengths[i], scale) for i in pieces])


def _padded(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed sequences as rows: token indices ``[B, T]`` (clamped beyond the end), which of them exist, and lengths."""
    lengths = cu_seqlens.diff().long()
    columns = torch.arange(int(lengths.max()))
    real = columns < lengths[:, None]
    index = (cu_seqlens[:-1, None] + columns).clamp_(max=int(cu_seqlens[-1]) - 1)
    return index.long(), real, lengths


@implements("attention", "reference")
def reference_attention(q, k, v, cu_seqlens, max_seqlen: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[N, H, D]`` BF16 and an empty log-sum-exp: the backward recomputes it."""
    index, real, lengths = _padded(cu_seqlens)
    positions = torch.arange(index.shape[1]).expand_as(index)
    out = _attend_in_pieces(q[index], cache_form(k)[index], cache_form(v)[index], positions, lengths, scale)
    return out[real], q.new_empty(0, dtype=torch.float32)


@implements("attention_backward", "reference")
def reference_attention_backward(grad_out, q, k, v, cu_seqlens, out, lse, max_seqlen: int, scale: float):
    """Gradients by FP32 recomputation, straight through the rounding to grids."""
    index, real, _ = _padded(cu_seqlens)
    group = q.shape[1] // k.shape[1]
    gathered = [x[index].float().transpose(1, 2) for x in (q, k, v, grad_out)]
    gathered[1:3] = [x.repeat_interleave(group, dim=1) for x in gathered[1:3]]
    q32, k32, v32, dout = gathered
    dout = dout * real[:, None, :, None]
    tokens = index.shape[1]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu_(1)
    p = (q32 @ k32.transpose(-1, -2)).mul_(scale).masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    dv = p.transpose(-1, -2) @ dout
    dp = dout @ v32.transpose(-1, -2)
    ds = p * (dp - (dp * p).sum(dim=-1, keepdim=True)) * scale
    dq, dk = ds @ k32, ds.transpose(-1, -2) @ q32

    def packed(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        gradient = gradient.unflatten(1, (like.shape[1], -1)).sum(dim=2)
        return gradient.transpose(1, 2)[real].to(like.dtype)

    return packed(dq, q), packed(dk, k), packed(dv, v)


@implements("attention", "flash_attention_3")
def flash_attention_3(q, k, v, cu_seqlens, max_seqlen: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[N, H, D]`` and, for the backward, the log-sum-exp ``[H, N]`` FP32.

    Raises:
        RuntimeError: the GPU or the wheel has no FlashAttention 3.
    """
    return vllm_kernels.flash_attention_3(q, k, v, cu_seqlens, max_seqlen, scale)


@implements("attention_backward", "flash_attention_3")
def flash_attention_backward(grad_out, q, k, v, cu_seqlens, out, lse, max_seqlen: int, scale: float):
    """Gradients of q, k and v by torch's FlashAttention backward."""
    # Without dropout the random state is not read.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        as_type(grad_out, out.dtype).contiguous(),
        q,
        k,
        v,
        out,
        lse.contiguous(),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        True,
        unused,
        unused,
        scale=scale,
    )


def fake_attention(q, k, v, cu_seqlens, max_seqlen, scale):
    """Output and log-sum-exp of :func:`attention` on a GPU, for tracing."""
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def fake_attention_backward(grad_out, q, k, v, cu_seqlens, out, lse, max_seqlen, scale):
    """Gradients of the operands, for tracing."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake(q, k, v, cu_seqlens, max_seqlen, scale):
    out, lse = fake_attention(q, k, v, cu_seqlens, max_seqlen, scale)
    return out, lse if q.is_cuda else lse.new_empty(0)


_attention = dispatched(
    "attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int max_seqlen, float scale) -> (Tensor, Tensor)",
    fake=_fake,
    backends=FLASH_ATTENTION,
    probe=lambda inputs: attention(*inputs.sequences),
)
_attention_backward = dispatched(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor out, Tensor lse,"
    " int max_seqlen, float scale) -> (Tensor, Tensor, Tensor)",
    fake=fake_attention_backward,
    backends=FLASH_ATTENTION,
)


def _needed(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a forward that its backward reads: none where it recomputes the log-sum-exp."""
    return (out, lse) if lse.numel() else (lse, lse)


class PackedAttention(torch.autograd.Function):
    """Attention over packed sequences by a forward and a backward with the signatures of the operators above."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, max_seqlen: int, scale: float, run: Callable, run_backward: Callable):
        ctx.max_seqlen, ctx.scale, ctx.run_backward = max_seqlen, scale, run_backward
        out, lse = computed_once(run, q, k, v, cu_seqlens, max_seqlen, scale)
        ctx.save_for_backward(q, k, v, *_needed(out, lse))
        keep(ctx, cu_seqlens)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ctx.run_backward(grad_out, q, k, v, *kept(ctx), out, lse, ctx.max_seqlen, ctx.scale)
        return *gradients, None, None, None, None, None


class _PackedAttentionFP8(torch.autograd.Function):
    """The same with keys and values of an FP8 KV cache, saved as FP8 data or dequantized; straight-through gradient."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, max_seqlen: int, scale: float, keep_fp8: bool):
        ctx.max_seqlen, ctx.scale = max_seqlen, scale
        if keep_fp8:
            saved, k, v = quantize_kv(k, v)
        else:
            saved = k, v = quantize_dequantize_kv(k, v)
        out, lse = computed_once(_attention, q, k, v, cu_seqlens, max_seqlen, scale)
        ctx.save_for_backward(q, *saved, *_needed(out, lse))
        keep(ctx, cu_seqlens)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):
        # Read once: under activation checkpointing each read is another forward.
        q, *saved, out, lse = ctx.saved_tensors
        k, v = saved if len(saved) == 2 else dequantize_kv(QuantizedKV(*saved))
        gradients = _attention_backward(grad_out, q, k, v, *kept(ctx), out, lse, ctx.max_seqlen, ctx.scale)
        return *gradients, None, None, None, None


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    require_bf16("attention", q=q, k=k, v=v)
    check_head_dim(q.shape[-1])


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """Attention within each of several packed sequences; differentiable in ``q``, ``k`` and ``v``.

    Args:
        q: ``[N, H, D]`` BF16. k, v: ``[N, Hkv, D]`` BF16, ``Hkv`` dividing ``H``.
        cu_seqlens: ``[B + 1]`` int32, first token of each sequence and, last, ``N``; no sequence is empty.
        max_seqlen: length of the longest. scale: factor of the scores, usually ``D ** -0.5``.

    Returns:
        ``[N, H, D]`` BF16.

    Raises:
        TypeError: an operand is not BF16. ValueError: heads of another dimension than ``HEAD_DIMS``.
    """
    _check(q, k, v)
    return PackedAttention.apply(q, k, v, cu_seqlens, max_seqlen, scale, _attention, _attention_backward)


def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    *,
    keep_fp8: bool = True,
) -> torch.Tensor:
    """:func:`attention` to keys and values as an FP8 KV cache returns them, with straight-through gradients.

    Args:
        keep_fp8: whether keys and values are saved for the backward as FP8 data, half the bytes of BF16, at the cost of
            writing and dequantizing it. The bits are the same.
    """
    _check(q, k, v)
    return _PackedAttentionFP8.apply(q, k, v, cu_seqlens, max_seqlen, scale, keep_fp8 and torch.is_grad_enabled())


def _attend_to_pages(q, read: Callable, block_size: int, cu_queries, lengths, block_table, scale) -> torch.Tensor:
    """Attention of each request's newest tokens; ``read(blocks, longest)`` returns keys and values ``[R, longest, Hkv,
    D]`` of requests with the cache blocks ``blocks [R, blocks]``."""
    out = torch.empty_like(q)
    new_tokens = cu_queries.diff()
    # Requests with the same number of new tokens go together: all decodes are one call.
    for count in new_tokens.unique().tolist():
        if not count:
            continue
        rows = (new_tokens == count).nonzero().squeeze(1)
        in_cache = lengths[rows].long()
        longest = int(in_cache.max())
        keys, values = read(block_table[rows, : -(-longest // block_size)].long(), longest)
        index = cu_queries[rows, None].long() + torch.arange(count)
        positions = (in_cache - count)[:, None] + torch.arange(count)
        out[index] = _attend_in_pieces(q[index], keys, values, positions, in_cache, scale)
    return out


@implements("paged_attention", "reference")
def reference_paged_attention(q, key_cache, value_cache, cu_queries, lengths, block_table, scale) -> torch.Tensor:
    """As :func:`paged_attention`."""

    def read(blocks: torch.Tensor, longest: int) -> list[torch.Tensor]:
        # Cut before the copy, which is the time of a decode step, where one block is enough.
        caches = (key_cache[:, :, :longest], value_cache[:, :, :longest])
        return [cache[blocks].transpose(2, 3).flatten(1, 2)[:, :longest] for cache in caches]

    return _attend_to_pages(q, read, key_cache.shape[2], cu_queries, lengths, block_table, scale)


@implements("paged_attention_fp8", "reference")
def reference_paged_attention_fp8(q, cache, cu_queries, lengths, block_table, scale) -> torch.Tensor:
    """As :func:`paged_attention_fp8`."""

    def read(blocks: torch.Tensor, longest: int) -> list[torch.Tensor]:
        return [x.transpose(2, 3).flatten(1, 2)[:, :longest] for x in reference.read_cache(cache[blocks])]

    block_size = cache.shape[2] * reference.UNIT_TOKENS
    return _attend_to_pages(q, read, block_size, cu_queries, lengths, block_table, scale)


@operator(
    "paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor cu_queries, Tensor lengths,"
    " Tensor block_table, float scale) -> Tensor",
    fake=lambda q, *_: torch.empty_like(q),
    backends=CPU_ALONE,
)
def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_queries: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of each request's newest tokens to its cache, on the CPU; no gradient.

    On a GPU the rollout reaches the same kernel through vLLM's own FlashAttention backend (rollout/attention.py).

    Args:
        q: ``[N, H, D]`` BF16, the new tokens of one request after another.
        key_cache, value_cache: ``[blocks, Hkv, block size, D]`` BF16 in :func:`cache_form`, with the new tokens.
        cu_queries: ``[R + 1]`` first query of each request and, last, ``N``. lengths: ``[R]`` tokens in each cache.
        block_table: ``[R, most blocks]`` cache blocks of each request in order.

    Returns:
        ``[N, H, D]`` BF16.
    """
    require_bf16("paged_attention", q=q, key_cache=key_cache, value_cache=value_cache)
    check_head_dim(q.shape[-1])
    run = lookup("paged_attention", q.device)
    return run(q, key_cache, value_cache, cu_queries, lengths, block_table, scale)


@operator(
    "paged_attention_fp8(Tensor q, Tensor cache, Tensor cu_queries, Tensor lengths, Tensor block_table, float scale)"
    " -> Tensor",
    fake=lambda q, *_: torch.empty_like(q),
    backends=CPU_ALONE,
)
def paged_attention_fp8(
    q: torch.Tensor,
    cache: torch.Tensor,
    cu_queries: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """:func:`paged_attention` over an FP8 KV cache ``[pages, Hkv, units, 4128]`` (reference/kv_cache.py)."""
    require_bf16("paged_attention_fp8", q=q)
    check_head_dim(q.shape[-1], (HEAD_DIM,))
    return lookup("paged_attention_fp8", q.device)(q, cache, cu_queries, lengths, block_table, scale)
