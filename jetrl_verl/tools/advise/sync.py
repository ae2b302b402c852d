# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a weight sync: what both sides launch, the bytes that they move, and what verl does around it.

Equations: docs/advise.md, "Weight sync". verl's own sync handles each tensor by itself. Ours handles stacks: of several
decoder layers, what is equally wide is gathered, quantized, judged, summed and sent as one (sync/stacks.py).
"""

import math
from dataclasses import dataclass

from jetrl_verl.formats.catalog import UNQUANTIZED
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.rollout import WEIGHT_BYTES
from jetrl_verl.tools.advise.shapes import BF16, Model
from jetrl_verl.train.gather import TOGETHER_BYTES

FP32 = 4
LOADS_OF_A_LAYER = 4
"""Scales of a layer's attention that vLLM sets behind every load, under every precision."""


def spans(model: Model, together: int = TOGETHER_BYTES) -> int:
    """Parts of the decoder that ours gathers at once: as many whole layers as fit ``together`` bytes of BF16, but one
    at least."""
    layers = max(1, int(together // (BF16 * model.in_layers / model.layers)))
    return math.ceil(model.layers / layers)


def stacks(model: Model, together: int = TOGETHER_BYTES, quantized: bool | None = None) -> int:
    """Tensors that ours sends, scales and sums aside: of each span one for each width, one of its vectors, and two of
    each layer's experts; embedding, last norm and a head of its own.

    Args:
        quantized: count those alone that are, or are not, where it is given.
    """
    widths = {(k, fits) for _, k, fits in model.linears}
    of_experts = [fits for _, _, fits in model.experts.linears] if model.experts is not None else []
    counts = {
        True: spans(model, together) * sum(fits for _, fits in widths) + model.layers * sum(of_experts),
        False: spans(model, together) * (1 + sum(not fits for _, fits in widths))
        + model.layers * sum(not fits for fits in of_experts)
        + (2 if model.tied else 3),
    }
    return sum(counts.values()) if quantized is None else counts[quantized]


@dataclass(frozen=True)
class Work:
    """What both sides of one sync do.

    Attributes:
        launches: operators of torch that both sides call, views apart. moved: bytes read and written.
        gathers: collectives, where several GPUs share the weights. held: bytes that a trainer's rank sends, as
            they are held.
    """

    launches: float
    moved: float
    gathers: int
    held: float


def stock_work(model: Model) -> Work:
    """verl's own sync: each tensor copied into a bucket in FP32 and out of it into BF16, a head that is the embedding
    under both names."""
    tensors = model.tensors_of_verl
    parameters = model.in_layers + 2 * model.head
    launches, moved = 2 * tensors + LOADS_OF_A_LAYER * model.layers, (2 * FP32 + FP32 + BF16) * parameters
    return Work(launches, moved, tensors, BF16 * model.parameters)


def work(rates: Rates, model: Model, kind: str) -> Work:
    """Our sync: the cast of the shards; of a quantized weight its quantization; then what is sent is judged, summed,
    copied into a bucket and out of it, and summed again where it lies."""
    quantized = model.quantized if kind != UNQUANTIZED else 0
    sent = BF16 * (model.parameters - quantized) + WEIGHT_BYTES[kind] * quantized
    moved = (FP32 + BF16) * model.parameters + (BF16 + WEIGHT_BYTES[kind]) * quantized + 7 * sent
    launches = rates["sync.launches"] + rates["sync.launches_of_a_stack"] * stacks(model)
    return Work(launches + LOADS_OF_A_LAYER * model.layers, moved, spans(model) + 2, sent)


def sync_parts(rates: Rates, model: Model, kind: str, ours: bool, gpus: int) -> dict[str, float]:
    """Seconds of verl's ``update_weights`` with the contract check, by what they are spent on, after the first ones,
    which compile kernels.

    Args:
        kind: format of the rollout's linears. ours: whether the sync is ours, as under every precision but BF16's.
        gpus: of one host. On each a trainer's rank sends all weights to the rollout's worker beside it, which takes its
            part of them.
    """
    done = work(rates, model, kind) if ours else stock_work(model)
    return {
        "launches": done.launches * rates["sync.ours.launch" if ours else "sync.verl.launch"],
        "moved": done.moved / rates["bandwidth"],
        "probes": rates["sync.probes"] if ours else 0.0,
        "gathers": done.gathers * rates["sync.gather"] if gpus > 1 else 0.0,
        "gpus": (gpus - 1) * done.held * rates["sync.gpu"] if gpus > 1 else 0.0,
        "verl": rates["verl.sync"],
    }


def sync_seconds(rates: Rates, model: Model, kind: str, ours: bool, gpus: int) -> float:
    """The sum of :func:`sync_parts`."""
    return sum(sync_parts(rates, model, kind, ours, gpus).values())
