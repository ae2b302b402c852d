# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check: trainer and rollout have the same quantized layers, bytes, biases and kernels.

After each sync a vLLM worker sums its live parameters, not the bytes on the wire, and compares them with the trainer's
statement (statement.py), so a dropped, swapped or misplaced weight is seen.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from jetrl_verl import kernels
from jetrl_verl.formats import UNQUANTIZED, traits_of
from jetrl_verl.formats.format import QuantizedWeight
from jetrl_verl.formats.sums import element_sums, row_sums
from jetrl_verl.sync.quantize import Weight
from jetrl_verl.sync.statement import ContractViolation, Manifest
from jetrl_verl.sync.wire import Kind, entries_of


@dataclass(frozen=True, eq=False)
class LiveTensor:
    """A worker's part of one trainer tensor.

    Attributes:
        value: view of live storage, quantized or BF16; FP32 if vLLM keeps the trainer's BF16 values so.
        rows: runs of rows of the whole tensor, in elements, which follow each other in ``value``; of each group if
            there are several. columns: of the whole tensor.
        whole: shape of the whole tensor according to the worker's layer.
        parameter, start: the live parameter and this part's first row in it; None if ``value`` is the parameter.
        groups: number of equal matrices that the whole tensor is stacked from.
        padding: the parameter's rows without a token, which are zero; None for anything but an embedding.
    """

    value: Weight
    rows: tuple[slice, ...]
    columns: slice
    whole: tuple[int, int]
    parameter: QuantizedWeight | None = None
    start: int = 0
    groups: int = 1
    padding: torch.Tensor | None = None

    @property
    def format(self) -> str:
        """Its number format; ``UNQUANTIZED`` for BF16."""
        return self.value.format.traits.name if isinstance(self.value, QuantizedWeight) else UNQUANTIZED

    @property
    def data(self) -> torch.Tensor:
        """qdata, or the BF16 tensor itself."""
        return self.value.qdata if isinstance(self.value, QuantizedWeight) else self.value

    def parts_of(self, whole: torch.Tensor, rows_per: int = 1, columns_per: int | None = 1) -> list[torch.Tensor]:
        """Views of this part of a whole tensor ``[N, K]``, ``[E, N, K]`` or ``[N]``, one for each run of rows.

        Args:
            whole: with one element for ``rows_per`` rows and ``columns_per`` columns; None: for all columns.

        Returns:
            By groups if there are several.
        """
        runs = [slice(run.start // rows_per, run.stop // rows_per) for run in self.rows]
        if whole.ndim == 1:
            return [whole[rows] for rows in runs]
        columns = slice(None)
        if columns_per is not None:
            columns = slice(self.columns.start // columns_per, self.columns.stop // columns_per)
        whole = whole.flatten(0, -2)
        if self.groups == 1:
            return [whole[rows, columns] for rows in runs]
        return [whole.unflatten(0, (self.groups, -1))[:, rows, columns] for rows in runs]


class ContractReceiver:
    """Collects the trainer's statement from a sync's pieces and compares it with live parameters.

    Kept from sync to sync, it keeps the indices of compared sums on the worker's device: 8 bytes each, 6 MB at 4B.
    """

    def __init__(self) -> None:
        self._comparison: _Comparison | None = None
        self.start()

    def start(self) -> None:
        """Begin a sync: forget the last statement."""
        self._manifest: Manifest | None = None
        self._sums: torch.Tensor | None = None

    def take(self, pieces: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep a statement that is among these pieces; copied, since verl's bucket is reused."""
        for name, piece in pieces:
            for entry in entries_of(name):
                if entry.kind == Kind.SUMS:
                    self._sums = entry.of(piece).clone()
                elif entry.kind == Kind.MANIFEST:
                    self._manifest = Manifest.from_tensor(entry.of(piece))

    def verify(self, live: Mapping[str, LiveTensor], **facts: Any) -> dict[str, int]:
        """Compare the statement with this worker.

        Args:
            live: trainer's name -> this worker's part, quantized and plain.
            facts: of this worker, scale_rule, probe, operations and constants of :class:`Manifest`.

        Returns:
            Counts under ``"quantized"`` and ``"plain"``, and under ``"digest"`` the sum of all live sums modulo 2^64.

        Raises:
            ContractViolation: at the first difference.
        """
        own = Manifest(**facts)
        manifest = self._check_statement(own)
        if self._comparison is None or not self._comparison.fits(manifest, live):
            self._comparison = None
            _check_coverage(manifest, live)
            self._comparison = _Comparison(manifest, live)
        digest = self._comparison.run(self._sums)
        _check_code(manifest, own, self._sums.device)
        return self._comparison.counts | {"digest": digest % 2**64}

    def _check_statement(self, own: Manifest) -> Manifest:
        """The trainer's manifest; its scale rule and constants must equal this side's own."""
        manifest = self._manifest
        if manifest is None:
            raise ContractViolation(
                "contract check: the trainer sent no statement with its weights: it runs without the plugin or with "
                "another version of it. Install the same jetrl_verl on both sides."
            )
        if self._sums is None or len(self._sums) != manifest.length():
            raise ContractViolation(
                f"contract check: {0 if self._sums is None else len(self._sums)} of the trainer's {manifest.length()} "
                "sums arrived: the two sides run different versions of jetrl_verl. Install the same one on both."
            )
        if manifest.scale_rule != own.scale_rule:
            raise ContractViolation(
                f"contract check: the trainer has scale rule {manifest.scale_rule}, the rollout {own.scale_rule}. Set "
                "the same jetrl.scale_rule on both."
            )
        for name in sorted(manifest.constants.keys() | own.constants.keys()):
            sides = manifest.constants.get(name), own.constants.get(name)
            if sides[0] != sides[1]:
                raise ContractViolation(
                    f"contract check: {name} is {sides[0]} in the trainer and {sides[1]} in the rollout: they compute "
                    "different models. Start both from the same config.json and tokenizer, with overrides in "
                    "actor_rollout_ref.model.override_config alone, which both sides get."
                )
        return manifest


def _check_code(manifest: Manifest, own: Manifest, device: torch.device) -> None:
    """Both sides run the same kernels: linear layers by the probe, shared operations by their sums."""
    if manifest.probe != own.probe:
        stated, live = ("none" if value is None else f"{value:#x}" for value in (manifest.probe, own.probe))
        raise ContractViolation(
            f"contract check: the probe GEMM gives {stated} in the trainer, {live} in the rollout: "
            f"the two sides run different kernels, the rollout {kernels.describe_backends(device)}"
        )
    names = sorted(manifest.operations.keys() | own.operations.keys())
    different = [name for name in names if manifest.operations.get(name) != own.operations.get(name)]
    if different:
        raise ContractViolation(
            f"contract check: {', '.join(different)} of the shared operations differ between trainer and rollout: "
            f"the two sides run different kernels, the rollout on {device}. Install the same torch and jetrl_verl "
            "on both."
        )


def _check_coverage(manifest: Manifest, live: Mapping[str, LiveTensor]) -> None:
    """The rollout has every tensor that was sent and no other, in the same number formats."""
    stated = {name: number_format for name, number_format, _ in manifest.places()}
    for name in stated:
        if name not in live:
            raise ContractViolation(f"contract check: {name} is sent by the trainer and unknown to the rollout")
    # By storage: a tied head is the embedding's parameter under a second name that the trainer need not send.
    covered = {live[name].data.data_ptr() for name in stated}
    for name, part in live.items():
        if name not in stated and part.data.data_ptr() not in covered:
            raise ContractViolation(
                f"contract check: {name} is a parameter of the rollout that the trainer did not send: the two "
                "sides were built from different models"
            )
        if (number_format := stated.get(name, part.format)) != part.format:
            raise ContractViolation(
                f"contract check: layer {name} is {_label(number_format)} in the trainer and {_label(part.format)} in "
                "the rollout"
            )


def _label(number_format: str) -> str:
    traits = traits_of(number_format)
    return "BF16" if traits is None else traits.label


class _LiveSums:
    """Live tensors that one call sums, each once, however many of the trainer's it is stacked from.

    Args:
        sums_of_all: tensors -> their sums, concatenated.
    """

    def __init__(self, sums_of_all: Callable[[list[Any]], torch.Tensor]) -> None:
        self._sums_of_all = sums_of_all
        self._tensors: list[Any] = []
        self._places: dict[Any, torch.Tensor] = {}
        self.length = 0

    def places(self, key: Any, tensor: Any, shape: Sequence[int]) -> torch.Tensor:
        """Indices of a tensor's sums, which have this shape; tensors of one key are summed once."""
        if key not in self._places:
            end = self.length + math.prod(shape)
            self._places[key] = torch.arange(self.length, end, device="cpu").view(tuple(shape))
            self._tensors.append(tensor)
            self.length = end
        return self._places[key]

    def run(self) -> torch.Tensor:
        """The sums."""
        return self._sums_of_all(self._tensors)


class _Pair(NamedTuple):
    """A compared tensor: indices of its sums in the statement, and in those of ``group``; equal shapes."""

    name: str
    stated: torch.Tensor
    live: torch.Tensor
    group: _LiveSums


class _Comparison:
    """Pairs of stated and live sums, as two lists of indices into one vector of each side.

    They follow from the manifest's weights and the live tensors, so they are made once and reused with these.

    Raises:
        ContractViolation: from the constructor, if shapes differ.
    """

    def __init__(self, manifest: Manifest, live: Mapping[str, LiveTensor]) -> None:
        self._weights, self._tied, self._live = manifest.weights, manifest.tied, live
        self._quantized: dict[str, _LiveSums] = {}
        self._matrices = _LiveSums(lambda matrices: torch.cat([row_sums(*matrix).view(-1) for matrix in matrices]))
        # One call sums vectors of one dtype: concatenated, vectors of two would become FP32.
        self._vectors = {dtype: _LiveSums(element_sums) for dtype in (torch.bfloat16, torch.float32)}
        pairs = [
            (self._of_plain if number_format == UNQUANTIZED else self._of_quantized)(name, live[name], places)
            for name, number_format, places in manifest.places()
        ]
        plain = (self._matrices, *self._vectors.values())
        self._groups = [group for group in (*self._quantized.values(), *plain) if group.length]
        starts, start = {}, 0
        for group in self._groups:
            starts[group], start = start, start + group.length
        device = next(iter(live.values())).data.device
        self._shapes = [(pair.name, pair.stated.shape) for pair in pairs]
        self._stated_places = _together([pair.stated for pair in pairs], device)
        self._live_places = _together([pair.live + starts[pair.group] for pair in pairs], device)
        plain_pairs = sum(pair.group in plain for pair in pairs)
        self.counts = {"quantized": len(pairs) - plain_pairs, "plain": plain_pairs}

    def fits(self, manifest: Manifest, live: Mapping[str, LiveTensor]) -> bool:
        """Whether it can be reused; ``live`` has to be the same object."""
        return self._live is live and (self._weights, self._tied) == (manifest.weights, manifest.tied)

    def _of_quantized(self, name: str, part: LiveTensor, stated: torch.Tensor) -> _Pair:
        """The sums of blocks, of the parameter that the part is stacked in."""
        parameter, number_format = part.parameter or part.value, part.value.format
        block = number_format.traits.block
        _same_shape(name, stated, torch.Size(size // block for size in part.whole))
        group = self._quantized.setdefault(part.format, _LiveSums(number_format.sums_of_all))
        rows, columns = parameter.qdata.shape
        places = group.places(parameter, parameter, [rows // block, columns * number_format.packing // block])
        stated, first = torch.cat(part.parts_of(stated, block, block)).reshape(-1, places.shape[1]), part.start // block
        return _Pair(name, stated, places[first : first + len(stated)], group)

    def _of_plain(self, name: str, part: LiveTensor, stated: torch.Tensor) -> _Pair:
        """The sums of rows, or of this worker's part of each row."""
        stated = stated.view(len(stated), -1)
        _same_shape(name, stated[:, 0], torch.Size(part.whole[:1]))
        first, last = _parts(name, part, stated.shape[1])
        stated = torch.cat([stated[rows, first:last] for rows in part.rows])
        if last - first == 1:
            stated = stated[:, 0]
        # A tied head has the embedding's storage.
        key = (part.data.data_ptr(), part.data.shape, last - first)
        if part.data.ndim == 1:
            vectors = self._vectors[part.data.dtype]
            return _Pair(name, stated, vectors.places(key, part.data, stated.shape), vectors)
        matrix = (part.data, last - first)
        return _Pair(name, stated, self._matrices.places(key, matrix, stated.shape), self._matrices)

    def run(self, stated: torch.Tensor) -> int:
        """Compare, and return the sum of all live sums.

        It synchronizes with the device once: one wait per tensor took seconds on a GPU shared with other processes.
        """
        live = torch.cat([group.run() for group in self._groups]).index_select(0, self._live_places)
        expected = stated.to(live.device).index_select(0, self._stated_places)
        differing, digest = torch.stack([(expected != live).sum(), live.sum()]).tolist()
        if differing:
            self._name_difference(expected, live)
        return digest

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


def _together(places: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([indices.reshape(-1) for indices in places]).to(device, torch.int32)


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
