# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the trainer sends at a weight sync: qdata and scales of quantized layers, BF16 of all else, in few pieces.

Weights are quantized once, from the BF16 cast of the gathered master weight, which the trainer's forward quantizes too,
so the two sides cannot round differently. A quantized weight takes 1.0007 bytes with scales and the contract's sums;
verl's stock wire carries FP32.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from jetrl_verl import formats
from jetrl_verl.formats.format import Format, QuantizedWeight
from jetrl_verl.models.plan import LinearPlan, plan_of
from jetrl_verl.sync.stacks import Name, Stack, names_of, parts_of, renamed


@dataclass
class SyncStatistics:
    """Size and duration of one weight sync at the sender.

    Attributes:
        bytes: bytes sent. stock_bytes: bytes of the same tensors on verl's own wire.
        seconds: from the first tensor to the last, transfer included.
    """

    bytes: int = 0
    stock_bytes: int = 0
    seconds: float = 0.0


def quantize_stream(
    weights: Iterable[tuple[Name, torch.Tensor]],
    plans: Mapping[str, LinearPlan],
    scale_rule: str,
    format_name: str = formats.FLOW,
    fixed_scales: dict[str, torch.Tensor] | None = None,
) -> Iterator[tuple[Name, torch.Tensor | QuantizedWeight]]:
    """Quantize each planned weight; cast every other floating tensor to BF16.

    Args:
        weights: (Hugging Face name or stack of them, full tensor) of any floating type.
        plans: from :func:`jetrl_verl.models.plan.plan_linears`.
        scale_rule: rule of the scales.
        format_name: see :func:`jetrl_verl.formats.get`; ``UNQUANTIZED`` if the plans quantize nothing.
        fixed_scales: scales to reuse, by weight name; missing ones are computed and added. 0 marks a row that was all
            zeros so far and gets a scale later. None: scales are always computed.

    Yields:
        Planned weights quantized, ``[N, K]`` or experts ``[E, N, K]``; others BF16. A stack is split only if scales are
        fixed or its weights are planned differently.
    """
    number_format = None if format_name == formats.UNQUANTIZED else formats.get(format_name)
    for name, tensor in weights:
        if tensor.requires_grad:
            tensor = tensor.detach()
        planned = {quantized_by(plans, one) for one in names_of(name)}
        items = [(name, tensor)]
        if len(planned) > 1 or (planned == {True} and fixed_scales is not None):
            items = list(parts_of(name, tensor))
        for item, part in items:
            quantized = quantized_by(plans, names_of(item)[0])
            if quantized or part.is_floating_point():
                part = part.to(torch.bfloat16)
            if not quantized:
                yield item, part
                continue
            weight = number_format.quantize_weight(part, scale_rule)
            if fixed_scales is not None:
                weight = _with_kept_scales(number_format, item, part, weight, scale_rule, fixed_scales)
            yield item, weight


def quantized_by(plans: Mapping[str, LinearPlan], name: str) -> bool:
    """Whether a tensor of this name is sent as qdata."""
    plan = None if name.endswith(".bias") else plan_of(name, plans)
    return plan is not None and plan.quantized


def _with_kept_scales(
    number_format: Format,
    name: str,
    weight: torch.Tensor,
    fresh: QuantizedWeight,
    rule: str,
    kept: dict[str, torch.Tensor],
) -> QuantizedWeight:
    """``weight`` quantized with its ``kept`` scales; rows without one get their own, which is kept."""
    own = torch.where(fresh.qdata.any(dim=-1, keepdim=True), fresh.scales, 0.0)
    scales = kept.get(name, own)
    kept[name] = scales = torch.where(scales == 0, own, scales)
    return number_format.quantize_weight(weight, rule, torch.where(scales == 0, fresh.scales, scales))


def as_tensors(stream: Iterable[tuple[Name, torch.Tensor | QuantizedWeight]]) -> Iterator[tuple[Name, torch.Tensor]]:
    """The stream of :func:`quantize_stream` with each quantized weight as its tensors (``Format.wire``)."""
    for name, value in stream:
        if not isinstance(value, QuantizedWeight):
            yield name, value
            continue
        for suffix, tensor in value.format.wire(value):
            yield renamed(name, suffix=suffix), tensor


# --- tensors in few pieces -------------------------------------------------------------------------------------------

_PACK = "jetrl.packed/"
_SMALL = 2**18
"""Tensors up to this many bytes are packed: scales, norms, biases and sums."""
_PACK_BYTES = 2**19
"""A pack is sent once it has this many bytes; below 1 MiB, verl's smallest bucket, which must hold a piece."""
_STACK_BYTES = 192 * 2**20
"""Most bytes of stacked weights in a piece, unless one weight has more: less than the embedding of a 7B model, which is
one piece anyway."""
_ALIGNED = 16
"""Alignment in bytes of pieces, and of the tensors of a pack that allow it; a receiver copies words of 8."""


def packed(stream: Iterable[tuple[Name, torch.Tensor | QuantizedWeight]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Combine tensors into pieces, since verl spends a view, a copy and a message entry on each, on both sides.

    Yields:
        Large tensors unchanged; stacks as uint8 ``[bytes]`` under a name that lists the contents, in several pieces if
        they are too large; small tensors in such packs of at most 768 KiB.
    """
    small: list[tuple[Name, torch.Tensor]] = []
    size = 0
    for name, tensor in as_tensors(stream):
        if tensor.nbytes > _SMALL:
            yield from _large(name, tensor)
            continue
        small.append((name, tensor))
        size += tensor.nbytes
        if size >= _PACK_BYTES:
            yield _pack(small)
            small, size = [], 0
    if small:
        yield _pack(small)


def _large(name: Name, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(name, str):
        # A manifest may have any length, and the next piece begins where it ends.
        yield (name, tensor) if tensor.nbytes % _ALIGNED == 0 else _pack([(name, tensor)])
    elif tensor.nbytes <= _STACK_BYTES:
        yield _named([(name, tensor)]), tensor.view(torch.uint8).view(-1)
    else:
        start, bytes_of_a_row = 0, tensor.nbytes // len(tensor)
        for piece, length in _in_pieces(name, name.lengths(len(tensor)), _STACK_BYTES // bytes_of_a_row):
            yield _named([(piece, tensor[start : start + length])]), _bytes(tensor[start : start + length])
            start += length


def _in_pieces(stack: Stack, lengths: list[int], most: int) -> Iterator[tuple[Stack, int]]:
    """(part of a stack, its length) of at most ``most`` rows each, unless a single name has more."""
    first = 0
    while first < len(lengths):
        last, length = first + 1, lengths[first]
        while last < len(lengths) and length + lengths[last] <= most:
            length += lengths[last]
            last += 1
        yield Stack(stack.names[first:last], stack.rows[first:last]), length
        first = last


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _named(tensors: list[tuple[Name, torch.Tensor]]) -> str:
    """Name of a piece with these tensors."""
    index = []
    for name, tensor in tensors:
        rows = None if isinstance(name, str) else name.rows
        entry = (*names_of(name),), rows, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        index.append(entry)
    return _PACK + json.dumps(index, separators=(",", ":"))


def _pack(tensors: list[tuple[Name, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    # Multiples of the alignment first, then by element size, so that each tensor is aligned for its dtype.
    tensors.sort(key=lambda item: (item[1].nbytes % _ALIGNED != 0, -item[1].element_size()))
    used = sum(tensor.nbytes for _, tensor in tensors)
    # The next piece begins where this one ends.
    device = _device_of(tensors)
    whole = torch.empty(-(-used // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)
    torch.cat([_bytes(tensor.to(device)) for _, tensor in tensors], out=whole[:used])
    return _named(tensors), whole


def _device_of(tensors: list[tuple[Name, torch.Tensor]]) -> torch.device:
    # The manifest is made on the host; a tensor on a GPU takes precedence.
    return next((tensor.device for _, tensor in tensors if tensor.device.type != "cpu"), tensors[0][1].device)


def is_packed(name: str) -> bool:
    """Whether a piece is one of :func:`packed`."""
    return name.startswith(_PACK)


class Entry(NamedTuple):
    """One tensor of a piece; ``start`` and ``stop`` are bytes."""

    name: Name
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@lru_cache(maxsize=1024)
def entries_of(name: str) -> tuple[Entry, ...]:
    """Contents of a piece of :func:`packed`; the same objects for the same name, at every sync."""
    entries, start = [], 0
    for names, rows, dtype_name, shape in json.loads(name.removeprefix(_PACK)):
        dtype = getattr(torch, dtype_name)
        stop = start + dtype.itemsize * math.prod(shape)
        inner = names[0] if rows is None else Stack(tuple(names), tuple(rows))
        entries.append(Entry(inner, dtype, tuple(shape), start, stop))
        start = stop
    return tuple(entries)


def unpacked(name: str, whole: torch.Tensor) -> Iterator[tuple[Name, torch.Tensor]]:
    """(name, view) of the tensors in a piece of :func:`packed`, stacks as sent; other tensors unchanged.

    Args:
        name: of the piece. whole: uint8 if packed, aligned for 8-byte elements.
    """
    if not is_packed(name):
        yield name, whole
        return
    for entry in entries_of(name):
        yield entry.name, whole[entry.start : entry.stop].view(entry.dtype).view(entry.shape)


def measured(
    weights: Iterable[tuple[Name, torch.Tensor]], statistics: SyncStatistics
) -> Iterator[tuple[Name, torch.Tensor]]:
    """Pass a stream through and add its size and the time until it is drained to ``statistics``."""
    started = time.perf_counter()
    for name, tensor in weights:
        statistics.bytes += tensor.nbytes
        yield name, tensor
    statistics.seconds += time.perf_counter() - started


def counted_stock(
    weights: Iterable[tuple[Name, torch.Tensor]], statistics: SyncStatistics
) -> Iterator[tuple[Name, torch.Tensor]]:
    """Pass verl's own stream through and count its bytes."""
    for name, tensor in weights:
        statistics.stock_bytes += tensor.nbytes
        yield name, tensor
