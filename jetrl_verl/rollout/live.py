# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which part of the trainer's tensors a vLLM worker holds, and where: the inverse of vLLM's weight loaders.

vLLM stacks q/k/v and gate/up into one parameter and keeps only this rank's shard of it. The contract check compares the
trainer's tensors with live storage, so it has to find each of them again. That is computed here from the layers'
shapes and ranks, independently of the loaders, whose work is what is being checked.

Scales are placed from here, all by one call; through vLLM's loaders each would cost the host as much as its qdata. A
wrong map is still seen: qdata come through vLLM's loaders, and the check compares both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from jetrl_verl import formats
from jetrl_verl.config.support.table import refuse
from jetrl_verl.formats.format import SCALE_SUFFIX
from jetrl_verl.models import family
from jetrl_verl.models.families.base import Experts, Routing, place
from jetrl_verl.rollout.experts import held_parameters
from jetrl_verl.sync.contract import LiveParameter, LiveTensor


def _pieces(layer: torch.nn.Module) -> Iterator[tuple[int, int, int, int]]:
    """(rows held, first row in the parameter, first row in the trainer's tensor, its rows) of each stacked piece."""
    if isinstance(layer, QKVParallelLinear):
        q = layer.num_heads * layer.head_size
        kv = layer.num_kv_heads * layer.head_size
        kv_rank = layer.tp_rank // layer.num_kv_head_replicas
        whole_kv = layer.total_num_kv_heads * layer.head_size
        yield q, 0, layer.tp_rank * q, layer.total_num_heads * layer.head_size
        yield kv, q, kv_rank * kv, whole_kv
        yield kv, q + kv, kv_rank * kv, whole_kv
    else:
        start = 0
        for size in layer.output_sizes:
            rows = size // layer.tp_size
            yield rows, start, layer.tp_rank * rows, size
            start += rows


@dataclass(frozen=True)
class _Parameter:
    """A live parameter and what part of the trainer's columns it holds."""

    live: LiveParameter
    columns: slice
    whole_columns: int

    def part(self, rows: int, start: int = 0, first: int = 0, whole: int | None = None) -> LiveTensor:
        """``rows`` rows from ``start``, which are the trainer's rows from ``first`` of ``whole`` (all, by default)."""
        data, scales = self.live.data, self.live.scales
        return LiveTensor(
            data[start : start + rows],
            None if scales is None else formats.of(data).scales_of_rows(scales, start, rows),
            slice(first, first + rows),
            self.columns,
            (rows if whole is None else whole, self.whole_columns),
            None if scales is None else self.live,
            start,
        )


def _experts(
    prefix: str, layer: RoutedExperts, mixture: Experts, own: dict[str, torch.Tensor]
) -> dict[str, LiveTensor]:
    """Of one layer's experts, as matrices below each other."""
    found = {}
    for name, parameter, groups, rows, columns, whole in held_parameters(layer, mixture):
        data, scales = own[parameter].flatten(0, 1), own[parameter + SCALE_SUFFIX].flatten(0, 1)
        found[f"{prefix}.{name}"] = LiveTensor(data, scales, rows, columns, whole, groups=groups)
    return found


def live_tensors(model: torch.nn.Module) -> dict[str, LiveTensor]:
    """Every tensor of the trainer that this worker holds a part of, under the trainer's name.

    Args:
        model: vLLM's model of this worker.

    Returns:
        name -> live view. Column-parallel parts are row slices, row-parallel ones column slices, of the whole tensor.
    """
    live: dict[str, LiveTensor] = {}
    merged, mixture = family(model.config).pieces, family(model.config).experts
    # Duplicates stay: with tied embeddings vLLM's lm_head *is* the embedding module, and the trainer sends both names.
    for prefix, layer in model.named_modules(remove_duplicate=False):
        # As plain tensors: a view of one of vLLM's parameters is of its class, and each operator on it a Python call.
        own = {
            leaf: parameter.data.as_subclass(torch.Tensor)
            for leaf, parameter in layer._parameters.items()
            if parameter is not None
        }
        if not own:
            continue
        found = place(prefix)
        if isinstance(layer, RoutedExperts):
            live |= _experts(f"{found.layer}.{mixture.module}", layer, mixture, own)
            continue
        for leaf, data in own.items():
            if leaf.endswith(SCALE_SUFFIX):
                continue
            width = data.shape[1] if data.ndim > 1 else 1
            first_column, whole_columns = 0, width
            if isinstance(layer, RowParallelLinear) and data.ndim > 1:
                first_column, whole_columns = layer.tp_rank * width, layer.input_size
            columns = slice(first_column, first_column + width)
            scales = own[leaf + SCALE_SUFFIX] if formats.of(data) is not None else None
            held = _Parameter(LiveParameter(data, scales), columns, whole_columns)
            if isinstance(layer, QKVParallelLinear | MergedColumnParallelLinear):
                pieces = zip(merged[found.module], _pieces(layer), strict=True)
                for piece, (rows, start, first, whole) in pieces:
                    live[f"{found.layer}.{piece}.{leaf}"] = held.part(rows, start, first, whole)
            elif isinstance(layer, VocabParallelEmbedding):
                first, last = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
                live[f"{prefix}.{leaf}"] = held.part(last - first, 0, first, layer.org_vocab_size)
            else:
                live[f"{prefix}.{leaf}"] = held.part(data.shape[0])
    return live


def live_routing(model: torch.nn.Module) -> Routing | None:
    """How vLLM's mixture chooses experts, read from its layers; None if it is dense.

    Raises:
        UnsupportedConfiguration: its layers differ in that.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    found = {
        Routing(layer.w2_weight.shape[0], layer.top_k, layer.scoring_func, bool(layer.renormalize)) for layer in layers
    }
    if len(found) > 1:
        refuse("routing_by_layer")
    return found.pop() if found else None


class LiveMap:
    """:func:`live_tensors` of a model, kept until one of its parameters has another storage, shape or type.

    Views are of the storage that each parameter has when :meth:`tensors` is called, so a load that replaces parameters
    needs another call behind it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters = [layer._parameters for layer in model.modules() if layer._parameters]
        self._places: list[tuple] = []
        self._tensors: dict[str, LiveTensor] = {}

    def tensors(self) -> dict[str, LiveTensor]:
        """name -> live view, as :func:`live_tensors` says."""
        # vLLM's classes of parameters answer in Python otherwise. The views held here keep an address from being used
        # again, so an equal one is the same storage.
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


def place_scales(live: Mapping[str, LiveTensor], scales: Mapping[str, torch.Tensor]) -> None:
    """Copy what this worker holds of the trainer's scales into live storage.

    Args:
        live: of :func:`live_tensors`. scales: of whole weights ``[N, K]``, by the trainer's name, suffix included.

    Raises:
        ValueError: no quantized layer of this name, or another shape.
    """
    targets, sources = [], []
    for name, whole in scales.items():
        held = live.get(name.removesuffix(SCALE_SUFFIX))
        if held is None or held.scales is None:
            raise ValueError(f"{name} comes from the trainer and the rollout holds no scales of this name")
        number_format = formats.of(held.tensor)
        if tuple(whole.shape) != number_format.scales_shape(*held.whole):
            raise ValueError(f"{name} is {list(whole.shape)} in the trainer, and of {list(held.whole)} in the rollout")
        targets.append(held.scales)
        sources.append(number_format.scales_of_part(whole, held.rows, held.columns))
    if targets:
        torch._foreach_copy_(targets, sources)
