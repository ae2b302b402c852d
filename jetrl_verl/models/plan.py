# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which linear layers of a decoder are quantized, on both sides or on neither, from its configuration and TP size.

A format's block never crosses a shard: each tensor-parallel shard, and each piece of a projection that vLLM merges
(q/k/v, gate/up), must be a multiple of it in both dimensions, and merged pieces are quantized together or not at all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jetrl_verl.formats.catalog import FLOW, UNQUANTIZED, traits_of
from jetrl_verl.models.families import family
from jetrl_verl.models.families.base import Family, Shape, UnsupportedLayer, check_vllm_fields, place


@dataclass(frozen=True)
class LinearPlan:
    """One projection of every decoder layer.

    Attributes:
        suffix: the trainer's name below a decoder layer.
        kind: of vLLM's layer that it is part of; metrics group by it.
        n, k: output and input features of the whole layer.
        shard_n, shard_k: the same per tensor-parallel rank.
        format_name: of its weight on both sides; ``UNQUANTIZED`` if it is not quantized.
        reason: why it is not; empty if it is.
        experts: experts of a mixture stacked in this parameter; 1 for a linear layer.
    """

    suffix: str
    kind: str
    n: int
    k: int
    shard_n: int
    shard_k: int
    format_name: str
    reason: str = ""
    experts: int = 1

    @property
    def quantized(self) -> bool:
        """Whether its weight is quantized, on both sides."""
        return self.format_name != UNQUANTIZED


def _unfit(shapes: Mapping[str, Shape], pieces: Iterable[str], tp: int, block: int) -> str:
    """Why one of ``pieces`` does not divide into blocks on each of ``tp`` ranks; empty if all do."""
    for name in pieces:
        n, k, shard_n, shard_k = shapes[name]
        if n % shard_n or k % shard_k or shard_n % block or shard_k % block:
            return (
                f"layer {name} has shards of shape [{shard_n}, {shard_k}] (whole [{n}, {k}], tensor parallel "
                f"size {tp}) and both must be multiples of {block}"
            )
    return ""


def _largest(decoder: Family, hf_config: Any, tp: int, block: int | None) -> int | None:
    """The largest divisor of ``tp`` below it at which the heads and, if quantized in blocks, all layers fit."""
    for size in (size for size in range(tp - 1, 0, -1) if tp % size == 0):
        shapes = decoder.shapes(hf_config, size)
        names = [name for linear in decoder.linears if not linear.bf16 for name in linear.pieces]
        fits = block is None or not _unfit(shapes, names, size, block)
        if fits and decoder.divides_heads(hf_config, size):
            return size
    return None


def plan_linears(
    hf_config: Any, tp: int = 1, *, unfit_layers: str = "stop", format_name: str = FLOW
) -> dict[str, LinearPlan]:
    """Decide for every projection of a decoder whether it is quantized.

    Args:
        hf_config: Hugging Face configuration, object or mapping.
        tp: tensor-parallel size of the rollout.
        unfit_layers: ``"stop"`` raises at the first projection that does not fit; ``"skip"`` leaves it and what is
            merged with it in BF16 on both sides.
        format_name: a number format, or ``UNQUANTIZED`` for no quantized layer.

    Returns:
        suffix -> plan: q, k, v, o, gate, up, down; for a mixture q, k, v, o and its experts' parameters. If layers are
        of several kinds, the projections of all.

    Raises:
        UnsupportedLayer: unknown architecture; heads that do not divide by ``tp``; a shape that does not fit, under
            ``"stop"`` or of experts; no projection left under ``"skip"``.
    """
    decoder, traits = family(hf_config), traits_of(format_name)
    decoder.check(hf_config)
    check_vllm_fields(hf_config)
    if not decoder.divides_heads(hf_config, tp):
        largest = _largest(decoder, hf_config, tp, traits.block if traits and unfit_layers != "skip" else None)
        largest = largest or _largest(decoder, hf_config, tp, None)
        raise UnsupportedLayer(
            f"its {decoder.heads_of(hf_config)} are not divided by {tp} ranks of the rollout, as they are by {largest}",
            "rollout_ranks_of_the_heads",
            largest,
        )
    shapes = decoder.shapes(hf_config, tp)
    plans: dict[str, LinearPlan] = {}
    experts = decoder.experts.number(hf_config) if decoder.experts is not None else 1
    if decoder.experts is not None and not (traits and traits.mixtures):
        raise UnsupportedLayer(
            f"experts are products of the FP8 flow alone, and linear layers are in {format_name}",
            "mixture_of_another_format",
        )
    if traits is None:
        for linear in decoder.linears:
            for name in linear.pieces:
                plans[name] = LinearPlan(name, linear.kind, *shapes[name], UNQUANTIZED, "no linear layer is quantized")
        return plans
    first = ""
    for linear in decoder.linears:
        reason = "it is BF16 in every format" if linear.bf16 else _unfit(shapes, linear.pieces, tp, traits.block)
        if reason and not linear.bf16 and (linear.experts or unfit_layers != "skip"):
            of = "expert" if linear.experts else "layer"
            largest = _largest(decoder, hf_config, tp, traits.block)
            if largest is None:
                raise UnsupportedLayer(reason, f"{of}_shape")
            raise UnsupportedLayer(f"{reason}, as they are over {largest}", f"{of}_shard_shape", largest)
        first = first or ("" if linear.bf16 else reason)
        for name in linear.pieces:
            count = experts if linear.experts else 1
            number_format = UNQUANTIZED if reason else format_name
            plans[name] = LinearPlan(name, linear.kind, *shapes[name], number_format, reason, count)
    if not any(plan.quantized for plan in plans.values()):
        raise UnsupportedLayer(f"none of its linear layers fits the FP8 flow ({first})", "no_layer_fits")
    return plans


def plan_of(name: str, plans: Mapping[str, LinearPlan]) -> LinearPlan | None:
    """Plan of a module or parameter of a decoder layer (``model.layers.3.<suffix>[.weight]``); None for other names."""
    at = place(name)
    return plans.get(at.module) if at is not None else None
