# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Predictions as tables for a reader, and as JSON."""

import math
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl.config.support.scopes import ACTOR
from jetrl_verl.formats.catalog import QUANTIZED_CACHES, UNQUANTIZED, cache_traits
from jetrl_verl.tools.advise.gpus import GPUS
from jetrl_verl.tools.advise.job import Job, as_mapping
from jetrl_verl.tools.advise.memory import GIB, held_bytes, trainer_memory
from jetrl_verl.tools.advise.predict import PHASES, Prediction, batches
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.settings import Finding, unseen
from jetrl_verl.tools.advise.trainer import JET

SHOWN = ("bf16", "jet_fp8")
"""Columns that are looked into."""

LEAST_WAIT = 0.02
"""Share of a step from which on it is said that the GPU waits for its host."""

CONTEXTS = 3.7 * GIB
"""Of a GPU's memory: two processes' contexts, NCCL, CUDA graphs. With a trainer at rest beside a rollout of 8B, TP 4,
58.2 GiB of an H100 were in use where both are 54.5, and 82.4 of an H200 where they are 78.8."""

LARGER_BY = 2048
"""Tokens by which larger micro-batches are looked for."""


def warnings(job: Job, predictions: list[Prediction]) -> list[str]:
    """What the numbers alone do not say."""
    found = []
    batch, update, scored, trained = batches(job)
    if job.model.experts is not None:
        # A forward for the old log-probabilities; a forward and a backward for the update.
        passes = batch.micro + 2 * update.micro * job.epochs
        if job.gathers_once:
            passes = 1 + job.mini_batches * job.epochs
        gathered = passes * 2 * job.model.in_layers
        found.append(
            "a mixture of experts is predicted from rates of dense layers, so its seconds are rough (docs/advise.md): "
            "tokens are taken to be spread evenly over the experts, and FSDP's gathers of whole layers, "
            f"{gathered / 1e9:.0f} GB a GPU and step, are in no prediction"
            + ("." if job.gathers_once else "; larger micro-batches make them fewer.")
        )
    shown = [each for each in predictions if each.precision in SHOWN]
    waits = {each.precision: each.waits for each in shown if each.waits > LEAST_WAIT * each.step}
    if waits:
        said = " and ".join(f"{seconds:.1f} s under {name}" for name, seconds in waits.items())
        several = max(batch.micro, update.micro / job.mini_batches) > 1
        advice = larger_micro_batches(job) + gathered_once(job, predictions) if several else "a step has no more."
        found.append(
            f"micro-batches of {min(scored, trained):.0f} tokens: in a step the GPU waits for its host {said}; {advice}"
        )
    for each in predictions:
        if math.isinf(each.step):
            found.append(
                f"{each.precision}: the KV cache holds {each.rollout.tokens:.0f} tokens, less than one sequence of "
                f"{job.longest_prompt + job.longest_response}; raise gpu_memory_utilization or the rollout's tensor "
                "parallelism."
            )
    short = {each.precision: each for each in predictions if each.schedule.preemptions}
    if short:
        counts = ", ".join(f"{each.schedule.preemptions} under {name}" for name, each in short.items())
        holds = "; ".join(sorted({f"{each.running:.0f}" for each in short.values()}))
        found.append(
            f"the KV cache of a replica holds {holds} sequences of mean length and {job.most} may run, so requests are "
            f"preempted and prefilled again ({counts}); raise gpu_memory_utilization or lower max_num_seqs."
        )
    first = predictions[0]
    most = max(predictions, key=lambda each: each.trainer.peak)
    if most.trainer.peak + CONTEXTS > job.gpu_bytes:
        held = job.gathers_once and most.trainer.peak > first.trainer.peak
        found.append(
            f"an update needs {most.trainer.peak / GIB:.0f} GiB of a GPU's {job.gpu_bytes / GIB:.0f} under "
            f"{most.precision}; use smaller micro-batches, more GPUs, offload, "
            + ("jetrl.gathered=pass, or 8-bit moments." if held else "or 8-bit moments.")
        )
    resting = first.trainer.state + job.utilization * job.gpu_bytes + CONTEXTS
    if resting > job.gpu_bytes:
        found.append(
            f"weights and moments of the trainer ({first.trainer.state / GIB:.0f} GiB) and gpu_memory_utilization="
            f"{job.utilization:g} exceed a GPU; offload them (param_offload, optimizer_offload) or lower it to "
            f"{math.floor(100 * max(0.0, 1 - (first.trainer.state + CONTEXTS) / job.gpu_bytes)) / 100:.2f}."
        )
    return found


def larger_micro_batches(job: Job) -> str:
    """How large the micro-batches of an update may be, as what to set: what 0.9 of a GPU's memory holds under every
    precision, in steps of 2048 tokens, or of a sequence where the job counts sequences."""
    length = job.longest_prompt + job.longest_response
    step = LARGER_BY if job.micro_tokens is not None else length
    has = job.sequences / job.gpus / job.mini_batches * (job.prompt + job.response if job.packed else length)

    def peak(tokens: int) -> float:
        shards = job.shards or job.gpus
        return trainer_memory(
            job.model,
            shards,
            tokens,
            checkpointing=job.checkpointing,
            eight_bit=job.eight_bit,
            shared=False,
            held=held_bytes(job.model, JET) if job.gathers_once else 0.0,
        ).peak

    counts = range(max(1, math.ceil(has / step)), math.ceil(length / step) - 1, -1)
    count = next((count for count in counts if peak(count * step) <= 0.9 * job.gpu_bytes), None)
    if count is None:
        return "make them larger."
    if job.micro_tokens is not None:
        return f"make them larger: {count * step} tokens fit, {ACTOR}.ppo_max_token_len_per_gpu={count * step}."
    return f"make them larger: {count} sequences fit, {ACTOR}.ppo_micro_batch_size_per_gpu={count}."


def gathered_once(job: Job, predictions: list[Prediction]) -> str:
    """What ``jetrl.gathered=batch`` would take of a GPU under ``jet_fp8``, where 0.9 of it has the room; else empty."""
    jet = next((each.trainer for each in predictions if each.precision == "jet_fp8"), None)
    if jet is None or job.gathers_once:
        return ""
    more = held_bytes(job.model, JET)
    if jet.peak + more > 0.9 * job.gpu_bytes:
        return ""
    return (
        " Or gather and quantize weights once for all micro-batches, jetrl.gathered=batch under FSDP2, for "
        f"{more / GIB:.1f} GiB of each GPU under jet_fp8."
    )


def _seconds(value: float) -> str:
    if math.isinf(value):
        return "does not fit"
    return "-" if value == 0 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def cache_sentences(job: Job, caches: dict[str, Prediction]) -> list[str]:
    """What an FP8 KV cache is worth to ``jet_fp8``, and what it costs.

    Args:
        caches: the step with either one, by the values of ``jetrl.kv_cache``; empty where there is no choice.
    """
    if not caches:
        return []
    (other,) = QUANTIZED_CACHES
    bf16, small = caches[UNQUANTIZED], caches[other.name]

    def step(each: Prediction) -> str:
        if math.isinf(each.step):
            return "does not fit"
        return (
            f"a step of {each.step:.1f} s, generation {each.phases['generation'].seconds:.1f} s of it with "
            f"{each.schedule.preemptions} preemptions"
        )

    sizes = (
        f"{job.model.kv_bytes(other.name)} bytes a token instead of {job.model.kv_bytes()}, so that a replica "
        f"holds {small.rollout.tokens / 1e3:.0f}k tokens instead of {bf16.rollout.tokens / 1e3:.0f}k"
    )
    chosen = "is chosen" if cache_traits(job.kv_cache).quantized else "is not chosen"
    return [
        f"jetrl.kv_cache={other.name} {chosen}. With it jet_fp8 has {sizes}, and {step(small)}; with a BF16 cache "
        f"{step(bf16)}.",
        "It costs jet_fp8 no exactness: the trainer's attention sees the same keys and values. Under a baseline the "
        "rollout alone has it, which adds to the mismatch. Its own rounding: docs/log/kv_cache.md.",
    ]


def render(
    job: Job,
    rates: Rates,
    predictions: list[Prediction],
    settings: list[Finding] | None,
    caches: dict[str, Prediction],
    console: Console,
) -> None:
    """Print all there is.

    Args:
        settings: None where no settings were given. caches: see :func:`cache_sentences`.
    """

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    size = f"{job.model.parameters / 1e9:.2f}B parameters"
    if job.model.experts is not None:
        size += f" ({(job.model.active + job.model.head) / 1e9:.2f}B for a token)"
    say(
        f"{job.model.name}: {size}, {job.prompts} prompts x {job.samples} responses, up to {job.longest_prompt} + "
        f"{job.longest_response} tokens, {job.gpus} x {GPUS[job.gpu].name}, rollout TP {job.tp}"
    )
    table = Table(title="a step, seconds", box=SIMPLE_HEAD)
    table.add_column("phase")
    for each in predictions:
        table.add_column(each.precision, justify="right")
    for phase in PHASES:
        if phase != "reference" or job.reference:
            table.add_row(phase, *(_seconds(each.phases[phase].seconds) for each in predictions))
    table.add_row("step", *(_seconds(each.step) for each in predictions), style="bold")
    table.add_row("gain over bf16", *(_gain(predictions[0], each) for each in predictions))
    console.print(table)

    table = Table(title="what takes most of each phase", box=SIMPLE_HEAD)
    shown = [each for each in predictions if each.precision in SHOWN]
    for heading in ("phase", *(each.precision for each in shown)):
        table.add_column(heading)
    for phase in PHASES[:4]:
        if phase != "reference" or job.reference:
            table.add_row(phase, *(each.phases[phase].limit for each in shown))
    table.add_row("generation, alone at its end", *(f"{each.schedule.tail:.1f} s" for each in shown))
    console.print(table)

    table = Table(title="memory of one GPU, GiB", box=SIMPLE_HEAD)
    table.add_column("what")
    for each in predictions:
        table.add_column(each.precision, justify="right")
    for name, of in _MEMORY:
        if not any(of(each) for each in predictions):
            continue
        table.add_row(name, *(f"{of(each):.1f}" for each in predictions))
    table.add_row("sequences of mean length in the cache", *(f"{each.running:.0f}" for each in predictions))
    table.add_row("requests that run at once, at most", *(f"{each.schedule.running}" for each in predictions))
    console.print(table)

    for sentence in warnings(job, predictions):
        say(f"! {sentence}")
    if settings is not None:
        say("Settings that cost something:" if settings else "No setting is refused or costs exactness.")
        for finding in settings:
            say(f"  {finding.effect}: {finding.message}")
    say(unseen())
    for sentence in cache_sentences(job, caches):
        say(sentence)
    for sentence in job.notes:
        say(f"Assumed: {sentence}")
    say(f"Rates: {rates.machine}. {rates.builds_note()}")
    if rates.older:
        say(rates.older_note())
    say("Equations, errors and what is not covered: docs/advise.md.")


_MEMORY = (
    ("trainer: weights FP32", lambda each: each.trainer.weights / GIB),
    ("trainer: gradients", lambda each: each.trainer.gradients / GIB),
    ("trainer: optimizer", lambda each: each.trainer.moments / GIB),
    ("trainer: activations", lambda each: each.trainer.checkpoints / GIB),
    ("trainer: logits and their gradient", lambda each: each.trainer.logits / GIB),
    ("trainer: gathered layers and what is beside them", lambda each: each.trainer.gathered / GIB),
    ("trainer: experts' rows of a layer", lambda each: each.trainer.rows / GIB),
    ("trainer: peak", lambda each: each.trainer.peak / GIB),
    ("rollout: weights", lambda each: each.rollout.weights / GIB),
    ("rollout: KV cache", lambda each: each.rollout.cache / GIB),
)


def _gain(first: Prediction, each: Prediction) -> str:
    if math.isinf(first.step) or math.isinf(each.step):
        return "-"
    return f"{first.step / each.step:.2f}x"


def as_json(
    job: Job,
    rates: Rates,
    predictions: list[Prediction],
    settings: list[Finding] | None,
    caches: dict[str, Prediction],
) -> dict[str, Any]:
    """The same for a program; seconds that are not finite are null."""

    def number(value: float) -> float | None:
        return float(value) if math.isfinite(value) else None

    return {
        "machine": rates.machine,
        "builds": rates.builds_note(),
        "older_rates": rates.older,
        "job": {name: list(v) if isinstance(v, tuple) else v for name, v in as_mapping(job).items()},
        "precisions": {
            each.precision: {
                "step_s": number(each.step),
                "gain_over_bf16": number(predictions[0].step / each.step) if math.isfinite(each.step) else None,
                "phases": {
                    name: {
                        "seconds": number(phase.seconds),
                        "limit": phase.limit,
                        "parts_s": {part: number(value) for part, value in phase.parts.items()},
                    }
                    for name, phase in each.phases.items()
                },
                "tail_s": number(each.schedule.tail),
                "preemptions": each.schedule.preemptions,
                "requests_at_once": each.schedule.running,
                "memory_bytes": {
                    "trainer_weights": each.trainer.weights,
                    "trainer_gradients": each.trainer.gradients,
                    "trainer_optimizer": each.trainer.moments,
                    "trainer_activations": each.trainer.checkpoints,
                    "trainer_logits": each.trainer.logits,
                    "trainer_gathered": each.trainer.gathered,
                    "trainer_rows": each.trainer.rows,
                    "trainer_peak": each.trainer.peak,
                    "rollout_weights": each.rollout.weights,
                    "rollout_cache": each.rollout.cache,
                },
                "sequences_in_cache": number(each.running),
            }
            for each in predictions
        },
        "jet_fp8_by_kv_cache": {
            held: {
                "step_s": number(each.step),
                "generation_s": number(each.phases["generation"].seconds),
                "preemptions": each.schedule.preemptions,
                "bytes_per_token": job.model.kv_bytes(held),
                "tokens": each.rollout.tokens,
            }
            for held, each in caches.items()
        },
        "warnings": warnings(job, predictions),
        "unseen": unseen(),
        "settings": None if settings is None else [{"effect": s.effect, "message": s.message} for s in settings],
    }
