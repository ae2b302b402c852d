# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which linear layers of a decoder are quantized: the one rule that trainer, rollout and start-up checks all ask.

A layer is quantized on both sides or on neither. Whether it *can* be depends on its shape and on how the rollout shards
it: every tensor-parallel shard, and every piece of a merged projection (q/k/v, gate/up), must be a multiple of 128 in
both dimensions, because a 128x128 block never crosses a shard. So the plan is made from the model's configuration and
the rollout's tensor-parallel size alone, before a process is started, and pieces that vLLM merges stand or fall
together. A size that does not fit is refused with the largest one that does. Names and shapes come from the model's
family (models/families/base.py). Embeddings, norms, rotary, the attention core and ``lm_head`` stay BF16 by contract.
Where the rollout's linear layers are BF16 (``precision=bf16_shared``), none is quantized and every shape fits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jetrl_verl.formats.catalog import FLOW, UNQUANTIZED
from jetrl_verl.models.families import family
from jetrl_verl.models.families.base import Family, Shape, UnsupportedLayer, place, read
from jetrl_verl.reference.constants import BLOCK


@dataclass(frozen=True)
class LinearPlan:
    """One projection of every decoder layer.

    Attributes:
        suffix: the trainer's name of it below a decoder layer.
        kind: of the layer that it is part of in vLLM, under which metrics list it.
        n: output features of the whole layer. k: input features of the whole layer.
        shard_n: output features per tensor-parallel rank. shard_k: input features per rank.
        quantized: whether it is quantized on both sides.
        reason: why not, empty when it is.
        experts: how many experts of a mixture have one each, stacked in one parameter; 1 for a linear layer.
    """

    suffix: str
    kind: str
    n: int
    k: int
    shard_n: int
    shard_k: int
    quantized: bool
    reason: str = ""
    experts: int = 1


def _unfit(shapes: Mapping[str, Shape], pieces: Iterable[str], tp: int) -> str:
    """Which of ``pieces`` does not fit 128x128 blocks on each of ``tp`` ranks, and how; empty if all do."""
    for name in pieces:
        n, k, shard_n, shard_k = shapes[name]
        if n % shard_n or k % shard_k or shard_n % BLOCK or shard_k % BLOCK:
            return (
                f"layer {name} has shards of shape [{shard_n}, {shard_k}] (whole [{n}, {k}], tensor parallel "
                f"size {tp}) and both must be multiples of {BLOCK}"
            )
    return ""


def _largest(ours: Family, hf_config: Any, tp: int, quantized: bool) -> int | None:
    """The largest size below ``tp`` at which heads and, where they are ``quantized``, all layers fit; None without one.

    A divisor of ``tp``, so that the GPUs of the job hold whole replicas of it.
    """
    for size in (size for size in range(tp - 1, 0, -1) if tp % size == 0):
        shapes = ours.shapes(hf_config, size)
        if ours.deals_heads(hf_config, size) and not (quantized and _unfit(shapes, ours.projections, size)):
            return size
    return None


def plan_linears(
    hf_config: Any, tp: int = 1, *, unfit_layers: str = "stop", format_name: str = FLOW
) -> dict[str, LinearPlan]:
    """Decide for every projection of a decoder whether it is quantized.

    Args:
        hf_config: Hugging Face configuration, object or mapping.
        tp: tensor-parallel size of the rollout.
        unfit_layers: ``"stop"`` raises at the first projection that does not fit; ``"skip"`` leaves it, and what is
            merged with it, BF16 on both sides.
        format_name: of the linear layers, a number format or ``UNQUANTIZED``.

    Returns:
        suffix -> plan, in the family's order: q, k, v, o, gate, up, down; of a mixture q, k, v, o and the parameters of
        its experts.

    Raises:
        UnsupportedLayer: unknown architecture; heads that ``tp`` ranks cannot share; a shape that does not fit under
            ``"stop"``, or of experts; under ``"skip"``, no projection left.
    """
    ours = family(hf_config)
    ours.check(hf_config)
    if not ours.deals_heads(hf_config, tp):
        heads = read(hf_config, "num_attention_heads")
        fits = _largest(ours, hf_config, tp, format_name != UNQUANTIZED and unfit_layers != "skip")
        fits = fits or _largest(ours, hf_config, tp, False)
        raise UnsupportedLayer(
            f"its {heads} heads over {read(hf_config, 'num_key_value_heads', heads)} key heads are not divided by {tp} "
            "ranks of the rollout",
            "rollout_ranks_of_the_heads",
            largest=fits,
        )
    shapes = ours.shapes(hf_config, tp)
    plans: dict[str, LinearPlan] = {}
    experts = ours.experts.number(hf_config) if ours.experts is not None else 1
    if ours.experts is not None and format_name != FLOW:
        raise UnsupportedLayer(
            f"experts are products of the FP8 flow alone, and linear layers are in {format_name}",
            "mixture_of_another_format",
        )
    if format_name == UNQUANTIZED:
        for linear in ours.linears:
            for name in linear.pieces:
                plans[name] = LinearPlan(name, linear.kind, *shapes[name], False, "no linear layer is quantized")
        return plans
    first = ""
    for linear in ours.linears:
        reason = _unfit(shapes, linear.pieces, tp)
        if reason and (linear.experts or unfit_layers != "skip"):
            of = "expert" if linear.experts else "layer"
            fits = _largest(ours, hf_config, tp, True)
            if fits is None:
                raise UnsupportedLayer(reason, f"{of}_shape")
            raise UnsupportedLayer(f"{reason}, as they are over {fits}", f"{of}_shard_shape", largest=fits)
        first = first or reason
        for name in linear.pieces:
            count = experts if linear.experts else 1
            plans[name] = LinearPlan(name, linear.kind, *shapes[name], not reason, reason, count)
    if not any(plan.quantized for plan in plans.values()):
        raise UnsupportedLayer(f"none of its linear layers fits the FP8 flow ({first})", "no_layer_fits")
    return plans


def plan_of(name: str, plans: Mapping[str, LinearPlan]) -> LinearPlan | None:
    """Plan of a module or parameter of a decoder layer (``model.layers.3.<suffix>[.weight]``), None for other names."""
    found = place(name)
    return plans.get(found.module) if found is not None else None
