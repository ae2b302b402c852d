# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces the linear layers and experts of a stock Hugging Face decoder, in place."""

from collections.abc import Mapping

import torch
from torch import nn

from jetrl_verl import formats
from jetrl_verl.models import family
from jetrl_verl.models.families.base import Experts, leaf, place
from jetrl_verl.models.modules import linears_of
from jetrl_verl.models.plan import LinearPlan, UnsupportedLayer
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.handoff import hand_over
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.reference import ScaleRule


def replace_linears(
    model: nn.Module, plans: Mapping[str, LinearPlan], *, scale_rule: ScaleRule, backward: str | None = None
) -> list[str]:
    """Put ``JetLinear`` and ``JetExperts`` where the plan says so; the norms before them quantize (nn/handoff.py).

    Args:
        model: a decoder of the configuration that ``plans`` was made from, before FSDP wraps it.
        plans: from :func:`jetrl_verl.models.plan.plan_linears`.
        scale_rule: ``"fp32"`` or ``"pow2"``. backward: precision of DGrad and WGrad, ``"bf16"`` or
            the plans' format (None).

    Returns:
        Names of the replaced modules.

    Raises:
        UnsupportedLayer: a linear of a decoder layer is not in the plan; a mixture with a BF16 backward.
        ValueError: unknown scale rule or backward precision; a linear of another shape than the plan's.
    """
    replaced = []
    decoder = family(model.config)
    if decoder.experts is not None:
        if backward == formats.UNQUANTIZED:
            raise UnsupportedLayer("the gradients of experts are FP8 products", "mixture_with_bf16_backward")
        replaced += _replace_experts(model, decoder.experts, plans, scale_rule)
    for name, suffix, module in linears_of(model):
        plan = plans[suffix]
        _check_shape(name, module.weight, plan.n, plan.k)
        if plan.quantized:
            number_format, ranks = formats.get(plan.format_name), plan.k // plan.shard_k
            JetLinear.replace(
                module, number_format, scale_rule=scale_rule, backward=backward or plan.format_name, ranks=ranks
            )
            replaced.append(name)
    hand_over(model, decoder)
    return replaced


def _check_shape(name: str, weight: torch.Tensor, *shape: int) -> None:
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"{name} has shape {list(weight.shape)} but the model's configuration says {list(shape)}: "
            "the configuration and the weights do not belong together"
        )


def _replace_experts(
    model: nn.Module, mixture: Experts, plans: Mapping[str, LinearPlan], scale_rule: ScaleRule
) -> list[str]:
    replaced = []
    gate_up, down = plans[mixture.gate_up], plans[mixture.down]
    for name, module in model.named_modules():
        at = place(name)
        if at is None or at.module != mixture.module:
            continue
        for plan in (gate_up, down):
            parameter = leaf(plan.suffix)
            _check_shape(f"{name}.{parameter}", getattr(module, parameter), plan.experts, plan.n, plan.k)
        if down.quantized:
            number_format, ranks = formats.get(down.format_name), down.k // down.shard_k
            JetExperts.replace(module, number_format, mixture, scale_rule=scale_rule, ranks=ranks)
            replaced.append(name)
    return replaced
