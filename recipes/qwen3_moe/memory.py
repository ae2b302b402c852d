# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the memory tables of README.md, counted from the model's shapes as ``jetrl advise`` counts them.

python3 -m recipes.qwen3_moe.memory
"""

from jetrl_verl.tools.advise.gpus import GPUS
from jetrl_verl.tools.advise.memory import GIB, rollout_weights, trainer_memory
from jetrl_verl.tools.advise.shapes import KNOWN, model_of

MODEL = model_of("qwen3-30b-a3b", KNOWN["qwen3-30b-a3b"])
CARDS = {"80 GB": GPUS["h100"].memory / GIB, "H200": GPUS["h200"].memory / GIB}
"""GPU -> GiB that CUDA shows of it."""

SHARE = 0.95
"""Of a GPU's memory that a peak may take: the rest is what the allocator, CUDA and NCCL hold."""

TRAINED = ((8, 32768, False), (8, 16384, False), (8, 16384, True), (16, 16384, False), (16, 16384, True))
"""GPUs, tokens of a micro-batch, whether moments have 8 bits."""


def trainer_rows() -> list[tuple[str, ...]]:
    """One row of cells for each of ``TRAINED``, GiB."""
    rows = []
    for gpus, tokens, eight_bit in TRAINED:
        found = trainer_memory(MODEL, gpus, tokens, eight_bit=eight_bit)
        fits = ", ".join(name for name, memory in CARDS.items() if found.peak / GIB <= SHARE * memory) or "none"
        parts = (
            *(found.weights, found.gradients, found.moments),
            *(found.gathered, found.checkpoints, found.logits, found.rows, found.peak),
        )
        moments = "8 bits" if eight_bit else "FP32"
        rows.append((str(gpus), str(tokens), moments, *(f"{part / GIB:.1f}" for part in parts), fits))
    return rows


def rollout_rows() -> list[tuple[str, ...]]:
    """Weights of one GPU of the rollout by precision, GiB."""
    names = {"`bf16`": "bf16", "`fp8_rollout`, `jet_fp8`": "fp8"}
    return [
        (name, *(f"{rollout_weights(MODEL, kind) / tp / GIB:.1f}" for tp in (1, 2))) for name, kind in names.items()
    ]


def table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown."""
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables() -> str:
    """Both, as README has them."""
    trainer = (
        *("GPUs", "tokens", "moments", "weights", "gradients", "optimizer", "whole layers", "checkpoints", "logits"),
        *("rows", "peak", "fits"),
    )
    return "\n\n".join((table(trainer, trainer_rows()), table(("rollout", "TP 1", "TP 2"), rollout_rows())))


if __name__ == "__main__":
    print(tables())
