# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What leaves the trainer at a weight sync: qdata and scales for the quantized layers, BF16 for the rest.

Weights are quantized here, once, from the BF16 value of the gathered master weight, which is the value that the
trainer's own forward quantizes. The rollout copies the qdata and never sees a BF16 weight, so the two sides cannot
round differently (a trainer quantizing its FP32 master against a rollout quantizing the BF16 export has been reported
to cost a factor of 20 in k3_kl, xtuner #2044). The wire carries 1.0002 bytes per quantized weight, 1.0007 with the
contract check's sums; verl's stock wire carries FP32.
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
from jetrl_verl.formats.format import SCALE_SUFFIX, Format
from jetrl_verl.models.plan import LinearPlan, plan_of
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.sync.stacks import Name, Stack, names_of, parts_of, renamed


@dataclass
class SyncStatistics:
    """Size and duration of one weight sync as the sender saw it.

    Attributes:
        bytes: sent. stock_bytes: what the same tensors weigh on verl's own wire.
        seconds: from the first tensor asked for to the last one taken, transfer included.
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
) -> Iterator[tuple[Name, torch.Tensor]]:
    """Replace each planned weight by its qdata followed by its scales; cast every other floating tensor to BF16.

    Args:
        weights: (Hugging Face name or stack of them, full tensor) of any floating type.
        plans: from :func:`jetrl_verl.models.plan.plan_linears`.
        scale_rule: rule of the qdata.
        format_name: of the qdata, see :func:`jetrl_verl.formats.get`; ``UNQUANTIZED`` where the plans quantize nothing.
        fixed_scales: of weights, by name, where the format keeps scales: those that are in it are used, others are
            made and put in. 0 stands for a row that had nothing but zeros so far; its scale is made once it has others.
            None: all are made.

    Yields:
        What the format sends of a planned weight: ``<name>`` qdata [N, K], of experts [E, N, K], then
        ``<name>_scale_inv`` FP32; else ``<name>`` BF16. A stack stays one, unless scales are fixed, which are kept by
        name, or its weights are not planned alike.
    """
    number_format = None if format_name == formats.UNQUANTIZED else formats.get(format_name)
    for name, tensor in weights:
        if tensor.requires_grad:
            tensor = tensor.detach()
        planned = {quantized_by(plans, each) for each in names_of(name)}
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
            for suffix, sent in number_format.wire(weight):
                yield renamed(item, suffix=suffix), sent


def quantized_by(plans: Mapping[str, LinearPlan], name: str) -> bool:
    """Whether a tensor of this name is sent as qdata."""
    plan = None if name.endswith(".bias") else plan_of(name, plans)
    return plan is not None and plan.quantized


def _with_kept_scales(
    number_format: Format,
    name: str,
    weight: torch.Tensor,
    fresh: QuantizedTensor,
    rule: str,
    kept: dict[str, torch.Tensor],
) -> QuantizedTensor:
    """``weight`` under the scales that ``kept`` has of it; rows that it has none of get their own, and keep them."""
    made = torch.where(fresh.qdata.any(dim=-1, keepdim=True), fresh.scales, 0.0)
    scales = kept.get(name, made)
    kept[name] = scales = torch.where(scales == 0, made, scales)
    return number_format.quantize_weight(weight, rule, torch.where(scales == 0, fresh.scales, scales))


def with_completed(
    stream: Iterable[tuple[Name, torch.Tensor]],
) -> Iterator[tuple[Name, torch.Tensor, tuple[Name, torch.Tensor | QuantizedTensor] | None]]:
    """Read what :func:`quantize_stream` sends: each (name, tensor) and what is complete with it.

    Complete with its scales is a quantized weight, under the weight's own name; with qdata nothing is yet, None; any
    other tensor is complete by itself.
    """
    weight, scales_name, qdata = "", "", None
    for name, tensor in stream:
        if formats.of(tensor) is not None:
            weight, scales_name, qdata = name, renamed(name, suffix=SCALE_SUFFIX), tensor
            yield name, tensor, None
        elif qdata is not None and name == scales_name:
            yield name, tensor, (weight, QuantizedTensor(qdata, tensor))
            qdata = None
        else:
            yield name, tensor, (name, tensor)


# --- tensors in few pieces -------------------------------------------------------------------------------------------

_PACK = "jetrl.packed/"
_SMALL = 2**18
"""Bytes up to which a tensor is packed: scales, norms, biases and sums of every model; no weight worth mentioning."""
_PACK_BYTES = 2**19
"""Bytes from which a pack leaves. It stays below 1 MiB, verl's smallest bucket: without CUDA IPC what does not fit a
bucket cannot be sent."""
_STACK_BYTES = 192 * 2**20
"""Most bytes of stacked weights in a piece, where one alone has not more: less than the embedding of a 7B model, which
is one piece, so that a bucket made for that one holds every piece."""
_ALIGNED = 16
"""Bytes on whose multiples each tensor of a pack begins that can, and each piece: a receiver copies in words of 8."""


def packed(stream: Iterable[tuple[Name, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Put tensors of a stream together: for each that it sends verl makes a view, a copy and an entry of a message, and
    its receiver the same again.

    Yields:
        A large tensor unchanged, or, of a stack, uint8 ``[bytes]`` under a name that says what is in it, in more pieces
        if it is larger than a piece may be; small ones, under such a name, too, in packs of at most 768 KiB.
    """
    small: list[tuple[Name, torch.Tensor]] = []
    held = 0
    for name, tensor in stream:
        if tensor.nbytes > _SMALL:
            yield from _large(name, tensor)
            continue
        small.append((name, tensor))
        held += tensor.nbytes
        if held >= _PACK_BYTES:
            yield _pack(small)
            small, held = [], 0
    if small:
        yield _pack(small)


def _large(name: Name, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(name, str):
        # A manifest may have any length, and the piece behind it begins where it ends.
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
    """Name of a piece that has these tensors in it."""
    index = []
    for name, tensor in tensors:
        rows = None if isinstance(name, str) else name.rows
        entry = (*names_of(name),), rows, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        index.append(entry)
    return _PACK + json.dumps(index, separators=(",", ":"))


def _pack(tensors: list[tuple[Name, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    # Whole multiples of the alignment first, then wide elements, so that each lies where its type may lie.
    tensors.sort(key=lambda item: (item[1].nbytes % _ALIGNED != 0, -item[1].element_size()))
    used = sum(tensor.nbytes for _, tensor in tensors)
    # The piece behind it begins where this one ends.
    device = _device_of(tensors)
    whole = torch.empty(-(-used // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)
    torch.cat([_bytes(tensor.to(device)) for _, tensor in tensors], out=whole[:used])
    return _named(tensors), whole


def _device_of(tensors: list[tuple[Name, torch.Tensor]]) -> torch.device:
    # The manifest is made on the host; one tensor of a GPU decides.
    return next((tensor.device for _, tensor in tensors if tensor.device.type != "cpu"), tensors[0][1].device)


def is_packed(name: str) -> bool:
    """Whether a piece is one of :func:`packed`."""
    return name.startswith(_PACK)


class Entry(NamedTuple):
    """One tensor of a piece: its name, type and shape, and where it lies, in bytes."""

    name: Name
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@lru_cache(maxsize=1024)
def entries_of(name: str) -> tuple[Entry, ...]:
    """What is in a piece of :func:`packed`; the same objects for the same name, as in every sync of a model."""
    entries, start = [], 0
    for names, rows, dtype_name, shape in json.loads(name.removeprefix(_PACK)):
        dtype = getattr(torch, dtype_name)
        stop = start + dtype.itemsize * math.prod(shape)
        inner = names[0] if rows is None else Stack(tuple(names), tuple(rows))
        entries.append(Entry(inner, dtype, tuple(shape), start, stop))
        start = stop
    return tuple(entries)


def unpacked(name: str, whole: torch.Tensor) -> Iterator[tuple[Name, torch.Tensor]]:
    """(name, view) of what :func:`packed` put into a piece, stacks as they were sent; of what it let pass, itself.

    Args:
        name: of the piece. whole: where it is packed uint8, from where 8-byte elements may lie.
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
