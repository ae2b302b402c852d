# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The pieces of a weight sync: few byte tensors, each under a name that says what is in it.

verl's transport carries (name, tensor) pairs and spends a view, a copy and a message entry on each, on both sides. A
piece therefore holds many small tensors, or one stack. Its name is the JSON of its :class:`Entry` list and means
nothing to verl; nothing is remembered between syncs, so a worker may join or fail at any of them. A quantized weight
takes 1.0007 bytes with scales and sums; verl's stock wire carries FP32.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import torch

from jetrl_verl.formats import UNQUANTIZED
from jetrl_verl.formats.format import QuantizedWeight
from jetrl_verl.sync.quantize import Weight
from jetrl_verl.sync.stacks import Name, Stack, from_json, to_json


class Kind(StrEnum):
    """What a tensor of a sync is."""

    WEIGHT = "weight"
    """qdata of a quantized weight, or a BF16 tensor."""
    SCALES = "scales"
    SUMS = "sums"
    """The sums of a statement (statement.py)."""
    MANIFEST = "manifest"


class Part(NamedTuple):
    """A tensor of a sync.

    Attributes:
        name: of the weight or stack that it belongs to; empty for a statement's parts.
        format: of that weight; ``UNQUANTIZED`` for a BF16 tensor and a statement's parts.
    """

    kind: Kind
    name: Name
    format: str
    tensor: torch.Tensor


def parts_of_weight(name: Name, weight: Weight) -> Iterator[Part]:
    """A weight's parts in sending order."""
    if not isinstance(weight, QuantizedWeight):
        yield Part(Kind.WEIGHT, name, UNQUANTIZED, weight)
        return
    yield Part(Kind.WEIGHT, name, weight.format.traits.name, weight.qdata)
    yield Part(Kind.SCALES, name, weight.format.traits.name, weight.scales)


# --- sending ----------------------------------------------------------------------------------------------------------

_PREFIX = "jetrl:"
_SMALL = 2**18
"""Tensors up to this many bytes are packed: scales, norms, biases and a small model's sums."""
_PACK_BYTES = 2**19
"""A pack is sent once it has this many bytes; below 1 MiB, verl's smallest bucket, which must hold a piece."""
_STACK_BYTES = 192 * 2**20
"""Most bytes of stacked weights in a piece, unless one weight has more or verl's bucket is smaller: less than the
embedding of a 7B model, which is one piece anyway."""
_ALIGNED = 16
"""Alignment in bytes of pieces, and of the tensors of a pack that allow it; a receiver copies words of 8."""


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


def packed(
    parts: Iterable[Part], statistics: SyncStatistics | None = None, bucket_bytes: int = _STACK_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Combine a sync's parts into pieces.

    Args:
        statistics: gets the pieces' bytes, and the time until they are all read.
        bucket_bytes: of verl's transport, which stacks of smaller weights fit into.

    Yields:
        (name, uint8 ``[bytes]``), bytes a multiple of 16. A large tensor is a piece of its own, a stack several if it
        is too large; small tensors come in packs of at most 768 KiB.
    """
    started = time.perf_counter()
    for name, piece in _pieces(parts, min(bucket_bytes, _STACK_BYTES)):
        if statistics is not None:
            statistics.bytes += piece.nbytes
        yield name, piece
    if statistics is not None:
        statistics.seconds += time.perf_counter() - started


def _pieces(parts: Iterable[Part], most: int) -> Iterator[tuple[str, torch.Tensor]]:
    small: list[Part] = []
    size = 0
    for part in parts:
        if part.tensor.nbytes > _SMALL:
            yield from _large(part, most)
            continue
        small.append(part)
        size += part.tensor.nbytes
        if size >= _PACK_BYTES:
            yield _pack(small)
            small, size = [], 0
    if small:
        yield _pack(small)


def _large(part: Part, most: int) -> Iterator[tuple[str, torch.Tensor]]:
    name, tensor = part.name, part.tensor
    if tensor.nbytes % _ALIGNED:
        # A statement may have any length, and the next piece begins where it ends.
        yield _pack([part])
    elif isinstance(name, str) or tensor.nbytes <= most:
        yield _wire_name([part]), _bytes(tensor)
    else:
        start, bytes_of_a_row = 0, tensor.nbytes // len(tensor)
        for stack, length in _in_pieces(name, name.lengths(len(tensor)), most // bytes_of_a_row):
            rows = part._replace(name=stack, tensor=tensor[start : start + length])
            yield _wire_name([rows]), _bytes(rows.tensor)
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


def _pack(parts: list[Part]) -> tuple[str, torch.Tensor]:
    # Multiples of the alignment first, then by element size, so that each tensor is aligned for its dtype.
    parts.sort(key=lambda part: (part.tensor.nbytes % _ALIGNED != 0, -part.tensor.element_size()))
    used = sum(part.tensor.nbytes for part in parts)
    # The manifest is made on the host; a tensor on a GPU takes precedence.
    devices = [part.tensor.device for part in parts]
    device = next((device for device in devices if device.type != "cpu"), devices[0])
    # The next piece begins where this one ends.
    whole = torch.empty(-(-used // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)
    torch.cat([_bytes(part.tensor.to(device)) for part in parts], out=whole[:used])
    return _wire_name(parts), whole


def _wire_name(parts: list[Part]) -> str:
    index = []
    for kind, name, number_format, tensor in parts:
        dtype = str(tensor.dtype).removeprefix("torch.")
        index.append((kind, to_json(name), number_format, dtype, list(tensor.shape)))
    return _PREFIX + json.dumps(index, separators=(",", ":"))


# --- receiving --------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A part of a piece, without its data; ``start`` and ``stop`` are bytes."""

    kind: Kind
    name: Name
    format: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, piece: torch.Tensor) -> torch.Tensor:
        """View of this part in its piece: uint8, aligned for 8-byte elements."""
        return piece[self.start : self.stop].view(self.dtype).view(self.shape)


@lru_cache(maxsize=1024)
def entries_of(name: str) -> tuple[Entry, ...]:
    """Contents of a piece of :func:`packed`.

    Raises:
        ValueError: the piece is not one of ours.
    """
    if not name.startswith(_PREFIX):
        raise ValueError(
            f"the trainer sends {name} without the plugin or with another version of it. Install the same jetrl_verl "
            "on both sides."
        )
    entries, start = [], 0
    for kind, inner, number_format, dtype_name, shape in json.loads(name.removeprefix(_PREFIX)):
        dtype = getattr(torch, dtype_name)
        stop = start + dtype.itemsize * math.prod(shape)
        entries.append(Entry(Kind(kind), from_json(inner), number_format, dtype, tuple(shape), start, stop))
        start = stop
    return tuple(entries)
