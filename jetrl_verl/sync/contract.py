# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check: do trainer and rollout hold the same quantized layers, bytes, biases and kernels?

The trainer sends, behind the weights of every sync, what it believes the rollout now holds; each vLLM worker compares
that with its *live* parameters, the storage its kernels will read, not the bytes that went over the wire. A loader that
drops, swaps or misplaces a piece is therefore seen, and so is a parameter that a sleep/wake cycle lost.

Sums. A tensor is summarised by 64-bit multilinear sums: its bytes as 64-bit words, each times an odd constant of its
position, added modulo 2^64. Odd constants are invertible, so any change within one word always changes the sum. FP8
data get one sum per 128x128 block, the block's scale included, which is also the granularity of tensor-parallel shards
and merged projections: a worker compares exactly the blocks it holds. BF16 tensors get one sum per row, or, where the
rollout is tensor parallel, one per row and rank, since a rank of a row-parallel layer holds a part of each row.

Per-layer facts ride in a JSON manifest: quantized or not, block shape, scale rule, how a mixture chooses experts, and
the sum of a small probe GEMM run through the same operator on both sides, which tells two kernels apart that hold equal
weights; where operations are shared, a sum of each (sync/operations_probe.py).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from jetrl_verl import formats, kernels
from jetrl_verl.formats.format import Format
from jetrl_verl.formats.sums import element_sums, row_sums
from jetrl_verl.models.families.base import Routing
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.sync.stacks import continues, joined
from jetrl_verl.sync.wire import is_packed, unpacked, with_completed

MANIFEST_NAME = "jetrl.contract"
SUM_PREFIX = "jetrl.contract/"


class ContractViolation(RuntimeError):
    """Trainer and rollout differ; the message names the layer and both values."""


@dataclass
class Manifest:
    """What the trainer states about one sync.

    Attributes:
        scale_rule: rule that made the qdata. probe: ``stated_probe`` of the trainer (sync/operations_probe.py).
        operations: shared operation -> sum of its results on the probe's inputs; empty where none is shared.
        routing: fields of :class:`~jetrl_verl.models.families.base.Routing` of a mixture of experts, else None.
        block: side of a weight block. quantized: names of weights sent as qdata. plain: names of all other tensors.
    """

    scale_rule: str
    probe: int | None
    operations: dict[str, int] = field(default_factory=dict)
    routing: dict[str, Any] | None = None
    block: int = BLOCK
    quantized: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)

    def to_tensor(self) -> torch.Tensor:
        """uint8, the JSON text."""
        return torch.frombuffer(bytearray(json.dumps(vars(self)).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "Manifest":
        """Inverse of :meth:`to_tensor`."""
        return cls(**json.loads(bytes(tensor.cpu().numpy()).decode()))


def with_contract(
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    scale_rule: str,
    probe: int | None,
    operations: Mapping[str, int] = MappingProxyType({}),
    routing: Routing | None = None,
    ranks: int = 1,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a sync's stream through and append sums and manifest.

    Args:
        weights: (name, tensor); a quantized weight's qdata are followed at once by its scales.
        scale_rule: rule that made the qdata. probe, operations: as in :class:`Manifest`. routing: of a mixture.
        ranks: over how many the rollout splits each layer.

    Yields:
        ``weights`` unchanged, then :data:`SUM_PREFIX` + name with the int64 sums of each, last :data:`MANIFEST_NAME`.
    """
    manifest = Manifest(scale_rule=scale_rule, probe=probe, operations=dict(operations))
    manifest.routing = None if routing is None else asdict(routing)
    sums = _Sums()
    for name, tensor, completed in with_completed(weights):
        yield name, tensor
        if completed is None:
            continue
        whole, value = completed
        if isinstance(value, QuantizedTensor):
            sums.add(whole, value)
            manifest.quantized.append(whole)
        else:
            parts = ranks if value.ndim > 1 and value.shape[1] % ranks == 0 else 1
            sums.add(whole, value.to(torch.bfloat16), parts)
            manifest.plain.append(whole)
    for name, value in sums.of_all().items():
        yield SUM_PREFIX + name, value
    yield MANIFEST_NAME, manifest.to_tensor()


class _Sums:
    """Sums of many tensors with few calls.

    What reads much, qdata and matrices, is summed when it comes, qdata that lie below each other by one call; scales,
    norms and biases are small, so a call for each would be all launches, and are summed together in the end.
    """

    def __init__(self) -> None:
        self._found: dict[Any, torch.Tensor | None] = {}
        self._scales: dict[Format, dict[Any, torch.Tensor]] = {}
        self._vectors: dict[Any, torch.Tensor] = {}
        self._stack: list[tuple[Any, torch.Tensor]] = []

    def add(self, key: Any, value: torch.Tensor | QuantizedTensor, parts: int = 1) -> None:
        """A weight, whose scales stay referenced, or a BF16 tensor, which does if it is a vector; of a matrix each row
        in so many ``parts``."""
        self._found[key] = None  # keeps the order
        if isinstance(value, QuantizedTensor):
            # Experts' matrices are summed below each other; no block holds rows of two.
            qdata, scales = value.qdata.flatten(0, -2), value.scales.flatten(0, -2)
            self._scales.setdefault(formats.of(qdata), {})[key] = scales
            if self._stack and not continues(self._stack[-1][1], qdata):
                self._sum_stack()
            self._stack.append((key, qdata))
        elif value.ndim == 1:
            self._vectors[key] = value
        else:
            self._found[key] = row_sums(value, parts)

    def _sum_stack(self) -> None:
        if not self._stack:
            return
        qdata = [part for _, part in self._stack]
        sums = formats.of(qdata[0]).sums_of_qdata(joined(qdata))
        self._found |= zip((key for key, _ in self._stack), sums.split([len(part) // BLOCK for part in qdata]))
        self._stack.clear()

    def has(self, key: Any) -> bool:
        """Whether it was added."""
        return key in self._found

    def of_all(self) -> dict[Any, torch.Tensor]:
        """Key -> ``Format.sums`` or ``row_sums``, in the order in which they were added."""
        self._sum_stack()
        for number_format, scales in self._scales.items():
            without = [self._found[key] for key in scales]
            self._found |= zip(scales, number_format.with_scales(without, list(scales.values())), strict=True)
        if self._vectors:
            self._found |= zip(self._vectors, element_sums(list(self._vectors.values())), strict=True)
        return self._found


@dataclass(frozen=True, eq=False)
class LiveParameter:
    """A parameter of vLLM, which may be stacked from several tensors of the trainer: data, and scales if quantized."""

    data: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True)
class LiveTensor:
    """One trainer tensor as a worker holds it.

    Attributes:
        tensor: the live storage's view, qdata or BF16. scales: live scales view, None for BF16.
        rows, columns: which part of the whole tensor it is, in elements; of each of its ``groups`` where it is several.
        whole: rows and columns that the whole tensor has according to the worker's layer.
        parameter, start: the live parameter and its first row there; None where ``tensor`` is all there is to know.
        groups: matrices of equal shape that the whole tensor is stacked from, and the live one of the parts held.
    """

    tensor: torch.Tensor
    scales: torch.Tensor | None
    rows: slice
    columns: slice
    whole: tuple[int, int]
    parameter: LiveParameter | None = None
    start: int = 0
    groups: int = 1

    def blocks_of(self, sums: torch.Tensor) -> torch.Tensor:
        """Those of the whole tensor's sums ``[N/128, K/128]`` that are of the part held."""
        rows, columns = (slice(part.start // BLOCK, part.stop // BLOCK) for part in (self.rows, self.columns))
        if self.groups == 1:
            return sums[rows, columns]
        return sums.unflatten(0, (self.groups, -1))[:, rows, columns].flatten(0, 1)


class ContractReceiver:
    """Collects the trainer's statement from a sync's stream and compares it with live parameters."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._sums: dict[str, torch.Tensor] = {}

    def take(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Keep what belongs to the check (copied: the bucket is reused), return the weights proper."""
        rest = []
        for name, tensor in weights:
            if is_packed(name):
                # Its copy is one for all that is in it; what has no sums is for the loaders.
                ours = SUM_PREFIX in name
                rest += self._take(unpacked(name, tensor.clone() if ours else tensor), ours)
            else:
                rest += self._take([(name, tensor)], ours=False)
        return rest

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]], ours: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name.startswith(SUM_PREFIX):
                self._sums[name.removeprefix(SUM_PREFIX)] = tensor if ours else tensor.clone()
            elif name == MANIFEST_NAME:
                self._manifest = Manifest.from_tensor(tensor)
            else:
                yield name, tensor

    def verify(
        self,
        live: Mapping[str, LiveTensor],
        *,
        scale_rule: str,
        probe: int | None,
        operations: Mapping[str, int] = MappingProxyType({}),
        routing: Routing | None = None,
    ) -> dict[str, Any]:
        """Compare.

        Args:
            live: trainer's name -> what this worker holds of it, quantized and plain.
            scale_rule: rule of the live method. probe, operations: as in :class:`Manifest`, of this worker.
            routing: of this worker's mixture of experts.

        Returns:
            Counts under ``"quantized"`` and ``"plain"``, and under ``"digest"`` the sum of all live sums modulo 2^64.

        Raises:
            ContractViolation: at the first difference.
        """
        manifest = self._check_statement(scale_rule, routing)
        self._check_coverage(manifest, live)
        stated: list[tuple[str, torch.Tensor]] = []
        found = _Sums()
        for name in manifest.quantized:
            held, sums = live[name], self._stated(name)
            self._same_shape(name, sums, torch.Size(size // BLOCK for size in held.whole))
            stated.append((name, held.blocks_of(sums)))
            # A stacked parameter is summed once, for all tensors that it is stacked from.
            if held.parameter is None:
                found.add(name, QuantizedTensor(held.tensor, held.scales))
            elif not found.has(held.parameter):
                found.add(held.parameter, QuantizedTensor(held.parameter.data, held.parameter.scales))
        for name in manifest.plain:
            held, sums = live[name], self._stated(name)
            sums = sums.view(len(sums), -1)
            self._same_shape(name, sums[:, 0], torch.Size(held.whole[:1]))
            first, last = self._parts(name, held, sums.shape[1])
            part = sums[held.rows, first:last]
            stated.append((name, part if last - first > 1 else part[:, 0]))
            found.add(name, held.tensor, last - first)
        digest = self._compare(stated, live, found.of_all())
        self._check_code(manifest, probe, operations, next(iter(live.values())).tensor.device)
        return {
            "quantized": len(manifest.quantized),
            "plain": len(manifest.plain),
            "digest": digest % 2**64,
        }

    def _check_statement(self, scale_rule: str, routing: Routing | None) -> Manifest:
        """The trainer's manifest, whose blocks, scale rule and choice of experts are this side's."""
        manifest = self._manifest
        if manifest is None:
            raise ContractViolation(
                "contract check: the trainer sent no statement with its weights; it runs without the plugin or with "
                "another version of it, install the same jetrl_verl on both sides"
            )
        if manifest.block != BLOCK or manifest.scale_rule != scale_rule:
            raise ContractViolation(
                f"contract check: the trainer quantizes with {manifest.block}x{manifest.block} blocks and scale rule "
                f"{manifest.scale_rule}, the rollout with {BLOCK}x{BLOCK} and {scale_rule}"
            )
        theirs = None if manifest.routing is None else Routing(**manifest.routing)
        if theirs != routing:
            sides = ["no mixture of experts" if side is None else str(side) for side in (theirs, routing)]
            raise ContractViolation(
                f"contract check: the trainer has {sides[0]}, the rollout {sides[1]}; start both from the same "
                "config.json, without overrides of what it says about experts"
            )
        return manifest

    @staticmethod
    def _check_code(manifest: Manifest, probe: int | None, operations: Mapping[str, int], device: torch.device) -> None:
        """Both sides multiply, and run what they share, with the same code."""
        if manifest.probe != probe:
            theirs, ours = ("none" if value is None else f"{value:#x}" for value in (manifest.probe, probe))
            raise ContractViolation(
                f"contract check: the probe GEMM gives {theirs} in the trainer, {ours} in the rollout; "
                f"the two sides run different kernels, the rollout {kernels.describe_backends(device)}"
            )
        names = sorted(manifest.operations.keys() | operations.keys())
        different = [name for name in names if manifest.operations.get(name) != operations.get(name)]
        if different:
            raise ContractViolation(
                f"contract check: {', '.join(different)} of the shared operations differ between trainer and rollout; "
                f"the two sides run different kernels, the rollout on {device}; install the same torch and jetrl_verl "
                "on both"
            )

    @staticmethod
    def _check_coverage(manifest: Manifest, live: Mapping[str, LiveTensor]) -> None:
        """Every tensor sent is held, every tensor held was sent, and both sides agree on which are quantized."""
        quantized = set(manifest.quantized)
        sent = quantized | set(manifest.plain)
        for name in (*manifest.quantized, *manifest.plain):
            if name not in live:
                raise ContractViolation(f"contract check: {name} is sent by the trainer and unknown to the rollout")
        # By storage: a tied head is the embedding's parameter under a second name that the trainer need not send.
        covered = {live[name].tensor.data_ptr() for name in sent}
        for name, held in live.items():
            if name not in sent and held.tensor.data_ptr() not in covered:
                raise ContractViolation(
                    f"contract check: {name} is a parameter of the rollout that the trainer did not send; the two "
                    "sides were built from different models"
                )
            if (name in quantized) != (held.scales is not None):
                sides = ("FP8", "BF16") if name in quantized else ("BF16", "FP8")
                raise ContractViolation(
                    f"contract check: layer {name} is {sides[0]} in the trainer and {sides[1]} in the rollout"
                )

    def _stated(self, name: str) -> torch.Tensor:
        if name not in self._sums:
            raise ContractViolation(
                f"contract check: the trainer's sums of {name} did not arrive; the two sides run different versions of "
                "jetrl_verl, install the same one on both"
            )
        return self._sums[name]

    @staticmethod
    def _same_shape(name: str, stated: torch.Tensor, whole: torch.Size) -> None:
        if stated.shape != whole:
            raise ContractViolation(
                f"contract check: {name} has {tuple(stated.shape)} blocks or rows in the trainer and {tuple(whole)} in "
                "the rollout; vLLM reads another shape out of the model's configuration"
            )

    @staticmethod
    def _parts(name: str, held: LiveTensor, parts: int) -> tuple[int, int]:
        """First and last (exclusive) of the ``parts`` equal parts of a row that this worker holds."""
        width, rest = divmod(held.whole[1], parts)
        if rest or held.columns.start % width or held.columns.stop % width:
            raise ContractViolation(
                f"contract check: the trainer sums {width} columns of {name} at a time and the rollout holds columns "
                f"{held.columns.start} to {held.columns.stop}; the trainer was told another tensor-parallel size than "
                "the rollout has"
            )
        return held.columns.start // width, held.columns.stop // width

    @staticmethod
    def _compare(
        stated: list[tuple[str, torch.Tensor]], live: Mapping[str, LiveTensor], found: Mapping[Any, torch.Tensor]
    ) -> int:
        """Sum of all live sums, which must be the stated ones; ``found``: by name, or of whole parameters.

        The device is waited for once. A wait for every tensor took seconds where other processes shared the GPU, since
        each of several hundred had to wait for this process's turn.
        """
        if not stated:
            return 0

        def held(name: str) -> torch.Tensor:
            if name in found:
                return found[name]
            start, rows = live[name].start // BLOCK, live[name].tensor.shape[0] // BLOCK
            return found[live[name].parameter][start : start + rows]

        sums = [(name, expected, held(name)) for name, expected in stated]
        ours = torch.cat([value.flatten() for _, _, value in sums])
        theirs = torch.cat([expected.flatten() for _, expected, _ in sums]).to(ours.device)
        differing, digest = torch.stack([(theirs != ours).sum(), ours.sum()]).tolist()
        if differing:
            ContractReceiver._name_difference(sums)
        return digest

    @staticmethod
    def _name_difference(sums: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        for name, expected, found in sums:
            expected = expected.to(found.device)
            different = (expected != found).nonzero()
            if len(different):
                at = tuple(different[0].tolist())
                raise ContractViolation(
                    f"contract check: {name} differs between trainer and rollout in {len(different)} of "
                    f"{found.numel()} blocks or rows, first at {at}: sum {int(expected[at]):#x} in the trainer, "
                    f"{int(found[at]):#x} in the rollout's live parameter"
                )
