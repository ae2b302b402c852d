# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whole BF16 weights from FSDP2's shards, several decoder layers at a time.

verl gathers one parameter after another, in FP32 (``DTensor.full_tensor``). What a weight sync sends is BF16 or made of
BF16 values, and a cast commutes with a gather, so here shards are cast first: some layers are one collective of half
the bytes. On the host that is one call for their casts and one for their gather, where DTensor costs some 60 us of
Python for each parameter.

What of these layers is equally wide and goes the same way, q, k, v, gate and up, or all of o, comes as one tensor, a
stack (sync/stacks.py), and so do their vectors. Which stacks there are is found once and kept from sync to sync; no
memory of a GPU is.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from jetrl_verl.models.families.base import place
from jetrl_verl.sync.stacks import Name, Stack
from jetrl_verl.sync.wire import SyncStatistics

TOGETHER_BYTES = 768 * 2**20
"""Most bytes of BF16 that are gathered together, where a decoder layer alone has not more: three layers of a 4B model,
two of an 8B one, less than the embedding of a 4B one, which is gathered at once, too."""


class _Form(NamedTuple):
    """What a plan depends on of a parameter."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    mesh: DeviceMesh | None


class Gathered(NamedTuple):
    """One weight or several below each other, and which parameters of the span they are."""

    name: Name
    shape: tuple[int, ...]
    members: tuple[int, ...]


class _Span(NamedTuple):
    """What is gathered together.

    Attributes:
        names: of parameters. mesh: whose ranks each have some of their rows; None: another form, sent as verl does.
        rows: of each parameter. tensors: what is made of them.
    """

    names: tuple[str, ...]
    mesh: DeviceMesh | None
    rows: tuple[int, ...]
    tensors: tuple[Gathered, ...]


class Gather:
    """Gathers state dicts of one model, sync after sync.

    Args:
        alike: name of a weight -> what it has to share with those that it may be stacked with, beside its width.
        tied: whether a parameter under two names is sent under its first alone.
    """

    def __init__(self, alike: Callable[[str], Hashable] = lambda name: None, tied: bool = False) -> None:
        self._alike, self._drops_tied = alike, tied
        self._forms: list[_Form] = []
        self._spans: list[_Span] = []
        self._stock_bytes = 0
        self.tied: dict[str, str] = {}
        """Name that was left out of the last stream -> the name under which its tensor was sent."""

    def stream(
        self, params: Mapping[str, torch.Tensor], device: torch.device, statistics: SyncStatistics
    ) -> Iterator[tuple[Name, torch.Tensor]]:
        """(name or stack, whole tensor on ``device``) of a state dict, spans of layers in its order.

        Floating-point parameters, sharded along their first dimension, with or without replicas, come in BF16; all else
        comes as verl sends it. Every rank has to read the stream to its end: it runs collectives.

        Args:
            params: name -> parameter or buffer. statistics: gets the bytes of verl's own stream.
        """
        # By form, with no reference to a parameter: FSDP may exchange one, whose memory is not ours to keep, and moving
        # a model to the host swaps tensors, which a weak reference forbids.
        forms = [_Form(name, tensor.shape, tensor.dtype, _mesh(tensor)) for name, tensor in params.items()]
        tied = second_names(params) if self._drops_tied else {}
        if forms != self._forms or tied != self.tied:
            self._forms, self.tied = forms, tied
            self._plan(params)
        statistics.stock_bytes += self._stock_bytes
        return self._gathered(params, device)

    def _gathered(
        self, params: Mapping[str, torch.Tensor], device: torch.device
    ) -> Iterator[tuple[Name, torch.Tensor]]:
        for span in self._spans:
            if span.mesh is None:
                (name,) = span.names
                with torch.no_grad():
                    tensor = params[name]
                    yield name, tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
                continue
            whole = _whole(span, [params[name] for name in span.names], device)
            # Popped, so that this frame keeps nothing of what its reader is through with.
            while whole:
                yield whole.pop(0)

    def _plan(self, params: Mapping[str, torch.Tensor]) -> None:
        self._stock_bytes = sum(tensor.numel() * tensor.itemsize for tensor in params.values())
        self._spans = []
        names: list[str] = []
        for name in params:
            if name in self.tied:
                continue
            if names and not self._goes_on(names, name, params):
                self._close(names, params)
                names = []
            names.append(name)
        if names:
            self._close(names, params)

    def _goes_on(self, names: list[str], name: str, params: Mapping[str, torch.Tensor]) -> bool:
        """Whether a parameter is gathered together with those in front of it."""
        mesh, before, layer = _mesh(params[name]), _layer(names[-1]), _layer(name)
        if mesh is None or mesh != _mesh(params[names[-1]]) or None in (before, layer):
            return False
        if layer == before:
            return True
        # At a layer's end, where one more like the last one still fits.
        sizes = [(_layer(each), params[each].numel() * torch.bfloat16.itemsize) for each in names]
        return sum(size for _, size in sizes) + sum(size for at, size in sizes if at == before) <= TOGETHER_BYTES

    def _close(self, names: list[str], params: Mapping[str, torch.Tensor]) -> None:
        found, mesh = [params[name] for name in names], _mesh(params[names[0]])
        shapes = [tuple(tensor.shape) for tensor in found]
        rows = tuple(shape[0] if shape else 1 for shape in shapes)
        self._spans.append(_Span(tuple(names), mesh, rows, tensors_of(names, shapes, self._alike)))


def tensors_of(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], alike: Callable[[str], Hashable]
) -> tuple[Gathered, ...]:
    """What is made of parameters that are gathered together: a stack of those that are equally wide and ``alike``."""
    groups: dict[Hashable, list[int]] = {}
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        # Vectors have a tensor of their own: norms are kept until the end of a sync and would keep a matrix. Experts
        # are as many rows as a stack has.
        key = {1: (), 2: (shape[-1:], alike(name))}.get(len(shape), name)
        groups.setdefault(key, []).append(i)
    tensors = []
    for members in groups.values():
        rows = tuple(shapes[i][0] if shapes[i] else 1 for i in members)
        name = names[members[0]] if len(members) == 1 else Stack(tuple(names[i] for i in members), rows)
        shape = (sum(rows), *shapes[members[0]][1:]) if shapes[members[0]] else ()
        tensors.append(Gathered(name, shape, tuple(members)))
    return tuple(tensors)


def second_names(params: Mapping[str, object]) -> dict[str, str]:
    """Name of a parameter that was there before -> the first one."""
    first: dict[int, str] = {}
    return {name: found for name, param in params.items() if (found := first.setdefault(id(param), name)) != name}


def _layer(name: str) -> str | None:
    """The decoder layer of a parameter; None: it is in none."""
    found = place(name)
    return None if found is None else found.layer


def _mesh(tensor: torch.Tensor) -> DeviceMesh | None:
    """Whose ranks each have some rows of ``tensor``; its last dimension, others are replicas. None: another form."""
    if not isinstance(tensor, DTensor) or not tensor.is_floating_point() or tensor.ndim == 0:
        return None
    *replicas, last = tensor.placements
    sharded = last == Shard(0) and all(each == Replicate() for each in replicas)
    return tensor.device_mesh if sharded else None


@torch.no_grad()
def _whole(span: _Span, params: list[DTensor], device: torch.device) -> list[tuple[Name, torch.Tensor]]:
    locals_ = [param.to_local().to(device, non_blocking=True) for param in params]
    ranks = span.mesh.size(span.mesh.ndim - 1)
    whole = [torch.empty(each.shape, dtype=torch.bfloat16, device=device) for each in span.tensors]
    targets, sources = [], []
    if ranks == 1:
        for tensor, target in zip(span.tensors, whole, strict=True):
            targets += target.split([span.rows[i] for i in tensor.members])
            sources += [locals_[i] for i in tensor.members]
    else:
        for tensor, target, given in zip(span.tensors, whole, _of_all_ranks(span, locals_, ranks), strict=True):
            _arrange(span, tensor, target, given, targets, sources)
    if targets:
        torch._foreach_copy_(targets, sources)
    return [(tensor.name, target) for tensor, target in zip(span.tensors, whole, strict=True)]


def _of_all_ranks(span: _Span, locals_: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """Of each tensor ``[ranks, rows, ...]``: what each rank gives, of every parameter as many rows as the first one."""
    device, width = locals_[0].device, {tensor: tensor.shape[1:] for tensor in span.tensors}
    given = {tensor: [-(-span.rows[i] // ranks) for i in tensor.members] for tensor in span.tensors}
    sizes = [sum(given[tensor]) * torch.Size(width[tensor]).numel() for tensor in span.tensors]
    mine = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
    targets, sources = [], []
    for tensor, part in zip(span.tensors, mine.split(sizes), strict=True):
        for i, target in zip(tensor.members, part.view(-1, *width[tensor]).split(given[tensor]), strict=True):
            # What a rank gives behind its last row is padding.
            rows = len(locals_[i])
            if rows:
                targets.append(target if len(target) == rows else target[:rows])
                sources.append(locals_[i])
    if targets:
        torch._foreach_copy_(targets, sources)
    of_all = torch.empty(ranks, len(mine), dtype=torch.bfloat16, device=device)
    # As bytes: gloo has no BF16.
    group = span.mesh.get_group(span.mesh.ndim - 1)
    dist.all_gather_into_tensor(of_all.view(torch.uint8), mine.view(torch.uint8)[None], group=group)
    return [
        part.unflatten(1, (-1, *width[tensor]))
        for tensor, part in zip(span.tensors, of_all.split(sizes, dim=1), strict=True)
    ]


def _arrange(
    span: _Span,
    tensor: Gathered,
    target: torch.Tensor,
    given: torch.Tensor,
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
) -> None:
    """Append the copies that make ``target`` of what ranks have ``given``."""
    ranks = len(given)
    rows = [span.rows[i] for i in tensor.members]
    lengths = [-(-count // ranks) for count in rows]
    for count, length, part, pieces in zip(rows, lengths, target.split(rows), given.split(lengths, dim=1), strict=True):
        if count == ranks * length:
            sources.append(pieces)
            targets.append(part.unflatten(0, (ranks, length)))
        else:
            held = [max(0, min(length, count - rank * length)) for rank in range(ranks)]
            sources += [piece[:n] for piece, n in zip(pieces, held, strict=True) if n]
            targets += [piece for piece in part.split(held) if len(piece)]
