# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of the gated delta rule (gated_delta_rule.py) by chunks of 64 tokens, without a promise of bits: FP32 on
the CPU; on a GPU six Triton kernels, with products of BF16 operands in FP32 and no atomic additions."""

import torch
import torch.nn.functional as F
import triton.language as tl

from jetrl_verl.kernels.device.elementary import sigmoid, softplus
from jetrl_verl.kernels.device.launch import INTERPRETED, jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.reference import delta_net
from jetrl_verl.reference.delta_net import HEAD, L2_EPS, LINEAR_SOFTPLUS, heads_of

Gradients = tuple[torch.Tensor, ...]

CHUNK = 64
"""Tokens of a chunk, counted from its sequence's first."""
_STATE_BYTES = 2**27
"""Of FP32 states whose gradient the CPU computes at once, in some twenty times as much memory."""

# Of a chunk of one head, with q and k normed and q scaled, G the sum of g up to a row, S the state before the chunk
# and E = exp(G_63 - G):
#   A_tj = beta_t (k_t k_j) exp(G_t - G_j), j < t     P_tj = (q_t k_j) exp(G_t - G_j), j <= t
#   (I + A) r = beta (v - exp(G) k S)     o = exp(G) q S + P r     S' = exp(G_63) S + (E k)^T r
# so that, where d is the gradient of what follows it,
#   dr = P^T do + E k dS'     (I + A)^T dy = dr     dv = beta dy     dbeta = dy r / beta
#   dA = -dy r^T     dP = do r^T     dS = exp(G_63) dS' + (exp(G) q)^T do - (beta exp(G) k)^T dy
# (Yang et al., arXiv 2412.06464, section 3.3, differentiated). Rows without a token are zero and change nothing.

# --- reference --------------------------------------------------------------------------------------------------------


def rule_gradients(do, q, k, v, g, beta, cu_seqlens) -> Gradients:
    """Gradients of q, k, v, g and beta, by products of matrices in a chunk and one step per chunk for the state.

    Args:
        do, q, k, v: ``[T, H, 128]``, queries normed and scaled, keys normed, of one type. g, beta: ``[T, H]``.
        cu_seqlens: ``[B + 1]``.
    """
    sequence, place = delta_net.places(cu_seqlens, len(q))
    chunks_before = F.pad(((cu_seqlens.diff() + CHUNK - 1) // CHUNK).cumsum(0), (1, 0))
    row = chunks_before[sequence] * CHUNK + place
    chunks = int(chunks_before[-1])
    # [chunks, H, 64, ...]
    do, q, k, v, g, beta = (
        x.new_zeros(chunks * CHUNK, *x.shape[1:]).index_copy(0, row, x).unflatten(0, (chunks, CHUNK)).transpose(1, 2)
        for x in (do, q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1))
    )
    begins = torch.zeros(chunks + 1, dtype=torch.bool).index_fill_(0, chunks_before, True).tolist()

    # In float64, since differences of large sums are what counts.
    total = g.double().cumsum(-2)
    decay = (total - total.mT).to(g.dtype).masked_fill(torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1), -torch.inf)
    decay, since, until = decay.exp(), total.to(g.dtype).exp(), (total[..., -1:, :] - total).to(g.dtype).exp()
    q_k, k_k, whole = q @ k.mT, k @ k.mT, since[..., -1:, :]
    a = (beta * k_k * decay).tril(-1)
    inverse = torch.linalg.solve_triangular(a, torch.eye(CHUNK, dtype=a.dtype), upper=False, unitriangular=True)

    recalling, asking, adding = beta * since * k, since * q, until * k
    states, dstates = (k.new_empty(*k.shape[:2], HEAD, HEAD) for _ in range(2))
    r, dy = torch.empty_like(v), (q_k * decay).mT @ do
    nothing = state = k.new_zeros(k.shape[1], HEAD, HEAD)
    for chunk in range(chunks):
        states[chunk] = state = nothing if begins[chunk] else state
        r[chunk] = inverse[chunk] @ (beta[chunk] * v[chunk] - recalling[chunk] @ state)
        state = whole[chunk] * state + adding[chunk].mT @ r[chunk]
    for chunk in reversed(range(chunks)):
        dstates[chunk] = state = nothing if begins[chunk + 1] else state
        dy[chunk] = inverse[chunk].mT @ (dy[chunk] + adding[chunk] @ state)
        state = whole[chunk] * state + asking[chunk].mT @ do[chunk] - recalling[chunk].mT @ dy[chunk]

    dq_k, dk_k = do @ r.mT * decay, (-dy @ r.mT * decay).tril(-1)
    asked, recalled, added = since * (do @ states.mT), -beta * since * (dy @ states.mT), until * (r @ dstates.mT)
    dq = asked + dq_k @ k
    dk = recalled + added + dq_k.mT @ q + beta * dk_k @ k + (beta * dk_k).mT @ k
    dbeta = (dy * (v - since * (k @ states))).sum(-1) + (dk_k * k_k).sum(-1)
    # Row t of the products has exp(G_t), column j exp(-G_j), so g_s is between every j < s and t >= s.
    between = (dq_k * q_k + beta * dk_k * k_k).flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
    since_begin = (q * asked + k * recalled).sum(-1).flip(-1).cumsum(-1).flip(-1)
    until_end = F.pad((k * added).sum(-1).cumsum(-1), (1, -1))
    dg = between + since_begin + until_end + (whole * states * dstates).sum((-2, -1)).unsqueeze(-1)
    return tuple(x.transpose(1, 2).flatten(0, 1).index_select(0, row) for x in (dq, dk, beta * dy, dg, dbeta))


def chunk_gradients(do, qkv, b, a, a_log, dt_bias, cu_seqlens) -> Gradients:
    """Gradients of qkv, b, a, a_log and dt_bias, FP32."""
    q, k, v = (x.float() for x in heads_of(qkv, b.shape[1]))
    group = v.shape[1] // q.shape[1]
    q_norm, k_norm = ((x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    x, rate, beta = a + dt_bias.float(), -a_log.float().exp(), b.sigmoid()
    g = rate * F.softplus(x, threshold=LINEAR_SOFTPLUS)
    bytes_of_head = (ceil_div(len(qkv), CHUNK) + len(cu_seqlens)) * group * HEAD * HEAD * 4
    at_once, parts = max(1, _STATE_BYTES // bytes_of_head), []
    for first in range(0, q.shape[1], at_once):
        keys = slice(first, first + at_once)
        values = slice(first * group, (first + at_once) * group)
        normed = (x[:, keys].repeat_interleave(group, dim=1) for x in (q * q_norm * HEAD**-0.5, k * k_norm))
        of_values = (x[:, values] for x in (v, g, beta))
        parts.append(rule_gradients(do[:, values].float(), *normed, *of_values, cu_seqlens))
    dq, dk, dv, dg, dbeta = (torch.cat(gradients, dim=1) for gradients in zip(*parts, strict=True))
    dq, dk = (x.unflatten(1, (-1, group)).sum(2) for x in (dq * HEAD**-0.5, dk))
    dq, dk = (
        norm * (dx - x * norm.square() * (x * dx).sum(-1, keepdim=True))
        for dx, x, norm in ((dq, q, q_norm), (dk, k, k_norm))
    )
    da = dg * rate * x.sigmoid()
    dqkv = torch.cat([part.flatten(1) for part in (dq, dk, dv)], dim=1)
    return dqkv, dbeta * beta * (1 - beta), da, (dg * g).sum(0), da.sum(0)


@implements("gated_delta_rule_backward", "reference")
def reference_gated_delta_rule_backward(do, qkv, b, a, a_log, dt_bias, cu_seqlens) -> Gradients:
    """:func:`chunk_gradients`, that of qkv in BF16."""
    dqkv, *others = chunk_gradients(do, qkv, b, a, a_log, dt_bias, cu_seqlens)
    return dqkv.to(qkv.dtype), *others


# --- Triton -----------------------------------------------------------------------------------------------------------

# Products take queries and keys as they are; the norms multiply rows and columns of results.

_PREPARE = {"num_warps": 4, "num_stages": 1}
_SCAN = {"COLUMNS": 32, "num_warps": 4, "num_stages": 2}
"""Columns of a state that a program takes through the chunks; a multiprocessor has room for two programs."""
_OF_CHUNKS = {"num_warps": 8, "num_stages": 1}

_ROWS: tl.constexpr = tl.constexpr(CHUNK)
_WIDTH: tl.constexpr = tl.constexpr(HEAD)
_BLOCK: tl.constexpr = tl.constexpr(16)
_BLOCKS: tl.constexpr = tl.constexpr(CHUNK // 16)
_SCALE: tl.constexpr = tl.constexpr(HEAD**-0.5)
_EPS: tl.constexpr = tl.constexpr(L2_EPS)
_LINEAR: tl.constexpr = tl.constexpr(LINEAR_SOFTPLUS)
_SIZES = ["keys", "heads", "stride_b", "stride_a"]


@jit
def _product(a, b, KIND: tl.constexpr):
    """``a @ b`` in FP32 of operands rounded to ``KIND``."""
    a, b = a.to(KIND), b.to(KIND)
    if INTERPRETED:  # it multiplies the bits of BF16 values as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def _product_fp32(a, b):
    """To FP32 accuracy by three products of TF32."""
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def _chunks_before(cu_ptr, sequence):
    """Chunks of the sequences before this one."""
    place, chunks = tl.arange(0, 128), tl.zeros((128,), tl.int32)
    for start in range(0, sequence, 128):
        known = start + place < sequence
        begin = tl.load(cu_ptr + start + place, mask=known, other=0)
        end = tl.load(cu_ptr + start + place + 1, mask=known, other=0)
        chunks += (end - begin + (_ROWS - 1)) // _ROWS
    return tl.sum(chunks, axis=0)


@jit
def _inverse_of(a):
    """``(I + a)^-1`` of a strictly lower triangle, FP32.

    Blocks of 16 on the diagonal row by row. With D these inverses, L the rest of ``a`` and N = D L, whose fourth power
    is zero: ``(I - N + N^2 - N^3) D``.
    """
    row, column = tl.arange(0, _ROWS)[:, None], tl.arange(0, _ROWS)[None, :]
    block = tl.arange(0, _BLOCKS)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, tl.reshape(a, (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK)), 0.0), axis=2)
    t, j = tl.arange(0, _BLOCK)[None, :, None], tl.arange(0, _BLOCK)[None, None, :]
    inverse = tl.where(t == j, 1.0, 0.0) + tl.zeros_like(blocks)
    for step in range(0, _BLOCK - 1):
        final = tl.sum(tl.where(t == step, inverse, 0.0), axis=1, keep_dims=True)
        factor = tl.sum(tl.where(j == step, blocks, 0.0), axis=2, keep_dims=True)
        inverse = tl.where(t > step, inverse - factor * final, inverse)
    inverse = tl.reshape(tl.where(on_diagonal, inverse[:, :, None, :], 0.0), (_ROWS, _ROWS))
    n = _product_fp32(inverse, tl.where(row // _BLOCK > column // _BLOCK, a, 0.0))
    inverse += _product_fp32(_product_fp32(n, n), inverse)
    return inverse - _product_fp32(n, inverse)


@jit
def _places_kernel(cu_ptr, places_ptr):
    """First token of each chunk, and the end of its sequence."""
    sequence, number = tl.program_id(0), tl.arange(0, 128)
    first, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    places_ptr += _chunks_before(cu_ptr, sequence) * 2
    for start in range(first, end, 128 * _ROWS):
        token = start + number * _ROWS
        tl.store(places_ptr + number * 2, token, mask=token < end)
        tl.store(places_ptr + number * 2 + 1, end, mask=token < end)
        places_ptr += 128 * 2


@jit
def _norm_of(x):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + _EPS)


@jit(do_not_specialize=_SIZES)
def _prepare_kernel(
    qkv_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, do_ptr, places_ptr, norms_ptr, gates_ptr, inverses_ptr, dr_ptr,
    keys, heads, stride_b, stride_a,
):  # fmt: skip
    """Of a chunk in one value head: norms of queries and keys, G, beta, ``(I + A)^-1`` and ``P^T do``."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = tl.load(places_ptr + chunk * 2), tl.load(places_ptr + chunk * 2 + 1)
    if first < end:
        kind: tl.constexpr = inverses_ptr.dtype.element_ty
        row, feature, key = tl.arange(0, _ROWS), tl.arange(0, _WIDTH), head // (heads // keys)
        known, token, width = row < end - first, first.to(tl.int64), (2 * keys + heads) * _WIDTH
        query = qkv_ptr + token * width + key * _WIDTH + row[:, None] * width + feature[None, :]
        q = tl.load(query, mask=known[:, None], other=0.0)
        k = tl.load(query + keys * _WIDTH, mask=known[:, None], other=0.0)
        q_norm, k_norm = _norm_of(q) * _SCALE, _norm_of(k)
        a = tl.load(a_ptr + token * stride_a + head + row * stride_a, mask=known, other=0.0)
        b = tl.load(b_ptr + token * stride_b + head + row * stride_b, mask=known, other=0.0)
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        g = rate * softplus(a + tl.load(dt_bias_ptr + head).to(tl.float32), _LINEAR)
        total = tl.cumsum(tl.where(known, g, 0.0), axis=0)
        beta = tl.where(known, sigmoid(b), 0.0)
        norms = norms_ptr + (chunk * keys + key) * (2 * _ROWS) + row
        tl.store(norms, q_norm)  # the same bits by each value head of a key
        tl.store(norms + _ROWS, k_norm)
        gates = gates_ptr + (chunk * heads + head) * (2 * _ROWS) + row
        tl.store(gates, total)
        tl.store(gates + _ROWS, beta)

        later = row[:, None] > row[None, :]
        scores = _product(k, tl.trans(q), kind) * k_norm[:, None] * q_norm[None, :]  # transposed
        scores *= tl.exp(tl.where(later, -float("inf"), total[None, :] - total[:, None]))
        of_values = (token * heads + head) * _WIDTH + (row[:, None] * (heads * _WIDTH) + feature[None, :])
        do = tl.load(do_ptr + of_values, mask=known[:, None], other=0.0)
        tl.store(dr_ptr + of_values, _product(scores, do, kind).to(kind), mask=known[:, None])

        a = _product(k, tl.trans(k), kind) * (k_norm * beta)[:, None] * k_norm[None, :]
        a *= tl.exp(tl.where(later, total[:, None] - total[None, :], -float("inf")))
        square = (chunk * heads + head) * (_ROWS * _ROWS) + (row[:, None] * _ROWS + row[None, :])
        tl.store(inverses_ptr + square, _inverse_of(a).to(kind))


@jit
def _load_scales(norms_ptr, gates_ptr, keys, key, heads, head, chunk):
    """Norms of queries and keys, G, beta, and G of the last row."""
    norms = norms_ptr + (chunk * keys + key) * (2 * _ROWS) + tl.arange(0, _ROWS)
    gates_ptr += (chunk * heads + head) * (2 * _ROWS)
    gates = gates_ptr + tl.arange(0, _ROWS)
    return (
        tl.load(norms),
        tl.load(norms + _ROWS),
        tl.load(gates),
        tl.load(gates + _ROWS),
        tl.load(gates_ptr + _ROWS - 1),
    )


@jit(do_not_specialize=_SIZES)
def _states_kernel(
    qkv_ptr, norms_ptr, gates_ptr, inverses_ptr, cu_ptr, states_ptr, r_ptr, keys, heads, COLUMNS: tl.constexpr
):
    """Columns of the states before a sequence's chunks, and of r."""
    SLICES: tl.constexpr = _WIDTH // COLUMNS
    kind: tl.constexpr = states_ptr.dtype.element_ty
    program = tl.program_id(0)
    slice, head, sequence = program % SLICES, program // SLICES % heads, program // SLICES // heads
    first, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    chunk, key, width = (
        _chunks_before(cu_ptr, sequence).to(tl.int64),
        head // (heads // keys),
        (2 * keys + heads) * _WIDTH,
    )
    row, feature, column = tl.arange(0, _ROWS), tl.arange(0, _WIDTH), slice * COLUMNS + tl.arange(0, COLUMNS)
    qkv_ptr += first.to(tl.int64) * width
    r_ptr += (first.to(tl.int64) * heads + head) * _WIDTH
    state = tl.zeros((_WIDTH, COLUMNS), tl.float32)
    for start in range(first, end, _ROWS):
        known, place = (row < end - start)[:, None], chunk * heads + head
        k = tl.load(qkv_ptr + (keys + key) * _WIDTH + row[:, None] * width + feature[None, :], mask=known, other=0.0)
        v = tl.load(
            qkv_ptr + (2 * keys + head) * _WIDTH + row[:, None] * width + column[None, :], mask=known, other=0.0
        )
        inverse = tl.load(inverses_ptr + place * (_ROWS * _ROWS) + (row[:, None] * _ROWS + row[None, :]))
        _, k_norm, total, beta, whole = _load_scales(norms_ptr, gates_ptr, keys, key, heads, head, chunk)
        square = states_ptr + place * (_WIDTH * _WIDTH) + (feature[:, None] * _WIDTH + column[None, :])
        tl.store(square, state.to(kind))
        recalled = _product(k, state, kind) * (k_norm * tl.exp(total))[:, None]
        r = _product(inverse, (v.to(tl.float32) - recalled) * beta[:, None], kind)
        tl.store(r_ptr + row[:, None] * (heads * _WIDTH) + column[None, :], r.to(kind), mask=known)
        added = r * (k_norm * tl.exp(whole - total))[:, None]
        state = state * tl.exp(whole) + _product(tl.trans(k), added, kind)
        chunk += 1
        qkv_ptr += _ROWS * width
        r_ptr += _ROWS * heads * _WIDTH


@jit(do_not_specialize=_SIZES)
def _reverse_kernel(
    qkv_ptr, do_ptr, norms_ptr, gates_ptr, inverses_ptr, cu_ptr, dstates_ptr, dy_ptr, keys, heads,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns of the gradients of the states after a sequence's chunks, from the last to the first, and of y, which
    replace ``P^T do``."""
    SLICES: tl.constexpr = _WIDTH // COLUMNS
    kind: tl.constexpr = dstates_ptr.dtype.element_ty
    program = tl.program_id(0)
    slice, head, sequence = program % SLICES, program // SLICES % heads, program // SLICES // heads
    first, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    before, key, width = _chunks_before(cu_ptr, sequence), head // (heads // keys), (2 * keys + heads) * _WIDTH
    row, feature, column = tl.arange(0, _ROWS), tl.arange(0, _WIDTH), slice * COLUMNS + tl.arange(0, COLUMNS)
    dstate, chunks = tl.zeros((_WIDTH, COLUMNS), tl.float32), (end - first + (_ROWS - 1)) // _ROWS
    for step in range(0, chunks):
        number = chunks - 1 - step
        start, chunk = (first + number * _ROWS).to(tl.int64), (before + number).to(tl.int64)
        known, place = (row < end - start)[:, None], chunk * heads + head
        query = qkv_ptr + start * width + key * _WIDTH + row[:, None] * width + feature[None, :]
        q = tl.load(query, mask=known, other=0.0)
        k = tl.load(query + keys * _WIDTH, mask=known, other=0.0)
        of_values, at = (start * heads + head) * _WIDTH, row[:, None] * (heads * _WIDTH) + column[None, :]
        do = tl.load(do_ptr + of_values + at, mask=known, other=0.0)
        square = place * (_ROWS * _ROWS) + (row[:, None] * _ROWS + row[None, :])
        inverse, dr = tl.load(inverses_ptr + square), tl.load(dy_ptr + of_values + at, mask=known, other=0.0)
        q_norm, k_norm, total, beta, whole = _load_scales(norms_ptr, gates_ptr, keys, key, heads, head, chunk)
        square = dstates_ptr + place * (_WIDTH * _WIDTH) + (feature[:, None] * _WIDTH + column[None, :])
        tl.store(square, dstate.to(kind))
        dr = _product(k, dstate, kind) * (k_norm * tl.exp(whole - total))[:, None] + dr.to(tl.float32)
        dy = _product(tl.trans(inverse), dr, kind)
        tl.store(dy_ptr + of_values + at, dy.to(kind), mask=known)
        decay = tl.exp(total)
        asked = _product(tl.trans(q), do.to(tl.float32) * (q_norm * decay)[:, None], kind)
        recalled = _product(tl.trans(k), dy * (k_norm * beta * decay)[:, None], kind)
        dstate = dstate * tl.exp(whole) + asked - recalled


@jit(do_not_specialize=_SIZES)
def _gradients_kernel(
    qkv_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, do_ptr, places_ptr, norms_ptr, gates_ptr, states_ptr, dstates_ptr,
    r_ptr, dy_ptr, dq_k_ptr, dk_k_ptr, dqkv_ptr, db_ptr, da_ptr, of_heads_ptr, keys, heads, stride_b, stride_a,
):  # fmt: skip
    """Gradients of a chunk's tokens in one value head; those of its normed queries and keys replace r and dy."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = tl.load(places_ptr + chunk * 2), tl.load(places_ptr + chunk * 2 + 1)
    if first < end:
        kind: tl.constexpr = states_ptr.dtype.element_ty
        row, feature, key = tl.arange(0, _ROWS), tl.arange(0, _WIDTH), head // (heads // keys)
        known, token, width = row < end - first, first.to(tl.int64), (2 * keys + heads) * _WIDTH
        qkv_ptr += token * width
        at = row[:, None] * width + feature[None, :]
        of_values = (token * heads + head) * _WIDTH + (row[:, None] * (heads * _WIDTH) + feature[None, :])
        square = (chunk * heads + head) * (_WIDTH * _WIDTH) + (feature[:, None] * _WIDTH + feature[None, :])
        small = (chunk * heads + head) * (_ROWS * _ROWS) + (row[:, None] * _ROWS + row[None, :])
        q_norm, k_norm, total, beta, whole = _load_scales(norms_ptr, gates_ptr, keys, key, heads, head, chunk)
        q = tl.load(qkv_ptr + key * _WIDTH + at, mask=known[:, None], other=0.0)
        k = tl.load(qkv_ptr + (keys + key) * _WIDTH + at, mask=known[:, None], other=0.0)
        do = tl.load(do_ptr + of_values, mask=known[:, None], other=0.0)
        r = tl.load(r_ptr + of_values, mask=known[:, None], other=0.0)
        dy = tl.load(dy_ptr + of_values, mask=known[:, None], other=0.0)

        # dbeta beta (1 - beta) without a quotient
        b = tl.load(b_ptr + token * stride_b + head + row * stride_b, mask=known, other=0.0)
        db = tl.sum(dy.to(tl.float32) * r.to(tl.float32), axis=1) * sigmoid(-b)
        tl.store(db_ptr + token * heads + head + row * heads, db, mask=known)
        dv = dqkv_ptr + token * width + (2 * keys + head) * _WIDTH + at
        tl.store(dv, (dy.to(tl.float32) * beta[:, None]).to(dqkv_ptr.dtype.element_ty), mask=known[:, None])

        # exp(G_t - G_j) is selected, not multiplied, since above the diagonal it may exceed every number.
        later, between = row[:, None] > row[None, :], total[:, None] - total[None, :]
        decay = tl.exp(tl.where(row[:, None] >= row[None, :], between, -float("inf")))
        dq_k = _product(do, tl.trans(r), kind) * decay
        tl.store(dq_k_ptr + small, dq_k.to(kind))
        dk_k = _product(dy, tl.trans(r), kind) * -beta[:, None] * decay
        dk_k = tl.where(later, dk_k, 0.0)
        tl.store(dk_k_ptr + small, dk_k.to(kind))
        # Row t has exp(G_t), column j exp(-G_j); both sums of the same numbers, so that what cancels does.
        of_decay = tl.where(later, dq_k, 0.0) * (_product(q, tl.trans(k), kind) * q_norm[:, None])
        of_decay = (of_decay + dk_k * (_product(k, tl.trans(k), kind) * k_norm[:, None])) * k_norm[None, :]
        dtotal = tl.sum(of_decay, axis=1) - tl.sum(of_decay, axis=0)

        state = tl.load(states_ptr + square)
        dq = _product(do, tl.trans(state), kind) * tl.exp(total)[:, None]
        dtotal += tl.sum(q.to(tl.float32) * dq, axis=1) * q_norm
        dk = _product(dy, tl.trans(state), kind) * (-beta * tl.exp(total))[:, None]
        dtotal += tl.sum(k.to(tl.float32) * dk, axis=1) * k_norm
        dstate = tl.load(dstates_ptr + square)
        kept = tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0) * tl.exp(whole)
        added = _product(r, tl.trans(dstate), kind) * tl.exp(whole - total)[:, None]
        of_added = tl.sum(k.to(tl.float32) * added, axis=1) * k_norm
        dtotal += tl.where(row == _ROWS - 1, kept + tl.sum(of_added, axis=0), 0.0) - of_added
        dk += added
        dg = tl.cumsum(dtotal, axis=0, reverse=True)

        x = tl.load(a_ptr + token * stride_a + head + row * stride_a, mask=known, other=0.0)
        x += tl.load(dt_bias_ptr + head).to(tl.float32)
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        da = tl.where(known, dg * rate * sigmoid(x), 0.0)
        da_log = tl.where(known, dg * rate * softplus(x, _LINEAR), 0.0)
        of_heads = of_heads_ptr + (chunk * heads + head) * 2
        tl.store(of_heads, tl.sum(da_log, axis=0))
        tl.store(of_heads + 1, tl.sum(da, axis=0))
        tl.store(da_ptr + token * heads + head + row * heads, da, mask=known)
        tl.debug_barrier()  # every thread has read r and dy
        tl.store(r_ptr + of_values, dq.to(kind), mask=known[:, None])
        tl.store(dy_ptr + of_values, dk.to(kind), mask=known[:, None])


@jit(do_not_specialize=_SIZES)
def _queries_and_keys_kernel(
    qkv_ptr, places_ptr, norms_ptr, dq_ptr, dk_ptr, dq_k_ptr, dk_k_ptr, dqkv_ptr, keys, heads
):  # fmt: skip
    """Adds a key head's value heads, in ascending order, and goes on to the queries and keys before their norms."""
    chunk, key = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = tl.load(places_ptr + chunk * 2), tl.load(places_ptr + chunk * 2 + 1)
    if first < end:
        kind: tl.constexpr = dq_ptr.dtype.element_ty
        row, feature = tl.arange(0, _ROWS), tl.arange(0, _WIDTH)
        known, token, width = (row < end - first)[:, None], first.to(tl.int64), (2 * keys + heads) * _WIDTH
        norms = norms_ptr + (chunk * keys + key) * (2 * _ROWS) + row
        q_norm, k_norm = tl.load(norms), tl.load(norms + _ROWS)
        dq, dk = tl.zeros((_ROWS, _WIDTH), tl.float32), tl.zeros((_ROWS, _WIDTH), tl.float32)
        dq_k, dk_k = tl.zeros((_ROWS, _ROWS), tl.float32), tl.zeros((_ROWS, _ROWS), tl.float32)
        for head in range(key * (heads // keys), (key + 1) * (heads // keys)):
            small = (chunk * heads + head) * (_ROWS * _ROWS) + (row[:, None] * _ROWS + row[None, :])
            dq_k += tl.load(dq_k_ptr + small).to(tl.float32)
            dk_k += tl.load(dk_k_ptr + small).to(tl.float32)
            of_values = (token * heads + head) * _WIDTH + (row[:, None] * (heads * _WIDTH) + feature[None, :])
            dq += tl.load(dq_ptr + of_values, mask=known, other=0.0).to(tl.float32)
            dk += tl.load(dk_ptr + of_values, mask=known, other=0.0).to(tl.float32)
        at = token * width + key * _WIDTH + (row[:, None] * width + feature[None, :])
        q = tl.load(qkv_ptr + at, mask=known, other=0.0)
        k = tl.load(qkv_ptr + keys * _WIDTH + at, mask=known, other=0.0)
        dq += _product(dq_k * k_norm[None, :], k, kind)
        dk += _product(tl.trans((dq_k * q_norm[:, None]).to(kind)), q, kind)
        dk += _product(dk_k * k_norm[None, :], k, kind)
        dk += _product(tl.trans((dk_k * k_norm[:, None]).to(kind)), k, kind)
        q, k = q.to(tl.float32), k.to(tl.float32)
        dq -= q * (tl.sum(q * dq, axis=1) * (q_norm * q_norm / (_SCALE * _SCALE)))[:, None]
        dk -= k * (tl.sum(k * dk, axis=1) * (k_norm * k_norm))[:, None]
        tl.store(dqkv_ptr + at, (dq * q_norm[:, None]).to(dqkv_ptr.dtype.element_ty), mask=known)
        tl.store(dqkv_ptr + keys * _WIDTH + at, (dk * k_norm[:, None]).to(dqkv_ptr.dtype.element_ty), mask=known)


@implements("gated_delta_rule_backward", "triton")
def triton_gated_delta_rule_backward(
    do, qkv, b, a, a_log, dt_bias, cu_seqlens, operands: torch.dtype = torch.bfloat16
) -> Gradients:
    """As :func:`reference_gated_delta_rule_backward`; 16,384 tokens of 32 value heads need about 900 MiB more than the
    results. ``operands``: what products round their operands to, which is the type of qkv's gradient."""
    do, qkv, (tokens, heads), sequences = do.contiguous(), qkv.contiguous(), b.shape, len(cu_seqlens) - 1
    b, a = (x if x.stride(1) == 1 else x.contiguous() for x in (b, a))
    keys = (qkv.shape[1] // HEAD - heads) // 2
    # At least as many as there are, known without waiting for the device.
    chunks = ceil_div(tokens, CHUNK) + max(sequences - 1, 0)
    places = cu_seqlens.new_zeros(chunks, 2)
    norms, gates = b.new_empty(chunks, keys, 2, CHUNK), b.new_empty(chunks, heads, 2, CHUNK)
    inverses, dq_k = (qkv.new_empty(chunks, heads, CHUNK, CHUNK, dtype=operands) for _ in range(2))
    states, dstates = (qkv.new_empty(chunks, heads, HEAD, HEAD, dtype=operands) for _ in range(2))
    r, dy = (torch.empty_like(do, dtype=operands) for _ in range(2))
    dqkv, db, da = torch.empty_like(qkv, dtype=operands), *(b.new_empty(tokens, heads) for _ in range(2))
    of_heads = b.new_zeros(chunks, heads, 2)
    if tokens:
        sizes, strides = (keys, heads), (b.stride(0), a.stride(0))
        columns_of_states = (sequences * heads * (HEAD // _SCAN["COLUMNS"]),)
        _places_kernel[(sequences,)](cu_seqlens, places, num_warps=4)
        _prepare_kernel[(chunks, heads)](
            qkv, b, a, a_log, dt_bias, do, places, norms, gates, inverses, dy, *sizes, *strides, **_PREPARE
        )
        _states_kernel[columns_of_states](qkv, norms, gates, inverses, cu_seqlens, states, r, *sizes, **_SCAN)
        _reverse_kernel[columns_of_states](qkv, do, norms, gates, inverses, cu_seqlens, dstates, dy, *sizes, **_SCAN)
        dk_k = inverses  # which nothing reads from here on
        _gradients_kernel[(chunks, heads)](
            qkv,
            b,
            a,
            a_log,
            dt_bias,
            do,
            places,
            norms,
            gates,
            states,
            dstates,
            r,
            dy,
            dq_k,
            dk_k,
            dqkv,
            db,
            da,
            of_heads,
            *sizes,
            *strides,
            **_OF_CHUNKS,
        )
        _queries_and_keys_kernel[(chunks, keys)](qkv, places, norms, r, dy, dq_k, dk_k, dqkv, *sizes, **_OF_CHUNKS)
    da_log, ddt_bias = (x.sum(0) for x in of_heads.unbind(2))
    return dqkv, db, da, da_log, ddt_bias


# --- torch operator ---------------------------------------------------------------------------------------------------


def _fake(do, qkv, b, a, a_log, dt_bias, cu_seqlens):
    return qkv.new_empty(qkv.shape), *(b.new_empty(shape) for shape in (b.shape, b.shape, b.shape[1:], b.shape[1:]))


@operator(
    "gated_delta_rule_backward(Tensor do, Tensor qkv, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias,"
    " Tensor cu_seqlens) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
)
def gated_delta_rule_backward(do, qkv, b, a, a_log, dt_bias, cu_seqlens) -> Gradients:
    """Gradients of qkv in BF16, of b, a, a_log and dt_bias in FP32.

    Args:
        do: ``[T, HV, 128]`` BF16. The others: as of ``gated_delta_rule``, a_log and dt_bias at their BF16 values.
    """
    return lookup("gated_delta_rule_backward", qkv.device)(do, qkv, b, a, a_log, dt_bias, cu_seqlens)
