# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which part of the trainer's tensors a vLLM worker holds, and where: the inverse of vLLM's weight loaders.

vLLM stacks q/k/v and gate/up into one parameter and keeps this rank's shard. The contract check needs to find each of
the trainer's tensors in live storage, so the map is computed from shapes and ranks, independently of the loaders that
it checks. Scales are placed by this map in one call; a wrong map still shows, since qdata comes through the loaders.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from jetrl_verl.config.support.table import refuse
from jetrl_verl.formats.format import SCALE_SUFFIX, Format
from jetrl_verl.models import family
from jetrl_verl.models.families.base import Experts, Routing, place
from jetrl_verl.rollout.experts import expert_parameters
from jetrl_verl.rollout.vllm_compat import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RoutedExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
)
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
    """A live parameter and the columns of the trainer's tensor that it holds."""

    live: LiveParameter
    columns: slice
    whole_columns: int
    format: Format | None

    def part(self, rows: int, start: int = 0, first: int = 0, whole: int | None = None) -> LiveTensor:
        """Rows from ``start`` on, which are the trainer's from ``first`` on, of ``whole`` (``rows`` by default)."""
        data, scales = self.live.data, self.live.scales
        return LiveTensor(
            data[start : start + rows],
            None if scales is None else self.format.scales_of_rows(scales, start, rows),
            slice(first, first + rows),
            self.columns,
            (rows if whole is None else whole, self.whole_columns),
            None if scales is None else self.live,
            start,
            format=self.format,
        )


def _experts(
    prefix: str, layer: RoutedExperts, mixture: Experts, own: dict[str, torch.Tensor]
) -> dict[str, LiveTensor]:
    """The live tensors of one layer's experts, flattened to ``[E N, K]``."""
    tensors = {}
    for name, parameter, groups, rows, columns, whole in expert_parameters(layer, mixture):
        data, scales = own[parameter].flatten(0, 1), own[parameter + SCALE_SUFFIX].flatten(0, 1)
        number_format = layer.quant_method.format
        tensors[f"{prefix}.{name}"] = LiveTensor(
            data, scales, rows, columns, whole, groups=groups, format=number_format
        )
    return tensors


def live_tensors(model: torch.nn.Module) -> dict[str, LiveTensor]:
    """Every tensor of the trainer that this worker holds a part of, under the trainer's name.

    Args:
        model: vLLM's model of this worker.

    Returns:
        name -> live view. Column-parallel parts are row slices, row-parallel ones column slices, of the whole tensor.
    """
    live: dict[str, LiveTensor] = {}
    merged, mixture = family(model.config).pieces, family(model.config).experts
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
        location = place(prefix)
        if isinstance(layer, RoutedExperts):
            live |= _experts(f"{location.layer}.{mixture.module}", layer, mixture, own)
            continue
        for leaf, data in own.items():
            if leaf.endswith(SCALE_SUFFIX):
                continue
            width = data.shape[1] if data.ndim > 1 else 1
            first_column, whole_columns = 0, width
            if isinstance(layer, RowParallelLinear) and data.ndim > 1:
                first_column, whole_columns = layer.tp_rank * width, layer.input_size
            columns = slice(first_column, first_column + width)
            scales = own.get(leaf + SCALE_SUFFIX)
            number_format = None if scales is None else layer.quant_method.format
            parameter = _Parameter(LiveParameter(data, scales), columns, whole_columns, number_format)
            if isinstance(layer, QKVParallelLinear | MergedColumnParallelLinear):
                pieces = zip(merged[location.module], _pieces(layer), strict=True)
                for piece, (rows, start, first, whole) in pieces:
                    live[f"{location.layer}.{piece}.{leaf}"] = parameter.part(rows, start, first, whole)
            elif isinstance(layer, VocabParallelEmbedding):
                first, last = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
                live[f"{prefix}.{leaf}"] = parameter.part(last - first, 0, first, layer.org_vocab_size)
            else:
                live[f"{prefix}.{leaf}"] = parameter.part(data.shape[0])
    return live


def live_routing(model: torch.nn.Module) -> Routing | None:
    """How vLLM's mixture chooses experts, read from its layers; None for a dense model.

    Raises:
        UnsupportedConfiguration: its layers choose differently.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    routings = {
        Routing(layer.w2_weight.shape[0], layer.top_k, layer.scoring_func, bool(layer.renormalize)) for layer in layers
    }
    if len(routings) > 1:
        refuse("routing_by_layer")
    return routings.pop() if routings else None


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


def place_scales(live: Mapping[str, LiveTensor], scales: Mapping[str, torch.Tensor]) -> None:
    """Copy what this worker holds of the trainer's scales into live storage.

    Args:
        live: from :func:`live_tensors`.
        scales: scales of whole weights ``[N, K]`` by the trainer's name, suffix included.

    Raises:
        ValueError: no quantized layer of this name, or another shape.
    """
    targets, sources = [], []
    for name, whole in scales.items():
        part = live.get(name.removesuffix(SCALE_SUFFIX))
        if part is None or part.scales is None:
            raise ValueError(f"the trainer sends {name}, and the rollout has no scales of this name")
        if tuple(whole.shape) != part.format.scales_shape(*part.whole):
            raise ValueError(f"{name} is {list(whole.shape)} in the trainer, and of {list(part.whole)} in the rollout")
        targets.append(part.scales)
        sources.append(part.format.scales_of_part(whole, part.rows, part.columns))
    if targets:
        torch._foreach_copy_(targets, sources)
