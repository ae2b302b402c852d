# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check: trainer and rollout have the same quantized layers, bytes, biases and kernels.

After the weights of each sync the trainer sends sums of what the rollout should have now; each vLLM worker compares
them with its live parameters, not with the bytes on the wire, so a dropped, swapped or misplaced piece is seen. A sum
is 64-bit multilinear: words times odd constants of their positions, modulo 2^64, so a change within one word always
changes it. FP8 weights have one per 128x128 block, scale included; BF16 tensors one per row and rank of the rollout.
A JSON manifest carries the facts of each layer, and sums of probes that tell kernels apart (sync/operations_probe.py).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from jetrl_verl import kernels
from jetrl_verl.formats.format import Format, QuantizedWeight
from jetrl_verl.formats.sums import element_sums, row_sums
from jetrl_verl.models.families.base import Routing
from jetrl_verl.reference import BLOCK
from jetrl_verl.sync.stacks import Name, Stack, names_of, parts_of, renamed
from jetrl_verl.sync.wire import unpacked

MANIFEST_NAME = "jetrl.contract"
SUM_PREFIX = "jetrl.contract/"


class ContractViolation(RuntimeError):
    """Trainer and rollout differ; the message names the layer and both values."""


@dataclass
class Manifest:
    """The trainer's statement about one sync.

    Attributes:
        scale_rule: rule of the scales. probe: the trainer's ``stated_probe`` (sync/operations_probe.py).
        operations: shared operation -> sum of its results on the probe's inputs; empty if none is shared.
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
    weights: Iterable[tuple[Name, torch.Tensor | QuantizedWeight]],
    *,
    scale_rule: str,
    probe: int | None,
    operations: Mapping[str, int] = MappingProxyType({}),
    routing: Routing | None = None,
    ranks: int = 1,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[Name, torch.Tensor | QuantizedWeight]]:
    """Pass a sync's stream through and append sums and manifest.

    Args:
        weights: (name or stack, tensor or quantized weight).
        scale_rule, probe, operations: as in :class:`Manifest`. routing: of a mixture of experts.
        ranks: tensor-parallel size of the rollout.
        tied: second name -> first name of tied tensors, stated under both; read at the end of the stream.

    Yields:
        ``weights`` unchanged, then :data:`SUM_PREFIX` + name with int64 sums, then :data:`MANIFEST_NAME`.
    """
    manifest = Manifest(scale_rule=scale_rule, probe=probe, operations=dict(operations))
    manifest.routing = None if routing is None else asdict(routing)
    sums = _Sums()
    for name, value in weights:
        yield name, value
        if isinstance(value, QuantizedWeight):
            sums.add(name, value)
            manifest.quantized += names_of(name)
        else:
            parts = ranks if value.ndim > 1 and value.shape[1] % ranks == 0 else 1
            sums.add(name, value.to(torch.bfloat16), parts)
            manifest.plain += names_of(name)
    values = sums.of_all()
    for second, first in tied.items():
        values[second] = values[first]
        manifest.plain.append(second)
    for name, value in values.items():
        yield renamed(name, prefix=SUM_PREFIX), value
    yield MANIFEST_NAME, manifest.to_tensor()


class _Sums:
    """Sums of many tensors with few launches: qdata and matrices at once, scales and vectors together at the end."""

    def __init__(self) -> None:
        self._values: dict[Name, torch.Tensor | None] = {}
        self._scales: dict[Format, dict[Name, torch.Tensor]] = {}
        self._vectors: dict[Name, torch.Tensor] = {}

    def add(self, name: Name, value: torch.Tensor | QuantizedWeight, parts: int = 1) -> None:
        """Add a quantized weight or a BF16 tensor; scales and vectors stay referenced. ``parts``: sums per row."""
        self._values[name] = None  # keeps the order
        if isinstance(value, QuantizedWeight):
            # Experts' matrices are summed as one; no block has rows of two.
            self._scales.setdefault(value.format, {})[name] = value.scales.flatten(0, -2)
            self._values[name] = value.format.sums_of_qdata(value.qdata.flatten(0, -2))
        elif value.ndim == 1:
            self._vectors[name] = value
        else:
            self._values[name] = row_sums(value, parts)

    def of_all(self) -> dict[Name, torch.Tensor]:
        """Name -> ``Format.sums`` or ``row_sums``, in the order of :meth:`add`."""
        for number_format, scales in self._scales.items():
            without = [self._values[name] for name in scales]
            self._values |= zip(scales, number_format.with_scales(without, list(scales.values())), strict=True)
        if self._vectors:
            sums = element_sums(list(self._vectors.values()))
            self._values |= zip(
                self._vectors, sums.split([len(vector) for vector in self._vectors.values()]), strict=True
            )
        return self._values


@dataclass(frozen=True, eq=False)
class LiveParameter:
    """A parameter of vLLM, perhaps stacked from several tensors of the trainer: data, and scales if quantized."""

    data: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True)
class LiveTensor:
    """A worker's part of one trainer tensor.

    Attributes:
        tensor: view of live storage, qdata or BF16. scales: view of live scales, None for BF16.
        rows, columns: this part of the whole tensor, in elements; of each group if there are several.
        whole: shape of the whole tensor according to the worker's layer.
        parameter, start: the live parameter and this part's first row in it; None if ``tensor`` is the parameter.
        groups: number of equal matrices that the whole tensor is stacked from.
        format: of the qdata; None for BF16.
    """

    tensor: torch.Tensor
    scales: torch.Tensor | None
    rows: slice
    columns: slice
    whole: tuple[int, int]
    parameter: LiveParameter | None = None
    start: int = 0
    groups: int = 1
    format: Format | None = None

    def blocks_of(self, sums: torch.Tensor) -> torch.Tensor:
        """This part's sums out of the whole tensor's ``[N/128, K/128]``."""
        rows, columns = (slice(part.start // BLOCK, part.stop // BLOCK) for part in (self.rows, self.columns))
        if self.groups == 1:
            return sums[rows, columns]
        return sums.unflatten(0, (self.groups, -1))[:, rows, columns].flatten(0, 1)


class ContractReceiver:
    """Collects the trainer's statement from a sync's stream and compares it with live parameters.

    Kept from sync to sync, it keeps the indices of compared sums on the worker's device: 8 bytes each, 6 MB at 4B.
    """

    def __init__(self) -> None:
        self._comparison: _Comparison | None = None
        self.start()

    def start(self) -> None:
        """Begin a sync: forget the last statement."""
        self._manifest: Manifest | None = None
        self._sums: dict[Name, torch.Tensor] = {}

    def take(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Keep a copy of the check's pieces, since the bucket is reused, and return the weights one by one."""
        rest: list[tuple[str, torch.Tensor]] = []
        for name, tensor in weights:
            items = list(unpacked(name, tensor))
            if is_contract_piece(name):
                # One copy of the piece for its sums; loaders read its weights in place.
                copies = unpacked(name, tensor.clone())
                items = [item for item, kept in zip(items, copies, strict=True) if not self._keep(*kept)]
            for item in items:
                rest += parts_of(*item)
        return rest

    def _keep(self, name: Name, tensor: torch.Tensor) -> bool:
        """Keep a tensor of the check; returns whether it is one."""
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
        """Compare the statement with this worker.

        Args:
            live: trainer's name -> this worker's part, quantized and plain.
            scale_rule, probe, operations, routing: as in :class:`Manifest`, of this worker.

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
        """The trainer's manifest; its blocks, scale rule and choice of experts must equal this side's."""
        manifest = self._manifest
        if manifest is None:
            raise ContractViolation(
                "contract check: the trainer sent no statement with its weights: it runs without the plugin or with "
                "another version of it. Install the same jetrl_verl on both sides."
            )
        if manifest.block != BLOCK or manifest.scale_rule != scale_rule:
            raise ContractViolation(
                f"contract check: the trainer quantizes with {manifest.block}x{manifest.block} blocks and scale rule "
                f"{manifest.scale_rule}, the rollout with {BLOCK}x{BLOCK} and {scale_rule}"
            )
        stated = None if manifest.routing is None else Routing(**manifest.routing)
        if stated != routing:
            sides = ["no mixture of experts" if side is None else str(side) for side in (stated, routing)]
            raise ContractViolation(
                f"contract check: the trainer has {sides[0]}, the rollout {sides[1]}. Start both from the same "
                "config.json, without overrides of its fields about experts."
            )
        return manifest

    @staticmethod
    def _check_code(manifest: Manifest, probe: int | None, operations: Mapping[str, int], device: torch.device) -> None:
        """Both sides run the same kernels: linear layers by the probe, shared operations by their sums."""
        if manifest.probe != probe:
            stated, live = ("none" if value is None else f"{value:#x}" for value in (manifest.probe, probe))
            raise ContractViolation(
                f"contract check: the probe GEMM gives {stated} in the trainer, {live} in the rollout: "
                f"the two sides run different kernels, the rollout {kernels.describe_backends(device)}"
            )
        names = sorted(manifest.operations.keys() | operations.keys())
        different = [name for name in names if manifest.operations.get(name) != operations.get(name)]
        if different:
            raise ContractViolation(
                f"contract check: {', '.join(different)} of the shared operations differ between trainer and rollout: "
                f"the two sides run different kernels, the rollout on {device}. Install the same torch and jetrl_verl "
                "on both."
            )

    @staticmethod
    def _check_coverage(manifest: Manifest, live: Mapping[str, LiveTensor]) -> None:
        """The rollout has every tensor that was sent and no other, and both sides agree on which are quantized."""
        quantized = set(manifest.quantized)
        sent = quantized | set(manifest.plain)
        for name in (*manifest.quantized, *manifest.plain):
            if name not in live:
                raise ContractViolation(f"contract check: {name} is sent by the trainer and unknown to the rollout")
        # By storage: a tied head is the embedding's parameter under a second name that the trainer need not send.
        covered = {live[name].tensor.data_ptr() for name in sent}
        for name, part in live.items():
            if name not in sent and part.tensor.data_ptr() not in covered:
                raise ContractViolation(
                    f"contract check: {name} is a parameter of the rollout that the trainer did not send: the two "
                    "sides were built from different models"
                )
            if (name in quantized) != (part.scales is not None):
                sides = ("FP8", "BF16") if name in quantized else ("BF16", "FP8")
                raise ContractViolation(
                    f"contract check: layer {name} is {sides[0]} in the trainer and {sides[1]} in the rollout"
                )


def is_contract_piece(name: str) -> bool:
    """Whether a piece of the wire has a part of the statement."""
    return SUM_PREFIX in name or MANIFEST_NAME in name


class _Comparison:
    """Pairs of stated and live sums: two lists of indices into one vector of sums per side.

    They follow from names, shapes and live storage, so they are made once and reused while these stay the same.

    Raises:
        ContractViolation: from the constructor, if shapes differ or sums are missing.
    """

    def __init__(
        self, manifest: Manifest, stated: list[tuple[Name, torch.Size]], live: Mapping[str, LiveTensor]
    ) -> None:
        self._made_of = (manifest.quantized, manifest.plain, stated, live)
        # Live tensors to sum, grouped by the sum they need. Keys are names, or storage that several names share.
        self._weights: dict[Format, dict[Any, QuantizedWeight]] = {}
        self._matrices: dict[Any, tuple[torch.Tensor, int]] = {}
        self._vectors: dict[Any, torch.Tensor] = {}
        # (name, indices of stated sums, key of the live sums, slice of them) of each compared tensor.
        pairs: list[tuple[str, torch.Tensor, Any, slice]] = []
        places = _places_of(stated)
        for name in manifest.quantized:
            part, sums = live[name], _stated(name, places)
            _same_shape(name, sums, torch.Size(size // BLOCK for size in part.whole))
            # A stacked parameter is summed once, for all tensors that it is stacked from.
            if part.parameter is None:
                key, span, weight = name, slice(None), QuantizedWeight(part.format, part.tensor, part.scales)
            else:
                first = part.start // BLOCK
                key, span = part.parameter, slice(first, first + part.tensor.shape[0] // BLOCK)
                weight = QuantizedWeight(part.format, part.parameter.data, part.parameter.scales)
            self._weights.setdefault(weight.format, {})[key] = weight
            pairs.append((name, part.blocks_of(sums), key, span))
        for name in manifest.plain:
            part, sums = live[name], _stated(name, places)
            sums = sums.view(len(sums), -1)
            _same_shape(name, sums[:, 0], torch.Size(part.whole[:1]))
            first, last = _parts(name, part, sums.shape[1])
            sums = sums[part.rows, first:last]
            # A tied head has the embedding's storage.
            key = (part.tensor.data_ptr(), part.tensor.shape, last - first)
            if part.tensor.ndim == 1:
                self._vectors[key] = part.tensor
            else:
                self._matrices[key] = (part.tensor, last - first)
            pairs.append((name, sums if last - first > 1 else sums[:, 0], key, slice(None)))
        places_of_live = self._places_of_live()
        self._shapes = [(name, stated_places.shape) for name, stated_places, _, _ in pairs]
        device = next(iter(live.values())).tensor.device
        if pairs:
            self._stated_places = _together([stated_places for _, stated_places, _, _ in pairs], device)
            self._live_places = _together([places_of_live[key][span] for _, _, key, span in pairs], device)

    def fits(self, manifest: Manifest, stated: list[tuple[Name, torch.Size]], live: Mapping[str, LiveTensor]) -> bool:
        """Whether it can be reused; ``live`` has to be the same object."""
        quantized, plain, before, mapping = self._made_of
        return mapping is live and (quantized, plain, before) == (manifest.quantized, manifest.plain, stated)

    def run(self, stated: list[torch.Tensor]) -> int:
        """Compare, and return the sum of all live sums.

        It synchronizes with the device once: one wait per tensor took seconds on a GPU shared with other processes.
        """
        if not self._shapes:
            return 0
        live = self._live_sums().index_select(0, self._live_places)
        expected = torch.cat([sums.reshape(-1) for sums in stated]).to(live.device).index_select(0, self._stated_places)
        differing, digest = torch.stack([(expected != live).sum(), live.sum()]).tolist()
        if differing:
            self._name_difference(expected, live)
        return digest

    def _live_sums(self) -> torch.Tensor:
        sums = [number_format.sums_of_all(list(weights.values())) for number_format, weights in self._weights.items()]
        sums += [row_sums(matrix, parts).view(-1) for matrix, parts in self._matrices.values()]
        if self._vectors:
            sums.append(element_sums(list(self._vectors.values())))
        return torch.cat(sums)

    def _places_of_live(self) -> dict[Any, torch.Tensor]:
        """Indices of each key's sums in :meth:`_live_sums`."""
        shapes: dict[Any, tuple[int, ...]] = {}
        for weights in self._weights.values():
            shapes |= {key: tuple(size // BLOCK for size in weight.qdata.shape) for key, weight in weights.items()}
        for key, (matrix, parts) in self._matrices.items():
            shapes[key] = (len(matrix), parts) if parts > 1 else (len(matrix),)
        shapes |= {key: tuple(vector.shape) for key, vector in self._vectors.items()}
        return dict(_places_of(shapes.items()))

    def _name_difference(self, all_expected: torch.Tensor, all_live: torch.Tensor) -> None:
        lengths = [shape.numel() for _, shape in self._shapes]
        parts = zip(self._shapes, all_expected.split(lengths), all_live.split(lengths), strict=True)
        for (name, shape), expected, live in parts:
            expected, live = expected.view(shape), live.view(shape)
            different = (expected != live).nonzero()
            if len(different):
                at = tuple(different[0].tolist())
                raise ContractViolation(
                    f"contract check: {name} differs between trainer and rollout in {len(different)} of "
                    f"{live.numel()} blocks or rows, first at {at}: sum {int(expected[at]):#x} in the trainer, "
                    f"{int(live[at]):#x} in the rollout's live parameter"
                )


def _places_of(shapes: Iterable[tuple[Any, Sequence[int]]]) -> dict[Any, torch.Tensor]:
    """Key, or each name of a stack -> indices of its elements in the concatenation of all tensors.

    Args:
        shapes: (key, shape) in the order of the concatenation.
    """
    indices, start = {}, 0
    for key, shape in shapes:
        length = math.prod(shape)
        places = torch.arange(start, start + length, device="cpu").view(tuple(shape))
        indices |= dict(parts_of(key, places)) if isinstance(key, Stack) else {key: places}
        start += length
    return indices


def _together(places: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([indices.reshape(-1) for indices in places]).to(device, torch.int32)


def _stated(name: str, places: Mapping[str, torch.Tensor]) -> torch.Tensor:
    sums = places.get(SUM_PREFIX + name)
    if sums is None:
        raise ContractViolation(
            f"contract check: the trainer's sums of {name} did not arrive: the two sides run different versions of "
            "jetrl_verl. Install the same one on both."
        )
    return sums


def _same_shape(name: str, stated: torch.Tensor, whole: torch.Size) -> None:
    if stated.shape != whole:
        raise ContractViolation(
            f"contract check: {name} has {tuple(stated.shape)} blocks or rows in the trainer and {tuple(whole)} in "
            "the rollout: vLLM reads another shape from the model's configuration"
        )


def _parts(name: str, live: LiveTensor, parts: int) -> tuple[int, int]:
    """First and last (exclusive) of the ``parts`` equal parts of a row that this worker has."""
    width, rest = divmod(live.whole[1], parts)
    if rest or live.columns.start % width or live.columns.stop % width:
        raise ContractViolation(
            f"contract check: the trainer sums {width} columns of {name} at a time and the rollout has columns "
            f"{live.columns.start} to {live.columns.stop}: the trainer's tensor-parallel size of the rollout is wrong"
        )
    return live.columns.start // width, live.columns.stop // width
