# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whole BF16 weights from FSDP2's shards, several decoder layers at a time.

verl gathers parameters one by one in FP32 (``DTensor.full_tensor``, some 60 us of Python each). A cast commutes with a
gather, so here shards are cast first and several layers are one collective of half the bytes. Matrices of equal width
that are sent alike come as one tensor, a stack (sync/stacks.py), and so do vectors; the plan is kept from sync to sync.
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
"""Most bytes of BF16 gathered together, unless one decoder layer has more: three layers at 4B, two at 8B."""


class _Form(NamedTuple):
    """The facts about a parameter that a plan depends on."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    mesh: DeviceMesh | None


class Gathered(NamedTuple):
    """A weight or a stack; ``members`` are indices of parameters in the span."""

    name: Name
    shape: tuple[int, ...]
    members: tuple[int, ...]


class _Span(NamedTuple):
    """Parameters that are gathered together.

    Attributes:
        names: of the parameters. mesh: device mesh whose ranks have their rows; None: sent as verl does.
        rows: of each parameter. tensors: the results.
    """

    names: tuple[str, ...]
    mesh: DeviceMesh | None
    rows: tuple[int, ...]
    tensors: tuple[Gathered, ...]


class Gather:
    """Gathers state dicts of one model at every sync.

    Args:
        alike: name of a weight -> key that stacked weights must share, in addition to their width.
        tied: whether a parameter with two names is sent under the first one only.
    """

    def __init__(self, alike: Callable[[str], Hashable] = lambda name: None, tied: bool = False) -> None:
        self._alike, self._drops_tied = alike, tied
        self._forms: list[_Form] = []
        self._spans: list[_Span] = []
        self._stock_bytes = 0
        self.tied: dict[str, str] = {}
        """Name left out of the last stream -> name under which its tensor was sent."""

    def stream(
        self, params: Mapping[str, torch.Tensor], device: torch.device, statistics: SyncStatistics
    ) -> Iterator[tuple[Name, torch.Tensor]]:
        """(name or stack, whole tensor on ``device``) of a state dict, in its order.

        Floating-point parameters sharded along their first dimension come in BF16, all else as verl sends it. It runs
        collectives, so every rank reads the stream to its end.

        Args:
            params: name -> parameter or buffer. statistics: gets the bytes of verl's own stream.
        """
        # Forms without references: FSDP may replace a parameter, and offloading swaps tensors, which a weak reference
        # forbids.
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
            # Popped, so that this frame keeps no tensor that the reader has released.
            while whole:
                yield whole.pop(0)

    def _plan(self, params: Mapping[str, torch.Tensor]) -> None:
        self._stock_bytes = sum(tensor.numel() * tensor.itemsize for tensor in params.values())
        self._spans = []
        names: list[str] = []
        for name in params:
            if name in self.tied:
                continue
            if names and not self._joins(names, name, params):
                self._close(names, params)
                names = []
            names.append(name)
        if names:
            self._close(names, params)

    def _joins(self, names: list[str], name: str, params: Mapping[str, torch.Tensor]) -> bool:
        """Whether a parameter is gathered together with ``names``."""
        mesh, before, layer = _mesh(params[name]), _layer(names[-1]), _layer(name)
        if mesh is None or mesh != _mesh(params[names[-1]]) or None in (before, layer):
            return False
        if layer == before:
            return True
        # A new layer joins if one more of the last layer's size still fits.
        sizes = [(_layer(member), params[member].numel() * torch.bfloat16.itemsize) for member in names]
        return sum(size for _, size in sizes) + sum(size for at, size in sizes if at == before) <= TOGETHER_BYTES

    def _close(self, names: list[str], params: Mapping[str, torch.Tensor]) -> None:
        mesh, shapes = _mesh(params[names[0]]), [tuple(params[name].shape) for name in names]
        rows = tuple(shape[0] if shape else 1 for shape in shapes)
        self._spans.append(_Span(tuple(names), mesh, rows, tensors_of(names, shapes, self._alike)))


def tensors_of(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], alike: Callable[[str], Hashable]
) -> tuple[Gathered, ...]:
    """Results of a span: stacks of matrices that are equally wide and ``alike``, a stack of vectors, the rest.

    A parameter without a name is left out.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        # Vectors are apart: norms are referenced until the end of a sync and would keep matrices alive. A layer's
        # experts are one tensor already.
        key = {1: (), 2: (shape[-1:], alike(name))}.get(len(shape), name)
        if name:
            groups.setdefault(key, []).append(i)
    tensors = []
    for members in groups.values():
        rows = tuple(shapes[i][0] if shapes[i] else 1 for i in members)
        name = names[members[0]] if len(members) == 1 else Stack(tuple(names[i] for i in members), rows)
        shape = (sum(rows), *shapes[members[0]][1:]) if shapes[members[0]] else ()
        tensors.append(Gathered(name, shape, tuple(members)))
    return tuple(tensors)


def second_names(params: Mapping[str, object]) -> dict[str, str]:
    """Second name of a parameter -> its first name."""
    first: dict[int, str] = {}
    return {name: other for name, param in params.items() if (other := first.setdefault(id(param), name)) != name}


def _layer(name: str) -> str | None:
    """The decoder layer of a parameter, or None."""
    location = place(name)
    return None if location is None else location.layer


def _mesh(tensor: torch.Tensor) -> DeviceMesh | None:
    """The mesh over whose last dimension ``tensor`` is sharded by rows, others being replicas; None otherwise."""
    if not isinstance(tensor, DTensor) or not tensor.is_floating_point() or tensor.ndim == 0:
        return None
    *replicas, last = tensor.placements
    sharded = last == Shard(0) and all(placement == Replicate() for placement in replicas)
    return tensor.device_mesh if sharded else None


@torch.no_grad()
def _whole(span: _Span, params: list[DTensor], device: torch.device) -> list[tuple[Name, torch.Tensor]]:
    locals_ = [param.to_local().to(device, non_blocking=True) for param in params]
    ranks = span.mesh.size(span.mesh.ndim - 1)
    whole = [torch.empty(tensor.shape, dtype=torch.bfloat16, device=device) for tensor in span.tensors]
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
    """Each tensor as gathered, ``[ranks, rows, ...]``; every rank gives as many rows of a parameter as rank 0."""
    device, width = locals_[0].device, {tensor: tensor.shape[1:] for tensor in span.tensors}
    given = {tensor: [-(-span.rows[i] // ranks) for i in tensor.members] for tensor in span.tensors}
    sizes = [sum(given[tensor]) * torch.Size(width[tensor]).numel() for tensor in span.tensors]
    mine = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
    targets, sources = [], []
    for tensor, part in zip(span.tensors, mine.split(sizes), strict=True):
        for i, target in zip(tensor.members, part.view(-1, *width[tensor]).split(given[tensor]), strict=True):
            # Rows after a rank's last one are padding.
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
    """Append the copies from what ranks have ``given`` to ``target``."""
    ranks = len(given)
    rows = [span.rows[i] for i in tensor.members]
    lengths = [-(-count // ranks) for count in rows]
    for count, length, part, pieces in zip(rows, lengths, target.split(rows), given.split(lengths, dim=1), strict=True):
        if count == ranks * length:
            sources.append(pieces)
            targets.append(part.unflatten(0, (ranks, length)))
        else:
            counts = [max(0, min(length, count - rank * length)) for rank in range(ranks)]
            sources += [piece[:n] for piece, n in zip(pieces, counts, strict=True) if n]
            targets += [piece for piece in part.split(counts) if len(piece)]
