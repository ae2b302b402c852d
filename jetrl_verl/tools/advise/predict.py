# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A step of a job under one precision: seconds of its phases, what limits each, bytes of memory."""

from dataclasses import dataclass, replace

import numpy as np

from jetrl_verl.config.precision import group_values
from jetrl_verl.formats.catalog import CACHES, FLOW, UNQUANTIZED
from jetrl_verl.tools.advise.job import Job
from jetrl_verl.tools.advise.memory import RolloutMemory, TrainerMemory, held_bytes, rollout_memory, trainer_memory
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.rollout import Engine, Schedule, generate, response_lengths
from jetrl_verl.tools.advise.sync import sync_parts
from jetrl_verl.tools.advise.trainer import (
    BF16_SHARED,
    JET,
    JET_STOCK,
    LIGER,
    STOCK,
    Batch,
    Flow,
    Pass,
    log_probs,
    optimizer,
    update,
    verls_work,
)

POLL = 0.05
"""Seconds between two looks of the trainer at the replay buffer (docs/options.md)."""

SHARED = "bf16_shared"
STOCK_VERL = ("bf16", "bf16, Liger")
"""Columns that run without this project's settings, so no setting refuses them."""

PHASES = ("generation", "old log-probabilities", "reference", "update", "weight sync", "rest")

WORDS = {
    "weights": "bytes of the weights",
    "gemm": "GEMM operations",
    "cache": "reads of the KV cache",
    "layers": "latency of a layer's small kernels",
    "requests": "work for each request: sampling, many rows",
    "prefill": "prefill of the prompts",
    "preempted": "preemption: the cache is short",
    "attention": "attention operations",
    "between": "bytes between the GEMMs",
    "gathered": "casts and quantization of the weights, once a micro-batch",
    "verl": "verl's own work around it",
    "optimizer": "bytes of the optimizer's state",
    "launches": "launches: stacks of weights, or tensor by tensor",
    "moved": "bytes of the weights",
    "probes": "probes of the contract check",
    "gathers": "gathers between the GPUs",
    "gpus": "weights that cross the host to its further GPUs",
    "reductions": "sums over the GPUs of a replica",
    "host": "waiting for the host, whose work goes by layers and micro-batches",
}


@dataclass(frozen=True)
class Precision:
    """What runs under a name of the report.

    Attributes:
        trainer: of the actor. reference: of the reference policy. engine: what decodes.
    """

    name: str
    trainer: Flow
    reference: Flow
    engine: Engine


def precisions(job: Job, shared: bool) -> tuple[Precision, ...]:
    """The columns of the report.

    Args:
        shared: whether nothing in the job makes the operations of ``jet_fp8`` stock.
    """
    bf16, liger = (replace(flow, varlen=job.varlen) for flow in (LIGER if job.liger else STOCK, LIGER))
    shared = shared and not job.stock
    if job.model.experts is not None:
        return _of_a_mixture(job, bf16, shared)
    jet = JET if shared else replace(Flow(FLOW, "liger") if job.liger else JET_STOCK, varlen=job.varlen)
    jet = replace(jet, backward=job.backward)
    tp, ours = job.tp, {"tp": job.tp, "kv_cache": job.kv_cache}
    found = [Precision("bf16", bf16, bf16, Engine(UNQUANTIZED, tp=tp))]
    if not job.liger:
        found.append(Precision("bf16, Liger", liger, liger, Engine(UNQUANTIZED, tp=tp)))
    if shared:
        found.append(Precision(SHARED, BF16_SHARED, bf16, Engine(UNQUANTIZED, shared=True, **ours)))
    return (
        *found,
        Precision("fp8_rollout", bf16, bf16, Engine(FLOW, **ours)),
        Precision("jet_fp8", jet, jet if job.fp8_reference else bf16, Engine(FLOW, shared=shared, **ours)),
        Precision("int8_rollout", bf16, bf16, Engine(group_values("int8_rollout").jetrl.rollout, **ours)),
    )


def _of_a_mixture(job: Job, bf16: Flow, shared: bool) -> tuple[Precision, ...]:
    """What runs a mixture of experts: the FP8 flow with shared operations, and BF16; its Liger kernels have no record.

    The routers of stock operations choose differently in trainer and rollout, so ``jet_fp8`` is refused there.
    """
    found = [Precision("bf16", bf16, bf16, Engine(UNQUANTIZED, tp=job.tp))]
    ours = {"tp": job.tp, "kv_cache": job.kv_cache}
    found.append(Precision("fp8_rollout", bf16, bf16, Engine(FLOW, **ours)))
    if shared:
        reference = JET if job.fp8_reference else bf16
        found.append(Precision("jet_fp8", JET, reference, Engine(FLOW, shared=True, **ours)))
    return tuple(found)


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Attributes:
        seconds: predicted. parts: of them, by what they are spent on, words of ``WORDS``.
    """

    seconds: float
    parts: dict[str, float]

    @property
    def limit(self) -> str:
        """What takes most of it, with its share; empty for a phase that there is not."""
        if not self.parts or self.seconds <= 0:
            return ""
        part = max(self.parts, key=self.parts.__getitem__)
        return f"{WORDS[part]} ({self.parts[part] / self.seconds:.0%})"


@dataclass(frozen=True)
class Prediction:
    """A step under one precision.

    Attributes:
        phases: by the names of ``PHASES``. schedule: of the generation. trainer, rollout: bytes of one GPU.
        running: requests of a replica that its cache holds at the end of their mean response.
    """

    precision: str
    phases: dict[str, Phase]
    schedule: Schedule
    trainer: TrainerMemory
    rollout: RolloutMemory
    running: float

    @property
    def step(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def waits(self) -> float:
        """Seconds in which a trainer's GPU waits for its host, its micro-batches being small."""
        return sum(phase.parts.get("host", 0.0) for phase in self.phases.values())


def batches(job: Job) -> tuple[Batch, Batch, float, float]:
    """What a GPU scores and trains in a step, and the largest tokens of a micro-batch of each."""
    if job.packed:
        lengths = response_lengths(job.sequences, job.response, job.longest_response) + job.prompt
    else:
        lengths = np.full(job.sequences, float(job.longest_prompt + job.longest_response))
    tokens = float(lengths.sum()) / job.gpus
    weighted = float((lengths**2).sum() / lengths.sum())
    sequences = job.sequences_of_a_gpu

    def cut(most_tokens: int | None, most_sequences: int | None, times: int) -> tuple[Batch, float]:
        if most_tokens is not None:
            most = max(float(most_tokens), float(lengths.max()))
            micro = max(times, np.ceil(tokens / most))
            return Batch(tokens, weighted, micro), min(most, tokens / times)
        micro = times * np.ceil(sequences / times / most_sequences)
        return Batch(tokens, weighted, micro), min(float(lengths.max()) * most_sequences, tokens / times)

    scored, most_scored = cut(job.log_prob_tokens, job.log_prob_sequences, 1)
    trained, most_trained = cut(job.micro_tokens, job.micro_sequences, job.mini_batches)
    return scored, trained, most_scored, most_trained


def predict(rates: Rates, job: Job, precision: Precision) -> Prediction:
    """A step of the job, on its GPUs."""
    rates = rates.on(job.gpu)
    model, kind = job.model, precision.engine.linears
    memory = rollout_memory(
        model,
        kind,
        job.utilization,
        gpu_bytes=job.gpu_bytes,
        most=job.most,
        batched_tokens=job.batched_tokens,
        tp=job.tp,
        kv_cache=precision.engine.kv_cache,
    )
    schedule = _generation(rates, job, precision.engine, memory)
    scored, trained, _, most_trained = batches(job)

    once = job.gathers_once and precision.name not in STOCK_VERL
    gathers = 1 if once else None
    old = log_probs(rates, model, precision.trainer, scored, gathers=gathers)
    reference = log_probs(rates, model, precision.reference, scored, gathers=gathers) if job.reference else None
    new = update(
        rates,
        model,
        precision.trainer,
        trained,
        checkpointing=job.checkpointing,
        epochs=job.epochs,
        gathers=job.mini_batches if once else None,
    )
    adamw = optimizer(rates, model, job.shards or job.gpus, job.mini_batches * job.epochs)
    sync = sync_parts(rates, model, kind, precision.name not in STOCK_VERL, job.of_one_host)
    scoring = verls_work(rates, "verl.old_log_prob", job.sequences_of_a_gpu)
    phases = {
        "generation": Phase(
            schedule.seconds + POLL / 2,
            {**schedule.spent, "prefill": schedule.prefill, "preempted": schedule.preempted},
        ),
        "old log-probabilities": _with(old, scoring),
        "reference": Phase(0.0, {}) if reference is None else _with(reference, scoring),
        "update": _with(new, verls_work(rates, "verl.update", job.sequences_of_a_gpu * job.epochs), adamw),
        "weight sync": Phase(sum(sync.values()), sync),
        "rest": Phase(rates["verl.rest"], {"verl": rates["verl.rest"]}),
    }
    peak = trainer_memory(
        model,
        job.shards or job.gpus,
        int(most_trained),
        checkpointing=job.checkpointing,
        eight_bit=job.eight_bit,
        shared=precision.trainer.operations == "shared",
        held=held_bytes(model, precision.trainer) if once else 0.0,
    )
    fits = memory.sequences(job.prompt + job.response)
    return Prediction(precision.name, phases, schedule, peak, memory, fits)


def with_each_cache(rates: Rates, job: Job, precision: Precision) -> dict[str, Prediction]:
    """The step with either KV cache, by the values of ``jetrl.kv_cache``."""
    return {
        held: predict(rates, job, replace(precision, engine=replace(precision.engine, kv_cache=held)))
        for held in CACHES
    }


def _with(passes: Pass, verl: float, adamw: float = 0.0) -> Phase:
    parts = {
        "gemm": passes.gemm,
        "attention": passes.attention,
        "between": passes.between,
        "gathered": passes.weights,
        "host": passes.host,
        "optimizer": adamw,
        "verl": verl,
    }
    return Phase(sum(parts.values()), parts)


def _generation(rates: Rates, job: Job, engine: Engine, memory: RolloutMemory) -> Schedule:
    """The replica with the longest response; all others end before it."""
    replicas = job.gpus // job.tp
    requests = -(-job.sequences // replicas)
    lengths = response_lengths(requests, job.response, job.longest_response)
    # A prompt that several of a group's requests share is prefilled once on each replica that they reach.
    copies = min(job.samples, replicas) if job.prefix_caching else job.samples
    if memory.tokens < job.longest_prompt + job.longest_response:
        return Schedule(seconds=float("inf"))
    return generate(
        rates,
        job.model,
        engine,
        lengths,
        job.prompt,
        cache_tokens=memory.tokens,
        most=job.most,
        prefill_share=copies / job.samples,
    )
