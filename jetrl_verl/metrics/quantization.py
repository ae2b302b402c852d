# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of what FP8 rounding does to a run's own tensors, from a sample, per kind of layer (docs/metrics.md).

Reported are underflow, subnormals and signal-to-noise ratio of X, W and both layouts of dY; the share of weight qdata
and scales that changed since the last sync. A sample is exact: 128
consecutive rows from a multiple of 128 quantize to the very qdata that the GEMMs read, so layers record nothing. It is
taken in the first pass after each sync, of the first micro-batch, in at most ``SAMPLED_LAYERS`` decoder layers, with
one wait for the device. The comparison of qdata keeps 64 KiB a weight and all scales, 18 MiB at 8B.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from jetrl_verl.formats.format import SCALE_SUFFIX, Format, QuantizedWeight
from jetrl_verl.metrics.experts import Sample, SampledExperts, experts_of
from jetrl_verl.metrics.kv_cache import KVCacheSampler
from jetrl_verl.metrics.sample import sampled_layers, sampled_rows, shares, shares_of_experts, tally
from jetrl_verl.models.families.base import place
from jetrl_verl.models.plan import LinearPlan, plan_of
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.reference import QuantizedTensor, ScaleRule, Segments
from jetrl_verl.sync.quantize import Weight
from jetrl_verl.sync.stacks import Name, Stack, names_of, renamed

SAMPLED_QDATA = 2**16
"""Qdata kept of each weight, on average in a stack: a share of 1e-3 is known to 12%, over 36 layers to 2%."""

SAMPLED_OF_AN_EXPERT = 2**10
"""Qdata kept of each expert: a share of 1e-3 is known to 14% for one expert over 48 layers."""


class QuantizationSampler:
    """Measures a sample of a model's quantized layers while it runs; nothing under ``torch.compile``.

    Args:
        model: the trainer's model, linear layers already replaced, before FSDP wraps it.
        plans: which projections are quantized, from :func:`jetrl_verl.models.plan.plan_linears`.
        scale_rule: rule of the scales. number_format: of the qdata; None if no layer is quantized.
    """

    def __init__(
        self, model: nn.Module, plans: Mapping[str, LinearPlan], scale_rule: ScaleRule, number_format: Format | None
    ) -> None:
        self._format = number_format
        planned: dict[int, list[tuple[str, nn.Linear]]] = {}
        for name, module in model.named_modules():
            plan = plan_of(name, plans) if isinstance(module, nn.Linear) else None
            if plan is not None and plan.quantized:
                planned.setdefault(place(name).index, []).append((plan.kind, module))
        experts = {
            place(name).index: layer for name, layer in experts_of(model, plans, number_format, scale_rule).items()
        }
        chosen = sampled_layers(planned)
        self._layers = [layer for index in chosen for layer in planned[index]]
        self._experts = [experts[index] for index in chosen if index in experts]
        # q, k and v read one X, and so do gate and up: measured at the first of them.
        self._reads_x = {id(layer) for index in chosen for layer in dict(reversed(planned[index])).values()}
        self._rule = scale_rule
        self._passes = 0
        self._tallies: dict[tuple[str, str], torch.Tensor] = {}
        self._by_expert: dict[tuple[str, str], torch.Tensor] = {}
        self._pairs: list[torch.Tensor] = []
        self._seen: set[tuple[int, str]] = set()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Measure the first call of each chosen layer inside the block, and its backward."""
        self._tallies.clear()
        self._by_expert.clear()
        self._pairs.clear()
        self._seen.clear()
        self._passes += 1
        hooks = [layer.register_forward_hook(partial(self._forward, kind)) for kind, layer in self._layers]
        hooks += [
            experts.module.register_forward_hook(partial(self._experts_forward, experts)) for experts in self._experts
        ]
        trained = [experts for experts in self._experts if isinstance(experts.module, JetExperts)]
        for experts in trained:
            experts.module.on_backward = partial(self._gate_up_backward, experts)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for experts in trained:
                experts.module.on_backward = None

    def metrics(self) -> dict[str, float]:
        """Metrics of the last :meth:`sampling`, see :func:`shares` and :func:`shares_of_experts`.

        A mixture adds ``experts/load_max``, tokens of the busiest expert over the mean, and ``experts/idle``, the share
        of experts without tokens: of the first micro-batch, means over the sampled layers.
        """
        metrics = shares(self._tallies) | shares_of_experts(self._by_expert)
        if self._pairs:
            pairs = torch.stack(self._pairs).double().cpu()
            metrics["experts/load_max"] = (pairs.max(dim=1).values / pairs.mean(dim=1)).mean().item()
            metrics["experts/idle"] = (pairs == 0).double().mean().item()
        return metrics

    def _first(self, layer: nn.Module, tensor: str) -> bool:
        # Activation checkpointing calls a layer twice, and a pass has many micro-batches.
        new = (id(layer), tensor) not in self._seen
        self._seen.add((id(layer), tensor))
        return new

    def _sample(self, matrix: torch.Tensor) -> torch.Tensor:
        return self._rows(matrix).to(torch.bfloat16)

    def _rows(self, matrix: torch.Tensor) -> torch.Tensor:
        return sampled_rows(matrix.detach().flatten(0, -2), self._passes, self._format.traits.block)

    def _add(self, kind: str, tensor: str, values: torch.Tensor, q: QuantizedTensor, restored: torch.Tensor) -> None:
        sums = tally(self._format, values, q.qdata, restored)
        self._tallies[kind, tensor] = self._tallies[kind, tensor] + sums if (kind, tensor) in self._tallies else sums

    def _add_of_experts(self, experts: int, sample: Sample) -> None:
        kind, tensor, values, q, restored, owners = sample
        if owners is None:
            self._add(kind, tensor, values, q, restored)
            return
        rows = tally(self._format, values, q.qdata, restored, dims=(1,))
        by_expert = rows.new_zeros(experts, rows.shape[1]).index_add_(0, owners, rows)
        for tallies, sums in ((self._by_expert, by_expert), (self._tallies, by_expert.sum(dim=0))):
            tallies[kind, tensor] = tallies[kind, tensor] + sums if (kind, tensor) in tallies else sums

    @torch.no_grad()
    def _experts_forward(
        self, layer: SampledExperts, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        hidden, chosen, weights = inputs
        x = hidden.source if isinstance(hidden, QuantizedTensor) else hidden
        if torch.compiler.is_compiling() or x.numel() == 0 or not self._first(module, "X"):
            return
        pairs = chosen.flatten().long()
        self._pairs.append(pairs.new_zeros(layer.experts).index_add_(0, pairs, torch.ones_like(pairs)))
        for sample in layer.weights(self._passes):
            self._add_of_experts(layer.experts, sample)
        for sample in layer.inputs(self._sample(x), self._rows(chosen), self._rows(weights)):
            self._add_of_experts(layer.experts, sample)
        samples = layer.gradients(chosen, self._passes) if output.requires_grad else None
        if samples is not None:
            output.register_hook(partial(self._experts_backward, layer.experts, samples))

    @torch.no_grad()
    def _experts_backward(
        self, experts: int, samples: Callable[[torch.Tensor], Iterator[Sample]], gradient: torch.Tensor
    ) -> None:
        for sample in samples(gradient):
            self._add_of_experts(experts, sample)

    @torch.no_grad()
    def _gate_up_backward(self, layer: SampledExperts, *operands: torch.Tensor | Segments) -> None:
        if self._first(layer.module, "dY of gate and up"):
            for sample in layer.gradients_of_gate_up(*operands, self._passes):
                self._add_of_experts(layer.experts, sample)

    @torch.no_grad()
    def _forward(self, kind: str, layer: nn.Linear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x = inputs[0].source if isinstance(inputs[0], QuantizedTensor) else inputs[0]
        if torch.compiler.is_compiling() or x.numel() == 0:
            return
        if id(layer) in self._reads_x and self._first(layer, "X"):
            x = self._sample(x)
            q = self._format.quantize_activation(x, self._rule)
            self._add(kind, "X", x, q, self._format.dequantize_activation(q))
        if self._first(layer, "W"):
            w = self._sample(layer.merged(layer.weight) if isinstance(layer, JetLinear) else layer.weight)
            q = self._format.quantize_weight(w, self._rule)
            self._add(kind, "W", w, q, self._format.dequantize_weight(q))
        if (
            isinstance(layer, JetLinear)
            and layer.quantized_backward
            and output.requires_grad
            and self._first(layer, "dY")
        ):
            output.register_hook(partial(self._backward, kind))

    @torch.no_grad()
    def _backward(self, kind: str, gradient: torch.Tensor) -> None:
        dy = self._sample(gradient)
        both = self._format.quantize_gradient(dy, self._rule, rowwise=True, colwise=True)
        for tensor, q, values in zip(("dY", "dY_tokens"), both, (dy, dy.t()), strict=True):
            self._add(kind, tensor, values, q, self._format.dequantize_activation(q))


class _Sampled(NamedTuple):
    """The sample of a sync's item: every ``step``th of its elements."""

    name: Name
    sample: torch.Tensor
    elements: int
    step: int


class CodeChanges:
    """Compares qdata of the last weight sync with those of the last report, on a fixed sample of every block.

    Syncs without a report in between (verl may send the same weights twice) do not move the baseline. All ranks have
    the whole weights, so they get the same shares.
    """

    def __init__(self, plans: Mapping[str, LinearPlan]) -> None:
        self._plans = plans
        self._kept: dict[tuple[str, ...], _Sampled] = {}
        self._before: dict[tuple[str, ...], _Sampled] = {}
        self._read = True

    def start_sync(self) -> None:
        """Forget the last sync's sample, or compare with it if it was reported."""
        if self._read:
            self._before = self._kept
        self._kept, self._read = {}, False

    def add(self, name: Name, weight: Weight) -> None:
        """Sample a weight of the sync, or a stack of them."""
        if isinstance(weight, QuantizedWeight):
            self._keep(name, weight.qdata.view(torch.uint8))
            self._keep(renamed(name, SCALE_SUFFIX), weight.scales)

    def _keep(self, name: Name, tensor: torch.Tensor) -> None:
        names = names_of(name)
        sample, step = _spread(tensor, len(names))
        self._kept[names] = _Sampled(name, sample, tensor.numel(), step)

    def metrics(self) -> dict[str, float]:
        """``qdata_changed/<kind>`` and ``scales_changed/<kind>`` of the last sync, for experts also
        ``.../<kind>_expert_{min,max}``; empty after the first sync."""
        self._read = True
        different: dict[str, list[torch.Tensor]] = {}
        for names in self._kept.keys() & self._before.keys():
            name, now, elements, step = self._kept[names]
            for single, part in _sampled_parts(name, now != self._before[names].sample, elements, step):
                metric = "scales_changed" if single.endswith(SCALE_SUFFIX) else "qdata_changed"
                kind = plan_of(single.removesuffix(SCALE_SUFFIX), self._plans).kind
                different.setdefault(f"{metric}/{kind}", []).append(part)
        if not different:
            return {}

        metrics = {}
        for name, group in different.items():
            share = torch.cat(group, dim=-1).double().mean(dim=-1)
            metrics[name] = share.mean()
            if share.ndim:
                metrics[f"{name}_expert_min"], metrics[f"{name}_expert_max"] = share.aminmax()
        return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def _spread(tensor: torch.Tensor, weights: int) -> tuple[torch.Tensor, int]:
    """(sample of about ``SAMPLED_QDATA`` elements of each of ``weights`` weights, its step); small tensors whole.

    Of experts ``[E, N, K]`` about ``SAMPLED_OF_AN_EXPERT`` elements each, as ``[E, S]``.
    """
    if tensor.ndim == 3:
        experts = tensor.flatten(1)
        step = max(experts.shape[1] // SAMPLED_OF_AN_EXPERT, 1) | 1
        return experts[:, ::step].clone(), step
    if tensor.numel() <= SAMPLED_QDATA * weights:
        return tensor.reshape(-1), 1
    # An odd step visits all columns of a power-of-two width.
    step = max(tensor.numel() // (SAMPLED_QDATA * weights), 1) | 1
    return tensor.view(-1)[::step].clone(), step


def _sampled_parts(name: Name, sample: torch.Tensor, elements: int, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, its part of the sample) of an item with so many elements."""
    if not isinstance(name, Stack):
        yield name, sample
        return
    stop, sampled = 0, 0
    for single, length in zip(name.names, name.lengths(elements), strict=True):
        stop += length
        before, sampled = sampled, -(-stop // step)
        yield single, sample[before:sampled]


class QuantizationMetrics:
    """All quantization metrics of one trainer, measured once after each weight sync.

    Args:
        model, plans, scale_rule, number_format: see :class:`QuantizationSampler`.
    """

    def __init__(
        self, model: nn.Module, plans: Mapping[str, LinearPlan], scale_rule: ScaleRule, number_format: Format | None
    ) -> None:
        self._sampler = QuantizationSampler(model, plans, scale_rule, number_format)
        self._cache = KVCacheSampler(model)
        self._changes = CodeChanges(plans)
        self._due = False

    def start_sync(self) -> None:
        """Begin a sync, and measure in the next :meth:`measuring`."""
        self._due = True
        self._changes.start_sync()

    def add(self, name: Name, weight: Weight) -> None:
        """Sample a weight of the sync, or a stack of them."""
        self._changes.add(name, weight)

    @contextmanager
    def measuring(self, metrics: dict[str, list[float]]) -> Iterator[None]:
        """Around a mini-batch: if it is the first after a sync, put ``jetrl/...`` into ``metrics`` at the end.

        Values are lists of one, since verl averages over ranks and mini-batches; every rank measures its own rows.
        """
        if not self._due:
            yield
            return
        self._due = False
        with self._sampler.sampling(), self._cache.sampling():
            yield
        values = self._sampler.metrics() | self._cache.metrics() | self._changes.metrics()
        metrics.update({f"jetrl/{name}": [value] for name, value in values.items()})
