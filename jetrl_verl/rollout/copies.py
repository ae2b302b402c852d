# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What vLLM's loaders copy at a worker's first weight sync, repeated at every later one.

A loader finds a parameter by its name, takes this rank's part of a tensor and copies it. All of that follows from names
and shapes, which no later sync changes, and it costs the host more than the copies cost the GPU: some 400 names a sync
of a 4B model. So the first sync runs the loaders and records their copies, which bytes of which piece of the wire went
where; the next ones copy the same bytes to the same places, all of a bucket by one call or two.

What was recorded is the loaders' own work and not a map of ours: the contract check, whose map of live parameters is
computed from layers and ranks (rollout/live.py), goes on to compare the two at every sync. A piece is repeated only if
its name, which states the names, types and shapes in it, is the same and no live parameter has moved, and only if
copies were all that its loaders did. Everything else is loaded again, and recorded again.

Kept are views of live parameters and numbers; no memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_verl.rollout.live import LiveMap

_WORD = 8
"""Bytes that are copied at a time where places and lengths allow it."""

Pieces = list[tuple[str, torch.Tensor]]


class _Part(NamedTuple):
    """Elements of a piece that go to ``target``, of its shape."""

    dtype: torch.dtype
    start: int
    stride: tuple[int, ...]
    target: torch.Tensor


class _Piece(NamedTuple):
    """All that is to be done with one piece of the wire.

    Attributes:
        sizes: into how many words it is split; empty: nothing of it is copied in words from end to end.
        taken: which of these are copied. targets: where to.
        parts: what is copied otherwise: some columns, another type, odd places.
        fills: (what is filled with a number, which one): rows of an embedding that no token has.
    """

    sizes: list[int]
    taken: list[int]
    targets: list[torch.Tensor]
    parts: list[_Part]
    fills: list[tuple[torch.Tensor, float]]


class Copies:
    """The copies of one worker's weight syncs.

    Args:
        live: of its model.
    """

    def __init__(self, live: LiveMap) -> None:
        self._live = live
        self._tensors: Any = None
        self._known: dict[tuple, _Piece] = {}
        self._held = True

    def start(self) -> None:
        """Begin a sync: nothing is repeated if a parameter has moved or the last one did not end in :meth:`hold`."""
        tensors = self._live.tensors()
        if not self._held or tensors is not self._tensors:
            self._known.clear()
        self._tensors, self._held = tensors, False

    def hold(self) -> None:
        """What was recorded is right: the sync has ended, and its contract holds if it is checked."""
        self._held = True

    def repeat(self, pieces: Pieces) -> tuple[Pieces, Pieces]:
        """(pieces whose copies have been repeated, the others)."""
        done, others = [], []
        runs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        parts: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        fills: list[tuple[torch.Tensor, float]] = []
        for name, tensor in pieces:
            known = self._known.get(_key(name, tensor))
            if known is None or tensor.data_ptr() % _WORD:
                others.append((name, tensor))
                continue
            done.append((name, tensor))
            fills += known.fills
            whole = tensor.view(-1)
            if known.sizes:
                words = whole.view(torch.int64).split_with_sizes(known.sizes)
                runs[0].extend(known.targets)
                runs[1].extend(words[i] for i in known.taken)
            for part in known.parts:
                typed = whole.view(part.dtype)
                place = typed.storage_offset() + part.start // part.dtype.itemsize
                targets, sources = parts.setdefault((part.target.dtype, part.dtype), ([], []))
                targets.append(part.target)
                sources.append(typed.as_strided(part.target.shape, part.stride, place))
        for targets, sources in (runs, *parts.values()):
            if targets:
                torch._foreach_copy_(targets, sources)
        for target, value in fills:
            target.fill_(value)
        return done, others

    @contextmanager
    def recording(self, pieces: Pieces) -> Iterator[None]:
        """Around the loaders of ``pieces``: remember what they copy."""
        recorder = _Recorder(pieces)
        with recorder:
            yield
        with torch._C.DisableTorchFunctionSubclass():
            storages = {
                each.untyped_storage().data_ptr()
                for held in self._tensors.values()
                for each in (held.tensor, held.scales)
                if each is not None
            }
            self._known |= recorder.recorded(storages)


def _key(name: str, tensor: torch.Tensor) -> tuple:
    return name, tensor.dtype, tensor.shape


class _Recorder(TorchDispatchMode):
    """Inside of it: which bytes of ``pieces`` are copied where."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = [(_key(name, piece), piece.data_ptr(), piece.nbytes) for name, piece in pieces]
        self._copies: dict[tuple, list[tuple[torch.Tensor, torch.Tensor, int]]] = {key: [] for key, *_ in self._pieces}
        self._fills: dict[tuple, list[tuple[torch.Tensor, float]]] = {key: [] for key, *_ in self._pieces}
        self._other: set[tuple | None] = set()
        self._last: tuple | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        operator = func.overloadpacket
        if operator is torch.ops.aten.copy_:
            self._copied(args[0], args[1])
        elif operator is torch.ops.aten._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                self._copied(target, source)
        elif operator is torch.ops.aten.fill_ and self._last is not None and not isinstance(args[1], torch.Tensor):
            # Behind the copy into the parameter that has more rows than the tensor.
            self._fills[self._last].append((_plain(args[0]), args[1]))
        elif func._schema.is_mutable:
            self._other.add(self._last)
        elif not func.is_view and operator not in _WITHOUT_DATA:
            # A tensor made of a piece, which may be copied in its place.
            self._other |= {self._piece_of(each)[0] for each in _tensors((*args, *(kwargs or {}).values()))}
        return func(*args, **(kwargs or {}))

    def _piece_of(self, tensor: torch.Tensor) -> tuple[tuple | None, int]:
        """(key of the piece in whose memory a tensor begins, where in it), None if it is in none."""
        place = tensor.data_ptr() if tensor.numel() else 0
        for key, start, length in self._pieces:
            if start <= place < start + length:
                return key, place - start
        return None, 0

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._last, start = self._piece_of(source)
        if self._last is not None:
            self._copies[self._last].append((_plain(target), _plain(source), start))

    def recorded(self, storages: set[int]) -> dict[tuple, _Piece]:
        """Of the pieces with which the loaders did nothing but copy them into ``storages``, each place once."""
        written: list[tuple[int, int, tuple]] = []
        odd = set(self._other)
        for key, copies in self._copies.items():
            for target, source, _ in copies:
                if target.untyped_storage().data_ptr() not in storages or target.shape != source.shape:
                    odd.add(key)
                written.append((target.data_ptr(), target.data_ptr() + _extent(target), key))
            if any(target.untyped_storage().data_ptr() not in storages for target, _ in self._fills[key]):
                odd.add(key)
        written.sort(key=lambda each: each[:2])
        for (_, end, one), (start, _, other) in zip(written, written[1:], strict=False):
            if start < end:
                odd |= {one, other}
        return {
            key: _piece(copies, self._fills[key], length)
            for (key, _, length), copies in zip(self._pieces, self._copies.values(), strict=True)
            if key not in odd
        }


_WITHOUT_DATA = {torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.split_with_sizes}
"""Operators that read and write no element, beside those that torch marks as views."""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # A view of one of vLLM's parameters is of its class, and each operator on it a Python call.
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _piece(
    copies: list[tuple[torch.Tensor, torch.Tensor, int]], fills: list[tuple[torch.Tensor, float]], length: int
) -> _Piece:
    runs: list[tuple[int, int, torch.Tensor]] = []
    parts: list[_Part] = []
    for target, source, start in sorted(copies, key=lambda copy: copy[2]):
        same = source.dtype == target.dtype
        in_words = same and not (start | source.nbytes | target.data_ptr() | length) % _WORD
        behind = not runs or start >= runs[-1][1]
        if in_words and behind and source.is_contiguous() and target.is_contiguous():
            words = target.view(-1).view(torch.int64)
            if runs and runs[-1][1] == start and _follows(words, runs[-1][2]):
                first, _, above = runs.pop()
                words, start = above.as_strided((len(above) + len(words),), (1,)), first
            runs.append((start, start + words.nbytes, words))
        elif same and (columns := _in_words(source, target, start | length)) is not None:
            parts.append(_Part(torch.int64, start, *columns))
        else:
            parts.append(_Part(source.dtype, start, source.stride(), target))
    sizes, taken, end = [], [], 0
    for start, stop, _ in runs:
        if start > end:
            sizes.append((start - end) // _WORD)
        taken.append(len(sizes))
        sizes.append((stop - start) // _WORD)
        end = stop
    if runs and length > end:
        sizes.append((length - end) // _WORD)
    return _Piece(sizes, taken, [target for *_, target in runs], parts, [each for each in fills if each[0].numel()])


def _follows(words: torch.Tensor, above: torch.Tensor) -> bool:
    # Parameters of their own may be neighbours in memory, too, and no view has elements of two storages.
    one = words.untyped_storage().data_ptr() == above.untyped_storage().data_ptr()
    return one and words.data_ptr() == above.data_ptr() + above.nbytes


def _in_words(source: torch.Tensor, target: torch.Tensor, place: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """(the source's strides, the target) of a copy of some columns in words; None if these or ``place`` are no whole
    ones."""
    each = _WORD // source.itemsize
    *outer, inner = source.stride() or (0,)
    places = (place, target.data_ptr(), source.shape[-1] * source.itemsize if source.ndim else 1)
    if inner != 1 or any(stride % each for stride in outer) or any(place % _WORD for place in places):
        return None
    if not target.is_contiguous():
        return None
    return (*(stride // each for stride in outer), 1), target.view(torch.int64)
