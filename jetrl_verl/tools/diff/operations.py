# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The operations of a decoder in the order in which they are computed: what both sides are cut into.

Each has one output per token and takes outputs of earlier ones alone (attention takes those of earlier tokens too), so
a difference that is first in this order was made by the operation that it shows in. Both sides are cut at the same
places: what vLLM merges (q/k/v, gate/up) is split, and a residual sum, which vLLM computes inside its norm, is an
operation of its own whose kind is the norm's.

A mixture of experts is its router's logits; the choice, a row of ``[E]`` weights with zeros for experts that a token
does not go to; its experts; and their combination. Stock engines on either side return experts already combined, so
there the two are one operation.

Under ``jetrl.kv_cache=fp8`` keys and values as the rollout's attention sees them are operations too, of kind
``kv_cache``: quantized and dequantized, between rotary and attention. Of a trainer whose attention has none of it they
are the keys and values themselves.
"""

from typing import NamedTuple

import torch

from jetrl_verl.models import Family, family, model_types
from jetrl_verl.models.families.base import leaf

KINDS = (
    *("embedding", "linear", "norm", "rotary", "kv_cache", "attention", "activation", "router", "choice", "combine"),
    *("lm_head", "sampler"),
)
"""What an operation is. Of these the projections and experts (``linear``) are quantized, and an FP8 ``kv_cache``."""

_FIRST = {"embedding": "embedding"}
_LAST = {"final_residual": "norm", "final_norm": "norm", "lm_head": "lm_head", "sampler": "sampler"}


def _of_layer(family: Family, shared: bool = True, kv_cache: bool = True) -> dict[str, str]:
    """Operations of a decoder layer, in order, with their kinds; projections and QK norms have the family's names."""
    mixture = (
        ("router", "router"),
        ("choice", "choice"),
        ("experts", "linear"),
        ("combine" if shared else "", "combine"),
    )
    dense = (
        (leaf(family.gate), "linear"),
        (leaf(family.up), "linear"),
        ("activation", "activation"),
        (leaf(family.down), "linear"),
    )
    named = (
        ("input_residual", "norm"),
        ("input_norm", "norm"),
        (leaf(family.q), "linear"),
        (leaf(family.k), "linear"),
        (leaf(family.v), "linear"),
        (leaf(family.q_norm), "norm"),
        (leaf(family.k_norm), "norm"),
        ("q_rotary", "rotary"),
        ("k_rotary", "rotary"),
        ("k_cache" if kv_cache else "", "kv_cache"),
        ("v_cache" if kv_cache else "", "kv_cache"),
        ("attention", "attention"),
        (leaf(family.o), "linear"),
        ("post_residual", "norm"),
        ("post_norm", "norm"),
        *(dense if family.experts is None else mixture),
    )
    return {name: kind for name, kind in named if name}


_FAMILIES = [family({"model_type": model_type}) for model_type in model_types()]
KIND_OF = {name: kind for ours in _FAMILIES for name, kind in (_FIRST | _of_layer(ours) | _LAST).items()}
"""Name of an operation of any family -> its kind."""


class Operation(NamedTuple):
    """One operation of one decoder layer; ``layer`` is None before the first and behind the last."""

    layer: int | None
    name: str

    @property
    def kind(self) -> str:
        return KIND_OF[self.name]

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


def operations(family: Family, layers: int, shared: bool = True, kv_cache: bool = False) -> list[Operation]:
    """All operations of a decoder of ``layers`` layers, in order; those of a mixture depend on whether both sides run
    the ``shared`` ones, and keys and values as attention sees them are there with a quantized ``kv_cache``."""
    return [
        *(Operation(None, name) for name in _FIRST),
        *(
            Operation(layer, name)
            for layer in range(layers)
            for name in _of_layer(family, shared, kv_cache)
            if (layer, name) != (0, "input_residual")  # the first layer's input is no sum yet
        ),
        *(Operation(None, name) for name in _LAST),
    ]


def dense_choice(chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """``[T, experts]`` FP32: each token's weight of each expert, 0 of one that it does not go to.

    Args:
        chosen: ``[T, k]`` integers. weights: ``[T, k]``.
    """
    rows = torch.zeros(len(chosen), experts, device=chosen.device)
    return rows.scatter_(1, chosen.long(), weights.float())


def chosen_of(choice: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts ``[T, k]`` int32, weights ``[T, k]`` FP32) of :func:`dense_choice`, by descending weight, equal ones by
    number: the order of the flow's router."""
    weights, chosen = choice.sort(dim=-1, descending=True, stable=True)
    return chosen[:, :k].to(torch.int32).contiguous(), weights[:, :k].contiguous()
