# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's LoRA in the FP8 flow: peft's modules, names and checkpoints; the products are of merged weights
(nn/adapter.py)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn

from jetrl_verl import kernels
from jetrl_verl.kernels.views import as_type
from jetrl_verl.models.adapters import ADAPTER, FACTORS, adapted_linears, factors_of
from jetrl_verl.nn.adapter import Adapter, Factor
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.sync.stacks import Name, names_of, parts_of
from jetrl_verl.train.features import Feature


class MergedAdapter(Linear):
    """peft's layer around a linear layer; A and B are used through their product alone."""

    jetrl_adapter: Adapter

    @classmethod
    def replace(cls, layer: Linear) -> None:
        """Turn peft's ``layer`` into this class in place."""
        for factor in FACTORS:
            getattr(layer, factor)[ADAPTER].__class__ = Factor
        layer.__class__ = cls
        layer.jetrl_adapter = Adapter(layer, ADAPTER)
        if isinstance(layer.base_layer, JetLinear):
            layer.base_layer.adapter = layer.jetrl_adapter

    @property
    def weight(self) -> torch.Tensor:
        """Of a layer that is not quantized, merged."""
        self.jetrl_adapter.read()
        return self.jetrl_adapter.added(self.base_layer.weight)

    def forward(self, x: Any, *_: Any, **__: Any) -> torch.Tensor:
        if isinstance(self.base_layer, JetLinear):
            return self.base_layer(x)
        return nn.functional.linear(x, self.weight, self.base_layer.bias)


class MergedAdapters(Feature):
    """Adapters of the linear layers, merged in every product."""

    def install(self, module: nn.Module) -> None:
        self._layers: list[MergedAdapter] = []

    def _build_lora_module(self, stock: Any, module: nn.Module) -> nn.Module:
        model = stock(module)
        for _, layer in adapted_linears(model):
            MergedAdapter.replace(layer)
            self._layers.append(layer)
        return model

    def forward_backward_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Frees the factors at the end."""
        try:
            return stock(*args, **kwargs)
        finally:
            for layer in self._layers:
                layer.jetrl_adapter.factors = None


def with_adapters(
    weights: Iterable[tuple[Name, torch.Tensor]],
    factors: Iterable[tuple[Name, torch.Tensor]],
    scales: Mapping[str, float],
) -> Iterator[tuple[Name, torch.Tensor]]:
    """A sync's weights with the terms of their adapters, as the forward multiplies with them.

    Args:
        weights: (name or stack of them, whole tensor). factors: the same of all A and B.
        scales: name of a weight with an adapter -> the scale of its term.
    """
    whole = {name: tensor for item, stack in factors for name, tensor in parts_of(item, stack)}
    for item, tensor in weights:
        if scales.keys().isdisjoint(names_of(item)):
            yield item, tensor
            continue
        parts = []
        for name, part in parts_of(item, tensor):
            if name in scales:
                a, b = (whole[factor] for factor in factors_of(name))
                part = kernels.merge_adapter(as_type(part, torch.bfloat16), a, b, scales[name])
            parts.append(part)
        yield item, parts[0] if len(parts) == 1 else torch.cat(parts)
