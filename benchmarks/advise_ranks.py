# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records of rollouts over several GPUs and of small micro-batches, and the rates of ``jetrl advise`` fitted to them: a
sum over the GPUs of a replica (benchmarks/reduce_ranks.py), and what a layer of a micro-batch takes of the host
(benchmarks/micro_batches.py)."""

import json
import statistics
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from benchmarks.advise_steps import COLUMN_OF_ROW, RESULTS, Record
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.rollout import Engine, generate
from jetrl_verl.tools.advise.shapes import BF16, KNOWN, Model, model_of

REDUCTIONS = (("reduce.2", 2, "stock"), ("reduce.4", 4, "stock"), ("reduce.4.ordered", 4, "one stage"))
"""Rate, ranks, and the way of benchmarks/reduce_ranks.py."""
MICRO_BATCHES = "micro_batches_1_7b_h200.json"
HOSTS = {"bf16": "host.bf16", "jet_fp8": "host.fp8", "jet_fp8+jetrl.gathered=batch": "host.fp8.kept"}
"""Row of benchmarks/micro_batches.py -> rates."""
ENGINES = "engine_over_ranks_h200.json"
PROMPT, SAMPLES = 141, 4
"""Tokens of a prompt in the mean, and responses to each, of benchmarks/verl_step.py."""


@cache
def recorded(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


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


def fit_host(put: Callable[..., None]) -> None:
    """Seconds of the host for a layer and micro-batch: what two sizes of a micro-batch differ by, of the same tokens.
    At both the GPU waits for its host to the end."""
    found = recorded(MICRO_BATCHES)
    model = model_of(found["model"], KNOWN["qwen3-1.7b"])
    small, large = sorted(found["rows"]["bf16"]["tokens"], key=int)
    count = {tokens: -(-found["sequences"] // (int(tokens) // found["length"])) for tokens in (small, large)}
    for row, name in HOSTS.items():
        took = found["rows"][row]["tokens"]
        for phase in ("log_probs", "update"):
            more = statistics.median(took[small][phase]) - statistics.median(took[large][phase])
            seconds = more / (count[small] - count[large]) / model.layers
            put(f"{name}.{phase}", seconds, "s", f"{MICRO_BATCHES}, {row}, {small} and {large} tokens a micro-batch")


def engine_records(model: Model) -> Iterable[Record]:
    """Engines of ``model``, all requests from the start, a group's prompt prefilled once."""
    found = recorded(ENGINES)
    for run in found["runs"]:
        column, tp = COLUMN_OF_ROW[run["row"]], run["tp"]
        linears = "bf16" if column == "bf16" else "fp8"
        engine = Engine(linears, shared=column == "jet_fp8", tp=tp)

        def seconds(rates: Rates, engine: Engine = engine) -> float:
            lengths = [found["response"]] * found["sequences"]
            return generate(rates, model, engine, lengths, PROMPT, prefill_share=1 / SAMPLES).seconds

        yield Record(
            "generation",
            f"8B, an engine over {tp}, {found['sequences']} x {found['response']}, {run['row']}",
            found["sequences"] * found["response"] / run["tokens_per_s"],
            ENGINES,
            seconds,
        )
