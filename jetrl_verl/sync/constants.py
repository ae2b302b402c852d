# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What decides a model's forward besides its weights, as its modules have it: part of a statement (statement.py).

The driver compares configurations; this finds what a module made of them. Read once per engine, at no cost to a sync.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jetrl_verl.formats.sums import odd_constants, row_sums
from jetrl_verl.models.families.base import Family, norm_eps


def constants_of(
    model: torch.nn.Module,
    decoder: Family,
    *,
    scale: Callable[[torch.nn.Module, Family], float],
    experts: Callable[[torch.nn.Module, Family], tuple[int, int, str, bool]],
    rotary: torch.Tensor | Mapping[str, Any],
    vocabulary: int,
    masked: Sequence[int] = (),
) -> dict[str, Any]:
    """Name of a constant -> its value, as JSON has it, for messages and to compare.

    Args:
        model: of either side, before FSDP wraps it. decoder: its family.
        scale: (decoder layer, names of its modules) -> factor of its attention scores.
        experts: the same -> number of experts, those of a token, from logits to probabilities, whether a token's
            weights add up to 1; asked of a mixture.
        rotary: table ``[P, D]`` of shared operations; the configuration's parameters if each side builds its own.
        vocabulary: first entries of the vocabulary that may be sampled. masked: those among them that may not.
    """
    get = decoder.module
    constants = {f"eps of {decoder.final_norm}": norm_eps(get(model, decoder.final_norm))}
    for i, (layer, names) in enumerate(decoder.named_layers(model)):
        at = f"{decoder.layers}.{i}"
        gated_norm = () if names.delta_net is None else (names.delta_net.norm,)
        for norm in (*names.norms, *gated_norm):
            constants[f"eps of {at}.{norm}"] = norm_eps(layer.get_submodule(norm))
        if names.delta_net is None:
            constants[f"the scale of {at}.{names.attention}"] = scale(layer, names)
        else:
            constants[f"the heads of {at}.{names.attention}"] = _heads(layer.get_submodule(names.attention))
        if names.has_mlp:
            kind = type(layer.get_submodule(names.activation)).__name__
            constants[f"the activation of {at}"] = "silu" if "silu" in kind.lower() else kind
        if names.experts is not None:
            count, per_token, scoring, renormalized = experts(layer, names)
            weights = f"weights {'' if renormalized else 'not '}renormalized"
            constants[f"the routing of {at}"] = f"{per_token} of {count} experts a token by {scoring}, {weights}"
    if isinstance(rotary, torch.Tensor):
        total = int((row_sums(rotary) * odd_constants(len(rotary), rotary.device)).sum())
        constants["the rotary table"] = f"{len(rotary)} positions with the sum {total % 2**64:#018x}"
    else:
        constants["rope_parameters"] = {name: value for name, value in rotary.items() if value is not None}
    head, embedding = (get(model, name).weight for name in (decoder.head, decoder.embedding))
    constants["tie_word_embeddings"] = head is embedding
    constants["the vocabulary with a token"] = vocabulary
    constants["masked tokens"] = list(masked)
    return constants


def _heads(delta_net: torch.nn.Module) -> str:
    """What decides a delta net's forward, which classes of both sides have by these names."""
    return (
        f"{delta_net.num_k_heads} keys of {delta_net.head_k_dim} and {delta_net.num_v_heads} values of "
        f"{delta_net.head_v_dim} features, after {delta_net.activation} of a convolution of width "
        f"{delta_net.conv_kernel_size}"
    )
