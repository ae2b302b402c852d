# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The operations of a decoder, in the order of computation, at which both sides are compared.

Each has one output per token and depends on earlier operations only, so the first that differs made the difference.
Merged projections (q/k/v, gate/up) are split. A residual sum, which vLLM computes inside its norm, is an operation of
kind ``norm``. A mixture is its router's logits, the choice (a row of ``[E]`` weights, 0 for experts that a token does
not go to), the experts, and their combination; stock engines return experts already combined. A shared expert is an
MLP, the logit of its gate, and the sum of all, of shared operations alone. With a quantized KV cache
``k_cache`` and ``v_cache`` are what attention reads: quantized and dequantized, or unchanged in a stock trainer. A
delta net is its projections, convolution, rule and gated norm, of shared operations alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from jetrl_verl.models import Family, family, model_types
from jetrl_verl.models.families.base import leaf

KINDS = (
    *("embedding", "linear", "norm", "rotary", "kv_cache", "attention", "convolution", "delta_rule", "activation"),
    *("router", "choice", "combine", "lm_head", "sampler"),
)
"""Projections and experts are ``linear``, the gate of an attention's output ``activation``."""

_FIRST = {"embedding": "embedding"}
_LAST = {"final_residual": "norm", "final_norm": "norm", "lm_head": "lm_head", "sampler": "sampler"}


def _of_layer(family: Family, shared: bool = True, kv_cache: bool = True) -> dict[str, str]:
    """Name -> kind of the operations of a decoder layer of one kind, in order; projections and QK norms have the
    family's names."""
    second = {}
    if family.has_mlp:
        second |= {leaf(family.gate): "linear", leaf(family.up): "linear", "activation": "activation"}
        second |= {leaf(family.down): "linear"}
    if (mixture := family.experts) is not None:
        second |= {"router": "router", "choice": "choice", "experts": "linear"}
        second |= {"combine": "combine"} if shared else {}
    if mixture is not None and mixture.shared_gate:
        second |= {leaf(mixture.shared_gate): "linear", "shared_sum": "combine"}
    first = {"input_residual": "norm", "input_norm": "norm"}
    if (delta := family.delta_net) is not None:
        first |= {leaf(delta.qkv): "linear", leaf(delta.z): "linear", "convolution": "convolution"}
        first |= {leaf(delta.b): "linear", leaf(delta.a): "linear", "delta_rule": "delta_rule", "gated_norm": "norm"}
        first |= {leaf(delta.out): "linear"}
    else:
        first |= dict.fromkeys(map(leaf, (family.q, family.k, family.v)), "linear")
        first |= dict.fromkeys(map(leaf, filter(None, (family.q_norm, family.k_norm))), "norm")
        first |= dict.fromkeys(("q_rotary", "k_rotary"), "rotary")
        first |= dict.fromkeys(("k_cache", "v_cache") if kv_cache else (), "kv_cache")
        first |= {"attention": "attention"} | ({"gated": "activation"} if family.gated else {})
        first |= {leaf(family.o): "linear"}
    return first | {"post_residual": "norm", "post_norm": "norm"} | second


def _kinds_of_layers(family: Family) -> tuple[Family, ...]:
    return (family,) if family.delta_net is None else (family.linear_layer, family.full_layer)


_FAMILIES = [kind for model_type in model_types() for kind in _kinds_of_layers(family({"model_type": model_type}))]
KIND_OF = {name: kind for one in _FAMILIES for name, kind in (_FIRST | _of_layer(one) | _LAST).items()}
"""Name of an operation of any family -> its kind."""


class Operation(NamedTuple):
    """One operation of one decoder layer; ``layer`` is None before the first and after the last."""

    layer: int | None
    name: str

    @property
    def kind(self) -> str:
        return KIND_OF[self.name]

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


def in_layer(layer: int | None, name: str) -> Operation:
    """The operation ``name`` of decoder layer ``layer``, or the one of that name outside of the layers."""
    return Operation(None if name in _FIRST or name in _LAST else layer, name)


def operations(layers: Sequence[Family], shared: bool = True, kv_cache: bool = False) -> list[Operation]:
    """All operations of a decoder, in order, from the names of each of its layers (``Family.kinds``).

    ``shared``: both sides run the shared operations, which matters for a mixture. ``kv_cache``: it is quantized.
    """
    return [
        *(Operation(None, name) for name in _FIRST),
        *(
            Operation(layer, name)
            for layer, names in enumerate(layers)
            for name in _of_layer(names, shared, kv_cache)
            if (layer, name) != (0, "input_residual")  # the first layer's input is not a sum
        ),
        *(Operation(None, name) for name in _LAST),
    ]


def dense_choice(chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """``[T, experts]`` FP32: each token's weight of each expert, else 0, from ``chosen`` and ``weights`` ``[T, k]``."""
    rows = torch.zeros(len(chosen), experts, device=chosen.device)
    return rows.scatter_(1, chosen.long(), weights.float())


def chosen_of(choice: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts ``[T, k]`` int32, weights ``[T, k]`` FP32) of a :func:`dense_choice`.

    In the order of the flow's router: by descending weight, then by the expert's number.
    """
    weights, chosen = choice.sort(dim=-1, descending=True, stable=True)
    return chosen[:, :k].to(torch.int32).contiguous(), weights[:, :k].contiguous()
