# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records what vLLM's loaders copy at a worker's first weight sync, and repeats those copies at later ones.

The loaders' work depends on names and shapes alone, which do not change, and costs more host time than the copies cost
the GPU (some 400 names at 4B). Since the copies are the loaders' own, the contract check still compares them with an
independent map (rollout/live.py). A piece is repeated only if its name, dtypes and shapes are the same, no live
parameter has moved, and its loaders did nothing but copy; everything else is loaded and recorded again.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_verl.rollout.live import LiveMap

_WORD = 8
"""Bytes of a word; copies go by words if addresses and lengths allow it."""

Pieces = list[tuple[str, torch.Tensor]]


class _Part(NamedTuple):
    """Elements of a piece that go to ``target``, from byte ``start`` on, by ``stride``."""

    dtype: torch.dtype
    start: int
    stride: tuple[int, ...]
    target: torch.Tensor


class _Piece(NamedTuple):
    """The copies of one piece of the wire.

    Attributes:
        sizes: words of each run into which the piece is split; empty if nothing is copied in contiguous words.
        taken: indices of the runs that are copied. targets: where they go.
        parts: other copies: some columns, another dtype, unaligned places.
        fills: (target, number) of embedding rows that no token has.
    """

    sizes: list[int]
    taken: list[int]
    targets: list[torch.Tensor]
    parts: list[_Part]
    fills: list[tuple[torch.Tensor, float]]


class Copies:
    """The copies of one worker's weight syncs, into the parameters of ``live``."""

    def __init__(self, live: LiveMap) -> None:
        self._live = live
        self._tensors: Any = None
        self._known: dict[tuple, _Piece] = {}
        self._committed = True

    def start(self) -> None:
        """Begin a sync; forget the recording if a parameter moved or the last sync did not :meth:`commit`."""
        tensors = self._live.tensors()
        if not self._committed or tensors is not self._tensors:
            self._known.clear()
        self._tensors, self._committed = tensors, False

    def commit(self) -> None:
        """Keep the recording; called once the sync has been verified."""
        self._committed = True

    def repeat(self, pieces: Pieces) -> tuple[Pieces, Pieces]:
        """Repeat the copies of known pieces; returns (known pieces, other pieces)."""
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
        """Record what the loaders of ``pieces`` copy inside the block."""
        recorder = _Recorder(pieces)
        with recorder:
            yield
        with torch._C.DisableTorchFunctionSubclass():
            storages = {
                tensor.untyped_storage().data_ptr()
                for live in self._tensors.values()
                for tensor in (live.tensor, live.scales)
                if tensor is not None
            }
            self._known |= recorder.recorded(storages)


def _key(name: str, tensor: torch.Tensor) -> tuple:
    return name, tensor.dtype, tensor.shape


class _Recorder(TorchDispatchMode):
    """Watches operators for copies out of the memory of ``pieces``."""

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
            # After the copy into a parameter that has more rows than the tensor.
            self._fills[self._last].append((_plain(args[0]), args[1]))
        elif func._schema.is_mutable:
            self._other.add(self._last)
        elif not func.is_view and operator not in _WITHOUT_DATA:
            # A new tensor computed from a piece may be copied instead of it.
            self._other |= {self._piece_of(tensor)[0] for tensor in _tensors((*args, *(kwargs or {}).values()))}
        return func(*args, **(kwargs or {}))

    def _piece_of(self, tensor: torch.Tensor) -> tuple[tuple | None, int]:
        """(key of the piece in whose memory a tensor begins, byte offset in it); (None, 0) outside of all pieces."""
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
        """Pieces that the loaders only copied into ``storages``, no byte of them twice."""
        written: list[tuple[int, int, tuple]] = []
        excluded = set(self._other)
        for key, copies in self._copies.items():
            for target, source, _ in copies:
                if target.untyped_storage().data_ptr() not in storages or target.shape != source.shape:
                    excluded.add(key)
                written.append((target.data_ptr(), target.data_ptr() + _extent(target), key))
            if any(target.untyped_storage().data_ptr() not in storages for target, _ in self._fills[key]):
                excluded.add(key)
        written.sort(key=lambda span: span[:2])
        for (_, end, first), (start, _, second) in zip(written, written[1:], strict=False):
            if start < end:
                excluded |= {first, second}
        return {
            key: _piece(copies, self._fills[key], length)
            for (key, _, length), copies in zip(self._pieces, self._copies.values(), strict=True)
            if key not in excluded
        }


_WITHOUT_DATA = {torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.split_with_sizes}
"""Operators without data access that torch does not mark as views."""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # On a view of vLLM's parameter classes each operator costs a Python call.
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the start of a tensor's first element to the end of its last."""
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
        after = not runs or start >= runs[-1][1]
        if in_words and after and source.is_contiguous() and target.is_contiguous():
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
    return _Piece(sizes, taken, [target for *_, target in runs], parts, [fill for fill in fills if fill[0].numel()])


def _follows(words: torch.Tensor, above: torch.Tensor) -> bool:
    # Separate parameters may be neighbours in memory, too, and a view cannot cross storages.
    same_storage = words.untyped_storage().data_ptr() == above.untyped_storage().data_ptr()
    return same_storage and words.data_ptr() == above.data_ptr() + above.nbytes


def _in_words(source: torch.Tensor, target: torch.Tensor, place: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """(source strides in words, target in words) of a copy of some columns; None if they are not whole words."""
    per_word = _WORD // source.itemsize
    *outer, inner = source.stride() or (0,)
    places = (place, target.data_ptr(), source.shape[-1] * source.itemsize if source.ndim else 1)
    if inner != 1 or any(stride % per_word for stride in outer) or any(place % _WORD for place in places):
        return None
    if not target.is_contiguous():
        return None
    return (*(stride // per_word for stride in outer), 1), target.view(torch.int64)
