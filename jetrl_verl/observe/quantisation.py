# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What the FP8 rounding does to a training run's own tensors, as metrics of verl's tracking, from a sample.

Three questions, each answered per kind of layer (``qkv``, ``o``, ``gate_up``, ``down``):

* *What does a quantiser lose?* Of a tensor's non-zero elements, the share whose code is zero (underflow) and the share
  in E4M3's subnormal range, where fewer than three mantissa bits are left; and the ratio of signal to rounding noise.
  For X and W as FProp reads them, and for dY as DGrad (``dY``) and as WGrad (``dY_tokens``) reads it. The groups along
  tokens see the largest spread: one scale serves 128 tokens with unrelated advantages.
* *Does an update reach the rollout?* The share of weight codes, and of block scales, that differ from those of the last
  weight sync. At a learning rate of 1e-6 an update can vanish in 8 bits.
* *Is a weight still a number?* A NaN or Inf in a weight is refused at the sync, by name, not rolled out.

**Why a sample is exact.** Groups of 1x128 lie in one row, blocks of 128x128 in one band of 128 rows, and groups along
tokens in 128 consecutive ones. So 128 consecutive rows from a multiple of 128 quantise by themselves to the very codes
that the GEMMs read: nothing of the layers has to be recorded, and a layer that trains in BF16 can be measured as well.

**What it costs.** In the first pass after each sync, one such group of rows of the first micro-batch, in at most
``SAMPLED_LAYERS`` decoder layers: a number of elements that does not grow with the batch, and one wait for the device
at the end. The code comparison keeps ``SAMPLED_CODES`` codes of each weight, 64 KiB, and all its scales, 1/4096 of the
weight's codes: 18 MiB on the trainer's device for an 8B model with its 252 weights.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from jetrl_verl import kernels
from jetrl_verl.layers import LinearPlan, plan_of
from jetrl_verl.linear import JetLinear
from jetrl_verl.numerics import (
    BLOCK,
    FP8_DTYPE,
    BlockQuantized,
    ScaleRule,
    dequantize_1x128,
    dequantize_128x128,
)
from jetrl_verl.numerics.formats import E4M3_NAN_CODE
from jetrl_verl.observe.contract import SCALE_SUFFIX

KINDS = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.down_proj": "down",
}
"""Projection below a decoder layer -> the kind of layer under which it is reported."""

SAMPLED_LAYERS = 4
"""Most decoder layers that are measured, spread evenly from the first to the last."""

SAMPLED_CODES = 2**16
"""Codes kept of each weight. A share of 1e-3 is then known to 12% for one weight, to 2% over the 36 of a kind."""

_SMALLEST_NORMAL_CODE = 0x08


_REMEDY = "resume from the last checkpoint, and lower the learning rate or the gradient clip if it happens again"


class NonFiniteWeightError(RuntimeError):
    """A weight holds NaN or Inf; the message names it."""


def tally(values: torch.Tensor, codes: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """What one quantisation did, in sums that can be added over samples.

    Args:
        values: the tensor that was quantised. codes: its E4M3 codes, same shape. restored: ``code * scale``, FP32.

    Returns:
        ``[5]`` FP64: non-zero elements; of them those with code zero; of them those with a subnormal code; sum of
        squares of the values; sum of squares of what rounding changed. A NaN or Inf makes the last two NaN.
    """
    values = values.double()
    magnitude = codes.contiguous().view(torch.uint8) & 0x7F
    present = values != 0
    zero, subnormal = magnitude == 0, (magnitude > 0) & (magnitude < _SMALLEST_NORMAL_CODE)
    noise = (values - restored.double()).square().sum()
    counts = [present.sum(), (present & zero).sum(), (present & subnormal).sum()]
    return torch.stack([*(count.double() for count in counts), values.square().sum(), noise])


def shares(tallies: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, float]:
    """Metrics of tallies by (kind, tensor): ``<kind>/<tensor>/{underflow,subnormal,snr_db}``.

    A tensor of zeros has no metric, a tensor that rounding left unchanged no ``snr_db``. Waits for the device once.
    """
    if not tallies:
        return {}
    metrics = {}
    for (kind, tensor), sums in zip(tallies, torch.stack(list(tallies.values())).tolist(), strict=True):
        present, zero, subnormal, signal, noise = sums
        if present == 0:
            continue
        metrics[f"{kind}/{tensor}/underflow"] = zero / present
        metrics[f"{kind}/{tensor}/subnormal"] = subnormal / present
        if noise != 0:
            metrics[f"{kind}/{tensor}/snr_db"] = 10.0 * float(torch.tensor(signal / noise).log10())
    return metrics


class QuantisationSampler:
    """Measures a sample of a model's quantised layers while it runs.

    Holds the layers themselves, so it is built before FSDP wraps the model and stays valid after. Under
    ``torch.compile`` nothing is measured: a hook inside a compiled region is traced as empty.

    Args:
        model: the trainer's model, linears already replaced.
        plans: which projections are quantised, from :func:`jetrl_verl.layers.plan_linears`.
        scale_rule: rule of the codes.
    """

    def __init__(self, model: nn.Module, plans: Mapping[str, LinearPlan], scale_rule: ScaleRule) -> None:
        planned: dict[int, list[tuple[str, nn.Linear]]] = {}
        for name, module in model.named_modules():
            plan = plan_of(name, plans) if isinstance(module, nn.Linear) else None
            if plan is not None and plan.quantised:
                index = int(re.search(r"\.layers\.(\d+)\.", f".{name}").group(1))
                planned.setdefault(index, []).append((KINDS[plan.suffix], module))
        places = sorted(planned)
        count = min(SAMPLED_LAYERS, len(places))
        chosen = sorted({places[round(i * (len(places) - 1) / max(count - 1, 1))] for i in range(count)})
        self._layers = [layer for index in chosen for layer in planned[index]]
        # q, k and v of a decoder layer read one X, and so do gate and up: it is measured at the first of them.
        self._reads_x = {id(layer) for index in chosen for layer in dict(reversed(planned[index])).values()}
        self._rule = scale_rule
        self._passes = 0
        self._tallies: dict[tuple[str, str], torch.Tensor] = {}
        self._seen: set[tuple[int, str]] = set()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Measure the first call of each chosen layer inside the block, and its backward."""
        self._tallies.clear()
        self._seen.clear()
        self._passes += 1
        hooks = [layer.register_forward_hook(partial(self._forward, kind)) for kind, layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def metrics(self) -> dict[str, float]:
        """What the last :meth:`sampling` found, see :func:`shares`."""
        return shares(self._tallies)

    def _first(self, layer: nn.Module, tensor: str) -> bool:
        # Activation checkpointing calls a layer twice, and a pass has many micro-batches.
        new = (id(layer), tensor) not in self._seen
        self._seen.add((id(layer), tensor))
        return new

    def _sample(self, matrix: torch.Tensor) -> torch.Tensor:
        """One group of 128 rows, another in each pass, the same for all tensors with as many rows."""
        rows = matrix.detach().flatten(0, -2)
        # A stride that shares no factor with usual numbers of groups visits each of them in turn.
        start = self._passes * 7919 % -(-len(rows) // BLOCK) * BLOCK
        return rows[start : start + BLOCK].to(torch.bfloat16)

    def _add(self, kind: str, tensor: str, values: torch.Tensor, q: BlockQuantized, restored: torch.Tensor) -> None:
        found = tally(values, q.codes, restored)
        self._tallies[kind, tensor] = self._tallies[kind, tensor] + found if (kind, tensor) in self._tallies else found

    @torch.no_grad()
    def _forward(self, kind: str, layer: nn.Linear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if torch.compiler.is_compiling() or inputs[0].numel() == 0:
            return
        if id(layer) in self._reads_x and self._first(layer, "X"):
            x = self._sample(inputs[0])
            q = kernels.quantize_1x128(x, self._rule)
            self._add(kind, "X", x, q, dequantize_1x128(q))
        if self._first(layer, "W"):
            w = self._sample(layer.weight)
            q = kernels.quantize_128x128(w, self._rule)
            self._add(kind, "W", w, q, dequantize_128x128(q))
        quantised_backward = isinstance(layer, JetLinear) and layer.backward_precision == "fp8"
        if quantised_backward and output.requires_grad and self._first(layer, "dY"):
            output.register_hook(partial(self._backward, kind))

    @torch.no_grad()
    def _backward(self, kind: str, gradient: torch.Tensor) -> None:
        dy = self._sample(gradient)
        for tensor, q, values in zip(
            ("dY", "dY_tokens"), kernels.quantize_1x128_and_128x1(dy, self._rule), (dy, dy.t()), strict=True
        ):
            self._add(kind, tensor, values, q, dequantize_1x128(q))


class CodeChanges:
    """Compares the codes of the last weight sync with those that the metrics last spoke of, on a fixed sample spread
    over every block.

    Those are of the sync before, unless verl sent the same weights again before anyone asked, as its validation does
    with a colocated reward model: what the update changed would be lost.

    Every rank gathers and quantises the whole weights, so all ranks find the same shares.
    """

    def __init__(self, plans: Mapping[str, LinearPlan]) -> None:
        self._plans = plans
        self._kept: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._read = True

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass a sync's stream of codes, scales and other tensors through."""
        if self._read:
            self._before = self._kept
        self._kept, self._read = {}, False
        for name, tensor in weights:
            if tensor.element_size() == 1:
                self._kept[name] = _spread(tensor.view(torch.uint8))
            elif name.endswith(SCALE_SUFFIX):
                self._kept[name] = _spread(tensor)
            yield name, tensor

    def metrics(self) -> dict[str, float]:
        """``codes_changed/<kind>`` and ``scales_changed/<kind>`` of the last sync; nothing after the first one."""
        self._read = True
        names: dict[str, list[str]] = {}
        for name in self._kept.keys() & self._before.keys():
            metric = "scales_changed" if name.endswith(SCALE_SUFFIX) else "codes_changed"
            kind = KINDS[plan_of(name.removesuffix(SCALE_SUFFIX), self._plans).suffix]
            names.setdefault(f"{metric}/{kind}", []).append(name)
        if not names:
            return {}

        def share(group: list[str]) -> torch.Tensor:
            now, before = (torch.cat([kept[name] for name in group]) for kept in (self._kept, self._before))
            return (now != before).double().mean()

        return dict(zip(names, torch.stack([share(group) for group in names.values()]).tolist(), strict=True))


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``SAMPLED_CODES`` elements or a few more, or of all."""
    # An odd stride walks through all columns of a power-of-two width instead of a few.
    return tensor.flatten()[:: max(tensor.numel() // SAMPLED_CODES, 1) | 1].clone()


class QuantisationMetrics:
    """Sampler and code changes of one trainer, in the rhythm of its steps: measured once after each weight sync.

    Args:
        model, plans, scale_rule: see :class:`QuantisationSampler`.
    """

    def __init__(self, model: nn.Module, plans: Mapping[str, LinearPlan], scale_rule: ScaleRule) -> None:
        self._sampler = QuantisationSampler(model, plans, scale_rule)
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
        with self._sampler.sampling():
            yield
        found = self._sampler.metrics() | self._changes.metrics()
        metrics.update({f"jetrl/{name}": [value] for name, value in found.items()})


def _named(broken: list[str]) -> str:
    names = ", ".join(name.removesuffix(SCALE_SUFFIX) for name in broken[:3])
    return names + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    # They carry a NaN along (torch.aminmax) and need no temporary of the tensor's size.
    return torch.stack(torch.aminmax(tensor)).float()


def _holds_non_finite(seen: torch.Tensor) -> torch.Tensor:
    """Of codes as uint8, or of extremes: whether one says NaN or Inf."""
    if seen.dtype == torch.uint8:
        return ((seen & 0x7F) == E4M3_NAN_CODE).any()
    return ~seen.isfinite().all()


def refuse_non_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a sync's stream through; at its end, name the weights that are not finite.

    One code of each 128x128 block is read, since a block that holds an Inf or NaN has NaN codes only; other tensors are
    read once. The device is waited for once, at the end.

    Raises:
        NonFiniteWeightError: after the last tensor, before what is appended to the stream behind this one.
    """
    seen: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if tensor.dtype == FP8_DTYPE:
            seen[name] = tensor.view(torch.uint8)[::BLOCK, ::BLOCK].flatten()
        elif tensor.is_floating_point():
            seen[name] = _extremes(tensor)
        yield name, tensor
    kinds = ([each for each in seen.values() if each.dtype == dtype] for dtype in (torch.uint8, torch.float32))
    together = [_holds_non_finite(torch.cat(kind)) for kind in kinds if kind]
    if together and torch.stack(together).any():
        broken = [name for name, each in seen.items() if _holds_non_finite(each)]
        raise NonFiniteWeightError(
            f"weight sync: {_named(broken)} of the trainer holds NaN or Inf and would make every sample garbage; "
            f"{_REMEDY}"
        )


def refuse_to_save_non_finite(model: nn.Module) -> None:
    """Keep a broken weight out of the checkpoints: verl saves before it syncs, and would resume from it for ever.

    Every rank looks at its own shards and all of them raise, so that none waits for the others in the save.

    Raises:
        NonFiniteWeightError: naming the weights of this rank's shards, if it is one of them.
    """
    shards = {name: getattr(p, "_local_tensor", p).detach() for name, p in model.named_parameters()}
    extremes = {name: _extremes(shard) for name, shard in shards.items() if shard.numel() > 0}
    found = torch.zeros((), dtype=torch.int32, device=next(iter(shards.values())).device)
    if extremes:
        found += _holds_non_finite(torch.stack(list(extremes.values())))
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    if found:
        broken = [name for name, pair in extremes.items() if _holds_non_finite(pair)]
        raise NonFiniteWeightError(
            f"checkpoint: {_named(broken) or 'a weight on another rank'} of the trainer holds NaN or Inf, so it is not "
            f"saved; {_REMEDY}"
        )
