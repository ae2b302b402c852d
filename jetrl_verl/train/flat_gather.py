# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whole BF16 weights from FSDP1's shards, with the stacks of gather.py.

FSDP1 flattens the parameters of a decoder layer into one vector, of which each rank has an equal part. Its state dict,
which verl sends from, gathers that vector in FP32, cuts every parameter out of it, shards each one by its rows, and
verl then gathers them one by one, again in FP32. Here the ranks' parts are cast to BF16 and gathered once, those of
several layers by one collective, and copied to where they belong. Shards that verl has moved to the host are read
there.
"""

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
        handle: FSDP's. names, shapes, starts: of each parameter and where it begins in the vector.
        part: elements of the vector that each rank has, padding included.
    """

    handle: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    part: int


class _Span(NamedTuple):
    """What is gathered together.

    Attributes:
        units: whose vectors. tensors: what is made of them.
        sizes: into which the gathered parts are split, rank after rank. taken: of these, what is copied, by tensor.
        lengths: into which each tensor is split to be copied to.
    """

    units: tuple[_Unit, ...]
    tensors: tuple[Gathered, ...]
    sizes: tuple[int, ...]
    taken: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]


class FlatGather:
    """Gathers a model under FSDP1, sync after sync.

    Args:
        module: the root. FSDP makes its vectors when it wraps a model and keeps them.
        alike, tied: as of :class:`~jetrl_verl.train.gather.Gather`, and so is the attribute ``tied``.
        sent_as: name in the module -> name in the stream.

    Raises:
        ValueError: FSDP has parameters that it does not keep as they are.
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
            if group and not _goes_on(group, unit):
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
                if name not in module._non_persistent_buffers_set:
                    statistics.stock_bytes += buffer.nbytes
                    yield self._name(prefix, name), buffer.detach().to(device)

    def _units(self, module: FullyShardedDataParallel) -> Iterator[_Unit]:
        for prefix, unit in module.named_modules():
            handle = unit._handle if isinstance(unit, FullyShardedDataParallel) else None
            if handle is None:
                continue
            flat = handle.flat_param
            names = [self._name(prefix, name) for name in flat._fqns]
            if not all(flat._contiguities) or any(flat._param_extensions):
                raise ValueError(f"weight sync: FSDP1 keeps {names[0]} and others of its unit in a form of their own")
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
            self._stock_bytes += sum(lengths.values()) * flat.itemsize
            part = flat._sharded_size.numel() if handle.uses_sharded_strategy else start
            yield _Unit(handle, tuple(names), shapes, tuple(starts), part)

    def _name(self, *parts: str) -> str:
        return self._sent_as(clean_tensor_name(".".join(part for part in parts if part)))


def _goes_on(group: list[_Unit], unit: _Unit) -> bool:
    """Whether a decoder layer is gathered with those in front of it."""
    if any(place(name) is None for each in (group[-1], unit) for name in each.names):
        return False
    size = torch.bfloat16.itemsize * sum(each.part * _ranks(each) for each in (*group, unit))
    return _group_of(unit) == _group_of(group[-1]) and size <= TOGETHER_BYTES


def _ranks(unit: _Unit) -> int:
    return unit.handle.world_size if unit.handle.uses_sharded_strategy else 1


def _group_of(unit: _Unit) -> dist.ProcessGroup | None:
    return unit.handle.process_group if unit.handle.uses_sharded_strategy else None


def _span(units: list[_Unit], alike: Callable[[str], Hashable]) -> _Span:
    ranks, of_a_rank = _ranks(units[0]), sum(unit.part for unit in units)
    names = [name for unit in units for name in unit.names]
    shapes = [shape for unit in units for shape in unit.shapes]
    # (where it begins in the gathered parts, its length) of the pieces of each parameter.
    pieces: list[list[tuple[int, int]]] = []
    before = 0
    for unit in units:
        for shape, start in zip(unit.shapes, unit.starts, strict=True):
            stop, found = start + torch.Size(shape).numel(), []
            while start < stop:
                rank, at = divmod(start, unit.part)
                length = min(stop - start, unit.part - at)
                found.append((rank * of_a_rank + before + at, length))
                start += length
            pieces.append(found)
        before += unit.part
    sizes, index, end = [], {}, 0
    for start, length in sorted(piece for found in pieces for piece in found):
        if start > end:
            sizes.append(start - end)
        index[start] = len(sizes)
        sizes.append(length)
        end = start + length
    sizes.append(ranks * of_a_rank - end)
    tensors = tensors_of(names, shapes, alike)
    of_tensors = [[piece for i in tensor.members for piece in pieces[i]] for tensor in tensors]
    taken = tuple(tuple(index[start] for start, _ in found) for found in of_tensors)
    lengths = tuple(tuple(length for _, length in found) for found in of_tensors)
    return _Span(tuple(units), tensors, tuple(sizes), taken, lengths)


@torch.no_grad()
def _whole(span: _Span, device: torch.device) -> list[tuple[Name, torch.Tensor]]:
    ranks, parts = _ranks(span.units[0]), [unit.part for unit in span.units]
    # Outside of a forward and a backward a flat parameter is this rank's part, in the optimizer's precision.
    mine = [unit.handle.flat_param.detach().to(device, non_blocking=True) for unit in span.units]
    gathered = torch.empty(ranks * sum(parts), dtype=torch.bfloat16, device=device)
    given = gathered if ranks == 1 else torch.empty(sum(parts), dtype=torch.bfloat16, device=device)
    torch._foreach_copy_(list(given.split(parts)), mine)
    if ranks > 1:
        # As bytes: gloo has no BF16.
        group = _group_of(span.units[0])
        dist.all_gather_into_tensor(gathered.view(torch.uint8), given.view(torch.uint8), group=group)
    whole = [torch.empty(tensor.shape, dtype=torch.bfloat16, device=device) for tensor in span.tensors]
    pieces = gathered.split(span.sizes)
    targets = [part for each, lengths in zip(whole, span.lengths, strict=True) for part in each.view(-1).split(lengths)]
    torch._foreach_copy_(targets, [pieces[i] for taken in span.taken for i in taken])
    return [(tensor.name, each) for tensor, each in zip(span.tensors, whole, strict=True)]
