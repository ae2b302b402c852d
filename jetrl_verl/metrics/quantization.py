# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the FP8 rounding does to a training run's own tensors, as metrics of verl's tracking, from a sample.

Three questions, each answered per kind of layer (``qkv``, ``o``, ``gate_up``, ``down``):

* *What does a quantizer lose?* Of a tensor's non-zero elements, the share that becomes zero (underflow) and the share
  in E4M3's subnormal range, where fewer than three mantissa bits are left; and the ratio of signal to rounding noise.
  For X and W as FProp reads them, and for dY as DGrad (``dY``) and as WGrad (``dY_tokens``) reads it. The groups along
  tokens see the largest spread: one scale covers 128 tokens with unrelated advantages.
* *Does an update reach the rollout?* The share of weight qdata, and of block scales, that differ from those of the last
  weight sync. At a learning rate of 1e-6 an update can vanish in 8 bits.
* *Is a weight still a number?* A NaN or Inf in a weight stops the sync, which names the weight.

With an FP8 KV cache the first question is also asked of keys and values (metrics/kv_cache.py). In a mixture of experts
the first two are also asked of every expert, and the extremes are reported (metrics/experts.py): the number of metrics
does not grow with the number of experts.

**Why a sample is exact.** Groups of 1x128 lie in one row, blocks of 128x128 in one band of 128 rows, and groups along
tokens in 128 consecutive ones. So 128 consecutive rows from a multiple of 128 quantize by themselves to the very qdata
that the GEMMs read: layers need not record anything, and a layer that trains in BF16 can be measured as well.

**What it costs.** In the first pass after each sync, one such group of rows of the first micro-batch, in at most
``SAMPLED_LAYERS`` decoder layers: a number of elements that does not grow with the batch, and one wait for the device
at the end. The comparison keeps ``SAMPLED_QDATA`` qdata of each weight, 64 KiB, and all its scales, 1/4096 of the
weight's qdata: 18 MiB on the trainer's device for an 8B model with its 252 weights. Of experts it keeps
``SAMPLED_OF_AN_EXPERT`` of each and at most as many scales.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from jetrl_verl import formats
from jetrl_verl.formats.format import SCALE_SUFFIX, Format
from jetrl_verl.metrics.experts import Sample, SampledExperts, experts_of
from jetrl_verl.metrics.kv_cache import KVCacheSampler
from jetrl_verl.metrics.sample import sampled_layers, sampled_rows, shares, shares_of_experts, tally
from jetrl_verl.models.families.base import place
from jetrl_verl.models.plan import LinearPlan, plan_of
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.reference import QuantizedTensor, ScaleRule, Segments
from jetrl_verl.sync.stacks import Name, Stack, names_of, parts_of
from jetrl_verl.sync.wire import with_completed

SAMPLED_QDATA = 2**16
"""FP8 data kept of each weight; of weights in a stack on average, more of larger ones. A share of 1e-3 is then known to
12% for one weight, to 2% over those of a kind in 36 layers."""

SAMPLED_OF_AN_EXPERT = 2**10
"""FP8 data kept of each expert in a weight. A share of 1e-3 is then known to 14% for one expert over 48 layers."""

_REMEDY = "resume from the last checkpoint, and lower the learning rate or the gradient clip if it happens again"


class NonFiniteWeightError(RuntimeError):
    """A weight holds NaN or Inf; the message names it."""


class QuantizationSampler:
    """Measures a sample of a model's quantized layers while it runs.

    Holds the layers themselves, so it is built before FSDP wraps the model and stays valid after. Under
    ``torch.compile`` nothing is measured: a hook inside a compiled region is traced as empty.

    Args:
        model: the trainer's model, linears already replaced.
        plans: which projections are quantized, from :func:`jetrl_verl.models.plan.plan_linears`.
        scale_rule: rule of the qdata.
        number_format: of the qdata, one that is measured; None where no layer is quantized.
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
        # q, k and v of a decoder layer read one X, and so do gate and up: it is measured at the first of them.
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
        """What the last :meth:`sampling` found, see :func:`shares` and :func:`shares_of_experts`; and of a mixture
        ``experts/{load_max,idle}``: tokens of the expert with most over the mean, and the share of experts with none,
        in the first micro-batch, means over the sampled layers."""
        found = shares(self._tallies) | shares_of_experts(self._by_expert)
        if self._pairs:
            pairs = torch.stack(self._pairs).double().cpu()
            found["experts/load_max"] = (pairs.max(dim=1).values / pairs.mean(dim=1)).mean().item()
            found["experts/idle"] = (pairs == 0).double().mean().item()
        return found

    def _first(self, layer: nn.Module, tensor: str) -> bool:
        # Activation checkpointing calls a layer twice, and a pass has many micro-batches.
        new = (id(layer), tensor) not in self._seen
        self._seen.add((id(layer), tensor))
        return new

    def _sample(self, matrix: torch.Tensor) -> torch.Tensor:
        return self._rows(matrix).to(torch.bfloat16)

    def _rows(self, matrix: torch.Tensor) -> torch.Tensor:
        return sampled_rows(matrix.detach().flatten(0, -2), self._passes)

    def _add(self, kind: str, tensor: str, values: torch.Tensor, q: QuantizedTensor, restored: torch.Tensor) -> None:
        found = tally(self._format, values, q.qdata, restored)
        self._tallies[kind, tensor] = self._tallies[kind, tensor] + found if (kind, tensor) in self._tallies else found

    def _add_of_experts(self, experts: int, sample: Sample) -> None:
        kind, tensor, values, q, restored, owners = sample
        if owners is None:
            self._add(kind, tensor, values, q, restored)
            return
        rows = tally(self._format, values, q.qdata, restored, dims=(1,))
        found = rows.new_zeros(experts, rows.shape[1]).index_add_(0, owners, rows)
        for tallies, sums in ((self._by_expert, found), (self._tallies, found.sum(dim=0))):
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
            w = self._sample(layer.weight)
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
    """What is kept of an item of a sync: every ``step``th of its elements."""

    name: Name
    sample: torch.Tensor
    elements: int
    step: int


class CodeChanges:
    """Compares the qdata of the last weight sync with those of the last report, on a fixed sample spread over every
    block.

    The last report was about the sync before. Only where verl sends the same weights again in between, as its
    validation does with a colocated reward model, it is an older one: else what the update changed would be lost.

    Every rank gathers and quantizes the whole weights, so all ranks find the same shares.
    """

    def __init__(self, plans: Mapping[str, LinearPlan]) -> None:
        self._plans = plans
        self._kept: dict[tuple[str, ...], _Sampled] = {}
        self._before: dict[tuple[str, ...], _Sampled] = {}
        self._read = True

    def watch(self, weights: Iterable[tuple[Name, torch.Tensor]]) -> Iterator[tuple[Name, torch.Tensor]]:
        """Pass a sync's stream of qdata, scales and other tensors through."""
        if self._read:
            self._before = self._kept
        self._kept, self._read = {}, False
        for name, tensor in weights:
            names = names_of(name)
            qdata = formats.of(tensor) is not None
            if qdata or names[0].endswith(SCALE_SUFFIX):
                sample, step = _spread(tensor.view(torch.uint8) if qdata else tensor, len(names))
                self._kept[names] = _Sampled(name, sample, tensor.numel(), step)
            yield name, tensor

    def metrics(self) -> dict[str, float]:
        """``qdata_changed/<kind>`` and ``scales_changed/<kind>`` of the last sync, of experts also the least and the
        largest share of one, ``.../<kind>_expert_{min,max}``; nothing after the first sync."""
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

        found = {}
        for name, group in different.items():
            share = torch.cat(group, dim=-1).double().mean(dim=-1)
            found[name] = share.mean()
            if share.ndim:
                found[f"{name}_expert_min"], found[f"{name}_expert_max"] = share.aminmax()
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))


def _spread(tensor: torch.Tensor, weights: int) -> tuple[torch.Tensor, int]:
    """A copy of ``SAMPLED_QDATA`` elements or a few more for each of so many weights below each other, and their
    distance; a tensor of no more than that itself.

    Of experts ``[E, N, K]`` a matrix ``[E, S]``, with ``SAMPLED_OF_AN_EXPERT`` elements or a few more of each.
    """
    if tensor.ndim == 3:
        each = tensor.flatten(1)
        step = max(each.shape[1] // SAMPLED_OF_AN_EXPERT, 1) | 1
        return each[:, ::step].clone(), step
    if tensor.numel() <= SAMPLED_QDATA * weights:
        return tensor.reshape(-1), 1
    # An odd stride walks through all columns of a power-of-two width instead of a few.
    step = max(tensor.numel() // (SAMPLED_QDATA * weights), 1) | 1
    return tensor.view(-1)[::step].clone(), step


def _sampled_parts(name: Name, sample: torch.Tensor, elements: int, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, its part of a sample) of an item of so many elements, every ``step``th of which is in the sample."""
    if not isinstance(name, Stack):
        yield name, sample
        return
    stop, sampled = 0, 0
    for single, length in zip(name.names, name.lengths(elements), strict=True):
        stop += length
        before, sampled = sampled, -(-stop // step)
        yield single, sample[before:sampled]


class QuantizationMetrics:
    """Samplers and qdata changes of one trainer, measured once after each weight sync.

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

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass a sync's stream through; the next :meth:`measuring` is then the first of a step."""
        self._due = True
        return self._changes.watch(weights)

    @contextmanager
    def measuring(self, metrics: dict[str, list[float]]) -> Iterator[None]:
        """Around a mini-batch: put ``jetrl/...`` into ``metrics`` at the end if it is the first after a sync.

        Lists of one, because verl joins the lists of ranks and mini-batches and takes their mean. Every rank measures
        rows of its own; the ranks' shares are averaged, and so are their decibels.
        """
        if not self._due:
            yield
            return
        self._due = False
        with self._sampler.sampling(), self._cache.sampling():
            yield
        found = self._sampler.metrics() | self._cache.metrics() | self._changes.metrics()
        metrics.update({f"jetrl/{name}": [value] for name, value in found.items()})


def _named(broken: list[str]) -> str:
    names = ", ".join(broken[:3])
    return names + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")


def _unless_small(tensor: torch.Tensor) -> torch.Tensor:
    """A vector itself, which is kept until the end of a sync, or the extremes of each row of a matrix."""
    return tensor if tensor.ndim <= 1 else torch.stack(torch.aminmax(tensor.flatten(1), dim=1), dim=1)


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    # They carry a NaN along (torch.aminmax) and need no temporary of the tensor's size.
    return torch.stack(torch.aminmax(tensor)).float()


def refuse_non_finite(weights: Iterable[tuple[Name, torch.Tensor]]) -> Iterator[tuple[Name, torch.Tensor]]:
    """Pass a sync's stream through; at its end, name the weights that are not finite.

    Of a quantized weight the format reads one value per scale; other tensors are read once. All samples are judged
    together at the end, and the device is waited for once; which weight it is, is only asked if there is one.

    Raises:
        NonFiniteWeightError: after the last tensor, before what is appended to the stream behind this one.
    """
    quantized: dict[Format, list[tuple[Name, torch.Tensor, torch.Tensor]]] = {}
    plain: dict[Name, torch.Tensor] = {}
    for name, tensor, completed in with_completed(weights):
        if completed is not None:
            whole, value = completed
            if isinstance(value, QuantizedTensor):
                number_format = formats.of(value.qdata)
                sample = number_format.nan_sample(value.qdata)
                quantized.setdefault(number_format, []).append((whole, sample, value.scales))
            elif value.is_floating_point():
                plain[whole] = _unless_small(value)
        yield name, tensor
    broken = _non_finite(quantized, plain)
    if broken:
        raise NonFiniteWeightError(
            f"weight sync: {_named(broken)} of the trainer holds NaN or Inf and would make every sample garbage; "
            f"{_REMEDY}"
        )


def _non_finite(
    quantized: Mapping[Format, list[tuple[Name, torch.Tensor, torch.Tensor]]], plain: Mapping[Name, torch.Tensor]
) -> list[str]:
    """Names of weights that are not finite: one answer for all of them first, each by itself if that is bad.

    Args:
        quantized: (name, what ``nan_sample`` read, scales) by format. plain: name -> vector, or extremes of rows.
    """
    bad = [
        number_format.is_nan(
            torch.cat([sample for _, sample, _ in read]), torch.cat([scales.reshape(-1) for _, _, scales in read])
        )
        for number_format, read in quantized.items()
    ]
    if plain:
        bad.append(~torch.cat([values.reshape(-1) for values in plain.values()]).isfinite().all())
    if not bad or not torch.stack(bad).any().item():
        return []
    each = {
        name: number_format.is_nan(sample, scales)
        for number_format, read in quantized.items()
        for whole, samples, all_scales in read
        for (name, sample), (_, scales) in zip(parts_of(whole, samples), parts_of(whole, all_scales), strict=True)
    }
    each |= {name: ~part.isfinite().all() for whole, values in plain.items() for name, part in parts_of(whole, values)}
    return [name for name, is_bad in zip(each, torch.stack(list(each.values())).tolist(), strict=True) if is_bad]


def refuse_to_save_non_finite(model: nn.Module) -> None:
    """Keep a weight with NaN or Inf out of the checkpoints: every resume would end at its first sync.

    Every rank looks at its own shards and all of them raise, so that none waits for the others in the save.

    Raises:
        NonFiniteWeightError: naming the weights of this rank's shards, if it is one of them.
    """
    shards = {name: getattr(p, "_local_tensor", p).detach() for name, p in model.named_parameters()}
    extremes = {name: _extremes(shard) for name, shard in shards.items() if shard.numel() > 0}
    found = torch.zeros((), dtype=torch.int32, device=next(iter(shards.values())).device)
    if extremes:
        found += ~torch.stack(list(extremes.values())).isfinite().all()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    if found:
        broken = [name for name, pair in extremes.items() if not pair.isfinite().all()]
        raise NonFiniteWeightError(
            f"checkpoint: {_named(broken) or 'a weight on another rank'} of the trainer holds NaN or Inf, so it is not "
            f"saved; {_REMEDY}"
        )
