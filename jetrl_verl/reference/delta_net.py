# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of a gated delta net's operations (Qwen3.5; Yang et al., arXiv 2412.06464): conv, rule, gated norm.

    y_t  = silu(x_{t-3} w_0 + x_{t-2} w_1 + x_{t-1} w_2 + x_t w_3), oldest tap first -> BF16, split into q | k | v
    q^   = q / |q| -> BF16      k^ = k / |k| -> BF16      g = -exp(A_log) softplus(a + dt_bias)      beta = sigmoid(b)
    n    = o / rms(o) * w * silu(z) -> BF16

The rule is computed by chunks of 64 tokens, counted from the first token of the sequence wherever a prompt is cut, and
blocks of 16 in a chunk. For row t of a chunk, in the block that begins at row p, with the FP32 state S before the
chunk, S16 = S -> BF16 and G_t = G_{t-1} + g_t, G_{-1} = 0:

    a_tj = beta_t (k^_t k^_j) exp(G_t - G_j)      P_tj = (q^_t k^_j) exp(G_t - G_j) / sqrt(128) -> BF16
    u_t  = beta_t (v_t - exp(G_t) S16^T k^_t) - sum_{j<p} (a_tj -> BF16) u_j - sum_{p<=j<t} a_tj u_j -> BF16
    o_t  = exp(G_t) / sqrt(128) S16^T q^_t + sum_{j<=t} P_tj u_j -> BF16
    S    = exp(G_63) S + sum_j k^_j (exp(G_63 - G_j) u_j -> BF16), once row 63 has been computed

FP32 inside, rounded to nearest even where "-> BF16" stands. A sequence between two steps is S and, for the rows of its
open chunk, k^, u and G (:class:`State`). S is S16 and a 16-bit integer there, to which :func:`split_state` rounds it at
the end of every chunk, in training too. Nothing after row t is multiplied, not even by zero: a token's bits depend on
its own sequence up to it alone.

On a CPU products of BF16 have exact sums, those within a block add in order without fusing, sums over a head's features
add halves (:func:`tree_sum`), and elementary functions are those of reproducible.py.
"""

from typing import NamedTuple

import torch

from jetrl_verl.reference.reproducible import exp, grid_bits, log1p, on_grid, sigmoid

HEAD = 128
"""Features of a head of queries, keys and values."""
CHUNK, BLOCK = 64, 16
"""Tokens of a chunk of the rule, and of the blocks within."""
SCALE = HEAD**-0.5
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


def exp32(x: torch.Tensor) -> torch.Tensor:
    """``exp(x)`` of BF16 or FP32 ``x``, rounded once, to FP32."""
    return exp(x.double()).float()


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
    return -exp32(a_log.to(torch.bfloat16)) * softplus, sigmoid(b)


def heads_of(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys ``[T, HK, 128]`` and values ``[T, HV, 128]`` in ``qkv [T, C]``, ``HV = heads``; views."""
    keys = (qkv.shape[1] - HEAD * heads) // 2
    return tuple(x.unflatten(1, (-1, HEAD)) for x in qkv.split([keys, keys, HEAD * heads], dim=1))


def state_shape(heads: int) -> tuple[int, int, int]:
    """Of a sequence's state in FP32: 386 rows of 128 BF16 words a value head, see :class:`State`."""
    return heads, 193, HEAD


class State(NamedTuple):
    """Views of the rows of states, which :func:`state_of` makes. What has not been written yet is not read.

    Attributes:
        upper, lower: ``[..., 128, 128]`` BF16 and int16, the halves of S at the open chunk's start, values first; of a
            sequence's first chunk S is zero and not here.
        k, u: ``[..., 64, 128]`` BF16, and total: ``[..., 64]`` FP32: k^, u and G of the open chunk's rows.
    """

    upper: torch.Tensor
    lower: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    total: torch.Tensor


def state_of(states: torch.Tensor) -> State:
    """The parts of ``states [..., 193, 128]`` FP32, of which each head's are contiguous: rows of 128 BF16 words."""
    words = states.view(torch.bfloat16).view(*states.shape[:-2], -1, HEAD)
    upper, lower, k, u, _ = words.split([HEAD, HEAD, CHUNK, CHUNK, 2], dim=-2)
    return State(upper, lower.view(torch.int16), k, u, states[..., -1, :CHUNK])


def join_state(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """The FP32 numbers with these halves: ``bits = (upper << 16) + lower``."""
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def split_state(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``s`` rounded to BF16, and the int16 that :func:`join_state` adds.

    A number halfway above an even BF16 number would need 2^15, so it becomes the FP32 number before it.
    """
    upper = s.to(torch.bfloat16)
    rest = s.view(torch.int32) - (upper.view(torch.int16).int() << 16)
    return upper, rest.clamp_(max=2**15 - 1).to(torch.int16)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a b^T`` FP32 of BF16 ``a [..., M, K]`` and ``b [..., N, K]``, K <= 128: exact sums, rounded once."""
    bits = grid_bits(HEAD)
    return (on_grid(a, bits).double() @ on_grid(b, bits).double().mT).float()


def _factors(
    pair: torch.Tensor, row: torch.Tensor, total: torch.Tensor, beta: torch.Tensor, state: State
) -> torch.Tensor:
    """What multiplies the chunk's u in the rows of ``pair``: -a and P, zero where the row does not reach.

    Args:
        pair: ``[R, HV, 2 M, 128]``, k^ and q^ of each token. row: ``[R, M]``. total, beta: ``[R, HV, M]``.

    Returns:
        ``[R, HV, 2 M, N]`` FP32, of as many rows of the chunk as the last token reaches, P rounded to BF16.
    """
    column = torch.arange(min(int(row.max()) + 1, CHUNK), device=row.device)
    reached = column < torch.stack([row, row + 1], 2).flatten(1)[:, None, :, None]
    between = total.repeat_interleave(2, 2).unsqueeze(-1) - state.total[:, :, None, : len(column)]
    decay = exp32(between.where(reached, -torch.inf))
    scale = torch.stack([-beta, torch.full_like(beta, SCALE)], 3).flatten(2).unsqueeze(-1)
    factors = scale * _product(pair, state.k[:, :, : len(column)]) * decay
    factors = factors.where(reached, 0)  # with rows after a token's own the product may be NaN
    factors[:, :, 1::2] = factors[:, :, 1::2].to(torch.bfloat16).float()
    return factors


def _block(
    state: State,
    first: torch.Tensor,
    new: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Up to M <= 16 next tokens of R sequences, those of a sequence in one block of its open chunk.

    Args:
        state: ``[R, HV, ...]``, updated in place; rows without a token are zero.
        first: ``[R]``, row of the first of these tokens in the chunk. new: ``[R, M]``, where there is a token.
        q, k, v: ``[R, HV, M, 128]`` BF16, q and k normed. g, beta: ``[R, HV, M]`` FP32. Without a token all are zero.

    Returns:
        o ``[R, HV, M, 128]`` BF16.
    """
    tokens = k.shape[2]
    row = first[:, None] + torch.arange(tokens, device=first.device)
    sequence, i = new.nonzero(as_tuple=True)
    at = sequence, slice(None), row[sequence, i]  # places of the tokens in the chunk, [N, HV, ...]
    total = state.total.gather(2, (first - 1).clamp(min=0)[:, None, None].expand(*beta.shape[:2], 1))
    total = [total[..., 0].where((first > 0)[:, None], 0)]
    for step in range(tokens):
        total.append(total[-1] + g[:, :, step])
    total = torch.stack(total[1:], 2)
    state.k[at], state.total[at] = k[sequence, :, i], total[sequence, :, i]

    # Rows of a token: 2 i becomes u, 2 i + 1 becomes o. Each row is a sum of its start and multiples of earlier u.
    pair = torch.stack([k, q], 3).flatten(2, 3)
    since = exp32(total).unsqueeze(-1)
    recalled = _product(pair, state.upper).unflatten(2, (-1, 2))
    u = beta.unsqueeze(-1) * (v.float() - since * recalled[:, :, :, 0])
    sums = torch.stack([u, SCALE * since * recalled[:, :, :, 1]], 3).flatten(2, 3)

    factors = _factors(pair, row, total, beta, state)
    begin = first // BLOCK * BLOCK
    if begins := int(begin.max()):  # rows of the blocks before
        earlier = (torch.arange(begins, device=first.device) < begin[:, None])[:, None, None]
        of_blocks = factors[..., :begins].where(earlier, 0).to(torch.bfloat16)
        sums += _product(of_blocks, state.u[:, :, :begins].where(earlier.mT, 0).mT)
    sums += 0.0  # without them, -0 would stay
    # Of their own block row by row. Where a sequence does not have a row yet, its u is zero.
    before, last = int((first - begin).max()), factors.shape[3] - 1
    if before:
        place = (begin[:, None] + torch.arange(before, device=first.device)).clamp(max=last)[:, None, None]
        rows = state.u.gather(2, place.mT.expand(*k.shape[:2], before, HEAD)).float()
        of_rows = factors.gather(3, place.expand(*factors.shape[:3], before))
        for step in range(before):
            sums += of_rows[..., step, None] * rows[:, :, step, None]
    place = row.clamp(max=last)[:, None, None].expand(*factors.shape[:3], tokens)
    of_rows, u = factors.gather(3, place), torch.empty_like(k)
    for step in range(tokens):
        u[:, :, step] = sums[:, :, 2 * step]
        sums[:, :, 2 * step + 1 :] += of_rows[:, :, 2 * step + 1 :, step, None] * u[:, :, step, None].float()
    state.u[at] = u[sequence, :, i]
    return sums[:, :, 1::2].to(torch.bfloat16)


def _close(state: State, full: torch.Tensor) -> None:
    """Begin the next chunk of the sequences ``full [F]``, whose open chunk has 64 rows; in place."""
    upper, lower, k, u, total = (part[full] for part in state)
    until = exp32(total[..., -1:] - total).unsqueeze(-1)
    since = exp32(total[..., -1])[..., None, None]
    s = since * join_state(upper, lower) + _product((until * u.float()).to(torch.bfloat16).mT, k.mT)
    state.upper[full], state.lower[full] = split_state(s)
    for part in state[2:]:
        part[full] = 0


def gated_delta_rule(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    states: torch.Tensor,
    computed: torch.Tensor,
) -> torch.Tensor:
    """The rule over packed sequences.

    Args:
        qkv: ``[T, C]`` BF16 of :func:`causal_conv1d`. b, a, a_log, dt_bias: of :func:`gates`.
        cu_seqlens: ``[B + 1]``. states: ``[B, HV, 193, 128]`` FP32, see :class:`State`, before each sequence's first
        token in ``qkv``; updated in place. computed: ``[B]``, tokens before it.

    Returns:
        o ``[T, HV, 128]`` BF16, zero after the last sequence.
    """
    heads = b.shape[1]
    q, k, v = heads_of(qkv, heads)
    q, k = (l2norm(x.float()).to(torch.bfloat16).repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    tokens = q, k, v, *gates(b, a, a_log, dt_bias)
    o = torch.zeros_like(v)
    left, row, first = cu_seqlens.diff().long(), computed.long() % CHUNK, cu_seqlens[:-1].long()
    upper, lower, *rows = state_of(states)
    for part in (upper, lower):
        part.index_fill_(0, (computed < CHUNK).nonzero()[:, 0], 0)
    stale = torch.arange(CHUNK, device=row.device) >= row[:, None]
    for part in rows:
        part.masked_fill_(stale[:, None] if part.ndim == 3 else stale[:, None, :, None], 0)
    # Sequences advance together by blocks.
    while len(live := (left > 0).nonzero()[:, 0]):
        advanced = states if len(live) == len(states) else states.index_select(0, live)
        state, count = state_of(advanced), torch.minimum(left, BLOCK - row % BLOCK)[live]
        place = torch.arange(int(count.max()), device=row.device)
        new = place < count[:, None]
        at = (first[live, None] + place).where(new, 0)
        of_block = [x[at].where(new.view(*new.shape, *[1] * (x.ndim - 1)), 0).transpose(1, 2) for x in tokens]
        o[at[new]] = _block(state, row[live], new, *of_block).transpose(1, 2)[new]
        first[live] += count
        left[live] -= count
        row[live] += count
        if len(full := (row[live] == CHUNK).nonzero()[:, 0]):
            _close(state, full)
            row[live[full]] = 0
        if advanced is not states:
            states.index_copy_(0, live, advanced)
    return o


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
