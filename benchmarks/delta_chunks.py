# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule by chunks of 64 tokens as Triton kernels that give a row the same bits in training and decode.

An experiment that ``delta_layer`` times next to the recurrent kernel. Chunk c of a sequence is its tokens 64 c to
64 c + 63, in sub-blocks of 16 rows. ``_prepare``, parallel over chunks and heads, writes normed queries and keys, the
products below the diagonal blocks, the inverses of these and the scores, all BF16. ``_advance``, sequential over a
sequence's chunks, computes u, o and the state. ``_decode`` computes one row of an open chunk.
"""

import torch
import triton.language as tl

from jetrl_verl.kernels.device.launch import INTERPRETED, jit


@jit
def dot(a, b, acc=None):
    if INTERPRETED:
        return (
            tl.dot(a.to(tl.float32), b.to(tl.float32))
            if acc is None
            else tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
        )
    else:
        return tl.dot(a, b) if acc is None else tl.dot(a, b, acc)


@jit
def _chunk_of(number, cu_ptr, sequences, BLOCK: tl.constexpr):
    """(sequence, first chunk of it) of chunk `number`, sequence == sequences beyond."""
    before = 0
    sequence = 0
    first = 0
    for start in range(0, sequences, BLOCK):
        place = start + tl.arange(0, BLOCK)
        begin = tl.load(cu_ptr + place, mask=place < sequences, other=0)
        end = tl.load(cu_ptr + place + 1, mask=place < sequences, other=0)
        chunks = (end - begin + 63) // 64
        upto = before + tl.cumsum(chunks, 0)  # chunks up to and with this sequence
        done = (upto <= number) & (place < sequences)
        sequence += tl.sum(done.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(done, upto, 0), 0))
        before += tl.sum(chunks, 0)
    return sequence, first, before


@jit
def _prepare(
    qkv_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_ptr,
    cu_ptr,
    qn_ptr,
    kn_ptr,
    A_ptr,
    T_ptr,
    P_ptr,
    E_ptr,
    sequences,
    keys,
    heads,
    sb,
    sa,
):
    number, head = tl.program_id(0), tl.program_id(1)
    sequence, chunk0, total = _chunk_of(number, cu_ptr, sequences, 128)
    if number < total:
        group = heads // keys
        key = head // group
        begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
        first = begin + (number - chunk0) * 64
        row, col = tl.arange(0, 64), tl.arange(0, 128)
        valid = first + row < end
        width = (2 * keys + heads) * 128
        base = qkv_ptr + (first + row).to(tl.int64)[:, None] * width + key * 128 + col[None, :]
        q = tl.load(base, mask=valid[:, None], other=0.0).to(tl.float32)
        k = tl.load(base + keys * 128, mask=valid[:, None], other=0.0).to(tl.float32)
        q = (q * tl.rsqrt(tl.sum(q * q, 1) + 1e-6)[:, None]).to(tl.bfloat16)
        k = (k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]).to(tl.bfloat16)
        if head % group == 0:
            out = (number * 64 + row).to(tl.int64)[:, None] * (keys * 128) + key * 128 + col[None, :]
            tl.store(qn_ptr + out, q)
            tl.store(kn_ptr + out, k)
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        x = tl.load(a_ptr + (first + row) * sa + head, mask=valid, other=0.0) + tl.load(dt_ptr + head).to(tl.float32)
        g = tl.where(valid, rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x))), 0.0)
        beta = tl.where(
            valid, 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + (first + row) * sb + head, mask=valid, other=0.0))), 0.0
        )
        G = tl.cumsum(g, 0)
        last = tl.sum(tl.where(row == 63, G, 0.0), 0)
        e = E_ptr + (number * heads + head).to(tl.int64) * 256 + row
        tl.store(e, tl.exp(G))
        tl.store(e + 64, beta)
        tl.store(e + 128, tl.exp(last - G))
        D = tl.exp(tl.where(row[:, None] >= row[None, :], G[:, None] - G[None, :], -float("inf")))
        a = dot(k, tl.trans(k)) * D * beta[:, None]
        P = dot(q, tl.trans(k)) * D * 0.08838834764831845
        square = (number * heads + head).to(tl.int64) * 4096 + row[:, None] * 64 + row[None, :]
        tl.store(P_ptr + square, P.to(tl.bfloat16))
        tl.store(A_ptr + square, tl.where(row[:, None] // 16 > row[None, :] // 16, a, 0.0).to(tl.bfloat16))
        # T of the four diagonal blocks at once: rows final in ascending order
        block, i = tl.arange(0, 4), tl.arange(0, 16)
        a4 = tl.reshape(a, (4, 16, 4, 16))
        a3 = tl.sum(tl.where(block[:, None, None, None] == block[None, None, :, None], a4, 0.0), 2)  # [4, 16, 16]
        t_, j_ = i[None, :, None], i[None, None, :]
        T = tl.where(t_ == j_, 1.0, 0.0) + tl.zeros((4, 16, 16), tl.float32)
        for j in range(0, 15):
            rowj = tl.sum(tl.where(t_ == j, T, 0.0), 1)[:, None, :]
            colj = tl.sum(tl.where(j_ == j, a3, 0.0), 2)[:, :, None]
            T = tl.where(t_ > j, T - colj * rowj, T)
        wide = tl.where(block[:, None, None, None] == block[None, None, :, None], T[:, :, None, :], 0.0)
        tl.store(T_ptr + square, tl.reshape(wide, (64, 64)).to(tl.bfloat16))


@jit
def _advance(
    qkv_ptr,
    qn_ptr,
    kn_ptr,
    A_ptr,
    T_ptr,
    P_ptr,
    E_ptr,
    cu_ptr,
    out_ptr,
    state_ptr,
    sequences,
    keys,
    heads,
    BV: tl.constexpr,
):
    slices = 128 // BV
    program = tl.program_id(0)
    slice, head, sequence = program % slices, program // slices % heads, program // slices // heads
    begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    place = tl.arange(0, 128)
    number = 0
    for start in range(0, sequence, 128):
        b_ = tl.load(cu_ptr + start + place, mask=start + place < sequence, other=0)
        e_ = tl.load(cu_ptr + start + place + 1, mask=start + place < sequence, other=0)
        number += tl.sum((e_ - b_ + 63) // 64, 0)
    key, width = head // (heads // keys), (2 * keys + heads) * 128
    row, col, v = tl.arange(0, 64), tl.arange(0, 128), slice * BV + tl.arange(0, BV)
    S = tl.zeros((128, BV), tl.float32)
    for first in range(begin, end, 64):
        at = (number * 64 + row).to(tl.int64)[:, None] * (keys * 128) + key * 128 + col[None, :]
        k = tl.load(kn_ptr + at)
        q = tl.load(qn_ptr + at)
        token = first + row
        value = tl.load(
            qkv_ptr + token.to(tl.int64)[:, None] * width + (2 * keys + head) * 128 + v[None, :],
            mask=(token < end)[:, None],
            other=0.0,
        ).to(tl.float32)
        e = E_ptr + (number * heads + head).to(tl.int64) * 256 + row
        decay, beta, until = tl.load(e), tl.load(e + 64), tl.load(e + 128)
        whole = tl.load(E_ptr + (number * heads + head).to(tl.int64) * 256 + 63)
        square = (number * heads + head).to(tl.int64) * 4096 + row[:, None] * 64 + row[None, :]
        A = tl.load(A_ptr + square)
        T = tl.load(T_ptr + square)
        P = tl.load(P_ptr + square)
        S16 = S.to(tl.bfloat16)
        x = beta[:, None] * (value - decay[:, None] * dot(k, S16))
        block = (row // 16)[:, None]
        u = dot(T, x.to(tl.bfloat16)).to(tl.bfloat16)
        u = tl.where(block == 0, u, 0.0)
        for b in tl.static_range(1, 4):
            y = (x - dot(A, u)).to(tl.bfloat16)
            u = tl.where(block == b, dot(T, y).to(tl.bfloat16), u)
        o = dot(q, S16) * (0.08838834764831845 * decay)[:, None]
        o = dot(P, u, o)
        tl.store(
            out_ptr + (token.to(tl.int64)[:, None] * heads + head) * 128 + v[None, :],
            o.to(tl.bfloat16),
            mask=(token < end)[:, None],
        )
        S = dot(tl.trans(k), (u.to(tl.float32) * until[:, None]).to(tl.bfloat16), S * whole)
        number += 1
    tl.store(state_ptr + ((sequence * heads + head).to(tl.int64) * 128 + col[:, None]) * 128 + v[None, :], S)


@jit
def _decode(
    qkv_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_ptr,
    S_ptr,
    kc_ptr,
    uc_ptr,
    gc_ptr,
    bc_ptr,
    slots_ptr,
    computed_ptr,
    out_ptr,
    keys,
    heads,
    sb,
    sa,
    BV: tl.constexpr,
):
    """One token of each request: the row of its open chunk.

    kc ``[slots, 64, keys * 128]``: normed keys. uc ``[slots, 64, heads * 128]``: u of closed sub-blocks, v in the open
    one. gc, bc ``[slots, 64, heads]``: g and beta.
    """
    slices = 128 // BV
    program = tl.program_id(0)
    slice, head, request = program % slices, program // slices % heads, program // slices // heads
    group = heads // keys
    key, width = head // group, (2 * keys + heads) * 128
    slot = tl.load(slots_ptr + request).to(tl.int64)
    n = tl.load(computed_ptr + request) % 64
    sub = n // 16
    row, col, v = tl.arange(0, 64), tl.arange(0, 128), slice * BV + tl.arange(0, BV)
    state = S_ptr + ((slot * heads + head) * 128 + col[:, None]) * 128 + v[None, :]
    S = tl.load(state)
    at = (slot * 64 + row)[:, None] * (keys * 128) + key * 128 + col[None, :]
    k = tl.load(kc_ptr + at, mask=(row < n)[:, None], other=0.0)
    new = qkv_ptr + request.to(tl.int64) * width + key * 128 + col[None, :] + row[:, None] * 0
    q_ = tl.load(new).to(tl.float32)
    k_ = tl.load(new + keys * 128).to(tl.float32)
    q = (q_ * tl.rsqrt(tl.sum(q_ * q_, 1) + 1e-6)[:, None]).to(tl.bfloat16)  # in every row
    k_ = (k_ * tl.rsqrt(tl.sum(k_ * k_, 1) + 1e-6)[:, None]).to(tl.bfloat16)
    k = tl.where((row == n)[:, None], k_, k)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    x = tl.load(a_ptr + request * sa + head) + tl.load(dt_ptr + head).to(tl.float32)
    g_new = rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
    beta_new = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + request * sb + head)))
    gates = (slot * 64 + row) * heads + head
    g = tl.where(row == n, g_new, tl.load(gc_ptr + gates, mask=row < n, other=0.0))
    beta = tl.where(row == n, beta_new, tl.load(bc_ptr + gates, mask=row < n, other=0.0))
    G = tl.cumsum(g, 0)
    i = tl.arange(0, 16)
    block = row // 16
    mine = (block[:, None] == sub) & (row[:, None] % 16 == i[None, :])  # picks the sub-block's rows
    G16 = tl.sum(tl.where(mine, G[:, None], 0.0), 0)
    beta16 = tl.sum(tl.where(mine, beta[:, None], 0.0), 0)
    row16 = sub * 16 + i
    k16 = tl.load(
        kc_ptr + (slot * 64 + row16)[:, None] * (keys * 128) + key * 128 + col[None, :],
        mask=(row16 < n)[:, None],
        other=0.0,
    )
    k16 = tl.where(
        (row16 == n)[:, None],
        tl.sum(tl.where(row[:, None] == 0, k_.to(tl.float32), 0.0), 0)[None, :].to(tl.bfloat16),
        k16,
    )
    values = (slot * 64 + row16)[:, None] * (heads * 128) + head * 128 + v[None, :]
    v_new = tl.load(qkv_ptr + request.to(tl.int64) * width + (2 * keys + head) * 128 + v)
    value = tl.load(uc_ptr + values, mask=(row16 < n)[:, None], other=0.0)
    value = tl.where((row16 == n)[:, None], v_new[None, :], value).to(tl.float32)
    before = tl.load(
        uc_ptr + (slot * 64 + row)[:, None] * (heads * 128) + head * 128 + v[None, :],
        mask=(block < sub)[:, None],
        other=0.0,
    )
    S16 = S.to(tl.bfloat16)
    D = tl.exp(tl.where(row16[:, None] >= row[None, :], G16[:, None] - G[None, :], -float("inf")))
    a = dot(k16, tl.trans(k)) * D * beta16[:, None]
    inner = tl.sum(
        tl.where(
            block[None, :, None] == sub, tl.where(row[None, :, None] % 16 == i[None, None, :], a[:, :, None], 0.0), 0.0
        ),
        1,
    )
    t_, j_ = i[:, None], i[None, :]
    T = tl.where(t_ == j_, 1.0, 0.0) + tl.zeros((16, 16), tl.float32)
    for j in range(0, 15):
        rowj = tl.sum(tl.where(t_ == j, T, 0.0), 0)[None, :]
        colj = tl.sum(tl.where(j_ == j, inner, 0.0), 1)[:, None]
        T = tl.where(t_ > j, T - colj * rowj, T)
    decay16 = tl.exp(G16)
    y = beta16[:, None] * (value - decay16[:, None] * dot(k16, S16))
    if sub > 0:
        y = y - dot(tl.where(block[None, :] < sub, a, 0.0).to(tl.bfloat16), before)
    u16 = dot(T.to(tl.bfloat16), y.to(tl.bfloat16)).to(tl.bfloat16)
    u = tl.where(tl.reshape(block, (4, 16))[:, :, None] == sub, u16[None, :, :], tl.reshape(before, (4, 16, BV)))
    u = tl.reshape(u, (64, BV))
    q16 = tl.sum(tl.where(row[:, None] == 0, q.to(tl.float32), 0.0), 0)[None, :].to(tl.bfloat16) + tl.zeros(
        (16, 128), tl.bfloat16
    )
    P = (dot(q16, tl.trans(k)) * D * 0.08838834764831845).to(tl.bfloat16)
    o = dot(q16, S16) * (0.08838834764831845 * decay16)[:, None]
    o = dot(P, u, o)
    o = tl.sum(tl.where((row16 == n)[:, None], o, 0.0), 0)
    tl.store(out_ptr + (request.to(tl.int64) * heads + head) * 128 + v, o.to(tl.bfloat16))
    closes = n % 16 == 15
    tl.store(uc_ptr + values, tl.where(closes, u16, value.to(tl.bfloat16)), mask=((row16 == n) | closes)[:, None])
    if n == 63:
        last = tl.sum(tl.where(row == 63, G, 0.0), 0)
        S = dot(tl.trans(k), (u.to(tl.float32) * tl.exp(last - G)[:, None]).to(tl.bfloat16), S * tl.exp(last))
        tl.store(state, S)
    if slice == 0:
        tl.store(gc_ptr + (slot * 64 + n) * heads + head, g_new)
        tl.store(bc_ptr + (slot * 64 + n) * heads + head, beta_new)
        if head % group == 0:
            tl.store(kc_ptr + at, k_, mask=(row == n)[:, None])


class Decode:
    """Caches of requests, a slot each; :meth:`step` computes one token of each request."""

    def __init__(self, slots, keys, heads, device):
        self.keys, self.heads = keys, heads
        self.S = torch.zeros(slots, heads, 128, 128, device=device)
        self.kc = torch.zeros(slots, 64, keys * 128, dtype=torch.bfloat16, device=device)
        self.uc = torch.zeros(slots, 64, heads * 128, dtype=torch.bfloat16, device=device)
        self.gc, self.bc = torch.zeros(slots, 64, heads, device=device), torch.zeros(slots, 64, heads, device=device)

    def step(self, qkv, b, a, a_log, dt, slots, computed, BV=64, warps=4):
        out = torch.empty(len(qkv), self.heads, 128, dtype=torch.bfloat16, device=qkv.device)
        _decode[(len(qkv) * self.heads * (128 // BV),)](
            qkv,
            b,
            a,
            a_log,
            dt,
            self.S,
            self.kc,
            self.uc,
            self.gc,
            self.bc,
            slots,
            computed,
            out,
            self.keys,
            self.heads,
            b.stride(0),
            a.stride(0),
            BV=BV,
            num_warps=warps,
        )
        return out


def prepare(qkv, b, a, a_log, dt, cu):
    T, heads = b.shape
    keys = (qkv.shape[1] // 128 - heads) // 2
    B = len(cu) - 1
    chunks = -(-T // 64) + B

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=qkv.device)

    w = dict(
        qn=new(chunks * 64, keys * 128),
        kn=new(chunks * 64, keys * 128),
        A=new(chunks, heads, 64, 64),
        T=new(chunks, heads, 64, 64),
        P=new(chunks, heads, 64, 64),
        E=torch.empty(chunks, heads, 256, device=qkv.device),
    )
    _prepare[(chunks, heads)](
        qkv,
        b,
        a,
        a_log,
        dt,
        cu,
        w["qn"],
        w["kn"],
        w["A"],
        w["T"],
        w["P"],
        w["E"],
        B,
        keys,
        heads,
        b.stride(0),
        a.stride(0),
        num_warps=4,
    )
    return w


def advance(w, qkv, heads, cu, BV=32, warps=4, stages=2):
    keys = (qkv.shape[1] // 128 - heads) // 2
    B = len(cu) - 1
    out = torch.empty(len(qkv), heads, 128, dtype=torch.bfloat16, device=qkv.device)
    state = torch.empty(B, heads, 128, 128, device=qkv.device)
    _advance[(B * heads * (128 // BV),)](
        qkv,
        w["qn"],
        w["kn"],
        w["A"],
        w["T"],
        w["P"],
        w["E"],
        cu,
        out,
        state,
        B,
        keys,
        heads,
        BV=BV,
        num_warps=warps,
        num_stages=stages,
    )
    return out, state
