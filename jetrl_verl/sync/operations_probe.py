# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check's probes: both sides run each operation on fixed inputs and compare sums of its results' bits.

Equal weights under different code therefore do not pass, and the operation that differs is named. Operations declare
their probes (kernels/operator.py); here are those of which each side runs its own code: the trainer attends to whole
sequences, the rollout decodes each of their tokens over pages that it has written, in steps of few and of many
requests; with gated delta nets the trainer computes whole sequences, the rollout continues states; each side of a
rollout over several GPUs adds the products of ranks by its own reduction. The host waits for the device once, for all
sums.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from jetrl_verl import formats, kernels
from jetrl_verl.formats.caches import KVCache
from jetrl_verl.formats.format import Format
from jetrl_verl.formats.sums import odd_constants, row_sums
from jetrl_verl.kernels.probe_inputs import (
    EXPERTS,
    LENGTHS,
    PER_TOKEN,
    PLAIN,
    ROWS,
    MixtureInputs,
    ProbeInputs,
    Variant,
    mixture_inputs,
    probe_inputs,
)
from jetrl_verl.kernels.sum_of_ranks import products_of_ranks
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.reference.delta_net import state_shape

_PAGE_TOKENS = 16
_STEPS = (1, 12, 32)
"""Requests of the first decode steps; the last step has the remaining tokens. With two KV heads and 132 SMs the decode
kernel uses clusters of 8, 4, 2 and 1 thread blocks."""


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
    """Cached, as ``probe_inputs``."""
    with torch.device("cpu"):  # whatever the default is
        owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        position = torch.cat([torch.arange(length) for length in LENGTHS])
        pages = [-(-length // _PAGE_TOKENS) for length in LENGTHS]
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


def _pages(inputs: ProbeInputs, kv_cache: KVCache) -> torch.Tensor:
    """Unwritten pages of :func:`_places`."""
    device = inputs.k.device
    return kv_cache.new_pages(_places(device).pages, _PAGE_TOKENS, *inputs.k.shape[1:], device)


def _heads(inputs: ProbeInputs, kv_cache: KVCache, rollout: bool) -> torch.Tensor:
    """Queries after QK norm and rotary, and keys and values as read from the cache: ``[N, H + 2 Hkv, D]``."""
    weights = inputs.weight.repeat(2)[: 2 * inputs.q.shape[-1]].chunk(2)
    others = (*weights, 1e-6, inputs.table, inputs.positions, inputs.unit_offset)
    if rollout:
        pages, slots = _pages(inputs, kv_cache), _places(inputs.q.device).slots
        q = kv_cache.norm_rotary_write((inputs.q, inputs.k, inputs.v, *others), pages, slots)
        cached = [x[slots] for x in kv_cache.read(pages)]
    else:
        q, k = kernels.norm_rotary(inputs.q, inputs.k, *others)
        cached = [kernels.cache_form(x) for x in kv_cache.seen(k, inputs.v)]
    return torch.cat([q, *cached], dim=1)


def _token_by_token(inputs: ProbeInputs, kv_cache: KVCache) -> torch.Tensor:
    """Attention ``[N, H, D]`` of each token as the new one of a decode step."""
    places, pages = _places(inputs.q.device), _pages(inputs, kv_cache)
    kv_cache.write(inputs.k, inputs.v, pages, places.slots)
    out = torch.empty_like(inputs.q)
    for tokens, lengths, table in places.steps:
        out[tokens] = kv_cache.decode(inputs.q[tokens], pages, lengths, table, inputs.sequences[-1])
    return out


_STATE_STEPS = (((0, 2, 4, 0), (5, 6, 0, 0), (6, 76, 2, 0)), ((2, 5, 4, 2), (76, 154, 2, 70)), ((154, 155, 2, 148),))
"""Steps of a rollout of a gated delta net over the probe's sequences: (first token, stop, slot, tokens computed)."""


@cache
def _state_steps(device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Tokens, slots, computed tokens and boundaries of each step, with a padded request. Cached."""
    steps = []
    with torch.device("cpu"):
        for requests in _STATE_STEPS:
            first, stop, *places = zip(*requests, (0, 1, -1, 1), strict=True)
            tokens = [torch.arange(*span) for span in zip(first, stop, strict=True)]
            lengths = torch.tensor([0, *map(len, tokens)])
            whole = (torch.tensor(x).to(device, torch.int32) for x in (*places, lengths.cumsum(0).tolist()))
            steps.append((torch.cat(tokens).to(device), *whole))
    return steps


def _delta_net(inputs: ProbeInputs, rollout: bool) -> dict[str, Any]:
    """Operation of a gated delta net -> its results, with one key head and two value heads."""
    x, residual = inputs.x, inputs.residual
    to_conv, to_rule = (torch.cat([left, right[:, :128]], dim=1) for left, right in ((x, residual), (residual, x)))
    taps = inputs.head.flatten()[: 4 * 512].view(512, 4)
    b, a = (inputs.logits[:, heads].contiguous() for heads in (slice(0, 2), slice(2, 4)))
    of_heads = inputs.weight[:2], inputs.weight[2:4]
    if rollout:
        outputs = torch.empty_like(to_conv), x.new_empty(len(x), 2, 128)
        states = x.new_full((5, 3, 512), torch.nan), b.new_full((5, *state_shape(2)), torch.nan)
        for tokens, *places in _state_steps(x.device):
            convolved = kernels.causal_conv1d_update(to_conv[tokens], taps, states[0], *places)
            ruled = torch.empty_like(outputs[1][tokens])
            kernels.gated_delta_rule_update(to_rule[tokens], b[tokens], a[tokens], *of_heads, states[1], *places, ruled)
            for output, rows in zip(outputs, (convolved, ruled), strict=True):
                output[tokens[:-1]] = rows[:-1]
    else:
        cu_seqlens = inputs.cu_seqlens
        outputs = (
            kernels.causal_conv1d(to_conv, taps, cu_seqlens),
            kernels.gated_delta_rule(to_rule, b, a, *of_heads, cu_seqlens),
        )
    return dict(zip(("causal_conv1d", "gated_delta_rule"), outputs, strict=True))


def _results(
    inputs: ProbeInputs, kv_cache: KVCache, rollout: bool, mixture: str | None, delta_net: bool
) -> dict[str, Any]:
    """Operation -> its results on ``inputs``, by this side's code."""
    results = {name: op.probe(inputs) for name, op in kernels.OPERATIONS.items() if op.probe}
    results["norm_rotary"] = _heads(inputs, kv_cache, rollout)
    if rollout:
        results[kv_cache.contract] = _token_by_token(inputs, kv_cache)
    else:
        results[kv_cache.contract] = kv_cache.attend(*inputs.sequences)
    if delta_net:
        results |= _delta_net(inputs, rollout)
    if mixture:
        inputs = mixture_inputs(inputs.x.device)
        results |= {name: op.mixture_probe(inputs) for name, op in kernels.OPERATIONS.items() if op.mixture_probe}
        # The trainer's segments begin at multiples of a block's rows, the rollout's anywhere.
        number_format = formats.get(mixture)
        results["experts"] = torch.cat(
            [_experts_forward(number_format, inputs, count, trains) for count in ROWS for trains in (True, False)]
        )
    return results


def _tensors(result: Any) -> list[torch.Tensor]:
    """Tensors of a result: of nested tuples and quantized tensors, without what was not requested."""
    if isinstance(result, (tuple, QuantizedTensor)):
        return [tensor for part in result for tensor in _tensors(part)]
    return [] if result is None else [result]


def _sums(results: Mapping[str, Any]) -> dict[str, int]:
    """Sum of the bits of each result, modulo 2^64."""
    sums = []
    for result in results.values():
        # A copy, since a column of a wider tensor counts as contiguous and yet has no view as bytes.
        copies = [part.flatten(1).clone(memory_format=torch.contiguous_format) for part in _tensors(result)]
        rows = row_sums(torch.cat([copy.view(torch.uint8) for copy in copies], dim=1))
        # A constant for each row, so that exchanged rows show.
        sums.append((rows * odd_constants(len(rows), rows.device)).sum())
    # One wait for the device, since each can take a turn of every other process on it.
    return dict(zip(results, torch.stack(sums).tolist(), strict=True))


def _experts_forward(flow: Format, inputs: MixtureInputs, tokens: int, trains: bool) -> torch.Tensor:
    """BF16 output of the format's experts for the first ``tokens`` tokens, by one side's operations."""
    rule = flow.traits.scale_rules[0]
    gate_up, down = (flow.quantize_weight(weight, rule) for weight in (inputs.gate_up, inputs.down))
    x, logits = flow.quantize_activation(inputs.x[:tokens], rule), inputs.logits[:tokens].contiguous()
    if trains:
        experts_of, weights = kernels.route(logits, PER_TOKEN, True)
        segments = kernels.segments(experts_of, EXPERTS, flow.traits.block)
        rows = kernels.gather_quantized(x, segments.pair, PER_TOKEN)
    else:
        weights, segments, rows = kernels.route_and_permute(logits, x, PER_TOKEN, True)
    y, *_ = flow.experts(rows, weights, segments, gate_up, down, rule)
    return kernels.combine(y, segments.row)


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
    mixture: str | None = None,
    variant: Variant = PLAIN,
) -> dict[str, int]:
    """A side's statement about ``"shared"`` operations: operation -> sum of its result bits, modulo 2^64; else empty.

    Args:
        kv_cache: format of the rollout's cache (``formats.CACHES``). rollout: whether this side is the rollout.
        mixture: format of a mixture's experts; None for a dense model. variant: of the model.
    """
    if operations != "shared":
        return {}
    with torch.no_grad():
        inputs = probe_inputs(device, variant)
        return _sums(_results(inputs, formats.kv_cache(kv_cache), rollout, mixture, variant.delta_net))


def stated_probe(device: torch.device, format_name: str, scale_rule: str) -> int | None:
    """A side's statement about its linear layers: ``Format.probe``; None for BF16, whose kernel varies by rows."""
    return None if format_name == formats.UNQUANTIZED else formats.get(format_name).probe(device, scale_rule)
