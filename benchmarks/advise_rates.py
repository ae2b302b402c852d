# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The rates behind ``jetrl advise``, fitted to part of the records, and the predictions held against the others.

    python -m benchmarks.advise_rates                       # the table of docs/advise.md, prediction against record
    python -m benchmarks.advise_rates --write               # rates.json of the package, the table into docs/advise.md
    python -m benchmarks.advise_rates OUT/verl_step.json    # of what benchmarks/verl_step.py has just measured

Records are the JSON files of benchmarks/results and, where a run left none, figures of docs/log. A record either
calibrates or checks, never both; of those of benchmarks/verl_step.py (``results/verl_step*_h*00.json``) two rows of two
jobs calibrate what verl does around a phase, all others check. No GPU.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.advise_ranks import engine_records, fit_host, fit_memory, fit_reductions, host_records
from benchmarks.advise_steps import (
    CALIBRATING,
    CALIBRATING_ROWS,
    OLD_LOGITS,
    OLD_ROLLOUT,
    OLD_SYNC,
    RESULTS,
    Record,
    fit_verl,
    recorded,
    shipped_records,
    step_records,
)
from benchmarks.advise_sync import LAUNCHES, fit_gpus, fit_sync, sync_records
from benchmarks.pages import with_written
from jetrl_verl.tools.advise import rates as of_package
from jetrl_verl.tools.advise.memory import GIB, trainer_memory
from jetrl_verl.tools.advise.rates import Rates, rates_of
from jetrl_verl.tools.advise.rollout import Engine, decode_step, generate, prefill
from jetrl_verl.tools.advise.shapes import KNOWN, Model, model_of
from jetrl_verl.tools.advise.sync import sync_seconds
from jetrl_verl.tools.advise.trainer import (
    JET,
    JET_STOCK,
    LIGER,
    STOCK,
    Batch,
    Flow,
    attention_operations,
    between_bytes,
    forward,
    gathered,
    log_probs,
    optimizer,
    update,
    verls_work,
)
from jetrl_verl.tools.bench.shapes import MODELS
from jetrl_verl.tools.provenance import builds_in

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "advise.md"
MACHINE = "one NVIDIA H200, torch 2.11.0+cu130, vLLM 0.24.0"
BAR = 0.15
SHIPPED = RESULTS / "recipes_shipped_h200.json"

_RECORD = re.compile(r"[\w/]+\.(?:json|md)")
COMMITS_BY_LOG = {
    "decode_h200.json": "1d44199",
    "docs/log/several_gpus.md": "6bfcf29",
    "docs/log/step_time.md": "e299c5b",
    "exact_cost_h200.json": "93d7124",
    "full_fprop_dgrad_h200.json": "c4dd3d3",
    "full_wgrad_h200.json": "c4dd3d3",
    "phase_shares_h200.json": "1d44199",
}
"""Of records that name no build themselves, and of figures of the log."""

OLD_LAUNCHES = "a trainer whose layers took 1.24 to 1.35 times stock BF16's work on the host, as before 3ef25ed"
READING = "docs/log/step_time.md, independent reading at e299c5b"
SEVERAL = "docs/log/several_gpus.md, 6bfcf29"
BF16, FP8, INT8 = Engine("bf16"), Engine("fp8", shared=True), Engine("int8")
FP8_CACHE = Engine("fp8", shared=True, kv_cache="fp8")

EIGHT = model_of("qwen3-8b", KNOWN["qwen3-8b"])
FOUR = model_of("qwen3-4b", KNOWN["qwen3-4b"])
DEMO_1_4B = model_of(
    "1.4b", KNOWN["qwen3-1.7b"] | {"vocab_size": 99, "num_attention_heads": 16, "num_key_value_heads": 8}
)
"""Policy of benchmarks/several_gpus.py."""

TRAINING_READ = ((16, 1024, 1.503, 1.81, 1.50), (4, 4096, 1.694, 1.76, 1.48), (1, 16384, 2.440, 1.62, 1.45))
"""Sequences, their tokens, seconds of ``jet_fp8``, and how many times those stock BF16 and BF16 with Liger took."""
DECODE_READ = ((1, 1024, 269, 1.38), (32, 384, 8284, 1.54), (32, 4096, 3895, 1.21), (256, 384, 21844, 1.19))
"""Requests, tokens of context, tokens/s of ``jet_fp8``, and its gain over BF16."""
IN_VERL = {
    "bf16": {"generation": 14.07, "old": 4.0, "update": 13.2, "sync": (0.29, 0.41), "step": 31.7},
    "jet_fp8": {"generation": 14.07, "old": 2.8, "update": 8.5, "sync": (0.57, 0.76), "step": 26.1},
}
"""4B, 64 sequences of 2048 tokens, one GPU, verl. Its micro-batches and prompts are not on record: 2048 tokens are
taken as those of prompt and response together, and micro-batches as 16,384 tokens. The replay buffer was asked every
2 s."""


def poll(seconds: float) -> float:
    """When a replay buffer that is asked every 2 s sees the end; the readings say 14.07 s for seven."""
    return 2 * np.ceil(seconds / 2) + 0.07


def results(name: str) -> dict:
    return recorded(f"{name}_h200.json")


def _gemm_records(what: str, name: str) -> list[dict]:
    """Of 8,192 and 16,384 tokens, written to BF16."""
    found = results("full_wgrad" if what == "wgrad" else "full_fprop_dgrad")["records"]
    tokens = "k" if what == "wgrad" else "m"
    ours = [r for r in found if r["what"] == what and name in r["model"].split("+") and r["out"] == "bf16"]
    return [r for r in ours if r[tokens] in (8192, 16384)]


def _gemm_seconds(what: str, name: str, contender: str) -> float:
    event = results("full_wgrad" if what == "wgrad" else "full_fprop_dgrad")["event_us"]
    return sum(1e-6 * (r["us"][contender]["median"] - event) for r in _gemm_records(what, name))


def _gemm_operations(what: str, name: str) -> float:
    return sum(2.0 * r["m"] * r["n"] * r["k"] for r in _gemm_records(what, name))


def training_records() -> Iterable[Record]:
    """Bare training: no FSDP, no optimizer, no verl."""

    def bare(flow: Flow, sequences: int, length: int, phase: str) -> Callable[[Rates], float]:
        batch = Batch(sequences * length, length, 1)

        def seconds(rates: Rates) -> float:
            old = log_probs(rates, EIGHT, flow, batch, sharded=False).total
            new = update(rates, EIGHT, flow, batch, sharded=False).total
            return {"old": old, "update": new, "both": old + new}[phase]

        return seconds

    for name in MODELS:
        for kind, contender in (("bf16", "bf16"), ("fp8", "native")):
            for what in ("fprop", "dgrad", "wgrad"):
                yield Record(
                    "GEMM",
                    f"{name}, {what}, {kind}",
                    _gemm_seconds(what, name, contender),
                    "full_wgrad_h200.json" if what == "wgrad" else "full_fprop_dgrad_h200.json",
                    lambda r, w=what, n=name, k=kind: _gemm_operations(w, n) / r[f"gemm.{k}.{w}"],
                    calibrates=name == "qwen3-8b",
                )
    shares = results("phase_shares")
    for precision, flow in (("bf16", STOCK), ("jet_fp8", JET)):
        for length in (1024, 4096, 16384):
            tokens = 512 + length
            sequences = 16896 // tokens
            for phase, key in (("old", "old_log_prob"), ("update", "update")):
                yield Record(
                    {"old": "old log-probabilities", "update": "update"}[phase],
                    f"8B, {sequences} x {tokens}, {precision}",
                    shares["training"][precision][key][str(length)] * sequences * tokens,
                    "phase_shares_h200.json",
                    bare(flow, sequences, tokens, phase),
                    calibrates=length != 4096,
                )
    cost = results("exact_cost")["training"]
    for precision, flow in (("bf16", STOCK), ("jet_fp8_stock", JET_STOCK), ("jet_fp8", JET)):
        for phase, key in (("old", "old_log_prob"), ("update", "update")):
            yield Record(
                {"old": "old log-probabilities", "update": "update"}[phase],
                f"8B, 8 x 1024, {precision}",
                cost[precision][key],
                "exact_cost_h200.json",
                bare(flow, 8, 1024, phase),
            )
    for sequences, length, seconds, stock, liger in TRAINING_READ:
        for name, flow, times in (("jet_fp8", JET, 1.0), ("bf16", STOCK, stock), ("bf16 with Liger", LIGER, liger)):
            yield Record(
                "old log-probabilities + update",
                f"8B, {sequences} x {length}, {name}",
                seconds * times,
                READING,
                bare(flow, sequences, length, "both"),
                calibrates=flow is LIGER and sequences == 16,
            )
    yield Record(
        "optimizer", "8B, AdamW", shares["optimiser_s"], "phase_shares_h200.json",
        lambda r: optimizer(r, EIGHT, 1, 1), calibrates=True,
    )  # fmt: skip


def rollout_records() -> Iterable[Record]:
    def step(name: str, engine: Engine, requests: int, context: float, seconds: float, source: str, **more) -> Record:
        return Record(
            "decode step",
            f"8B, {requests} x {context:.0f}, {name}",
            seconds,
            source,
            lambda r: decode_step(r, EIGHT, engine, requests, requests * context).total,
            **more,
        )

    shares = results("phase_shares")["rollout"]
    for context, seconds in shares["bf16"]["step_s"].items():
        # 64 steps from that context on.
        ends = context in ("512", "16896")
        yield step("bf16", BF16, 32, int(context) + 32, seconds, "phase_shares_h200.json", calibrates=ends)
    cost = results("exact_cost")["decode"]
    for name, engine in (("bf16", BF16), ("jet_fp8_stock", Engine("fp8"))):
        for key, found in cost[name]["rates"].items():
            requests, prompt = map(int, key.split(" x "))
            seconds = requests / found["tokens_per_s"]
            calibrates = requests == 256 or (name != "bf16" and requests == 16)
            # 256 steps from that prompt on.
            yield step(name, engine, requests, prompt + 128, seconds, "exact_cost_h200.json", calibrates=calibrates)
    ample = results("decode")["ample"]
    for name, engine in (("bf16", BF16), ("int8_rollout", INT8)):
        for key, rate in ample[name].items():
            requests, prompt = map(int, key.split(" x "))
            calibrates = requests == 1 or (engine is INT8 and requests == 256)
            seconds = requests / rate
            yield step(name, engine, requests, prompt + 128, seconds, "decode_h200.json", calibrates=calibrates)
    kv_cache = results("decode_kv_cache")
    for name, engine in (("bf16", BF16), ("jet_fp8", FP8), ("jet_fp8_kv_fp8", FP8_CACHE)):
        for key, found in kv_cache["ample"][name]["behind_last_layer"].items():
            requests, prompt = map(int, key.split(" x "))
            # By the profiler's clock, 12 of the first 20 steps: tokens/s of this record are differences of generations.
            source = "decode_kv_cache_h200.json"
            caveat = OLD_ROLLOUT.in_build(kv_cache["build"]) if engine.shared else ""
            yield step(name, engine, requests, prompt + 14, 1e-6 * found["step_us"], source, caveat=caveat)
    bf16_cache = results("decode_bf16_cache")["ample"]
    for name, engine in (("bf16", BF16), ("jet_fp8", FP8)):
        for case in ("32 x 384", "256 x 384"):
            requests, prompt = map(int, case.split(" x "))
            # 64 steps from that prompt on, timed one by one.
            source, calibrates = "decode_bf16_cache_h200.json", name == "jet_fp8"
            yield step(
                name, engine, requests, prompt + 32, requests / bf16_cache[name][case], source, calibrates=calibrates
            )  # fmt: skip
    for requests, context, rate, gain in DECODE_READ:
        yield step("jet_fp8", FP8, requests, context, requests / rate, READING, caveat=OLD_ROLLOUT.said)
        yield step("bf16", BF16, requests, context, requests * gain / rate, READING)
    for name, engine in (("bf16", BF16), ("jet_fp8", FP8)):
        yield Record(
            "prefill",
            f"8B, 32 x 512, {name}",
            shares[name]["prefill_s"],
            "phase_shares_h200.json",
            lambda r, e=engine: prefill(r, EIGHT, e, 32 * 512, 256),
            calibrates=name == "bf16",
        )
    short = results("decode")["short"]
    for name, engine in (("bf16", BF16), ("int8_rollout", INT8), ("jet_fp8", FP8)):
        tokens = short[name]["kv_gib"] * GIB / EIGHT.kv_bytes()
        old = "a decode kernel of 1d44199, since replaced: its steps of one request took 1.15 times as long"
        yield Record(
            "generation, cache too short",
            f"8B, 192 x (64 + 1024) in {short[name]['kv_gib']:.1f} GiB, {name}",
            192 * 1024 / short[name]["tokens_per_s"],
            "decode_h200.json",
            lambda r, e=engine, t=tokens: generate(r, EIGHT, e, [1024] * 192, 64, cache_tokens=t).seconds,
            caveat=old if name == "jet_fp8" else "",
        )


def verl_parts(rates: Rates, precision: str) -> dict[str, float]:
    """Seconds of each phase of the 4B run in verl."""
    flow, engine = {"bf16": (STOCK, BF16), "jet_fp8": (JET, FP8)}[precision]
    sequences = 64
    batch = Batch(sequences * 2048, 2048, 8)
    scoring, updating = (verls_work(rates, name, sequences) for name in ("verl.old_log_prob", "verl.update"))
    return {
        "generation": poll(generate(rates, FOUR, engine, [2048] * sequences, 0).seconds),
        "old": log_probs(rates, FOUR, flow, batch).total + scoring,
        "update": update(rates, FOUR, flow, batch).total + optimizer(rates, FOUR, 1, 1) + updating,
        "sync": sync_seconds(rates, FOUR, engine.linears, engine.shared, 1),
        "rest": rates["verl.rest"],
    }


def verl_records() -> Iterable[Record]:
    words = {"generation": "generation", "old": "old log-probabilities", "update": "update", "sync": "weight sync"}
    replaced = {
        "generation": OLD_ROLLOUT.said,
        "old": OLD_LOGITS.said,
        "update": OLD_LOGITS.said,
        "sync": OLD_SYNC.said,
    }
    for precision, found in IN_VERL.items():
        for part, phase in words.items():
            measured = found[part]
            yield Record(
                phase,
                f"verl, 4B, 64 x 2048, {precision}",
                sum(measured) / 2 if isinstance(measured, tuple) else measured,
                READING,
                lambda r, p=precision, w=part: verl_parts(r, p)[w],
                caveat=replaced.get(part, "") if precision == "jet_fp8" else "",
            )
        yield Record(
            "step", f"verl, 4B, 64 x 2048, {precision}", found["step"], READING,
            lambda r, p=precision: sum(verl_parts(r, p).values()),
            caveat=OLD_ROLLOUT.said if precision == "jet_fp8" else "",
        )  # fmt: skip
    for gpus, precision, seconds, arrangement in (
        (2, "bf16", 0.43, "FSDP2"), (2, "jet_fp8", 0.99, "FSDP2"), (4, "bf16", 0.53, "FSDP2"), (2, "bf16", 0.30, "TP 2")
    ):  # fmt: skip
        ours = precision != "bf16"
        other = "" if arrangement == "FSDP2" else "GPUs on which another job computed"
        yield Record(
            "weight sync",
            f"verl, 1.4B, {gpus} GPUs, {arrangement}, {precision}",
            seconds,
            SEVERAL,
            lambda r, o=ours, g=gpus: sync_seconds(r, DEMO_1_4B, "fp8" if o else "bf16", o, g),
            calibrates=gpus == 2 and precision == "bf16" and arrangement == "FSDP2",
            caveat=OLD_SYNC.said if ours else other,
        )
    for precision, flow, seconds in (("bf16", STOCK, 2.75), ("jet_fp8", JET, 4.35)):
        yield Record(
            "update",
            f"verl, 1.4B, 2 GPUs, micro-batches of 32 x 70 tokens, {precision}",
            seconds,
            SEVERAL,
            lambda r, f=flow: update(r, DEMO_1_4B, f, Batch(128 * 70, 70, 4)).total + verls_work(r, "verl.update", 128),
            caveat=OLD_LAUNCHES if flow is JET else "",
        )


def memory_records() -> Iterable[Record]:
    """Peaks: of bare training above weights and gradients, of a trainer in verl in all."""

    def passing(model: Model, tokens: int, shared: bool) -> float:
        found = trainer_memory(model, 1, tokens, shared=shared)
        return (found.checkpoints + found.logits) / GIB

    cost, shares = results("exact_cost")["training"], results("phase_shares")["training"]
    for precision in ("bf16", "jet_fp8"):
        shared, caveat = precision != "bf16", OLD_LOGITS.said if precision != "bf16" else ""
        yield Record(
            "memory", f"8B, peak of 8 x 1024, {precision}", cost[precision]["peak_gib"], "exact_cost_h200.json",
            lambda r, s=shared: passing(EIGHT, 8192, s), caveat=caveat,
        )  # fmt: skip
        for length in (1024, 4096, 16384):
            tokens = 16896 // (512 + length) * (512 + length)
            yield Record(
                "memory", f"8B, peak of {tokens // (512 + length)} x {512 + length}, {precision}",
                shares[precision]["peak_gib"][str(length)],
                "phase_shares_h200.json", lambda r, t=tokens, s=shared: passing(EIGHT, t, s), caveat=caveat,
            )  # fmt: skip
    seen = set()
    for run in results("several_gpus")["runs"]:
        case = (run["gpus"], run["arrangement"], run["precision"])
        if run["arrangement"] in ("fsdp2", "hsdp") and case not in seen:
            seen.add(case)
            shards = 2 if run["arrangement"] == "hsdp" else run["gpus"]
            yield Record(
                "memory",
                f"verl, 1.4B, peak of a trainer, {run['gpus']} GPUs, {run['arrangement']}, {run['precision']}",
                run["peak_gib"],
                "several_gpus_h200.json",
                lambda r, s=shards: trainer_memory(DEMO_1_4B, s, 32 * 72).peak / GIB,
            )


def records() -> list[Record]:
    steps = sorted(RESULTS.glob("verl_step*_h[12]00.json"))
    every = (training_records(), host_records(), rollout_records(), engine_records(), sync_records(), verl_records())
    every = (*every, memory_records())
    return [*(one for records_ in every for one in records_), *step_records(steps), *shipped_records(SHIPPED)]


def fit() -> dict[str, dict]:
    """Every rate with its unit and how it follows, in the order in which they are fitted."""
    found: dict[str, dict] = {}

    def put(name: str, value: float, unit: str, how: str, older: str = "") -> None:
        found[name] = {"value": float(f"{value:.6g}"), "unit": unit, "from": how} | ({"older": older} if older else {})

    def rates(**others: float) -> Rates:
        return Rates({name: entry["value"] for name, entry in found.items()}).including(others)

    def record(phase: str, case: str) -> float:
        (one,) = [r for r in records() if r.phase == phase and r.case == case and r.calibrates]
        return one.measured

    copy = results("full_fprop_dgrad")["copy_bandwidth"]
    put("bandwidth", copy, "B/s", "full_fprop_dgrad_h200.json, copy, read and written")
    for kind, contender in (("bf16", "bf16"), ("fp8", "native")):
        for what in ("fprop", "dgrad", "wgrad"):
            rate = _gemm_operations(what, "qwen3-8b") / _gemm_seconds(what, "qwen3-8b", contender)
            file = "full_wgrad_h200.json" if what == "wgrad" else "full_fprop_dgrad_h200.json"
            put(f"gemm.{kind}.{what}", rate, "operations/s", f"{file}, Qwen3-8B's linears, 8k and 16k tokens, c4dd3d3")
    fit_host(put)
    fit_reductions(put)
    put("gemm.int8.fprop", found["gemm.fp8.fprop"]["value"], "operations/s", "as gemm.fp8.fprop: no record of INT8")

    _fit_training(put, rates, record)
    _fit_decode(put, rates)

    fit_sync(put, rates)
    fit_verl(put, rates)
    of_several = [(DEMO_1_4B, 2, "verl, 1.4B, 2 GPUs, FSDP2, bf16"), (EIGHT, 4, "verl, gsm8k, 4 GPUs, 64 x 5, bf16")]
    fit_gpus(
        put,
        rates,
        [(model, gpus, record("weight sync", case)) for model, gpus, case in of_several],
        f"{SEVERAL}, 1.4B BF16 on 2 GPUs, and {SHIPPED.name}, 8B BF16 on 4",
    )
    fit_memory(put, rates)
    return found


def builds(fitted: Mapping[str, Mapping]) -> dict[str, list[dict | None]]:
    """Record, with its commit where the log alone has it -> the builds that made it (None: not recorded), of every
    record that a rate's ``from`` names."""
    found = {}
    for name in sorted({name for entry in fitted.values() for name in _RECORD.findall(entry["from"])}):
        record = recorded(name) if name.endswith(".json") else {}
        # Benchmarks of verl write a build for each run.
        of_runs = {run["build"]["sources_sha256"]: run["build"] for run in record.get("runs", ())
                   if "build" in run and (name not in CALIBRATING or run["row"] in CALIBRATING_ROWS)}  # fmt: skip
        made_by = list(of_runs.values()) or builds_in(record)
        found[name if None not in made_by else f"{name} (log: {COMMITS_BY_LOG[name]})"] = made_by
    return found


def _fit_training(put, rates, record) -> None:
    tokens = {length: 16896 // (512 + length) * (512 + length) for length in (1024, 16384)}
    source = "phase_shares_h200.json, responses of 1024 and 16384 tokens, 1d44199"
    for precision, flow, ops in (("bf16", STOCK, "stock"), ("jet_fp8", JET, "shared")):
        case = f"8B, {{}} x {{}}, {precision}"
        cases = {length: case.format(16896 // (512 + length), 512 + length) for length in tokens}
        weights = gathered(rates(), EIGHT, flow, sharded=False).total
        # Seconds a token, the weights' share taken off.
        ahead = {n: (record("old log-probabilities", cases[n]) - weights) / tokens[n] for n in tokens}
        both = {n: (record("update", cases[n]) - 2 * weights) / tokens[n] for n in tokens}
        behind = {n: both[n] - 2 * ahead[n] for n in tokens}
        operations = attention_operations(EIGHT, 1, 16896 / 2) - attention_operations(EIGHT, 1, 1536 / 2)
        put(
            f"attention.{ops}.forward",
            operations / (ahead[16384] - ahead[1024]),
            "operations/s",
            f"difference of {source}",
        )
        behind_rate = 2.5 * operations / (behind[16384] - behind[1024])
        put(f"attention.{ops}.backward", behind_rate, "operations/s", f"difference of {source}")
        nothing = rates(**{f"between.{ops}.forward": 0.0, f"between.{ops}.backward": 0.0})
        moved = between_bytes(EIGHT, flow) / nothing["bandwidth"]
        gap = ahead[1024] - forward(nothing, EIGHT, flow, 1, 1536 / 2).total
        put(f"between.{ops}.forward", gap / moved, "times the bytes of fused kernels", f"rest of {source}")
        whole = update(nothing, EIGHT, flow, Batch(1, 1536, 0), sharded=False).total
        gap = both[1024] - whole - 2 * gap
        put(f"between.{ops}.backward", gap / (2 * moved), "times the bytes of fused kernels", f"rest of {source}")

    put("attention.liger.forward", rates()["attention.stock.forward"], "operations/s", "as stock")
    put("attention.liger.backward", rates()["attention.stock.backward"], "operations/s", "as stock")
    ratio = rates()["between.stock.backward"] / rates()["between.stock.forward"]

    def seconds(times: float) -> float:
        tried = rates(**{"between.liger.forward": times, "between.liger.backward": ratio * times})
        batch = Batch(16 * 1024, 1024, 1)
        ours = (log_probs, update)
        return sum(of(tried, EIGHT, LIGER, batch, sharded=False).total for of in ours)

    nothing, slope = seconds(0.0), seconds(1.0) - seconds(0.0)
    times = (record("old log-probabilities + update", "8B, 16 x 1024, bf16 with Liger") - nothing) / slope
    put("between.liger.forward", times, "times the bytes of fused kernels", f"{READING}, 16 x 1024")
    put("between.liger.backward", ratio * times, "times the bytes of fused kernels", "stock's ratio to the forward")
    bytes_moved = 28 * EIGHT.parameters / record("optimizer", "8B, AdamW")
    put("optimizer", bytes_moved, "B/s", "phase_shares_h200.json, AdamW on FP32, 28 bytes a parameter")


def _fit_decode(put, rates) -> None:
    steps = results("phase_shares")["rollout"]["bf16"]["step_s"]
    moved = (16896 - 512) * 32 * EIGHT.kv_bytes()
    put(
        "cache",
        moved / (steps["16896"] - steps["512"]),
        "B/s",
        "phase_shares_h200.json, BF16, 512 and 16896 of context",
    )
    put("attention.shared.key", 0.0, "s", "")  # until it is known: what is fitted first is the part without it
    for kind in ("bf16", "fp8", "fp8.shared", "int8"):
        none = rates(**{f"decode.{kind}.layer": 0.0, f"decode.{kind}.request": 0.0})
        ours = [r for r in rollout_records() if r.phase == "decode step" and r.calibrates]
        names = {"bf16": "bf16", "fp8": "jet_fp8_stock", "fp8.shared": "jet_fp8", "int8": "int8_rollout"}
        ours = [r for r in ours if r.case.rpartition(", ")[2] == names[kind]]
        requests = [int(r.case.split(", ")[1].split(" x ")[0]) for r in ours]
        # Least squares of relative errors.
        left = [[EIGHT.layers / r.measured, n / r.measured] for r, n in zip(ours, requests, strict=True)]
        right = [(r.measured - r.predict(none)) / r.measured for r in ours]
        (layer, request), *_ = np.linalg.lstsq(np.array(left), np.array(right), rcond=None)
        how = "; ".join(f"{r.case.split(', ', 1)[1]} of {r.source}" for r in ours)
        put(f"decode.{kind}.layer", layer, "s", how)
        put(f"decode.{kind}.request", request, "s", how)
    _fit_shared_attention(put, rates)
    tokens = 32 * 512
    seconds = results("phase_shares")["rollout"]["bf16"]["prefill_s"]
    left = seconds - prefill(rates(**{"prefill.layer": 0.0}), EIGHT, BF16, tokens, 256)
    put("prefill.layer", left / tokens / EIGHT.layers, "s a token", "phase_shares_h200.json, BF16, 32 x 512")


def _fit_shared_attention(put, rates) -> None:
    """Of attention alone, both caches in one run. Where one cluster reads a request's keys: one long request. By bytes:
    BF16's rate in an engine, times what FP8 gains in the difference of two sizes; what a call costs beside its bytes
    is in the latency of a layer."""
    found = results("kv_cache")
    few, many, long = (64, 4096), (32, 16384), (1, 32768)
    us = {
        (r["requests"], r["tokens"]): {name: each["median"] - found["event_us"] for name, each in r["us"].items()}
        for r in found["records"]
    }
    source = "kv_cache_h200.json, attention alone, {}, 4284dc4"
    for name, contender in (("attention.shared.key", "ours"), ("attention.fp8_cache.key", "fp8")):
        put(name, us[long][contender] / long[1] / 1e6, "s", source.format("1 x 32768"))
    moved = {(r["requests"], r["tokens"]): r["bytes"]["fp8"] for r in found["records"]}
    seconds = {name: us[many][name] - us[few][name] for name in ("bf16", "fp8")}
    gain = seconds["bf16"] / seconds["fp8"] * EIGHT.kv_bytes("fp8") / EIGHT.kv_bytes()
    assert EIGHT.kv_bytes("fp8") / EIGHT.layers * many[0] * many[1] == moved[many]
    how = "cache, times FP8's bytes a second over BF16's of " + source.format("64 x 4096 to 32 x 16384")
    put("cache.fp8", rates()["cache"] * gain, "B/s", how)


def table(rates: Rates, shown: Sequence[Record] | None = None) -> str:
    """Prediction against record of every phase, as Markdown; of all records if ``shown`` is None."""
    shown = records() if shown is None else shown
    lines = ["| phase | case | recorded | predicted | error | | source |", "|---|---|---|---|---|---|---|"]
    for record in shown:
        predicted, error = record.predict(rates), record.error(rates)
        role = "calibrates" if record.calibrates else "not comparable" if record.caveat else "checks"
        if role == "checks" and abs(error) > BAR:
            role = "**checks, misses**"
        digits = f"{record.measured:.4g} | {predicted:.4g}"
        if record.phase == LAUNCHES:
            digits = f"{record.measured:.0f} | {predicted:.0f}"
        elif record.phase not in ("memory", "GEMM", "decode step"):
            digits = f"{record.measured:.3g} s | {predicted:.3g} s"
        elif record.phase == "memory":
            digits = f"{record.measured:.3g} GiB | {predicted:.3g} GiB"
        else:
            digits = f"{1e3 * record.measured:.2f} ms | {1e3 * predicted:.2f} ms"
        lines.append(f"| {record.phase} | {record.case} | {digits} | {error:+.1%} | {role} | {record.source} |")
    checked = [abs(r.error(rates)) for r in shown if not r.calibrates and not r.caveat]
    within = sum(error <= BAR for error in checked)
    if not checked:
        return "\n".join(lines)
    lines += [
        "",
        f"{within} of {len(checked)} records that check are within {BAR:.0%}; their errors have a median of "
        f"{np.median(checked):.1%}.",
    ]
    caveats = Counter(record.caveat for record in shown if record.caveat)
    lines += ["", "Not comparable are records of", "", *(f"- {of}: {count}" for of, count in caveats.most_common())]
    if note := rates.older_note():
        lines += ["", note]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write rates.json and the table of docs/advise.md")
    parser.add_argument("steps", type=Path, nargs="*", help="verl_step.json: hold the predictions against these alone")
    options = parser.parse_args()
    fitted = fit()
    rates = rates_of(fitted)
    if options.steps:
        try:
            print(table(rates, list(step_records(options.steps))))
        except ValueError as error:
            parser.error(str(error))
    elif options.write:
        written = {"machine": MACHINE, "builds": builds(fitted), "rates": fitted}
        of_package.FILE.write_text(json.dumps(written, indent=1) + "\n")
        if PAGE.exists():
            PAGE.write_text(with_written(PAGE.read_text(), table(rates)))
    else:
        print(table(rates))


if __name__ == "__main__":
    main()
