# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A sync's weights as the rollout has them: planned projections quantized, all else in BF16.

Weights are quantized once, from the BF16 cast of the gathered master weight, which the trainer's forward quantizes too,
so the two sides cannot round differently.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from jetrl_verl import formats
from jetrl_verl.formats import UNQUANTIZED
from jetrl_verl.formats.format import Format, QuantizedWeight
from jetrl_verl.models.plan import LinearPlan, plan_of
from jetrl_verl.sync.stacks import Name, names_of, parts_of, renamed

Weight = torch.Tensor | QuantizedWeight


def quantize_stream(
    weights: Iterable[tuple[Name, torch.Tensor]],
    plans: Mapping[str, LinearPlan],
    scale_rule: str,
    fixed_scales: dict[str, torch.Tensor] | None = None,
) -> Iterator[tuple[Name, Weight]]:
    """Quantize each planned weight; cast every other floating tensor to BF16.

    Args:
        weights: (Hugging Face name or stack of them, full tensor) of any floating type.
        plans: from :func:`jetrl_verl.models.plan.plan_linears`, with the format of each projection.
        scale_rule: rule of the scales.
        fixed_scales: scales to reuse, by weight name; missing ones are computed and added. 0 marks a row that was all
            zeros so far and gets a scale later. None: scales are always computed.

    Yields:
        Planned weights quantized, ``[N, K]`` or experts ``[E, N, K]``; others BF16. A stack is split only if scales are
        fixed or its weights have different formats.
    """
    for name, tensor in weights:
        if tensor.requires_grad:
            tensor = tensor.detach()
        planned = {format_of(plans, one) for one in names_of(name)}
        items = [(name, tensor)]
        if len(planned) > 1 or (planned != {UNQUANTIZED} and fixed_scales is not None):
            items = list(parts_of(name, tensor))
        for item, part in items:
            format_name = format_of(plans, names_of(item)[0])
            if part.is_floating_point():
                part = part.to(torch.bfloat16)
            if format_name == UNQUANTIZED:
                yield item, part
                continue
            number_format = formats.get(format_name)
            weight = number_format.quantize_weight(part, scale_rule)
            if fixed_scales is not None:
                weight = _with_kept_scales(number_format, item, part, weight, scale_rule, fixed_scales)
            yield item, weight


def format_of(plans: Mapping[str, LinearPlan], name: str) -> str:
    """Format in which a tensor of this name is sent; ``UNQUANTIZED`` for BF16."""
    plan = None if name.endswith(".bias") else plan_of(name, plans)
    return UNQUANTIZED if plan is None else plan.format_name


def _with_kept_scales(
    number_format: Format,
    name: str,
    weight: torch.Tensor,
    fresh: QuantizedWeight,
    rule: str,
    kept: dict[str, torch.Tensor],
) -> QuantizedWeight:
    """``weight`` quantized with its ``kept`` scales; rows without one get their own, which is kept."""
    own = torch.where(fresh.qdata.any(dim=-1, keepdim=True), fresh.scales, 0.0)
    scales = kept.get(name, own)
    kept[name] = scales = torch.where(scales == 0, own, scales)
    return number_format.quantize_weight(weight, rule, torch.where(scales == 0, fresh.scales, scales))


def as_tensors(stream: Iterable[tuple[Name, Weight]]) -> Iterator[tuple[Name, torch.Tensor]]:
    """The stream of :func:`quantize_stream` with each quantized weight as its tensors (``Format.wire``)."""
    for name, weight in stream:
        if not isinstance(weight, QuantizedWeight):
            yield name, weight
            continue
        for suffix, tensor in weight.format.wire(weight):
            yield renamed(name, suffix), tensor
