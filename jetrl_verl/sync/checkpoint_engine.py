# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's checkpoint engine ``jetrl``: the weight sync to rollouts on GPUs of their own, over NCCL, or gloo on a CPU.

It carries any stream of (name, tensor), the pieces of wire.py as well as verl's own tensors under ``bf16``. A tensor is
one broadcast from the trainer's first rank. What comes next is announced through a store on that rank's host, so a
receiver needs no size in advance and a rank whose stream differs says so instead of waiting. The plugin imports this
module where verl imports its own engines.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_id, get_device_name, get_torch_device

BACKEND = "jetrl"

_TIMEOUT = timedelta(minutes=10)
"""Longest wait for the next tensor: a first sync may compile kernels."""


class WeightSyncError(RuntimeError):
    """The ranks of a weight sync have different streams, or one of them is gone."""


class Group(NamedTuple):
    """A rank of a process group whose first ``senders`` ranks are the trainer's."""

    name: str
    rank: int
    size: int
    senders: int


class Member(NamedTuple):
    """What a process states before a sync.

    Attributes:
        node: address of its host. group: that it is in since the last sync, or None.
        store: (host, port) of the announcements, stated by the trainer's first rank.
    """

    node: str
    group: Group | None
    store: tuple[str, int] | None


class _Announcement(NamedTuple):
    """The tensor that comes next; ``dtype`` as torch names it."""

    name: str
    dtype: str
    shape: list[int]


class _Arrival(NamedTuple):
    """A tensor on its way to this process; ``payload``: its bytes."""

    announced: _Announcement
    payload: torch.Tensor
    work: Any

    def finish(self) -> tuple[str, torch.Tensor]:
        """Wait for it."""
        self.work.wait()
        name, dtype, shape = self.announced
        return name, self.payload.view(getattr(torch, dtype)).view(shape)


@CheckpointEngineRegistry.register(BACKEND)
class JetCheckpointEngine(CheckpointEngine):
    """A process's end of the sync. verl calls the methods in the order in which they stand here.

    The trainer's ranks on the first one's host join the group and pass tensors on; the other ones only take part in
    gathering.

    Args:
        bucket_size: of verl's other engines; a tensor is sent as it is. is_master: whether this is the first rank.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master
        self._node = ray.util.get_node_ip_address().strip("[]")
        self._store: dist.TCPStore | None = None
        self._group: Group | None = None
        self._backend: Any = None
        self._announced = 0
        """Number of announcements in this group so far."""

    def prepare(self) -> Member:
        if self._is_master and self._store is None:
            self._store = dist.TCPStore(self._node, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return Member(self._node, self._group, (self._node, self._store.port) if self._is_master else None)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Member]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of :meth:`init_process_group` for the trainer's ranks and the rollout's; called by the driver."""
        first = metadata[0]
        joins = [i >= actor_wg_world_size or member.node == first.node for i, member in enumerate(metadata)]
        size, senders = sum(joins), sum(joins[:actor_wg_world_size])
        ranks = [sum(joins[:i]) if joined else None for i, joined in enumerate(joins)]

        def groups(name: str) -> list[Group | None]:
            return [None if rank is None else Group(name, rank, size, senders) for rank in ranks]

        kept = groups(first.group.name) if first.group is not None else []
        if [member.group for member in metadata] != kept:  # the first sync, or replicas have come or gone
            kept = groups(uuid4().hex)
        trainer, rollout = kept[:actor_wg_world_size], kept[actor_wg_world_size:]
        return (
            {"group": trainer, "store": [first.store] * len(trainer)},
            {"group": rollout, "store": [first.store] * len(rollout)},
        )

    def init_process_group(self, group: Group | None, store: tuple[str, int]) -> None:
        if group == self._group:
            return
        self._group, self._announced = group, 0
        if group is None:
            return
        if self._store is None:
            self._store = dist.TCPStore(*store, is_master=False, timeout=_TIMEOUT)
        kind = dist.ProcessGroupGloo if get_device_name() == "cpu" else dist.ProcessGroupNCCL
        self._backend = kind(dist.PrefixStore(group.name, self._store), group.rank, group.size, _TIMEOUT)

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Send the trainer's stream; every rank reads its own to the end, since gathering is collective.

        Raises:
            WeightSyncError: on a rank whose stream is not that of the first one.
        """
        before = None
        for name, tensor in weights:
            if self._group is None:
                continue
            payload = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._announce(_Announcement(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            # The tensor before this one has travelled while the stream made this one.
            if before is not None:
                before.wait()
            before = self._backend.broadcast(payload if self._group.rank == 0 else torch.empty_like(payload), 0)
        if self._group is not None:
            self._announce(None)
            if before is not None:
                before.wait()
            get_torch_device().synchronize()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The trainer's stream; a tensor arrives while the reader has the one before it.

        Raises:
            WeightSyncError: the trainer is gone, or sends nothing for ten minutes.
        """
        before = None
        coming = asyncio.create_task(asyncio.to_thread(self._next))
        while (announced := await coming) is not None:
            size = math.prod(announced.shape) * getattr(torch, announced.dtype).itemsize
            payload = torch.empty(size, dtype=torch.uint8, device=get_device_id())
            arrival = _Arrival(announced, payload, self._backend.broadcast(payload, 0))
            coming = asyncio.create_task(asyncio.to_thread(self._next))
            if before is not None:
                yield before.finish()
            before = arrival
        if before is not None:
            yield before.finish()

    def finalize(self) -> None:
        if self._is_master:
            for number in range(self._announced):
                self._store.delete_key(self._key(number))
        self._announced = 0

    def _announce(self, coming: _Announcement | None) -> None:
        """State what comes next, None after the last tensor; on other ranks than the first compare it with that."""
        if self._group.rank == 0:
            self._store.set(self._key(self._announced), json.dumps(coming))
            self._announced += 1
        elif (stated := self._next()) != coming:
            raise WeightSyncError(
                f"weight sync: rank {self._group.rank} of the trainer has {_shown(coming)} where rank 0 has "
                f"{_shown(stated)}, so the rollout cannot get one set of weights; give every rank of the trainer the "
                "same model, options and environment."
            )

    def _next(self) -> _Announcement | None:
        """What the trainer's first rank announces next."""
        try:
            stated = json.loads(self._store.get(self._key(self._announced)))
        except dist.DistError as error:
            raise WeightSyncError(
                f"weight sync: the trainer's first rank is gone or has sent nothing for {_TIMEOUT.seconds} s "
                f"({error}), so this rank would wait for ever; see the trainer's messages above, and resume from its "
                "last checkpoint (trainer.resume_mode=auto)."
            ) from None
        self._announced += 1
        return None if stated is None else _Announcement(*stated)

    def _key(self, number: int) -> str:
        return f"{self._group.name}/{number}"


def _shown(coming: _Announcement | None) -> str:
    return "the end" if coming is None else f"{coming.name:.80} ({coming.dtype} {coming.shape})"
