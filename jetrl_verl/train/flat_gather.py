# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whole BF16 weights from FSDP1's shards, as the stacks of gather.py.

FSDP1 flattens a layer's parameters into one vector, of which each rank has an equal part. verl gathers it in FP32, cuts
out parameters, shards them by rows and gathers each again. Here parts are cast to BF16 and gathered once, and the
parameters of several layers are stacked. Shards that verl has offloaded are read on the host.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from jetrl_verl.models.families.base import place
from jetrl_verl.sync.stacks import Name
from jetrl_verl.sync.wire import SyncStatistics
from jetrl_verl.train.gather import TOGETHER_BYTES, Gathered, tensors_of


class _Unit(NamedTuple):
    """The parameters that FSDP1 has flattened into one vector.

    Attributes:
        handle: FSDP's handle. names, shapes, starts: of each parameter; ``starts`` are offsets in the vector.
        part: elements of the vector on each rank, padding included.
    """

    handle: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    part: int


class _Span(NamedTuple):
    """Units whose parameters are stacked together, and the results."""

    units: tuple[_Unit, ...]
    tensors: tuple[Gathered, ...]


class FlatGather:
    """Gathers a model under FSDP1 at every sync.

    Args:
        module: the root module, whose vectors FSDP keeps.
        alike, tied: as in :class:`~jetrl_verl.train.gather.Gather`, like the attribute ``tied``.
        sent_as: name in the module -> name in the stream; empty for what is not sent.

    Raises:
        ValueError: FSDP stores parameters in a form of their own.
    """

    def __init__(
        self,
        module: FullyShardedDataParallel,
        alike: Callable[[str], Hashable] = lambda name: None,
        tied: bool = False,
        sent_as: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._module, self._sent_as = module, sent_as
        self._second: dict[str, str] = {}
        self._stock_bytes = 0
        self._spans: list[_Span] = []
        units = list(self._units(module))
        self.tied: dict[str, str] = self._second if tied else {}
        group: list[_Unit] = []
        for unit in units:
            if group and not _joins(group, unit):
                self._spans.append(_span(group, alike))
                group = []
            group.append(unit)
        self._spans.append(_span(group, alike))

    def stream(self, device: torch.device, statistics: SyncStatistics) -> Iterator[tuple[Name, torch.Tensor]]:
        """(name or stack, whole tensor on ``device``), BF16; buffers as verl sends them.

        Every rank has to read the stream to its end: it runs collectives.

        Args:
            statistics: gets the bytes of verl's own stream.
        """
        statistics.stock_bytes += self._stock_bytes
        return self._gathered(device, statistics)

    def _gathered(self, device: torch.device, statistics: SyncStatistics) -> Iterator[tuple[Name, torch.Tensor]]:
        for span in self._spans:
            whole = _whole(span, device)
            while whole:
                item = whole.pop(0)
                yield item
                for second, first in self._second.items() if not self.tied else ():
                    if item[0] == first:
                        yield second, item[1]
                del item
        for prefix, module in self._module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set and (sent := self._name(prefix, name)):
                    statistics.stock_bytes += buffer.nbytes
                    yield sent, buffer.detach().to(device)

    def _units(self, module: FullyShardedDataParallel) -> Iterator[_Unit]:
        for prefix, unit in module.named_modules():
            handle = unit._handle if isinstance(unit, FullyShardedDataParallel) else None
            if handle is None:
                continue
            flat = handle.flat_param
            names = [self._name(prefix, name) for name in flat._fqns]
            if not any(names):
                continue
            if not all(flat._contiguities) or any(flat._param_extensions):
                raise ValueError(
                    f"weight sync: FSDP1 keeps {flat._fqns[0]} and others of its unit in a form of their own"
                )
            starts, start = [], 0
            for length, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
                if not is_padding:
                    starts.append(start)
                start += length
            shapes = tuple(tuple(shape) for shape in flat._shapes)
            lengths = dict(zip(names, flat._numels, strict=True))
            for shared in flat._shared_param_infos:
                second = self._name(prefix, shared.module_name, shared.param_name)
                first = self._name(prefix, shared.prim_module_name, shared.prim_param_name)
                self._second[second] = first
                self._stock_bytes += lengths[first] * flat.itemsize
            self._stock_bytes += sum(length for name, length in lengths.items() if name) * flat.itemsize
            part = flat._sharded_size.numel() if handle.uses_sharded_strategy else start
            yield _Unit(handle, tuple(names), shapes, tuple(starts), part)

    def _name(self, *parts: str) -> str:
        return self._sent_as(clean_tensor_name(".".join(part for part in parts if part)))


def _joins(group: list[_Unit], unit: _Unit) -> bool:
    """Whether a decoder layer's parameters are stacked with those of ``group``."""
    if any(place(name) is None for member in (group[-1], unit) for name in member.names):
        return False
    elements = sum(math.prod(shape) for member in (*group, unit) for shape in member.shapes)
    return torch.bfloat16.itemsize * elements <= TOGETHER_BYTES


def _span(units: list[_Unit], alike: Callable[[str], Hashable]) -> _Span:
    names = [name for unit in units for name in unit.names]
    shapes = [shape for unit in units for shape in unit.shapes]
    return _Span(tuple(units), tensors_of(names, shapes, alike))


@torch.no_grad()
def _whole(span: _Span, device: torch.device) -> list[tuple[Name, torch.Tensor]]:
    parts = [part for unit in span.units for part in _parts(unit, device)]
    whole = [torch.empty(tensor.shape, dtype=torch.bfloat16, device=device) for tensor in span.tensors]
    sources = [[parts[i] for i in tensor.members] for tensor in span.tensors]
    lengths = [list(map(len, members)) for members in sources]
    targets = [part for one, split in zip(whole, lengths, strict=True) for part in one.view(-1).split(split)]
    torch._foreach_copy_(targets, sum(sources, []))
    return [(tensor.name, one) for tensor, one in zip(span.tensors, whole, strict=True)]


def _parts(unit: _Unit, device: torch.device) -> list[torch.Tensor]:
    """The unit's parameters, flat, BF16; views of its gathered vector."""
    # Outside of forward and backward a flat parameter is this rank's part, in the optimizer's precision.
    flat = unit.handle.flat_param.detach().to(device, non_blocking=True)
    vector = torch.empty(unit.part, dtype=torch.bfloat16, device=device).copy_(flat)
    if unit.handle.uses_sharded_strategy and (ranks := unit.handle.world_size) > 1:
        mine, vector = vector, vector.new_empty(ranks * unit.part)
        # As bytes: gloo has no BF16.
        group = unit.handle.process_group
        dist.all_gather_into_tensor(vector.view(torch.uint8), mine.view(torch.uint8), group=group)
    sizes = [math.prod(shape) for shape in unit.shapes]
    return [vector[start : start + size] for start, size in zip(unit.starts, sizes, strict=True)]
