# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a decoder: where peft puts them, and the names of their parameters."""

from collections.abc import Iterator

from torch import nn

from jetrl_verl.models.families import family
from jetrl_verl.models.families.base import UnsupportedLayer, place

ADAPTER = "default"
"""verl's name of the adapter."""

FACTORS = ("lora_A", "lora_B")


def stock_name(name: str) -> str:
    """Name of a parameter of peft's model in the model without adapters; a factor keeps its own."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def is_factor(name: str) -> bool:
    """Whether a parameter is an A or a B."""
    return any(f".{factor}." in name for factor in FACTORS)


def factors_of(weight: str) -> list[str]:
    """Names of A and B of a weight, all by :func:`stock_name`."""
    return [f"{weight.removesuffix('.weight')}.{factor}.{ADAPTER}.weight" for factor in FACTORS]


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(Name, module) of every layer of peft's ``model`` that has an adapter.

    Raises:
        UnsupportedLayer: an adapter of anything but a linear layer of a decoder layer, or of another kind than
            ``lora_alpha / r * B A`` with the same ``r`` and ``lora_alpha`` for all, which verl's checkpoints keep.
    """
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    known, settings = family(model.config).projections, model.peft_config[ADAPTER]
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise UnsupportedLayer(f"its adapter trains {stock_name(name)} whole", "kind_of_adapter")
        if not isinstance(module, BaseTunerLayer):
            continue
        at = place(stock_name(name))
        if type(module) is not Linear or at is None or at.module not in known:
            reason = f"it has an adapter of {stock_name(name)}, which is no linear layer of a decoder layer"
            raise UnsupportedLayer(reason, "place_of_adapter")
        extras = module.lora_bias[ADAPTER] or module.fan_in_fan_out or module.lora_variant
        if extras or not isinstance(module.lora_dropout[ADAPTER], nn.Identity):
            reason = f"the adapter of {stock_name(name)} has a dropout, a bias or a magnitude of its own"
            raise UnsupportedLayer(reason, "kind_of_adapter")
        if (module.r[ADAPTER], module.scaling[ADAPTER]) != (settings.r, settings.lora_alpha / settings.r):
            reason = f"the adapter of {stock_name(name)} has an r or a scale of its own"
            raise UnsupportedLayer(reason, "kind_of_adapter")
        yield name, module
