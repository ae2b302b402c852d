# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records of rollouts over several GPUs and of small micro-batches, and the rates of ``jetrl advise`` fitted to them: a
sum over the GPUs of a replica (benchmarks/reduce_ranks.py), and what a layer of a micro-batch takes of the host
(benchmarks/micro_batches.py)."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial

import numpy as np

from benchmarks.advise_steps import CACHE, COLUMN_OF_ROW, Record, Replaced, column_of, given, key_of, recorded
from benchmarks.recipe_memory import sizes_of
from jetrl_verl.formats.catalog import UNQUANTIZED
from jetrl_verl.tools.advise.gpus import GPUS, MEASURED
from jetrl_verl.tools.advise.job import Job
from jetrl_verl.tools.advise.predict import precisions
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.rollout import generate
from jetrl_verl.tools.advise.shapes import BF16, KNOWN, model_of
from jetrl_verl.tools.advise.trainer import BF16_SHARED, JET, STOCK, Batch, log_probs, update
from jetrl_verl.tools.rows import parse_row

REDUCTIONS = (("reduce.2", 2, "stock"), ("reduce.4", 4, "stock"), ("reduce.4.ordered", 4, "one stage"))
"""Rate, ranks, and the way of benchmarks/reduce_ranks.py."""
MICRO_BATCHES = "micro_batches_1_7b_h200.json"
HOSTS = {"bf16": "stock", "jet_fp8": "fp8", "jet_fp8+jetrl.gathered=batch": "fp8.kept"}
"""Row of benchmarks/micro_batches.py -> whose host."""
LAYERS = {
    "stock.kept": ("batch", "bf16"),
    "shared": ("pass", "bf16_shared"),
    "shared.kept": ("batch", "bf16_shared"),
}
"""Whose host -> run and row of benchmarks/layer_host_time.py that has its part of stock BF16's."""
LAYER_FLOWS = {"bf16": STOCK, "bf16_shared": BF16_SHARED, "jet_fp8": JET}
"""Row of benchmarks/layer_host_time.py -> what its trainer runs."""
PHASES = {"log_probs": "old log-probabilities", "update": "update"}
ENGINES = {"h200": "engine_over_ranks_h200.json", "h100": "engine_over_ranks_h100.json"}
"""GPU -> record of benchmarks/engine_over_ranks.py."""
CALIBRATING = ("h100", "bf16", 1)
"""GPU, row and TP of the engine that says how much slower another GPU's memory is."""
BESIDE_A_START = Replaced(
    "an engine beside which another one was starting on the same GPU, as before bc7129f", ("1f16a230",)
)
"""The first one of those that took turns with TP 1, ``jet_fp8``."""
LAYERS_ON = {"h200": "layer_host_time_fsdp_pass_1_7b_h200.json", "h100": "layer_host_time_fsdp_1_7b_h100.json"}
"""GPU -> record of benchmarks/layer_host_time.py, weights gathered in each pass."""
LAYER = (2048, 512)
"""Tokens of its micro-batch, and of a sequence."""
PROMPT, SAMPLES = 141, 4
"""Tokens of a prompt in the mean, and responses to each, of benchmarks/verl_step.py."""


def fit_reductions(put: Callable[..., None]) -> None:
    """Seconds of a sum in a CUDA graph by its bytes; least squares of relative errors."""
    for name, ranks, way in REDUCTIONS:
        file = f"reduce_ranks_{ranks}_h200.json"
        found = recorded(file)
        ours = [each for each in found["records"] if each["way"] == way and each["captured"]]
        seconds = np.array([1e-6 * each["us"] for each in ours])
        moved = np.array([BF16 * found["columns"] * each["rows"] for each in ours])
        (start, a_byte), *_ = np.linalg.lstsq(
            np.stack([1 / seconds, moved / seconds], 1), np.ones(len(ours)), rcond=None
        )
        put(name, start, "s", f"{file}, {way}, up to {max(each['rows'] for each in ours)} rows")
        put(f"{name}.byte", a_byte, "s/B", f"{file}, {way}")


def _micro_batches(tokens: str) -> int:
    """How many micro-batches of so many tokens a pass has in :data:`MICRO_BATCHES`."""
    found = recorded(MICRO_BATCHES)
    return -(-found["sequences"] // (int(tokens) // found["length"]))


@cache
def host_of(phase: str) -> tuple[dict[str, float], float]:
    """Of a phase of :data:`MICRO_BATCHES`: row -> seconds of the host for a layer and micro-batch, and those that no
    row and no micro-batch changes. Least squares of relative errors; at both sizes the GPU waits to the end."""
    found = recorded(MICRO_BATCHES)
    layers = model_of(found["model"], KNOWN["qwen3-1.7b"]).layers
    rows, left = [], []
    for place, row in enumerate(HOSTS):
        for tokens, took in found["rows"][row]["tokens"].items():
            work = np.zeros(len(HOSTS) + 1)
            work[place], work[-1] = layers * _micro_batches(tokens), 1.0
            rows.append(work / statistics.median(took[phase]))
            left.append(1.0)
    *seconds, rest = np.linalg.lstsq(np.array(rows), np.array(left), rcond=None)[0]
    return dict(zip(HOSTS, map(float, seconds), strict=True)), float(rest)


def fit_host(put: Callable[..., None]) -> None:
    """What a layer of a micro-batch takes of the host: in verl's engine, or its part of stock BF16's by the layer."""

    def of_layer(run: str, row: str) -> float:
        found = recorded(f"layer_host_time_fsdp_{run}_1_7b_h200.json")
        return statistics.median(found["precisions"][row]["tokens"]["2048"]["step"])

    for phase in PHASES:
        seconds, _ = host_of(phase)
        for row, name in HOSTS.items():
            put(
                f"host.{name}.{phase}", seconds[row], "s", f"{MICRO_BATCHES}, {row}, 2048 and 4096 tokens a micro-batch"
            )
        for name, (run, row) in LAYERS.items():
            part = of_layer(run, row) / of_layer("pass", "bf16")
            how = f"stock BF16's, times {row}'s part of it in layer_host_time_fsdp_{run}_1_7b_h200.json"
            put(f"host.{name}.{phase}", seconds["bf16"] * part, "s", how)


def host_records() -> Iterable[Record]:
    """verl's engine by itself, with small micro-batches; what no micro-batch changes is as it was fitted."""
    found = recorded(MICRO_BATCHES)
    model = model_of(found["model"], KNOWN["qwen3-1.7b"])
    flows = {"bf16": STOCK, "jet_fp8": JET, "jet_fp8+jetrl.gathered=batch": JET}
    for phase, name in PHASES.items():
        _, rest = host_of(phase)
        for row, flow in flows.items():
            for tokens, took in found["rows"][row]["tokens"].items():
                batch = Batch(found["sequences"] * found["length"], found["length"], _micro_batches(tokens))
                of_phase = partial(
                    {"log_probs": log_probs, "update": update}[phase],
                    model=model, flow=flow, batch=batch, gathers=1 if "gathered" in row else None,
                )  # fmt: skip
                yield Record(
                    name,
                    f"verl's engine, 1.7B, micro-batches of {tokens}, {row}",
                    statistics.median(took[phase]),
                    MICRO_BATCHES,
                    lambda rates, of_phase=of_phase, rest=rest: of_phase(rates).total + rest,
                    calibrates=True,
                )


def engine_records() -> Iterable[Record]:
    """Engines alone, all requests from the start, a group's prompt prefilled once."""
    for gpu in ENGINES:
        yield from _engines_on(gpu)


def fit_memory(put: Callable[..., None], rates: Callable[..., Rates]) -> None:
    """Bytes a second of another GPU's memory, by the seconds of an engine: the fewer, the longer it takes."""
    gpu, row, tp = CALIBRATING
    (engine,) = [record for record in _engines_on(gpu) if record.calibrates]
    low, high = 1e11, rates()["bandwidth"]

    def seconds(bandwidth: float) -> float:
        return engine.predict(rates(**{GPUS[gpu].bandwidth: bandwidth, GPUS[gpu].between: 1.0}))

    assert seconds(low) > engine.measured > seconds(high), "its memory is slower than an H200's, and not by so much"
    while high - low > 1e6:
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) > engine.measured else (low, middle)
    put(GPUS[gpu].bandwidth, low, "B/s", f"{ENGINES[gpu]}, {row}, TP {tp}")
    _fit_between(put, rates(), gpu)


def _fit_between(put: Callable[..., None], rates: Rates, gpu: str) -> None:
    """How many times as long what lies between a trainer's GEMMs takes on another GPU: by the GPU's seconds of layers,
    of which GEMMs and attention stay and weights go by bytes. Least squares of relative errors."""
    ours, theirs = (recorded(LAYERS_ON[each])["precisions"] for each in (MEASURED, gpu))
    tokens, length = LAYER
    layers = replace(model_of("1.7b", KNOWN["qwen3-1.7b"]), vocabulary=0)
    slower = rates["bandwidth"] / rates[GPUS[gpu].bandwidth]
    grows, left = [], []
    for row, flow in LAYER_FLOWS.items():
        mine, other = (found[row]["tokens"][str(tokens)]["kernels"] for found in (ours, theirs))
        parts = update(rates, layers, flow, Batch(tokens, length, 1))
        whole = parts.total - parts.host
        times = other / mine
        grows.append(parts.between / whole / times)
        left.append(1 - (parts.gemm + parts.attention + slower * parts.weights) / whole / times)
    (longer,), *_ = np.linalg.lstsq(np.array(grows)[:, None], np.array(left), rcond=None)
    how = f"{LAYERS_ON[gpu]} over {LAYERS_ON[MEASURED]}, the GPU's seconds of three rows"
    put(GPUS[gpu].between, longer, "times an H200's seconds", how)


def _engines_on(gpu: str) -> Iterable[Record]:
    file = ENGINES[gpu]
    found = recorded(file)
    assert key_of(found["gpu"]) == gpu
    for run in found["runs"]:
        if run["status"] or (name := column_of(run["row"])) is None:
            continue
        tp, kept = run["tp"], given(parse_row(run["row"], COLUMN_OF_ROW).settings)
        lengths = [float(found["response"])] * found["sequences"]
        sizes = sizes_of(run["model"], None, tp)
        prompts, cache_of = found["sequences"] // SAMPLES, kept.get(CACHE, UNQUANTIZED)
        job = Job(
            sizes, prompts, SAMPLES, PROMPT, lengths[0], PROMPT, found["response"], gpus=tp, tp=tp, kv_cache=cache_of
        )
        (precision,) = [each for each in precisions(job, True) if each.name == name]

        def seconds(rates: Rates, of=(sizes, precision.engine, lengths)) -> float:
            return generate(rates.on(gpu), *of, PROMPT, prefill_share=1 / SAMPLES).seconds

        over = f"TP {tp}" if gpu == MEASURED else f"TP {tp}, {gpu.upper()}"
        yield Record(
            "generation",
            f"{run['model']}, an engine of {over}, {found['sequences']} x {found['response']}, {run['row']}",
            found["sequences"] * found["response"] / run["tokens_per_s"],
            file,
            seconds,
            calibrates=(gpu, run["row"], tp) == CALIBRATING,
            caveat=BESIDE_A_START.in_build(run["build"]) if (run["row"], tp) == ("jet_fp8", 1) else "",
        )
