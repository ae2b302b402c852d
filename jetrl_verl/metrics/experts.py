# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Samples of a mixture's experts for the quantization metrics, with the expert of each row.

They are exact as in quantization.py: a block of each expert's weight, rows of tokens before the experts, rows
of pairs before the down projection, and of both gradients a group of 128 rows of one expert's segment. Gate and up's
gradient exists in one kernel's registers only, so it is recomputed from operands handed over in backward
(``JetExperts.on_backward``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from jetrl_verl import kernels
from jetrl_verl.formats.format import Format
from jetrl_verl.kernels.weighted_silu_mul import gradients_of_rows
from jetrl_verl.models.families.base import leaf
from jetrl_verl.models.plan import LinearPlan
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.reference import QuantizedTensor, ScaleRule, Segments


class Sample(NamedTuple):
    """A quantized sample.

    Attributes:
        kind, tensor: names of its metrics. values: ``[rows, columns]``. quantized: of these. restored: FP32.
        owners: ``[rows]`` int64, the expert of each row; None if a row belongs to several.
    """

    kind: str
    tensor: str
    values: torch.Tensor
    quantized: QuantizedTensor
    restored: torch.Tensor
    owners: torch.Tensor | None


@dataclass(frozen=True)
class SampledExperts:
    """One layer's experts.

    Attributes:
        module: transformers' module or :class:`JetExperts`. gate_up, down: plans of its parameters.
        number_format, rule: of the qdata.
    """

    module: nn.Module
    gate_up: LinearPlan
    down: LinearPlan
    number_format: Format
    rule: ScaleRule

    @property
    def experts(self) -> int:
        return self.down.experts

    @property
    def block(self) -> int:
        return self.number_format.traits.block

    def weights(self, step: int) -> Iterator[Sample]:
        """One block of each expert's weights, which depends on ``step``."""
        block = self.block
        for plan in (self.gate_up, self.down):
            weight = getattr(self.module, leaf(plan.suffix)).detach()
            across, place = plan.k // block, step * 7919 % (plan.n // block * (plan.k // block))
            row, column = place // across * block, place % across * block
            blocks = weight[:, row : row + block, column : column + block].to(torch.bfloat16).flatten(0, 1)
            q = self.number_format.quantize_weight(blocks, self.rule)
            owners = torch.arange(self.experts, device=blocks.device).repeat_interleave(block)
            yield Sample(plan.kind, "W", blocks, q, self.number_format.dequantize_weight(q), owners)

    def inputs(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Iterator[Sample]:
        """Inputs of the experts of a few tokens.

        Args:
            x: ``[T, H]`` BF16. chosen: experts ``[T, k]``. weights: ``[T, k]``.
        """
        number_format, module = self.number_format, self.module
        q = number_format.quantize_activation(x, self.rule)
        yield Sample(self.gate_up.kind, "X", x, q, number_format.dequantize_activation(q), None)
        if not isinstance(module, JetExperts):
            return
        chosen, weights = chosen.to(torch.int32).contiguous(), weights.float().contiguous()
        segments = kernels.segments(chosen, self.experts, 1)
        gate_up, down = (getattr(module, leaf(plan.suffix)) for plan in (self.gate_up, self.down))
        _, product, inner = module.forward_rows(q, weights, segments, gate_up, down, align=1)
        pair = segments.pair.long()
        gate, up = product.float().chunk(2, dim=-1)
        values = (nn.functional.silu(gate) * up * weights.flatten()[pair, None]).to(torch.bfloat16)
        owners = chosen.flatten()[pair].long()
        yield Sample(self.down.kind, "X", values, inner, number_format.dequantize_activation(inner), owners)

    def gradients(self, chosen: torch.Tensor, step: int) -> Callable[[torch.Tensor], Iterator[Sample]] | None:
        """A function that samples the output's gradient ``[..., H]`` in backward; None for experts that train in BF16.

        Args:
            chosen: experts ``[T, k]`` of all tokens. step: selects the group of rows.
        """
        if not isinstance(self.module, JetExperts):
            return None
        segments, k = kernels.segments(chosen.to(torch.int32), self.experts, self.block), chosen.shape[1]
        place, owner = _group(segments, step, self.block)
        pair = segments.pair[place]

        def samples(gradient: torch.Tensor) -> Iterator[Sample]:
            rows = gradient.detach().flatten(0, -2).to(torch.bfloat16)[(pair.clamp(min=0) // k).long()]
            yield from self._gradient(self.down.kind, rows.masked_fill((pair < 0)[:, None], 0), owner)

        return samples

    def gradients_of_gate_up(
        self, dh: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, segments: Segments, step: int
    ) -> Iterator[Sample]:
        """Inputs of gate and up's DGrad and WGrad, one group of rows; arguments of ``JetExperts.on_backward``."""
        place, owner = _group(segments, step, self.block)
        rows, _ = gradients_of_rows(dh[place], gate_up[place], weights, segments.pair[place])
        yield from self._gradient(self.gate_up.kind, rows, owner)

    def _gradient(self, kind: str, rows: torch.Tensor, owner: torch.Tensor) -> Iterator[Sample]:
        """Both layouts of a group of rows ``[128, N]`` BF16 of one expert."""
        both = self.number_format.quantize_gradient(rows, self.rule, rowwise=True, colwise=True)
        for tensor, q, values in zip(("dY", "dY_tokens"), both, (rows, rows.t()), strict=True):
            restored = self.number_format.dequantize_activation(q)
            yield Sample(kind, tensor, values, q, restored, owner.expand(len(values)))


def _group(segments: Segments, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[size]`` of one group, selected by ``step``, and its expert ``[1]``; on the device, unsynchronized."""
    group = step * 7919 % (segments.start[-1].long() // size).clamp(min=1)
    place = group * size + torch.arange(size, device=segments.pair.device)
    return place, torch.searchsorted(segments.start[1:].long(), place[:1], right=True)


def experts_of(
    model: nn.Module, plans: Mapping[str, LinearPlan], number_format: Format, rule: ScaleRule
) -> dict[str, SampledExperts]:
    """Name -> the quantized experts of each layer; empty for a dense model."""
    parameters: dict[str, list[LinearPlan]] = {}
    for plan in plans.values():
        if plan.experts > 1 and plan.quantized:
            parameters.setdefault(plan.suffix.rpartition(".")[0], []).append(plan)
    layers = {}
    for suffix, (gate_up, down) in parameters.items():
        for name, module in model.named_modules():
            if name.endswith(f".{suffix}"):
                layers[name] = SampledExperts(module, gate_up, down, number_format, rule)
    return layers
