# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check's probes: both sides run each operation on fixed inputs and compare sums of its results' bits.

Equal weights under different code therefore do not pass, and the operation that differs is named. If the sides run
different code for one result, each runs its own: the trainer attends to whole sequences, the rollout decodes each of
their tokens over pages that it has written, in steps of few and of many requests; each side of a rollout over several
GPUs adds the products of ranks by its own reduction. A mixture's inputs have tied logits, an expert without tokens, and
rows whose sum depends on the order. The host waits for the device once, for all sums.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from jetrl_verl import formats, kernels
from jetrl_verl.formats.caches import KVCache
from jetrl_verl.formats.sums import odd_constants, row_sums
from jetrl_verl.kernels.sum_of_ranks import products_of_ranks
from jetrl_verl.reference import BLOCK, QuantizedTensor

_LENGTHS = (5, 1, 149)
"""Tokens of the sequences; the last one has two blocks of 128 keys."""
_HEAD_DIM = 128
_PAGE_TOKENS = 16
_STEPS = (1, 12, 32)
"""Requests of the first decode steps; the last step has the remaining tokens. With two KV heads and 132 SMs the decode
kernel uses clusters of 8, 4, 2 and 1 thread blocks."""


def _bytes(quantized: QuantizedTensor) -> torch.Tensor:
    """FP8 data and scales side by side."""
    return torch.cat([x.contiguous().view(torch.uint8) for x in quantized], dim=1)


class _Inputs(NamedTuple):
    """Inputs of the operations on one device."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    head: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    temperature: torch.Tensor
    logits: torch.Tensor
    following: torch.Tensor


@cache
def _inputs(device: torch.device) -> _Inputs:
    """Cached, 1 MB: copies from the host wait for the device, and no operation writes into its inputs."""
    generator = torch.Generator().manual_seed(20260122)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16)

    tokens = sum(_LENGTHS)
    x, residual, weight, head = normal(tokens, 384), normal(tokens, 384), normal(384), normal(200, 384)
    q, k, v = normal(tokens, 4, _HEAD_DIM), normal(tokens, 2, _HEAD_DIM), normal(tokens, 2, _HEAD_DIM)
    return _Inputs(
        *(x, residual, weight, head, q, k, v),
        table=kernels.rotary_table(_HEAD_DIM, 2048, {"rope_theta": 1e6}).to(device),
        positions=torch.arange(2047, 2047 - tokens, -1, device=device),
        cu_seqlens=torch.tensor([0, *_LENGTHS], device=device).cumsum(0).to(torch.int32),
        temperature=torch.linspace(0.3, 2, tokens).to(device),
        # Not the results of kernels.logits, so that a difference shows in the operation that makes it alone.
        logits=torch.randn(tokens, 200, generator=generator, device="cpu").to(device),
        following=torch.arange(tokens, device=device)[:, None],
    )


class _Step(NamedTuple):
    """A decode step of some of the probe's tokens, each a request of its own.

    Attributes:
        tokens: ``[R]``. lengths: int32 ``[R]``, of sequences up to these tokens. table: int32 ``[R, pages]``.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


class _Places(NamedTuple):
    """The rollout's cache: ``slots [N]`` of all tokens in ``pages``, and decode ``steps`` with each token once."""

    pages: int
    slots: torch.Tensor
    steps: tuple[_Step, ...]


@cache
def _places(device: torch.device) -> _Places:
    """Cached, as :func:`_inputs`."""
    with torch.device("cpu"):  # whatever the default is
        owner = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
        position = torch.cat([torch.arange(length) for length in _LENGTHS])
        pages = [-(-length // _PAGE_TOKENS) for length in _LENGTHS]
        # Scattered: sequences share no page, and their pages are not consecutive.
        numbers = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(3)).split(pages)
        table = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True)
        slots = table[owner, position // _PAGE_TOKENS] * _PAGE_TOKENS + position % _PAGE_TOKENS
        # Each step has requests with one and with two blocks of keys.
        tokens = len(position)
        order = (tokens - 1 - 41 * torch.arange(tokens)) % tokens
        steps = order.split([*_STEPS, tokens - sum(_STEPS)])

        def step(tokens: torch.Tensor) -> _Step:
            lengths, tables = (x.to(torch.int32).to(device) for x in (position[tokens] + 1, table[owner[tokens]]))
            return _Step(tokens.to(device), lengths, tables)

        return _Places(sum(pages), slots.to(device), tuple(map(step, steps)))


def _pages(device: torch.device, kv_cache: KVCache) -> torch.Tensor:
    """Unwritten pages of :func:`_places`."""
    return kv_cache.new_pages(_places(device).pages, _PAGE_TOKENS, _inputs(device).k.shape[1], device)


def _heads(device: torch.device, kv_cache: KVCache, rollout: bool) -> torch.Tensor:
    """Queries after QK norm and rotary, and keys and values as read from the cache: ``[N, H + 2 Hkv, D]``."""
    inputs = _inputs(device)
    weights = inputs.weight[: 2 * _HEAD_DIM].chunk(2)
    others = (*weights, 1e-6, inputs.table, inputs.positions)
    if rollout:
        pages, slots = _pages(device, kv_cache), _places(device).slots
        q = kv_cache.norm_rotary_write((inputs.q, inputs.k, inputs.v, *others), pages, slots)
        cached = [x[slots] for x in kv_cache.read(pages)]
    else:
        q, k = kernels.norm_rotary(inputs.q, inputs.k, *others)
        cached = [kernels.cache_form(x) for x in kv_cache.seen(k, inputs.v)]
    return torch.cat([q, *cached], dim=1)


def _token_by_token(device: torch.device, kv_cache: KVCache) -> torch.Tensor:
    """Attention ``[N, H, D]`` of each token as the new one of a decode step."""
    inputs, places, pages = _inputs(device), _places(device), _pages(device, kv_cache)
    kv_cache.write(inputs.k, inputs.v, pages, places.slots)
    out = torch.empty_like(inputs.q)
    for tokens, lengths, table in places.steps:
        out[tokens] = kv_cache.decode(inputs.q[tokens], pages, lengths, table, _HEAD_DIM**-0.5)
    return out


def _results(device: torch.device, kv_cache: KVCache, rollout: bool) -> dict[str, torch.Tensor]:
    """Operation -> its results on ``device``, by this side's code."""
    x, residual, weight, head, q, k, v, table, positions, cu_seqlens, temperature, logits, following = _inputs(device)
    sequences = q, k, v, cu_seqlens, max(_LENGTHS), _HEAD_DIM**-0.5
    results = {
        "rms_norm": kernels.rms_norm(x, weight, 1e-6),
        "add_rms_norm": torch.cat(kernels.add_rms_norm(x, residual, weight, 1e-6)),
        "rms_norm_quantize_1x128": _bytes(kernels.rms_norm_quantize_1x128(x, weight, 1e-6, "fp32")),
        "add_rms_norm_quantize_1x128": _bytes(
            kernels.add_rms_norm_quantize_1x128(x, residual, weight, 1e-6, "fp32", with_normed=False)[0]
        ),
        "rotary": torch.cat(kernels.rotary(q, k, table, positions), dim=1),
        "norm_rotary": _heads(device, kv_cache, rollout),
        "silu_mul": kernels.silu_mul(x, residual),
        "silu_mul_quantize": _bytes(
            kernels.silu_mul_quantize(x, residual, "fp32", with_product=False, with_colwise=False)[0]
        ),
        "attention": kernels.attention(*sequences),
        "logits": kernels.logits(x, head),
        "log_probs": kernels.log_probs(logits, following, temperature),
    }
    if rollout:
        results[kv_cache.contract] = _token_by_token(device, kv_cache)
    else:
        # With a BF16 cache this is the attention above.
        is_bf16 = kv_cache is formats.kv_cache(formats.UNQUANTIZED)
        results[kv_cache.contract] = results["attention"] if is_bf16 else kv_cache.attend(*sequences)
    return results


def _sums(results: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Sum of the bits of each result, modulo 2^64."""
    sums = []
    for result in results.values():
        rows = row_sums(result.flatten(1))
        # A constant for each row, so that exchanged rows show.
        sums.append((rows * odd_constants(len(rows), rows.device)).sum())
    # One wait for the device, since each can take a turn of every other process on it.
    return dict(zip(results, torch.stack(sums).tolist(), strict=True))


_EXPERTS, _PER_TOKEN, _WIDTH = 6, 3, 128
_ROWS = (1, 5, 137)
"""Token counts of the experts' probe; kernels are chosen by their number."""


class _MixtureInputs(NamedTuple):
    """Inputs of a mixture's operations on one device."""

    tied: torch.Tensor
    x: torch.Tensor
    logits: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    terms: torch.Tensor


@cache
def _mixture_inputs(device: torch.device) -> _MixtureInputs:
    """Cached, as :func:`_inputs`."""
    generator = torch.Generator().manual_seed(20261124)
    tokens = max(_ROWS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    # Expert 2 gets no token, expert 0 most of them.
    logits = normal(tokens, _EXPERTS)
    logits[:, 0] += 3
    logits[:, 2] -= 100
    # Two terms of a token cancel; the order decides whether the third is lost.
    large = normal(tokens, 2 * BLOCK).mul_(2.0**12)
    terms = torch.stack([large, normal(tokens, 2 * BLOCK), -large], dim=1)
    return _MixtureInputs(
        tied=torch.randint(-2, 3, (tokens, 32), generator=generator, device="cpu").float().to(device),
        x=normal(tokens, 2 * BLOCK).to(device, torch.bfloat16),
        logits=logits.to(device),
        gate_up=normal(_EXPERTS, 2 * _WIDTH, 2 * BLOCK).mul_(0.1).to(device, torch.bfloat16),
        down=normal(_EXPERTS, 2 * BLOCK, _WIDTH).mul_(0.1).to(device, torch.bfloat16),
        terms=terms.flatten(0, 1).to(device, torch.bfloat16),
    )


def _experts_forward(inputs: _MixtureInputs, tokens: int, trains: bool) -> torch.Tensor:
    """BF16 output of the flow's experts for the first ``tokens`` tokens, by one side's operations."""
    flow = formats.get(formats.FLOW)
    gate_up, down = (flow.quantize_weight(weight, "fp32") for weight in (inputs.gate_up, inputs.down))
    x, logits = flow.quantize_activation(inputs.x[:tokens], "fp32"), inputs.logits[:tokens].contiguous()
    if trains:
        experts_of, weights = kernels.route(logits, _PER_TOKEN, True)
        segments = kernels.segments(experts_of, _EXPERTS, BLOCK)
        rows = kernels.gather_quantized(x, segments.pair, _PER_TOKEN)
    else:
        weights, segments, rows = kernels.route_and_permute(logits, x, _PER_TOKEN, True)
    y, *_ = flow.experts(rows, weights, segments, gate_up, down, "fp32")
    return kernels.combine(y, segments.row)


def _results_of_mixture(device: torch.device) -> dict[str, torch.Tensor]:
    """Operation of a mixture of experts -> its results on ``device``."""
    inputs = _mixture_inputs(device)
    tokens = max(_ROWS)
    rows = torch.arange(tokens * _PER_TOKEN, dtype=torch.int32, device=device).view(tokens, _PER_TOKEN)
    plain = _inputs(device)
    residual, weight = plain.residual[:tokens, : 2 * BLOCK].contiguous(), plain.weight[: 2 * BLOCK]
    norm_inputs = inputs.terms, rows, residual, weight, 1e-6
    chosen = [kernels.route(inputs.tied, 4, renormalize) for renormalize in (False, True)]
    # The trainer's segments begin at multiples of 128 rows, the rollout's anywhere.
    outputs = [_experts_forward(inputs, count, trains) for count in _ROWS for trains in (True, False)]
    return {
        "route": torch.cat([x.view(torch.int32) for pair in chosen for x in pair], dim=1).view(torch.bfloat16),
        "experts": torch.cat(outputs),
        "combine": kernels.combine(inputs.terms, rows),
        "combine_add_rms_norm": torch.cat(kernels.combine_add_rms_norm(*norm_inputs)),
        "combine_add_rms_norm_quantize_1x128": _bytes(
            kernels.combine_add_rms_norm_quantize_1x128(*norm_inputs, "fp32", with_normed=False)[0]
        ),
    }


def stated_reduction(
    device: torch.device, ranks: int, reduce: Callable[[Sequence[torch.Tensor]], torch.Tensor] = kernels.sum_of_ranks
) -> dict[str, int]:
    """A side's statement about the reduction of its row-parallel layers; empty with one rank.

    Args:
        reduce: sum of the products of all ranks; a rank of the rollout reduces its own product.
    """
    if ranks == 1:
        return {}
    sums = torch.stack([row_sums(reduce(products)).sum() for products in products_of_ranks(device, ranks)])
    return {f"the sum of {ranks} ranks' products": int(sums.sum())}


def stated_operations(
    device: torch.device,
    operations: str,
    kv_cache: str = formats.UNQUANTIZED,
    *,
    rollout: bool = False,
    mixture: bool = False,
) -> dict[str, int]:
    """A side's statement about ``"shared"`` operations: operation -> sum of its result bits, modulo 2^64; else empty.

    Args:
        kv_cache: format of the rollout's cache (``formats.CACHES``). rollout: whether this side is the rollout.
        mixture: whether the model is a mixture of experts.
    """
    if operations != "shared":
        return {}
    with torch.no_grad():
        results = _results(device, formats.kv_cache(kv_cache), rollout)
        return _sums(results | (_results_of_mixture(device) if mixture else {}))


def stated_probe(device: torch.device, format_name: str, scale_rule: str) -> int | None:
    """A side's statement about its linear layers: ``Format.probe``; None for BF16, whose kernel varies by rows."""
    return None if format_name == formats.UNQUANTIZED else formats.get(format_name).probe(device, scale_rule)
