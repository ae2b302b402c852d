# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whole BF16 weights from FSDP2's shards, a decoder layer at a time.

verl gathers one parameter after another, in FP32 (``DTensor.full_tensor``). What a weight sync sends is BF16 or made of
BF16 values, and a cast commutes with a gather, so here shards are cast first: a layer is one collective of half the
bytes. On the host that is one call for a layer's casts and one for its gather, where DTensor costs some 60 us of Python
for each of its eleven parameters.

A layer's matrices lie one behind the other in one storage, in the model's order, so that q, k and v, and gate and up,
are one matrix each to whoever wants to read them as such (sync/stacks.py). Vectors have a storage of their own, since
norms are kept until the end of a sync and would keep the matrices.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from jetrl_verl.models.families.base import place
from jetrl_verl.sync.wire import SyncStatistics

_ALIGNED = 128
"""Elements on whose multiples a tensor begins: quantizers load 16 bytes at a time."""


class _Shards(NamedTuple):
    """One parameter of which each rank has the same number of rows, the last ones maybe fewer or none."""

    name: str
    local: torch.Tensor
    shape: torch.Size

    def rows_of(self, ranks: int) -> int:
        return -(-self.shape[0] // ranks)


def gathered(
    params: Mapping[str, torch.Tensor], device: torch.device, statistics: SyncStatistics
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on ``device``) of a state dict, in its order.

    Floating-point parameters of FSDP2, sharded along their first dimension, with or without replicas, come in BF16;
    all else comes as verl sends it. Every rank has to read the stream to its end: it runs collectives.

    Args:
        params: name -> parameter or buffer. statistics: gets the bytes of verl's own stream.
    """
    for (_, mesh), group in groupby(params.items(), lambda item: (_layer(item[0]), _mesh(item[1]))):
        if mesh is None:
            for name, tensor in group:
                with torch.no_grad():
                    tensor = tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
                statistics.stock_bytes += tensor.nbytes
                yield name, tensor
            continue
        whole = _whole(dict(group), device, mesh, statistics)
        # Popped, so that this frame keeps nothing of what its reader is through with.
        while whole:
            yield whole.pop(0)


def _layer(name: str) -> str:
    """Whose tensors are gathered together: those of a decoder layer, else the tensor alone."""
    found = place(name)
    return name if found is None else found.layer


def _mesh(tensor: torch.Tensor) -> DeviceMesh | None:
    """Whose ranks each have some rows of ``tensor``; its last dimension, others are replicas. None: another form."""
    if not isinstance(tensor, DTensor) or not tensor.is_floating_point() or tensor.ndim == 0:
        return None
    *replicas, last = tensor.placements
    sharded = last == Shard(0) and all(each == Replicate() for each in replicas)
    return tensor.device_mesh if sharded else None


def _places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin in one storage, and how long it is."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return starts, end


def _parts(storage: torch.Tensor, starts: list[int], sizes: Iterable[int]) -> list[torch.Tensor]:
    return [storage[start : start + size] for start, size in zip(starts, sizes, strict=True)]


@torch.no_grad()
def _whole(
    params: Mapping[str, DTensor], device: torch.device, mesh: DeviceMesh, statistics: SyncStatistics
) -> list[tuple[str, torch.Tensor]]:
    ranks, shards = mesh.size(mesh.ndim - 1), []
    for name, param in params.items():
        statistics.stock_bytes += param.numel() * param.itemsize
        shards.append(_Shards(name, param.to_local().to(device, non_blocking=True), param.shape))
    # What this rank gives, and what it then has of all ranks.
    given = [shard.rows_of(ranks) * shard.shape[1:].numel() for shard in shards]
    if ranks > 1:
        starts, length = _places(given)
        mine = torch.empty(length, dtype=torch.bfloat16, device=device)
        locals_ = [shard.local.flatten() for shard in shards]
        torch._foreach_copy_(_parts(mine, starts, (local.numel() for local in locals_)), locals_)
        of_all = torch.empty(ranks, length, dtype=torch.bfloat16, device=device)
        # As bytes: gloo has no BF16.
        group = mesh.get_group(mesh.ndim - 1)
        dist.all_gather_into_tensor(of_all.view(torch.uint8), mine.view(torch.uint8)[None], group=group)
    found: dict[str, torch.Tensor] = {}
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for vectors in (False, True):
        chosen = [i for i, shard in enumerate(shards) if (len(shard.shape) == 1) == vectors]
        sizes = [shards[i].shape.numel() for i in chosen]
        places, length = _places(sizes)
        parts = _parts(torch.empty(length, dtype=torch.bfloat16, device=device), places, sizes)
        for i, part in zip(chosen, parts, strict=True):
            shard = shards[i]
            found[shard.name] = part.view(shard.shape)
            if ranks == 1:
                sources.append(shard.local)
                targets.append(found[shard.name])
                continue
            pieces = of_all[:, starts[i] : starts[i] + given[i]]
            if len(part) == ranks * given[i]:
                sources.append(pieces)
                targets.append(part.view(ranks, -1))
            else:
                # What ranks gave behind the last row is padding.
                lengths = [max(0, min(given[i], len(part) - rank * given[i])) for rank in range(ranks)]
                sources += [piece[:n] for piece, n in zip(pieces, lengths, strict=True) if n]
                targets += [target for target in part.split(lengths) if len(target)]
    if targets:
        torch._foreach_copy_(targets, sources)
    return [(shard.name, found[shard.name]) for shard in shards]
