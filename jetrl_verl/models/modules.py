# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a built decoder has the modules of its family: asked in the driver of a model on the meta device, and by a
worker of the model that it trains. A class that comes with the checkpoint may have others.
"""

from collections.abc import Iterable, Iterator

from torch import nn

from jetrl_verl.models.families import family
from jetrl_verl.models.families.base import Family, UnsupportedLayer, UnsupportedOperation, place


def linears_of(model: nn.Module) -> Iterator[tuple[str, str, nn.Linear]]:
    """(Name, name below its layer, module) of every linear layer in a decoder layer.

    Raises:
        UnsupportedLayer: one that the family does not have.
    """
    known = family(model.config).projections
    for name, module in model.named_modules():
        at = place(name) if isinstance(module, nn.Linear) else None
        if at is not None:
            if at.module not in known:
                raise UnsupportedLayer(f"its family has no linear layer {name}", "linear_of_no_family")
            yield name, at.module, module


def check_operations_of(model: nn.Module) -> None:
    """Refuse a decoder whose modules are not those that the shared operations replace.

    Raises:
        UnsupportedOperation: it lacks a module of its family; it has one with parameters, or directly in a layer, that
            the family does not name; its lm_head has a bias.
    """
    decoder = family(model.config)
    named = {decoder.final_norm, decoder.rotary_embedding, decoder.embedding, decoder.head}
    used = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    if decoder.tower:
        used = {name for name in used if not f"{name}.".startswith(f"{decoder.tower}.")}
    for i, (layer, names) in enumerate(decoder.named_layers(model)):
        named |= {f"{decoder.layers}.{i}.{part}" for part in names.parts}
        used |= {f"{decoder.layers}.{i}.{child}" for child, _ in layer.named_children()}
    for wrong, word in ((named - dict(model.named_modules()).keys(), "without"), (used - named, "with")):
        if wrong:
            raise UnsupportedOperation(f"it is a {type(model).__name__} {word} {min(wrong)}", "another_decoder")
    if model.get_submodule(decoder.head).bias is not None:
        raise UnsupportedOperation("its lm_head has a bias, and vLLM's has none", "another_decoder")


def check_scaling(weights: Iterable[str], decoder: Family) -> None:
    """Refuse a decoder layer without a norm or projection that QuRL's factor is folded into.

    Args:
        weights: names of all parameters of the model.

    Raises:
        UnsupportedLayer: a layer lacks one.
    """
    names = set(weights)
    modules = [
        [module for norm, pieces in kind.fed_by_norms for module in (norm, *pieces)] for kind in decoder.distinct_kinds
    ]
    for layer in sorted({at.layer for at in map(place, names) if at is not None}):
        absent = [next((one for one in kind if f"{layer}.{one}.weight" not in names), "") for kind in modules]
        if all(absent):
            raise UnsupportedLayer(f"{layer} has no {absent[0]}", "layer_without_scaling")
