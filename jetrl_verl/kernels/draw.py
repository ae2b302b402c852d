# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Draw one token per row from the softmax of FP32 logits and report its log-probability and rank, in one read of the
logits.

A uniform number picks a chunk of 4096 columns by its mass (log_probs.py), a second one a column within it, both by
inverting cumulated sums in float64. The uniforms are one call of Philox4x32-10 keyed by the row's seed and counter, the
same on CPU and GPU. Log-probabilities are those of the trainer in every bit.
"""

import torch
import triton.language as tl

from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.log_probs import (
    CHUNK,
    ELEMENTS,
    WARPS,
    Normalized,
    log_probs_of,
    normalize,
    reference_normalized,
    scaled_by,
)
from jetrl_verl.kernels.operator import operator, require_shape
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.kernels.views import unit_stride
from jetrl_verl.reference.reproducible import exp

__all__ = ["draw_tokens", "drawn_log_probs"]

_LOW = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""Of Philox4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011)."""
_HIGH_UNIT: tl.constexpr = tl.constexpr(2.0**-32)
_LOW_UNIT: tl.constexpr = tl.constexpr(2.0**-64)


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of two 32-bit numbers in int64, which wraps around at 64 bits."""
    product = a * b
    return (product >> 32) & _LOW, product & _LOW


def reference_uniforms(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """``[N, 2]`` float64 in [0, 1] from int64 seeds and counters ``[N]``, of which the low 32 bits count."""
    keys = [seeds & _LOW, (seeds >> 32) & _LOW]
    state = [counters & _LOW, *(torch.zeros_like(counters) for _ in range(3))]
    for _ in range(10):
        (high_0, low_0), (high_2, low_2) = (_product(state[at], _MULTIPLIERS[at // 2]) for at in (0, 2))
        state = [high_2 ^ state[1] ^ keys[0], low_2, high_0 ^ state[3] ^ keys[1], low_0]
        keys = [(key + step) & _LOW for key, step in zip(keys, _WEYL, strict=True)]
    a, b, c, d = (word.double() for word in state)
    return torch.stack([a * 2.0**-32 + b * 2.0**-64, c * 2.0**-32 + d * 2.0**-64], dim=1)


def _chosen(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """``[N]``: first place where the cumulated ``mass [N, n]`` exceeds the share ``uniform [N]`` of its sum."""
    mass = torch.where(mass > 0, mass, 0.0)
    up_to = mass.cumsum(dim=1)
    place = torch.arange(mass.shape[1]).expand(mass.shape)
    first = torch.where((up_to > uniform[:, None] * up_to[:, -1:]) & (mass > 0), place, mass.shape[1]).amin(dim=1)
    return torch.minimum(first, torch.where(mass > 0, place, 0).amax(dim=1))


@implements("draw", "reference")
def reference_draw(logits, temperature, seeds, counters) -> tuple[torch.Tensor, Normalized]:
    """Tokens ``[N]`` int64, and what their softmax divides by, as :func:`draw_tokens`."""
    rows, columns = logits.shape
    width = min(columns, CHUNK)
    chunks = ceil_div(columns, width)
    made = Normalized(*(torch.empty((rows, n), dtype=torch.float64) for n in (chunks, chunks, 1, 1)))
    tokens, uniforms = torch.empty(rows, dtype=torch.int64), reference_uniforms(seeds, counters)
    step = max(1, ELEMENTS // columns)
    for start in range(0, rows, step):
        at = slice(start, start + step)
        scaled = logits[at].double().div_(temperature[at, None].double())
        made.highest[at], made.log_sum[at] = reference_normalized(scaled)
        pieces = torch.nn.functional.pad(scaled, (0, chunks * width - columns), value=-torch.inf)
        pieces = pieces.view(len(scaled), chunks, width)
        above = pieces.amax(dim=2)
        origin = torch.where(above == -torch.inf, 0.0, above)
        terms = exp(pieces - origin[..., None]).masked_fill_(pieces == -torch.inf, 0.0)
        made.chunk_highest[at], made.chunk_sums[at] = above, terms.sum(dim=2)
        mass = made.chunk_sums[at] * (above - made.highest[at]).exp()
        chunk = _chosen(mass, uniforms[at, 0])
        terms = terms[torch.arange(len(terms)), chunk]
        tokens[at] = chunk * width + _chosen(terms, uniforms[at, 1])
    return tokens, made


@implements("drawn_log_probs", "reference")
def reference_drawn_log_probs(logits, tokens, temperature, normalized: Normalized) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`drawn_log_probs`; log-probabilities are ``reference_log_probs``'s."""
    picked = logits.gather(1, tokens[:, None])
    scaled = picked.double().div_(temperature[:, None].double())
    return (scaled - normalized.highest - normalized.log_sum).float(), (logits >= picked).sum(dim=1)


@jit
def _chosen_place(mass, uniform, SIZE: tl.constexpr):
    """As :func:`_chosen` for one row. A scan over threads may step back by a rounding, not to an empty place."""
    mass = tl.where(mass > 0, mass.to(tl.float64), 0.0)
    place = tl.arange(0, SIZE)
    up_to = tl.cumsum(mass, axis=0)
    target = uniform * tl.max(up_to, axis=0)
    first = tl.min(tl.where((up_to > target) & (mass > 0), place, SIZE), axis=0)
    return tl.minimum(first, tl.max(tl.where(mass > 0, place, 0), axis=0))


@jit
def _uniform(high, low):
    return high.to(tl.float64) * _HIGH_UNIT + low.to(tl.float64) * _LOW_UNIT


@jit(do_not_specialize=["columns", "stride", "chunks"])
def _draw_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, counters_ptr, chunk_highest_ptr, chunk_sums_ptr, highest_ptr, tokens_ptr,
    columns, stride, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    a, b, c, d = tl.philox(tl.load(seeds_ptr + row), tl.load(counters_ptr + row).to(tl.uint32), 0, 0, 0)
    index = tl.arange(0, CHUNKS)
    first = row * chunks
    above = tl.load(chunk_highest_ptr + first + index, mask=index < chunks, other=float("-inf"))
    sums = tl.load(chunk_sums_ptr + first + index, mask=index < chunks, other=0.0)
    chunk = _chosen_place(sums * tl.exp(above - tl.load(highest_ptr + row)), _uniform(a, b), CHUNKS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + column, mask=column < columns, other=float("-inf"))
    scaled = scaled_by(x, tl.load(temperature_ptr + row))
    terms = tl.exp(scaled - tl.load(chunk_highest_ptr + first + chunk))
    tl.store(tokens_ptr + row, chunk.to(tl.int64) * CHUNK + _chosen_place(terms, _uniform(c, d), CHUNK))


@jit(do_not_specialize=["rows", "columns", "stride", "chunks"])
def _rank_kernel(
    logits_ptr, tokens_ptr, temperature_ptr, chunk_highest_ptr, counts_ptr, rows, columns, stride, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    # The chunks that were read last, the first ones, may still be in L2.
    row, chunk = tl.program_id(0) % rows, tl.program_id(0) // rows
    place = row * chunks + chunk
    source = logits_ptr + row.to(tl.int64) * stride
    picked = tl.load(source + tl.load(tokens_ptr + row))
    count = tl.full((), 0, dtype=tl.int32)
    # Division keeps the order of logits, so no column of another chunk reaches the token's.
    if tl.load(chunk_highest_ptr + place) >= tl.div_rn(picked, tl.load(temperature_ptr + row)):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(source + column, mask=column < columns, other=float("-inf"))
        count = tl.sum((x >= picked).to(tl.int32), axis=0)
    tl.store(counts_ptr + place, count)


@implements("draw", "triton")
def triton_draw(logits, temperature, seeds, counters) -> tuple[torch.Tensor, Normalized]:
    """As :func:`reference_draw`, up to rounding of the cumulated sums."""
    logits, temperature = unit_stride(logits), temperature.contiguous()
    normalized = normalize(logits, temperature)
    (rows, columns), chunks = logits.shape, normalized.chunk_sums.shape[1]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _draw_kernel[(rows,)](
            logits,
            temperature,
            seeds.contiguous(),
            counters.contiguous(),
            *normalized[:3],
            tokens,
            columns,
            logits.stride(0),
            chunks,
            CHUNKS=next_power_of_2(chunks),
            CHUNK=CHUNK,
            num_warps=WARPS,
        )
    return tokens, normalized


@implements("drawn_log_probs", "triton")
def triton_drawn_log_probs(logits, tokens, temperature, normalized: Normalized) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_drawn_log_probs`."""
    logits, temperature, tokens = unit_stride(logits), temperature.contiguous(), tokens.contiguous()
    values = log_probs_of(logits, tokens[:, None], temperature, normalized)
    counts = torch.empty(normalized.chunk_sums.shape, dtype=torch.int32, device=logits.device)
    if counts.numel():
        _rank_kernel[(counts.numel(),)](
            logits,
            tokens,
            temperature,
            normalized.chunk_highest,
            counts,
            *logits.shape,
            logits.stride(0),
            counts.shape[1],
            CHUNK=CHUNK,
            num_warps=WARPS,
        )
    return values, counts.sum(dim=1)


def _fake_draw(logits, temperature, seeds, counters):
    rows, columns = logits.shape
    chunks, dtype = ceil_div(columns, CHUNK), torch.float32 if logits.is_cuda else torch.float64
    return seeds.new_empty(rows), *(logits.new_empty((rows, n), dtype=dtype) for n in (chunks, chunks, 1, 1))


@operator(
    "draw(Tensor logits, Tensor temperature, Tensor seeds, Tensor counters)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_draw,
)
def _draw(logits, temperature, seeds, counters) -> tuple[torch.Tensor, ...]:
    """Tokens, and the four of :class:`Normalized`."""
    tokens, normalized = lookup("draw", logits.device)(logits, temperature, seeds, counters)
    return tokens, *normalized


def draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, counters: torch.Tensor
) -> tuple[torch.Tensor, Normalized]:
    """Draw a token of each row from ``softmax(logits / temperature)``, without waiting for the device.

    Args:
        logits: ``[N, V]`` FP32, minus infinity where a token may not be drawn. A row with a NaN gives any token, with
            log-probability NaN.
        temperature: ``[N]`` FP32, positive.
        seeds, counters: ``[N]`` int64, 64 and 32 bits; the same pair draws the same token.

    Returns:
        ``[N]`` int64, and what :func:`drawn_log_probs` needs.

    Raises:
        TypeError: logits or temperatures that are not FP32, seeds or counters that are not int64.
    """
    for name, tensor, dtype in (
        ("logits", logits, torch.float32),
        ("temperature", temperature, torch.float32),
        ("seeds", seeds, torch.int64),
        ("counters", counters, torch.int64),
    ):
        if tensor.dtype != dtype:
            raise TypeError(f"draw_tokens: {name} has type {tensor.dtype}, expected {dtype}")
        if name != "logits":
            require_shape("draw_tokens", name, tensor, logits.shape[:1])
    tokens, *normalized = _draw(logits, temperature, seeds, counters)
    return tokens, Normalized(*normalized)


@operator(
    "drawn_log_probs(Tensor logits, Tensor tokens, Tensor temperature, Tensor chunk_highest, Tensor chunk_sums,"
    " Tensor highest, Tensor log_sum) -> (Tensor, Tensor)",
    fake=lambda logits, tokens, *_: (logits.new_empty((len(tokens), 1)), tokens.new_empty(tokens.shape)),
)
def _drawn_log_probs(logits, tokens, temperature, *normalized) -> tuple[torch.Tensor, torch.Tensor]:
    return lookup("drawn_log_probs", logits.device)(logits, tokens, temperature, Normalized(*normalized))


def drawn_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, normalized: Normalized
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ranks of ``tokens [N]`` int64, after :func:`draw_tokens`.

    Returns:
        ``[N, 1]`` FP32, the bits of ``log_probs``, and ``[N]`` int64, how many logits are not below that of the token.
    """
    require_shape("drawn_log_probs", "tokens", tokens, logits.shape[:1])
    return _drawn_log_probs(logits, tokens, temperature, *normalized)
