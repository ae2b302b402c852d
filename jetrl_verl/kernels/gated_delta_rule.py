# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (reference/delta_net.py): l2 norms of queries and keys, gates, and one step per token.

``gated_delta_rule`` computes whole sequences, ``gated_delta_rule_update`` continues those of a rollout's slots: the
same bits, wherever a sequence is cut. The gradient is computed by chunks of 64 tokens from the saved inputs: on a CPU
in FP32, on a GPU by flash-linear-attention where it is installed, else by gated_delta_rule_gradient.py.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from packaging.version import Version
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.device.elementary import numbers_of, prefetch, sigmoid, softplus
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.gated_delta_rule_gradient import Gradients, gated_delta_rule_backward
from jetrl_verl.kernels.operator import operator, require_bf16, require_fp32, require_shape
from jetrl_verl.kernels.recomputation import computed_once
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.kernels.slots import read_slots, require_slots, write_slots, zero_padded
from jetrl_verl.kernels.views import as_type
from jetrl_verl.reference import delta_net
from jetrl_verl.reference.delta_net import HEAD, L2_EPS, LINEAR_SOFTPLUS, heads_of

__all__ = ["gated_delta_rule", "gated_delta_rule_update"]

# --- reference --------------------------------------------------------------------------------------------------------


@implements("gated_delta_rule", "reference")
def reference_gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens) -> torch.Tensor:
    """``[T, HV, 128]`` BF16."""
    nothing = b.new_zeros(len(cu_seqlens) - 1, b.shape[1], HEAD, HEAD)
    return delta_net.gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens, nothing)[0]


@implements("gated_delta_rule_update", "reference")
def reference_gated_delta_rule_update(qkv, b, a, a_log, dt_bias, states, slots, computed, cu_seqlens) -> torch.Tensor:
    """``[T, HV, 128]`` BF16; ``states`` are written in place."""
    state = read_slots(states, slots, computed)
    o, state = delta_net.gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens, state)
    write_slots(states, slots, cu_seqlens, state)
    return zero_padded(o, slots, cu_seqlens)


# --- Triton -----------------------------------------------------------------------------------------------------------

# A program has 32 or 64 of a head's values. Its state is four tiles [4, 8, 4, NEIGHBORS, 4], tile j of keys 4 i + j:
# four values and eight times four words of keys by lane, four warps of values, NEIGHBORS values and four words in a
# thread. So a thread adds 16 products, eight lanes add their sums, and a token waits for no other warp. Triton lays
# tiles out along what it sees to be contiguous; the permutation ``^ 1`` of an index hides it.
_LAYOUT = {"VALUES": 4, "LANES": 8, "WARPS": 4, "WORDS": 4}
_MANY_HEADS = 256
"""Heads of all sequences from which a thread has four values, which share its keys; programs still fill the GPU."""
_TOKENS = 4
"""Tokens of a warp that computes norms and gates."""
_SHARE_FROM = 4
"""Tokens a request, on average, from which norms and gates are computed once, in a launch of their own."""
_MOST_REGISTERS = {(True, 2): 128, (True, 4): 168, (False, 2): 168}
"""For four or three programs a multiprocessor. What does not fit, the state's addresses, is not read in the loop."""
_WIDTH: tl.constexpr = tl.constexpr(HEAD)
_SCALE: tl.constexpr = tl.constexpr(HEAD**-0.5)
_EPS: tl.constexpr = tl.constexpr(L2_EPS)
_AHEAD: tl.constexpr = tl.constexpr(8)
_LINEAR: tl.constexpr = tl.constexpr(LINEAR_SOFTPLUS)
# One compilation whatever the sizes, since the order of a sum follows from it.
_SIZES = ["tokens", "sequences", "keys", "heads", "stride_b", "stride_a"]
_SIZES += ["stride_slot", "stride_head", "stride_key", "stride_value", "paged"]
_POINTERS = ["words_ptr", "values_ptr", "b_ptr", "a_ptr", "a_log_ptr", "dt_bias_ptr", "states_ptr"]
_POINTERS += ["slots_ptr", "computed_ptr", "cu_ptr", "out_ptr"]


@jit
def _sum_over_keys(x0, x1, x2, x3, y0, y1, y2, y3):
    sum0, sum1 = tl.sum(x0 * y0, axis=4, keep_dims=True), tl.sum(x1 * y1, axis=4, keep_dims=True)
    sum2, sum3 = tl.sum(x2 * y2, axis=4, keep_dims=True), tl.sum(x3 * y3, axis=4, keep_dims=True)
    return tl.sum((sum0 + sum1) + (sum2 + sum3), axis=1, keep_dims=True)


@jit
def _norms_of(q_words, k_words):
    """What a token's query and key are multiplied by, and their product, from words laid out as the state's."""
    q0, q1, q2, q3 = numbers_of(q_words)
    k0, k1, k2, k3 = numbers_of(k_words)
    q_norm = tl.rsqrt(_sum_over_keys(q0, q1, q2, q3, q0, q1, q2, q3) + _EPS) * _SCALE
    k_norm = tl.rsqrt(_sum_over_keys(k0, k1, k2, k3, k0, k1, k2, k3) + _EPS)
    return q_norm, k_norm, _sum_over_keys(q0, q1, q2, q3, k0, k1, k2, k3)


@jit
def _gates_of(b, a, a_log, dt_bias):
    """Decay and beta."""
    rate = -tl.exp(a_log.to(tl.bfloat16).to(tl.float32))
    return tl.exp(rate * softplus(a + dt_bias.to(tl.bfloat16).to(tl.float32), _LINEAR)), sigmoid(b)


# What a token's programs share, computed once where there are many tokens; the rule's kernel has the same bits.
@jit(do_not_specialize=["tokens", "keys", "heads", "stride_b", "stride_a"])
def _shared_kernel(
    words_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, norms_ptr, gates_ptr, tokens, keys, heads, stride_b, stride_a,
    TOKENS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, WORDS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    start, key = tl.program_id(0) * TOKENS * WARPS, tl.program_id(1)
    token = start + tl.arange(0, WARPS)[None, None, :, None, None] * TOKENS
    token = tl.broadcast_to(token + (tl.arange(0, TOKENS) ^ 1)[:, None, None, None, None], (TOKENS, 1, WARPS, 1, 1))
    word = tl.arange(0, LANES)[None, :, None, None, None] * WORDS + (tl.arange(0, WORDS) ^ 1)[None, None, None, None, :]
    place = token.to(tl.int64) * ((2 * keys + heads) * (_WIDTH // 4)) + key * (_WIDTH // 4) + word
    known = (token < tokens) & (word >= 0)
    q_words = tl.load(words_ptr + place, mask=known, other=0)
    k_words = tl.load(words_ptr + keys * (_WIDTH // 4) + place, mask=known, other=0)
    q_norm, k_norm, q_k = _norms_of(q_words, k_words)
    norms = norms_ptr + (token.to(tl.int64) * keys + key) * 3
    tl.store(norms, q_norm, mask=token < tokens)
    tl.store(norms + 1, k_norm, mask=token < tokens)
    tl.store(norms + 2, q_k, mask=token < tokens)
    group, number = heads // keys, tl.arange(0, HEADS)[None, :]
    row, head = (start + tl.arange(0, TOKENS * WARPS))[:, None], key * group + number
    known = (row < tokens) & (number < group)
    b = tl.load(b_ptr + row.to(tl.int64) * stride_b + head, mask=known, other=0.0)
    a = tl.load(a_ptr + row.to(tl.int64) * stride_a + head, mask=known, other=0.0)
    a_log, dt_bias = (
        tl.load(a_log_ptr + head, mask=number < group, other=0.0),
        tl.load(dt_bias_ptr + head, mask=number < group, other=0.0),
    )
    decay, beta = _gates_of(b, a, a_log, dt_bias)
    gates = gates_ptr + (row.to(tl.int64) * heads + head) * 2
    tl.store(gates, decay, mask=known)
    tl.store(gates + 1, beta, mask=known)


@jit
def _load_state(ptr, neighbor, known, PAIRED: tl.constexpr):
    """A tile of the state, FP32; ``ptr`` to int64 words of two neighboring values or to single ones."""
    if PAIRED:
        words = tl.load(ptr, mask=known, other=0)
        return tl.where(neighbor == 0, words.to(tl.int32), (words >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr, mask=known, other=0.0)


@jit
def _store_state(ptr, state, neighbor, known, PAIRED: tl.constexpr):
    if PAIRED:
        halves = (state.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) << (32 * neighbor).to(tl.int64)
        tl.store(ptr, tl.sum(halves, axis=3, keep_dims=True), mask=known)
    else:
        tl.store(ptr, state, mask=known)


@jit
def _vectors(words_ptr, keys, values_ptr):
    return tl.load(words_ptr), tl.load(words_ptr + keys * (_WIDTH // 4)), tl.load(values_ptr)


@jit
def _scalars(b_ptr, a_ptr, SHARED: tl.constexpr):
    b, a = tl.load(b_ptr), tl.load(a_ptr)
    if SHARED:
        return b, tl.load(b_ptr + 1), tl.load(b_ptr + 2), a, tl.load(a_ptr + 1)
    else:
        return b, a, b, b, b


@jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _rule_kernel(
    words_ptr, values_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, states_ptr, slots_ptr,
    computed_ptr, cu_ptr, out_ptr, tokens, sequences, keys, heads, stride_b, stride_a, stride_slot, stride_head,
    stride_key, stride_value, paged, SHARED: tl.constexpr, PAIRED: tl.constexpr,
    VALUES: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, NEIGHBORS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = _WIDTH // (VALUES * WARPS * NEIGHBORS)
    program = tl.program_id(0)
    slice, head, sequence = program % SLICES, program // SLICES % heads, program // SLICES // heads
    # The programs after those of the sequences write zeros after the last sequence.
    known = sequence < sequences
    first, last = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1, mask=known, other=tokens)
    slot = tl.load(slots_ptr + sequence, mask=known & (paged != 0), other=0).to(tl.int64)
    slot = tl.where(known, slot, -1)
    resumed = tl.load(computed_ptr + sequence, mask=known & (paged != 0), other=0) > 0

    pair = (slice * WARPS + tl.arange(0, WARPS)[None, None, :, None, None]) * VALUES
    pair += (tl.arange(0, VALUES) ^ 1)[:, None, None, None, None]
    neighbor = (tl.arange(0, NEIGHBORS) ^ 1)[None, None, None, :, None]
    value = tl.broadcast_to(pair * NEIGHBORS + neighbor, (VALUES, LANES, WARPS, NEIGHBORS, 1))
    word = tl.arange(0, LANES)[None, :, None, None, None] * WORDS + (tl.arange(0, WORDS) ^ 1)[None, None, None, None, :]
    word = tl.broadcast_to(word, (VALUES, LANES, WARPS, 1, WORDS))
    # Of two values as one number, or of each one.
    states_ptr += slot * stride_slot + head * stride_head
    place = word * 4 * stride_key + (pair if PAIRED else value * stride_value)
    read = (place >= 0) & (slot >= 0) & resumed
    s0 = _load_state(states_ptr + place, neighbor, read, PAIRED)
    s1 = _load_state(states_ptr + stride_key + place, neighbor, read, PAIRED)
    s2 = _load_state(states_ptr + 2 * stride_key + place, neighbor, read, PAIRED)
    s3 = _load_state(states_ptr + 3 * stride_key + place, neighbor, read, PAIRED)

    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    start = tl.minimum(first, tokens - 1).to(tl.int64)  # a sequence without tokens loads another's
    row, key = (2 * keys + heads) * _WIDTH, head // (heads // keys)
    words_ptr += start * (row // 4) + key * (_WIDTH // 4)
    values_ptr += start * row
    own = (2 * keys + head) * _WIDTH + value
    # A lane's sector of the query, the key or the values, of 32 bytes.
    ahead = tl.arange(0, VALUES)[:, None, None, None, None]
    ahead = tl.where(ahead == 0, key, tl.where(ahead == 1, keys + key, 2 * keys + head)) * _WIDTH
    ahead += tl.broadcast_to(tl.arange(0, LANES)[None, :, None, None, None] * WORDS * 4, (VALUES, LANES, WARPS, 1, 1))
    # Of each token: b and a, or norms and gates.
    b_ptr += start * stride_b + (key * 3 if SHARED else head)
    a_ptr += start * stride_a + (head * 2 if SHARED else head)
    out_ptr += (start * heads + head) * _WIDTH
    q_words, k_words, v = _vectors(words_ptr + word, keys, values_ptr + own)
    c0, c1, c2, c3, c4 = _scalars(b_ptr, a_ptr, SHARED)
    for token in range(first, last):
        q0, q1, q2, q3 = numbers_of(q_words)
        k0, k1, k2, k3 = numbers_of(k_words)
        if SHARED:
            q_norm, k_norm, q_k, decay, beta = c0, c1, c2, c3, c4
        else:
            q_norm, k_norm, q_k = _norms_of(q_words, k_words)
            decay, beta = _gates_of(c0, c1, a_log, dt_bias)
        target = v.to(tl.float32)
        # The next token's operands, while these are used; later ones come from memory into the L2 cache.
        more = (token + 1 < last).to(tl.int32)  # the last token's are loaded again
        words_ptr += more * (row // 4)
        values_ptr += more * row
        b_ptr += more * stride_b
        a_ptr += more * stride_a
        q_words, k_words, v = _vectors(words_ptr + word, keys, values_ptr + own)
        c0, c1, c2, c3, c4 = _scalars(b_ptr, a_ptr, SHARED)
        if token + _AHEAD < last:
            prefetch(values_ptr + (_AHEAD - 1) * row + ahead)
        # Norms and decay multiply sums over keys, not the keys, and o = S'^T q comes from S^T q: both sums at once.
        recalled = _sum_over_keys(s0, s1, s2, s3, k0, k1, k2, k3)
        asked = _sum_over_keys(s0, s1, s2, s3, q0, q1, q2, q3)
        delta = tl.fma(-decay * k_norm, recalled, target) * (beta * k_norm)
        s0, s1 = tl.fma(decay, s0, k0 * delta), tl.fma(decay, s1, k1 * delta)
        s2, s3 = tl.fma(decay, s2, k2 * delta), tl.fma(decay, s3, k3 * delta)
        o = tl.fma(decay * q_norm, asked, q_norm * q_k * delta)
        tl.store(out_ptr + value, tl.where(slot >= 0, o, 0.0).to(tl.bfloat16))
        out_ptr += heads * _WIDTH
    written = (place >= 0) & (slot >= 0) & (paged != 0) & (first < last)
    _store_state(states_ptr + place, s0, neighbor, written, PAIRED)
    _store_state(states_ptr + stride_key + place, s1, neighbor, written, PAIRED)
    _store_state(states_ptr + 2 * stride_key + place, s2, neighbor, written, PAIRED)
    _store_state(states_ptr + 3 * stride_key + place, s3, neighbor, written, PAIRED)


@implements("gated_delta_rule_update", "triton")
def triton_gated_delta_rule_update(qkv, b, a, a_log, dt_bias, states, slots, computed, cu_seqlens) -> torch.Tensor:
    """As :func:`reference_gated_delta_rule_update`; without states every sequence starts here."""
    qkv, (tokens, heads), sequences = qkv.contiguous(), b.shape, len(cu_seqlens) - 1
    b, a = (x if x.stride(1) == 1 else x.contiguous() for x in (b, a))
    keys = (qkv.shape[1] // HEAD - heads) // 2
    out = torch.empty(tokens, heads, HEAD, dtype=torch.bfloat16, device=qkv.device)
    if not tokens:
        return out
    paged, shared = states is not None, tokens >= _SHARE_FROM * sequences
    words = qkv.view(torch.int64)
    # In vLLM's types, so that both sides compile one kernel.
    a_log, dt_bias = a_log.float().contiguous(), dt_bias.to(torch.bfloat16).contiguous()
    if shared:
        norms, gates = b.new_empty(tokens, keys * 3), b.new_empty(tokens, heads * 2)
        _shared_kernel[(ceil_div(tokens, _TOKENS * _LAYOUT["WARPS"]), keys)](
            words,
            b,
            a,
            a_log,
            dt_bias,
            norms,
            gates,
            tokens,
            keys,
            heads,
            b.stride(0),
            a.stride(0),
            TOKENS=_TOKENS,
            LANES=_LAYOUT["LANES"],
            WARPS=_LAYOUT["WARPS"],
            WORDS=_LAYOUT["WORDS"],
            HEADS=next_power_of_2(heads // keys),
            num_warps=_LAYOUT["WARPS"],
        )
        b, a = norms, gates
    neighbors = 4 if shared and not paged and sequences * heads >= _MANY_HEADS else 2
    strides = states.stride() if paged else (0, 0, 0, 1)
    paired = neighbors == 2 and strides[3] == 1 and all(stride % 2 == 0 for stride in strides[:3])
    if paged and paired:
        states, strides = states.view(torch.int64), [stride // 2 for stride in strides]
    # Pointers of what is absent are never dereferenced.
    _rule_kernel[((sequences + 1) * heads * (HEAD // (16 * neighbors)),)](
        words,
        qkv,
        b,
        a,
        a_log,
        dt_bias,
        states if paged else (words if paired else b),
        slots if paged else cu_seqlens,
        computed if paged else cu_seqlens,
        cu_seqlens,
        out,
        tokens,
        sequences,
        keys,
        heads,
        b.stride(0),
        a.stride(0),
        *strides,
        int(paged),
        SHARED=shared,
        PAIRED=paired,
        **_LAYOUT,
        NEIGHBORS=neighbors,
        num_warps=_LAYOUT["WARPS"],
        maxnreg=_MOST_REGISTERS[shared, neighbors],
    )
    return out


@implements("gated_delta_rule", "triton")
def triton_gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens) -> torch.Tensor:
    """As :func:`reference_gated_delta_rule`, by the update's kernel."""
    return triton_gated_delta_rule_update(qkv, b, a, a_log, dt_bias, None, None, None, cu_seqlens)


# --- gradient ---------------------------------------------------------------------------------------------------------


@cache
def _fla_rule() -> Callable | None:
    """``chunk_gated_delta_rule`` of flash-linear-attention (package fla-core), None where it has no gradient.

    Its gradient refuses Hopper under Triton from 3.4 to before 3.7.1, which compiles it wrongly.
    """
    if (3, 4) <= Version(triton.__version__).release < (3, 7, 1):
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


def fla_gradients(do, qkv, b, a, a_log, dt_bias, cu_seqlens) -> Gradients:
    """As ``gated_delta_rule_backward`` by flash-linear-attention, whose products round their operands to BF16."""
    with torch.enable_grad():
        leaves = [x.requires_grad_() for x in (qkv.detach(), *(x.detach().float() for x in (b, a, a_log, dt_bias)))]
        q, k, v = heads_of(leaves[0], b.shape[1])
        q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], dim=1) for x in (q, k))
        b, a, a_log, dt_bias = leaves[1:]
        g, beta = -a_log.exp() * F.softplus(a + dt_bias, threshold=LINEAR_SOFTPLUS), b.sigmoid()
        batch = (x[None].contiguous() for x in (q, k, v, g, beta.to(q.dtype)))
        # The caller's own tensor of boundaries, by which fla caches what it derives from them.
        o, _ = _fla_rule()(*batch, scale=HEAD**-0.5, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
    return torch.autograd.grad(o, leaves, do[None])


# --- torch operators --------------------------------------------------------------------------------------------------


def _fake(qkv, b, *_):
    return qkv.new_empty(*b.shape, HEAD)


@operator(
    "gated_delta_rule(Tensor qkv, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias, Tensor cu_seqlens) -> Tensor",
    fake=_fake,
)
def _gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens) -> torch.Tensor:
    return lookup("gated_delta_rule", qkv.device)(qkv, b, a, a_log, dt_bias, cu_seqlens)


@operator(
    "gated_delta_rule_update(Tensor qkv, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias, Tensor(a!) states,"
    " Tensor slots, Tensor computed, Tensor cu_seqlens) -> Tensor",
    fake=_fake,
)
def gated_delta_rule_update(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    computed: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """:func:`gated_delta_rule` of the next tokens of requests, for inference.

    Args:
        qkv: ``[T, C]`` BF16 of ``causal_conv1d_update``. b, a, a_log, dt_bias: as of :func:`gated_delta_rule`.
        states: ``[slots, HV, 128, 128]`` FP32, keys' features first, any strides, written in place.
        slots, computed, cu_seqlens: as of ``causal_conv1d_update``.

    Returns:
        ``[T, HV, 128]`` BF16.

    Raises:
        TypeError: an operand of another type. ValueError: shapes that do not fit.
    """
    _check("gated_delta_rule_update", qkv, b, a, a_log, dt_bias)
    require_fp32("gated_delta_rule_update", states=states)
    require_shape("gated_delta_rule_update", "states", states, (states.shape[0], b.shape[1], HEAD, HEAD))
    require_slots("gated_delta_rule_update", slots, computed, cu_seqlens)
    run = lookup("gated_delta_rule_update", qkv.device)
    return run(qkv, b, a, a_log, dt_bias, states, slots, computed, cu_seqlens)


def _check(operation: str, qkv, b, a, a_log, dt_bias) -> None:
    require_bf16(operation, qkv=qkv)
    require_fp32(operation, b=b, a=a)
    require_shape(operation, "b", b, (len(qkv), b.shape[-1]))
    for name, tensor, shape in (("a", a, b.shape), ("a_log", a_log, b.shape[1:]), ("dt_bias", dt_bias, b.shape[1:])):
        require_shape(operation, name, tensor, shape)
    keys, rest = divmod(qkv.shape[1] - HEAD * b.shape[1], 2 * HEAD)
    if rest or keys < 1 or b.shape[1] % keys:
        raise ValueError(
            f"{operation}: {qkv.shape[1]} columns are not query, key and {b.shape[1]} value heads of {HEAD}, with as "
            "many value heads for each key head; pass the convolution's q | k | v"
        )


# --- functions --------------------------------------------------------------------------------------------------------


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, b, a, a_log, dt_bias, cu_seqlens):
        ctx.save_for_backward(qkv, b, a)
        keep(ctx, a_log, dt_bias, cu_seqlens)
        return computed_once(_gated_delta_rule, qkv, b, a, a_log, dt_bias, cu_seqlens)

    @staticmethod
    @once_differentiable
    def backward(ctx, do: torch.Tensor):
        (qkv, b, a), (a_log, dt_bias, cu_seqlens) = ctx.saved_tensors, kept(ctx)
        with_fla = qkv.is_cuda and _fla_rule() is not None
        gradients = fla_gradients if with_fla else gated_delta_rule_backward
        rounded = (x.to(torch.bfloat16) for x in (a_log, dt_bias))
        with torch.autocast(qkv.device.type, enabled=False):  # products stay FP32
            dqkv, db, da, da_log, ddt_bias = gradients(do, qkv, b, a, *rounded, cu_seqlens)
        return dqkv, db, da, as_type(da_log, a_log.dtype), as_type(ddt_bias, dt_bias.dtype), None


def gated_delta_rule(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """The recurrence over packed sequences, which begin with a state of zeros; differentiable in all but the last.

    Args:
        qkv: ``[T, C]`` BF16 of ``causal_conv1d``: q and k of HK heads, v of HV heads, all of 128 features.
        b, a: ``[T, HV]`` FP32. a_log, dt_bias: ``[HV]``, taken at their BF16 values.
        cu_seqlens: ``[B + 1]`` int32, first tokens of the sequences and T.

    Returns:
        ``[T, HV, 128]`` BF16.

    Raises:
        TypeError: an operand of another type. ValueError: shapes that do not fit.
    """
    _check("gated_delta_rule", qkv, b, a, a_log, dt_bias)
    if torch.is_grad_enabled():
        return _GatedDeltaRule.apply(qkv, b, a, a_log, dt_bias, cu_seqlens)
    return _gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens)
