# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How much of a GPU's memory a run of a recipe plans with, so that several runs share one GPU: counted as ``jetrl
memory`` counts.

A run's peak is the larger of two: an update, where the rollout sleeps (weights, gradients, moments, one micro-batch),
and generation, where weights and moments wait (the rollout's weights, its cache, the buffer of the weight sync).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.published_shapes import fields_of
from jetrl_verl.config.support.scopes import ROLLOUT
from jetrl_verl.formats.catalog import UNQUANTIZED

if TYPE_CHECKING:
    from jetrl_verl.tools.memory.shapes import Model

GIB = 2**30
CACHE = 4 * GIB
"""Of keys and values: 8 layers of an 8B model keep 131,072 tokens in it, 28 of the 1.5B model 149,796."""

BUCKET = 2 * GIB
"""verl's ``update_weights_bucket_megabytes``, lent by the trainer while weights are sent."""

HELD = 5 * GIB
"""Two processes' CUDA contexts, NCCL, CUDA graphs, and what torch's allocator keeps in pieces."""


def words_of_cache(size: int) -> tuple[str, ...]:
    """Overrides of a rollout that starts while others do on the same GPU: vLLM asks for a share of it at its start, and
    takes a cache of ``size`` bytes whatever that is."""
    return f"{ROLLOUT}.gpu_memory_utilization=0.05", f"++{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={size}"


def sizes_of(name: str, layers: int | None, tp: int = 1) -> "Model":
    """Sizes of a shape of ``PUBLISHED``, with fewer layers if so many are named, for a rollout of ``tp`` ranks."""
    from jetrl_verl.tools.memory.shapes import model_of  # torch, which the program of a run does not need

    return model_of(name, fields_of(name, layers), tp)


@dataclass(frozen=True)
class Plan:
    """GiB of one run: parts, and the sums of an update and of generation; ``peak`` is what the run takes of the GPU."""

    weights: float
    gradients: float
    moments: float
    micro_batch: float
    rollout: float
    cache: float
    held: float
    update: float
    generation: float

    @property
    def peak(self) -> float:
        return max(self.update, self.generation)


def plan(
    name: str,
    layers: int | None,
    micro_tokens: int,
    eight_bit: bool,
    *,
    shards: int = 1,
    ranks: int = 1,
    offloads: bool = False,
) -> Plan:
    """What a run needs of each GPU. A BF16 rollout is counted, the larger one.

    Args:
        shards: GPUs that FSDP shards over. ranks: of a replica of the rollout. offloads: whether weights and moments
        are on the host while the rollout works.
    """
    from jetrl_verl.tools.memory.terms import rollout_weights, state, update

    model = sizes_of(name, layers)
    trainer = update(model, shards, micro_tokens, eight_bit=eight_bit)
    rollout, peak = rollout_weights(model, UNQUANTIZED) / ranks, sum(trainer.values())
    kept = [trainer[term] for term in ("FP32 weights", "gradients", "optimizer moments")]
    parts = (*kept, peak - sum(kept), rollout, CACHE, HELD)
    waits = 0.0 if offloads else sum(state(model, shards, eight_bit).values())
    return Plan(
        *(part / GIB for part in parts),
        update=(peak + HELD) / GIB,
        generation=(waits + rollout + CACHE + BUCKET + HELD) / GIB,
    )


def table_of_plans(plans: Mapping[str, tuple[Sequence[str], Plan]]) -> Table:
    """A row for each run: its name, words on it, and the parts of its plan in GiB."""
    columns = ("weights", "gradients", "moments", "micro_batch", "rollout", "cache", "held", "update", "generation")
    shown = Table(box=SIMPLE_HEAD, title="GiB of the GPU that a run plans with")
    for name in ("recipe", "model", "layers", "moments in", "tokens"):
        shown.add_column(name, no_wrap=True)
    for column in columns:
        shown.add_column(column.replace("_", "-"), justify="right")
    for name, (words, each) in plans.items():
        shown.add_row(name, *words, *(f"{getattr(each, column):.1f}" for column in columns))
    return shown
