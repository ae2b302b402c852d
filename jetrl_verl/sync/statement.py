# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's statement about a sync: what the rollout should have after it, for contract.py to compare.

A sum is 64-bit multilinear: words times odd constants of their positions, modulo 2^64, so a change within one word
always changes it. Quantized weights have one per block, scale included; BF16 tensors one per row and rank of
the rollout. The manifest has the facts, and the sums of probes that tell kernels apart (operations_probe.py).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from jetrl_verl.formats import UNQUANTIZED
from jetrl_verl.formats.format import Format, QuantizedWeight
from jetrl_verl.formats.sums import element_sums, odd_constants, row_sums
from jetrl_verl.sync.quantize import Weight
from jetrl_verl.sync.stacks import Name, from_json, names_of, parts_of, to_json
from jetrl_verl.sync.wire import Kind, Part


class ContractViolation(RuntimeError):
    """Trainer and rollout differ; the message names the layer and both values."""


class Summed(NamedTuple):
    """A weight or stack of a statement.

    Attributes:
        format: its number format; ``UNQUANTIZED`` for BF16.
        shape: of its sums, of blocks ``[N/block, K/block]``, or ``[R]`` or ``[R, ranks]`` for BF16.
    """

    name: Name
    format: str
    shape: tuple[int, ...]


@dataclass
class Manifest:
    """The facts of a statement.

    Attributes:
        scale_rule: rule of the scales. probe: the trainer's ``stated_probe`` (operations_probe.py).
        operations: shared operation -> sum of its results on the probe's inputs; empty if none is shared.
        constants: what decides the forward besides weights (:func:`~jetrl_verl.sync.constants.constants_of`).
        tied: second name -> first name of tensors that are sent once.
        weights: in the order of their sums.
    """

    scale_rule: str
    probe: int | None
    operations: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    weights: list[Summed] = field(default_factory=list)

    def to_tensor(self) -> torch.Tensor:
        """uint8, the JSON text."""
        weights = [(to_json(name), number_format, shape) for name, number_format, shape in self.weights]
        return torch.frombuffer(bytearray(json.dumps(vars(self) | {"weights": weights}).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "Manifest":
        """Inverse of :meth:`to_tensor`."""
        fields = json.loads(bytes(tensor.cpu().numpy()).decode())
        weights = [Summed(from_json(name), form, tuple(shape)) for name, form, shape in fields.pop("weights")]
        return cls(**fields, weights=weights)

    def length(self) -> int:
        """Number of sums."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    def places(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(name, format, indices of its sums) of each weight alone; tied ones follow under their second names."""
        places, start = {}, 0
        for name, number_format, shape in self.weights:
            indices = torch.arange(start, start + math.prod(shape), device="cpu").view(shape)
            places |= {single: (number_format, part) for single, part in parts_of(name, indices)}
            start += indices.numel()
        places |= {second: places[first] for second, first in self.tied.items()}
        for name, (number_format, indices) in places.items():
            yield name, number_format, indices


class Statement:
    """Sums the weights of one sync with few launches: qdata and matrices at once, scales and vectors at the end.

    Args:
        ranks: tensor-parallel size of the rollout. facts: fields of :class:`Manifest`.
    """

    def __init__(self, *, ranks: int = 1, **facts: Any) -> None:
        self._manifest, self._ranks = Manifest(**facts), ranks
        self._sums: list[torch.Tensor] = []
        self._scales: dict[Format, dict[int, torch.Tensor]] = {}
        self._vectors: dict[int, torch.Tensor] = {}

    def add(self, name: Name, weight: Weight) -> None:
        """Sum a weight or stack; scales and vectors stay referenced."""
        number_format, at = UNQUANTIZED, len(self._sums)
        if isinstance(weight, QuantizedWeight):
            # Experts' matrices are summed as one; no block has rows of two.
            qdata, scales = (part.flatten(0, -2) for part in weight)
            self._scales.setdefault(weight.format, {})[at] = scales
            number_format, sums = weight.format.traits.name, weight.format.sums_of_qdata(qdata)
        elif weight.ndim == 1:
            self._vectors[at] = sums = weight.to(torch.bfloat16)
        else:
            parts = self._ranks if weight.shape[1] % self._ranks == 0 else 1
            sums = row_sums(weight.to(torch.bfloat16), parts)
        self._sums.append(sums)
        self._manifest.weights.append(Summed(name, number_format, tuple(sums.shape)))

    def finish(self) -> tuple[Manifest, torch.Tensor]:
        """The manifest and all sums, int64."""
        for number_format, scales in self._scales.items():
            complete = number_format.with_scales([self._sums[at] for at in scales], list(scales.values()))
            for at, sums in zip(scales, complete, strict=True):
                self._sums[at] = sums
        if self._vectors:
            lengths = [len(vector) for vector in self._vectors.values()]
            for at, sums in zip(self._vectors, element_sums(list(self._vectors.values())).split(lengths), strict=True):
                self._sums[at] = sums
        return self._manifest, torch.cat([sums.reshape(-1) for sums in self._sums])


def statement_parts(manifest: Manifest, sums: torch.Tensor) -> Iterator[Part]:
    """The parts of a sync that follow its weights."""
    yield Part(Kind.SUMS, "", UNQUANTIZED, sums)
    yield Part(Kind.MANIFEST, "", UNQUANTIZED, manifest.to_tensor())


def compare_ranks(manifest: Manifest, sums: torch.Tensor) -> None:
    """Compare a statement over the trainer's ranks; collective over the default group.

    A rollout worker compares itself with its own rank alone, so it cannot see that ranks have drifted apart.

    Raises:
        ContractViolation: on every rank, naming the first tensor that differs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # Running sums at the end of each tensor, modulo 2^64: few words to gather, and the first that differs names the
    # first tensor that does.
    lengths: dict[str, int] = {}
    for name, _, (rows, *others) in manifest.weights:
        rows_of_each = (rows,) if isinstance(name, str) else name.lengths(rows)
        lengths |= {one: n * math.prod(others) for one, n in zip(names_of(name), rows_of_each, strict=True)}
    ends = torch.tensor(list(lengths.values())).cumsum(0).to(sums.device) - 1
    mine = (sums * odd_constants(len(sums), sums.device)).cumsum(0)[ends]
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    differing = (torch.stack(ranks) != ranks[0]).nonzero().tolist()
    if differing:
        tensor, rank = min((tensor, rank) for rank, tensor in differing)
        raise ContractViolation(
            f"contract check: {list(lengths)[tensor]} of the trainer's rank {rank} differs from that "
            "of rank 0: the ranks train different policies. Set actor_rollout_ref.actor.strategy=fsdp2, and look for "
            "code that changes weights or gradients on one rank alone."
        )
