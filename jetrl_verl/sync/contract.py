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
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from jetrl_verl import formats, kernels
from jetrl_verl.formats.format import Format
from jetrl_verl.formats.sums import element_sums, row_sums
from jetrl_verl.models.families.base import Routing
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.sync.stacks import Name, Stack, names_of, parts_of, renamed
from jetrl_verl.sync.wire import unpacked, with_completed

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
    weights: Iterable[tuple[Name, torch.Tensor]],
    *,
    scale_rule: str,
    probe: int | None,
    operations: Mapping[str, int] = MappingProxyType({}),
    routing: Routing | None = None,
    ranks: int = 1,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[Name, torch.Tensor]]:
    """Pass a sync's stream through and append sums and manifest.

    Args:
        weights: (name or stack, tensor); qdata are followed at once by their scales.
        scale_rule: rule that made the qdata. probe, operations: as in :class:`Manifest`. routing: of a mixture.
        ranks: over how many the rollout splits each layer.
        tied: second names of tensors of the stream, which are stated under both -> their names there; read at the end.

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
            manifest.quantized += names_of(whole)
        else:
            parts = ranks if value.ndim > 1 and value.shape[1] % ranks == 0 else 1
            sums.add(whole, value.to(torch.bfloat16), parts)
            manifest.plain += names_of(whole)
    found = sums.of_all()
    for second, first in tied.items():
        found[second] = found[first]
        manifest.plain.append(second)
    for name, value in found.items():
        yield renamed(name, prefix=SUM_PREFIX), value
    yield MANIFEST_NAME, manifest.to_tensor()


class _Sums:
    """Sums of many tensors with few calls.

    What reads much, qdata and matrices, is summed when it comes; scales, norms and biases are small, so a call for each
    would be all launches, and are summed together in the end.
    """

    def __init__(self) -> None:
        self._found: dict[Name, torch.Tensor | None] = {}
        self._scales: dict[Format, dict[Name, torch.Tensor]] = {}
        self._vectors: dict[Name, torch.Tensor] = {}

    def add(self, name: Name, value: torch.Tensor | QuantizedTensor, parts: int = 1) -> None:
        """A weight, whose scales stay referenced, or a BF16 tensor, which does if it is a vector; of a matrix each row
        in so many ``parts``."""
        self._found[name] = None  # keeps the order
        if isinstance(value, QuantizedTensor):
            # Experts' matrices are summed below each other; no block holds rows of two.
            qdata, scales = _flat(value)
            number_format = formats.of(qdata)
            self._scales.setdefault(number_format, {})[name] = scales
            self._found[name] = number_format.sums_of_qdata(qdata)
        elif value.ndim == 1:
            self._vectors[name] = value
        else:
            self._found[name] = row_sums(value, parts)

    def of_all(self) -> dict[Name, torch.Tensor]:
        """Name -> ``Format.sums`` or ``row_sums``, in the order in which they were added."""
        for number_format, scales in self._scales.items():
            without = [self._found[name] for name in scales]
            self._found |= zip(scales, number_format.with_scales(without, list(scales.values())), strict=True)
        if self._vectors:
            sums = element_sums(list(self._vectors.values()))
            self._found |= zip(self._vectors, sums.split([len(each) for each in self._vectors.values()]), strict=True)
        return self._found


def _flat(weight: QuantizedTensor) -> QuantizedTensor:
    if weight.qdata.ndim == 2:
        return weight
    return QuantizedTensor(weight.qdata.flatten(0, -2), weight.scales.flatten(0, -2))


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
    """Collects the trainer's statement from a sync's stream and compares it with live parameters.

    One that is kept for the next sync (:meth:`start`) keeps where what is compared lies, too: 8 bytes for each sum on
    the worker's device, 6 MB for a model of 4B.
    """

    def __init__(self) -> None:
        self._comparison: _Comparison | None = None
        self.start()

    def start(self) -> None:
        """Forget the statement of the sync before."""
        self._manifest: Manifest | None = None
        self._sums: dict[Name, torch.Tensor] = {}

    def take(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Keep what belongs to the check (copied: the bucket is reused), return the weights proper, each by itself."""
        rest: list[tuple[str, torch.Tensor]] = []
        for name, tensor in weights:
            items = list(unpacked(name, tensor))
            if states(name):
                # One copy for all that is in the piece; weights are for the loaders, where they lie.
                copies = unpacked(name, tensor.clone())
                items = [item for item, kept in zip(items, copies, strict=True) if not self._keep(*kept)]
            for item in items:
                rest += parts_of(*item)
        return rest

    def _keep(self, name: Name, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to the check; it is kept then."""
        if names_of(name)[0].startswith(SUM_PREFIX):
            self._sums[name] = tensor
        elif name == MANIFEST_NAME:
            self._manifest = Manifest.from_tensor(tensor)
        else:
            return False
        return True

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
        stated = [(name, tensor.shape) for name, tensor in self._sums.items()]
        if self._comparison is None or not self._comparison.fits(manifest, stated, live):
            self._comparison = None
            self._check_coverage(manifest, live)
            self._comparison = _Comparison(manifest, stated, live)
        digest = self._comparison.run(list(self._sums.values()))
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


def states(name: str) -> bool:
    """Whether a piece holds a part of the statement."""
    return SUM_PREFIX in name or MANIFEST_NAME in name


class _Comparison:
    """Which of the stated sums have to be which of the live ones.

    Both sides' sums are one vector each, and what is compared are two lists of places in them. Names, shapes and live
    storage determine all of it, so it is made once and then holds until one of these differs from the sync before.

    Raises:
        ContractViolation: when it is made, where the two sides' shapes differ or a statement is missing.
    """

    def __init__(
        self, manifest: Manifest, stated: list[tuple[Name, torch.Size]], live: Mapping[str, LiveTensor]
    ) -> None:
        self._made_of = (manifest.quantized, manifest.plain, stated, live)
        # Of the live side: what is summed, by how. Keys are names, or storage that several names share.
        self._weights: dict[Format, dict[Any, QuantizedTensor]] = {}
        self._matrices: dict[Any, tuple[torch.Tensor, int]] = {}
        self._vectors: dict[Any, torch.Tensor] = {}
        # Of what is compared, in this order: name, places in the stated sums, key of the live ones, the part of them.
        chosen: list[tuple[str, torch.Tensor, Any, slice]] = []
        places = _places_of(stated)
        for name in manifest.quantized:
            held, sums = live[name], _stated(name, places)
            _same_shape(name, sums, torch.Size(size // BLOCK for size in held.whole))
            # A stacked parameter is summed once, for all tensors that it is stacked from.
            if held.parameter is None:
                key, part, weight = name, slice(None), QuantizedTensor(held.tensor, held.scales)
            else:
                first = held.start // BLOCK
                key, part = held.parameter, slice(first, first + held.tensor.shape[0] // BLOCK)
                weight = QuantizedTensor(held.parameter.data, held.parameter.scales)
            self._weights.setdefault(formats.of(weight.qdata), {})[key] = weight
            chosen.append((name, held.blocks_of(sums), key, part))
        for name in manifest.plain:
            held, sums = live[name], _stated(name, places)
            sums = sums.view(len(sums), -1)
            _same_shape(name, sums[:, 0], torch.Size(held.whole[:1]))
            first, last = _parts(name, held, sums.shape[1])
            part = sums[held.rows, first:last]
            # A tied head has the embedding's storage.
            key = (held.tensor.data_ptr(), held.tensor.shape, last - first)
            if held.tensor.ndim == 1:
                self._vectors[key] = held.tensor
            else:
                self._matrices[key] = (held.tensor, last - first)
            chosen.append((name, part if last - first > 1 else part[:, 0], key, slice(None)))
        ours = self._places_of_live()
        self._shapes = [(name, theirs.shape) for name, theirs, _, _ in chosen]
        device = next(iter(live.values())).tensor.device
        if chosen:
            self._theirs = _together([theirs for _, theirs, _, _ in chosen], device)
            self._ours = _together([ours[key][part] for _, _, key, part in chosen], device)

    def fits(self, manifest: Manifest, stated: list[tuple[Name, torch.Size]], live: Mapping[str, LiveTensor]) -> bool:
        """Whether this is the comparison of these; ``live`` has to be the very mapping."""
        quantized, plain, before, held = self._made_of
        return held is live and (quantized, plain, before) == (manifest.quantized, manifest.plain, stated)

    def run(self, stated: list[torch.Tensor]) -> int:
        """Sum of all live sums, which must be the stated ones.

        The device is waited for once. A wait for every tensor took seconds where other processes shared the GPU, since
        each of several hundred had to wait for this process's turn.
        """
        if not self._shapes:
            return 0
        ours = self._live_sums().index_select(0, self._ours)
        theirs = torch.cat([sums.reshape(-1) for sums in stated]).to(ours.device).index_select(0, self._theirs)
        differing, digest = torch.stack([(theirs != ours).sum(), ours.sum()]).tolist()
        if differing:
            self._name_difference(theirs, ours)
        return digest

    def _live_sums(self) -> torch.Tensor:
        found = [number_format.sums_of_all(list(held.values())) for number_format, held in self._weights.items()]
        found += [row_sums(matrix, parts).view(-1) for matrix, parts in self._matrices.values()]
        if self._vectors:
            found.append(element_sums(list(self._vectors.values())))
        return torch.cat(found)

    def _places_of_live(self) -> dict[Any, torch.Tensor]:
        """Where the sums of each key lie in :meth:`_live_sums`."""
        shapes: dict[Any, tuple[int, ...]] = {}
        for held in self._weights.values():
            shapes |= {key: tuple(size // BLOCK for size in weight.qdata.shape) for key, weight in held.items()}
        for key, (matrix, parts) in self._matrices.items():
            shapes[key] = (len(matrix), parts) if parts > 1 else (len(matrix),)
        shapes |= {key: tuple(vector.shape) for key, vector in self._vectors.items()}
        return dict(_places_of(shapes.items()))

    def _name_difference(self, theirs: torch.Tensor, ours: torch.Tensor) -> None:
        lengths = [shape.numel() for _, shape in self._shapes]
        for (name, shape), expected, found in zip(
            self._shapes, theirs.split(lengths), ours.split(lengths), strict=True
        ):
            expected, found = expected.view(shape), found.view(shape)
            different = (expected != found).nonzero()
            if len(different):
                at = tuple(different[0].tolist())
                raise ContractViolation(
                    f"contract check: {name} differs between trainer and rollout in {len(different)} of "
                    f"{found.numel()} blocks or rows, first at {at}: sum {int(expected[at]):#x} in the trainer, "
                    f"{int(found[at]):#x} in the rollout's live parameter"
                )


def _places_of(shapes: Iterable[tuple[Any, Sequence[int]]]) -> dict[Any, torch.Tensor]:
    """Key -> where each element of its tensor lies among all of them, one behind the other; of a stack, of each name.

    Args:
        shapes: (key, shape) in the order in which they lie.
    """
    found, start = {}, 0
    for key, shape in shapes:
        length = math.prod(shape)
        places = torch.arange(start, start + length, device="cpu").view(tuple(shape))
        found |= dict(parts_of(key, places)) if isinstance(key, Stack) else {key: places}
        start += length
    return found


def _together(places: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in places]).to(device, torch.int32)


def _stated(name: str, places: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found = places.get(SUM_PREFIX + name)
    if found is None:
        raise ContractViolation(
            f"contract check: the trainer's sums of {name} did not arrive; the two sides run different versions of "
            "jetrl_verl, install the same one on both"
        )
    return found


def _same_shape(name: str, stated: torch.Tensor, whole: torch.Size) -> None:
    if stated.shape != whole:
        raise ContractViolation(
            f"contract check: {name} has {tuple(stated.shape)} blocks or rows in the trainer and {tuple(whole)} in "
            "the rollout; vLLM reads another shape out of the model's configuration"
        )


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
