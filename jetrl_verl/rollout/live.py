# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which part of the trainer's tensors a vLLM worker holds, and where: the inverse of vLLM's weight loaders.

vLLM stacks q/k/v and gate/up into one parameter and keeps this rank's shard. The contract check needs to find each of
the trainer's tensors in live storage, so the map is computed from shapes and ranks, independently of the loaders.
Once a verified sync has shown that map and loaders agree on every place, :class:`Placement` copies by the map alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from jetrl_verl.formats.format import SCALE_SUFFIX, QuantizedWeight
from jetrl_verl.models import family
from jetrl_verl.models.families.base import Experts, Family, Place, place, read
from jetrl_verl.rollout import vllm_compat as vllm
from jetrl_verl.rollout.experts import expert_parameters
from jetrl_verl.sync.constants import constants_of
from jetrl_verl.sync.contract import LiveTensor
from jetrl_verl.sync.quantize import Weight
from jetrl_verl.sync.stacks import parts_of
from jetrl_verl.sync.wire import Entry, Kind, entries_of


class _Run(NamedTuple):
    """Rows of a trainer's tensor that ranks divide, as the heads of one kind: how many, and those of this rank."""

    whole: int
    rows: slice


def _run(whole: int, ranks: int, rank: int) -> _Run:
    """The run of which rank ``rank`` of ``ranks`` has an equal part."""
    rows = whole // ranks
    return _Run(whole, slice(rank * rows, (rank + 1) * rows))


def _runs_of(layer: torch.nn.Module) -> list[_Run]:
    """The runs of a layer that vLLM stacks, in the order of its rows."""
    if not isinstance(layer, vllm.QKVParallelLinear):
        return [_run(size, layer.tp_size, layer.tp_rank) for size in layer.output_sizes]
    replicas = layer.num_kv_head_replicas
    q = _run(layer.total_num_heads * layer.head_size, layer.tp_size, layer.tp_rank)
    kv = _run(layer.total_num_kv_heads * layer.head_size, layer.tp_size // replicas, layer.tp_rank // replicas)
    return [q, kv, kv]


def _divided(
    model: torch.nn.Module, layer: torch.nn.Module, location: Place | None, decoder: Family
) -> dict[str, list[_Run]]:
    """Modules of the trainer -> their runs, in the order of the rows of ``layer``; empty if each rank has all rows.
    Names are relative to the decoder layer."""
    delta, module = decoder.delta_net, location.module if location is not None else ""
    if isinstance(layer, vllm.QKVParallelLinear | vllm.MergedColumnParallelLinear):
        runs = iter(_runs_of(layer))
        # A delta net's q, k and v are one tensor of the trainer.
        counts = {delta.qkv: 3} if delta is not None else {}
        # vLLM's experts have a second name for the shared one, which is none of the family's.
        return {piece: list(islice(runs, counts.get(piece, 1))) for piece in decoder.pieces.get(module, ())}
    if delta is not None and module == delta.conv:  # of the channels of q, k and v
        projection = model.get_submodule(decoder.rollout_name(f"{location.layer}.{delta.qkvz}"))
        return {delta.conv: _runs_of(projection)[:3]}
    if delta is not None and module == delta.block:
        return {delta.block: [_run(layer.num_v_heads, layer.tp_size, layer.tp_rank)]}
    return {}


def _divided_in_a_tower(model: torch.nn.Module, layer: torch.nn.Module, name: str) -> dict[str, list[_Run]]:
    """As :func:`_divided`, of a vision tower's layer with this name in the trainer; the names are whole."""
    if isinstance(layer, vllm.QKVParallelLinear):  # one tensor of the trainer, too
        return {name: _runs_of(layer)}
    if isinstance(layer, vllm.MergedColumnParallelLinear):
        parent, _, merged = name.rpartition(".")
        pieces = zip(model.packed_modules_mapping[merged], _runs_of(layer), strict=True)
        return {f"{parent}.{piece}": [run] for piece, run in pieces}
    if isinstance(layer, vllm.ColumnParallelLinear):
        return {name: [_run(layer.output_size, layer.tp_size, layer.tp_rank)]}
    return {}


class _Parameter(NamedTuple):
    """A live parameter and the columns of the trainer's tensor that it holds."""

    value: Weight
    columns: slice
    whole_columns: int

    def part(self, runs: Sequence[_Run], start: int = 0) -> LiveTensor:
        """The tensor of these runs, of which this rank has the rows from ``start`` on."""
        value, parameter = self.value, None
        rows, whole = [], 0
        for run in runs:
            rows.append(slice(whole + run.rows.start, whole + run.rows.stop))
            whole += run.whole
        stop = start + sum(run.stop - run.start for run in rows)
        if isinstance(value, QuantizedWeight):
            parameter, number_format = value, value.format
            scales = number_format.scales_of_rows(value.scales, start, stop - start)
            value = QuantizedWeight(number_format, value.qdata[start:stop], scales)
        else:
            value = value[start:stop]
        return LiveTensor(value, tuple(rows), self.columns, (whole, self.whole_columns), parameter, start)


def _experts(
    prefix: str, layer: vllm.RoutedExperts, mixture: Experts, own: dict[str, torch.Tensor]
) -> dict[str, LiveTensor]:
    """The live tensors of one layer's experts, flattened to ``[E N, K]``."""
    tensors = {}
    for name, parameter, groups, rows, columns, whole in expert_parameters(layer, mixture):
        flat = (own[leaf].flatten(0, 1) for leaf in (parameter, parameter + SCALE_SUFFIX))
        weight = QuantizedWeight(layer.quant_method.format, *flat)
        tensors[f"{prefix}.{name}"] = LiveTensor(weight, (rows,), columns, whole, groups=groups)
    return tensors


def live_tensors(model: torch.nn.Module) -> dict[str, LiveTensor]:
    """Every tensor of the trainer that this worker holds a part of, under the trainer's name.

    Args:
        model: vLLM's model of this worker.

    Returns:
        name -> live view. Column-parallel parts are row slices, row-parallel ones column slices, of the whole tensor.
    """
    live: dict[str, LiveTensor] = {}
    decoder = family(model.config)
    # Duplicates stay: with tied embeddings vLLM's lm_head is the embedding module, and the trainer sends both names.
    for prefix, layer in model.named_modules(remove_duplicate=False):
        # Plain tensors: on a view of vLLM's parameter classes each operator costs a Python call.
        own = {
            leaf: parameter.data.as_subclass(torch.Tensor)
            for leaf, parameter in layer._parameters.items()
            if parameter is not None
        }
        if not own:
            continue
        name = decoder.trainer_name(prefix)
        location = place(name)
        if isinstance(layer, vllm.RoutedExperts):
            live |= _experts(f"{location.layer}.{decoder.experts.module}", layer, decoder.experts, own)
            continue
        if decoder.tower and name.startswith(f"{decoder.tower}."):
            divided = _divided_in_a_tower(model, layer, name)
        else:
            runs_of = _divided(model, layer, location, decoder)
            divided = {f"{location.layer}.{module}": runs for module, runs in runs_of.items()}
        for leaf, data in own.items():
            if leaf.endswith(SCALE_SUFFIX):
                continue
            data = data.flatten(1) if data.ndim > 2 else data  # a convolution's
            scales = own.get(leaf + SCALE_SUFFIX)
            value = data if scales is None else QuantizedWeight(layer.quant_method.format, data, scales)
            width = data.shape[1] if data.ndim > 1 else 1
            if scales is not None:
                width *= value.format.packing
            first_column, whole_columns = 0, width
            if isinstance(layer, vllm.RowParallelLinear) and data.ndim > 1:
                first_column, whole_columns = layer.tp_rank * width, layer.input_size
            columns = slice(first_column, first_column + width)
            parameter = _Parameter(value, columns, whole_columns)
            if isinstance(layer, vllm.VocabParallelEmbedding):
                first, last = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
                part = parameter.part([_Run(layer.org_vocab_size, slice(first, last))])
                live[f"{name}.{leaf}"] = replace(part, padding=data[last - first :])
                continue
            start = 0
            for module, runs in divided.items():
                part = live[f"{module}.{leaf}"] = parameter.part(runs, start)
                start += len(part.data)
            if not divided:
                live[f"{name}.{leaf}"] = parameter.part([_run(len(data), 1, 0)])
    return live


def live_constants(
    model: torch.nn.Module, shared: bool, vocabulary: int | None = None, masked: Sequence[int] = ()
) -> dict[str, Any]:
    """The constants (:func:`~jetrl_verl.sync.constants.constants_of`) of vLLM's model of this worker.

    Args:
        shared: whether it runs the shared operations. vocabulary, masked: of verl's mask of logits; None without one.
    """

    def experts(layer: torch.nn.Module, names: Family) -> tuple[int, int, str, bool]:
        routed = layer.get_submodule(names.experts.vllm_module)
        return routed.w2_weight.shape[0], routed.top_k, routed.scoring_func, routed.renormalize

    decoder = family(model.config)
    with_attention = next(layer for layer, names in decoder.named_layers(model) if names.rotary)
    entries = decoder.module(model, decoder.embedding).org_vocab_size
    table = with_attention.get_submodule(decoder.rotary).cos_sin_cache
    return constants_of(
        model,
        decoder,
        scale=lambda layer, names: layer.get_submodule(names.core).impl.scale,
        experts=experts,
        rotary=table if shared else read(model.config, "rope_parameters"),
        vocabulary=entries if vocabulary is None else min(vocabulary, entries),
        masked=masked,
    )


class LiveMap:
    """:func:`live_tensors` of a model, cached until one of its parameters has another storage, shape or dtype."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters = [layer._parameters for layer in model.modules() if layer._parameters]
        self._places: list[tuple] = []
        self._tensors: dict[str, LiveTensor] = {}

    def tensors(self) -> dict[str, LiveTensor]:
        """name -> live view, of the storage that parameters have now; call again after a load that replaces them."""
        # Without it vLLM's parameter classes answer in Python. The cached views keep storage alive, so an equal address
        # is the same storage.
        with torch._C.DisableTorchFunctionSubclass():
            places = [
                (parameter.data_ptr(), parameter.shape, parameter.dtype)
                for parameters in self._parameters
                for parameter in parameters.values()
                if parameter is not None
            ]
        if places != self._places:
            self._places, self._tensors = places, live_tensors(self._model)
        return self._tensors


# --- weight sync ------------------------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """A copy of elements of a piece, seen as ``dtype``, from element ``start`` on and by ``stride``, to ``target``."""

    dtype: torch.dtype
    start: int
    stride: tuple[int, ...]
    target: torch.Tensor


class _Places(NamedTuple):
    """Where a piece goes: copies in few runs, and rows of embeddings that no token has, which get zeros."""

    copies: list[_Copy]
    padding: list[torch.Tensor]


class Placement:
    """Places the weights of a worker's syncs in live storage.

    At the first sync vLLM's loaders place all but scales, and the contract check finds every tensor by the map. Both
    were written independently, so a sync that passes shows that they agree on every place. Later syncs copy by the map,
    in few launches and without host time for each name. After a moved parameter, another piece or a sync that was not
    verified the loaders run again; without the contract check they always do.
    """

    def __init__(self, live: LiveMap) -> None:
        self._live = live
        self._tensors: Mapping[str, LiveTensor] = {}
        self._places: dict[str, _Places] = {}
        self._loaded: list[str] = []
        self._is_verified = True

    def start(self) -> None:
        """Begin a sync."""
        tensors = self._live.tensors()
        if not self._is_verified or tensors is not self._tensors:
            self._places.clear()
        self._tensors, self._loaded, self._is_verified = tensors, [], False

    def place(
        self, pieces: Sequence[tuple[str, torch.Tensor]], load: Callable[[list[tuple[str, torch.Tensor]]], None]
    ) -> None:
        """Place the weights of a bucket.

        Args:
            pieces: of :func:`jetrl_verl.sync.wire.packed`. load: copies (trainer's name, tensor) into live parameters.

        Raises:
            ValueError: a tensor that the worker's layers have no place for.
        """
        copies: dict[tuple, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        unplaced: list[tuple[str, torch.Tensor]] = []
        for name, piece in pieces:
            places = self._places.get(name)
            if places is None:
                self._loaded.append(name)
                places = self._places_of(name, Kind.SCALES)
                for entry in entries_of(name):
                    if entry.kind == Kind.WEIGHT:
                        unplaced += parts_of(entry.name, entry.of(piece))
            elements = piece
            for dtype, start, stride, target in places.copies:
                if elements.dtype != dtype:
                    elements = piece.view(dtype)
                source = elements.as_strided(target.shape, stride, elements.storage_offset() + start)
                # Lists of one dtype and of contiguous tensors are one launch.
                targets, sources = copies.setdefault((dtype, target.dtype, len(stride) == 1), ([], []))
                targets.append(target)
                sources.append(source)
            for rows in places.padding:
                rows.zero_()
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)
        if unplaced:
            load(unplaced)

    def commit(self) -> None:
        """The sync has been verified: the map is right about all of its pieces."""
        self._places |= {name: self._places_of(name, Kind.WEIGHT, Kind.SCALES) for name in self._loaded}
        self._is_verified = True

    def _places_of(self, name: str, *kinds: Kind) -> _Places:
        """The places of a piece's parts of these kinds."""
        entries = entries_of(name)
        places, piece = _Places([], []), torch.empty(entries[-1].stop, dtype=torch.uint8, device="meta")
        for entry in entries:
            for single, whole in parts_of(entry.name, entry.of(piece)) if entry.kind in kinds else ():
                part = self._tensors.get(single)
                for source, target in _sources_and_targets(entry, single, whole, part):
                    _append(places.copies, *_in_words(source, target))
                if part.padding is not None:
                    places.padding.append(part.padding)
        return places


def _sources_and_targets(
    entry: Entry, name: str, whole: torch.Tensor, part: LiveTensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(rows of a worker's part of one of the trainer's tensors, their live view) in one shape, of each run of rows."""
    if part is None or entry.format != part.format:
        kind = "scales" if entry.kind == Kind.SCALES else "tensor"
        raise ValueError(f"the trainer sends {kind} of {name}, and the rollout has none of this name in {entry.format}")
    target, shape, block = part.data, part.whole, (1, 1)
    if part.groups == 1 and whole.ndim > 2:  # a convolution's
        whole = whole.flatten(1)
    if isinstance(part.value, QuantizedWeight):
        number_format = part.value.format
        shape, block = number_format.qdata_shape(*part.whole), (1, number_format.packing)
        if entry.kind == Kind.SCALES:
            target, shape = part.value.scales, number_format.scales_shape(*part.whole)
            block = (number_format.rows_per_scale, number_format.columns_per_scale)
    if (whole.numel() // whole.shape[-1], whole.shape[-1]) != shape and tuple(whole.shape) != shape[:1]:
        raise ValueError(
            f"{entry.kind} of {name} are {list(whole.shape)} in the trainer, and of {list(part.whole)} in the rollout"
        )
    sources = part.parts_of(whole, *block)
    if part.groups > 1:
        return zip(sources, [target.unflatten(0, (part.groups, -1))], strict=True)
    return zip(sources, target.split([len(source) for source in sources]), strict=True)


def _in_words(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both flat if they are contiguous, and as 8-byte words if they consist of whole ones."""
    if source.is_contiguous() and target.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    if source.dtype == target.dtype and _has_words(source) and _has_words(target):
        source, target = source.view(torch.int64), target.view(torch.int64)
    return source, target


def _has_words(tensor: torch.Tensor) -> bool:
    *strides, last = tensor.stride()
    places = (*strides, tensor.shape[-1], tensor.storage_offset())
    return last == 1 and not any(place * tensor.itemsize % torch.int64.itemsize for place in places)


def _append(copies: list[_Copy], source: torch.Tensor, target: torch.Tensor) -> None:
    """Append a copy, or lengthen the last one if both of its ends go on here."""
    start = source.storage_offset()
    if copies and source.ndim == 1:
        last = copies[-1]
        end = last.target.data_ptr() + last.target.nbytes
        # Separate parameters may be neighbours in memory, too, and a view cannot cross storages.
        same_storage = last.target.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
        follows = (last.dtype, last.stride, last.start + len(last.target)) == (source.dtype, (1,), start)
        if follows and same_storage and end == target.data_ptr() and last.target.dtype == target.dtype:
            copies[-1] = last._replace(target=last.target.as_strided((len(last.target) + len(target),), (1,)))
            return
    copies.append(_Copy(source.dtype, start, source.stride(), target))
