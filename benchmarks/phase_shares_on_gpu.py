# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes over the length of the responses: rollout, log-probabilities, update and weight sync.

    python benchmarks/phase_shares_on_gpu.py --out benchmarks/results/phase_shares_h200.json

RL is said to spend over 70% of its time in rollout (Jet-RL, arXiv 2601.14243, section 1). One GPU, a Qwen3-8B shape
with random weights, ``--sequences`` sequences a step with a prompt of 512 tokens and responses of one length L, one
update. Each phase is measured by itself, since one GPU does not hold a trainer's 128 GB of FP32 state beside an engine:

- *rollout*: the seconds of one decoding step of the whole batch at contexts from 512 tokens to the longest, joined by
  straight lines and summed over the L steps; and the prefill. Real responses end at different times, which leaves the
  last ones alone in the batch: real shares of rollout are higher than these.
- *log-prob* and *update*: forward, and forward and backward with activation checkpointing, of one micro-batch of about
  ``--tokens`` tokens in sequences of 512 + L, times the number of micro-batches; the update adds AdamW on FP32 masters,
  measured on a 36th of the parameters.
- *sync*: making the rollout's weights from the trainer's (qdata, or BF16 copies) and loading them. Transport between
  processes is left out.

Precisions run one after another in the engine, interleaved in the trainer: BF16, ``jet_fp8``, and ``jet_fp8`` with an
FP8 KV cache, of as many tokens in about half of the bytes. About 7 minutes for the first two.
"""

import argparse
import json
import statistics
import sys
from bisect import bisect_left
from pathlib import Path

import torch
from qwen3_8b import (
    DEVICE,
    GIB,
    OPTIONS,
    Engine,
    EngineSettings,
    build_models,
    drop_qdata,
    log_probs,
    random_weights,
    shape,
    timed,
    token_bytes,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

from jetrl_verl.models.plan import plan_linears
from jetrl_verl.sync.wire import quantize_stream
from jetrl_verl.tools.provenance import provenance

PRECISIONS = ("bf16", "jet_fp8", "jet_fp8_kv_fp8")
PROMPT = 512
STEPS = 64
"""Decoding steps that one measurement covers."""

console = Console(width=140)


def rollout(precision: str, config: Qwen3Config, options: argparse.Namespace) -> dict:
    """Seconds of a decoding step at each context, of the prefill, of start and load."""
    longest = PROMPT + max(options.lengths)
    settings = EngineSettings(
        int(1.02 * options.sequences * (longest + 2 * STEPS) * token_bytes(precision, config)),
        max_model_len=longest + 2 * STEPS,
        max_num_seqs=options.sequences,
        captured=[options.sequences],
    )
    engine = Engine(precision, config, settings, options.out.with_suffix(f".{precision}.log"))
    engine.begin()
    if not engine.wait():
        sys.exit(1)
    engine.generate(options.sequences, 64, 8)  # compiles what is left
    found = {"start_s": engine.start_s, "load_s": engine.load_s, "kv_gib": settings.kv_cache / GIB, "step_s": {}}
    found["prefill_s"] = engine.generate(options.sequences, PROMPT, 1)[0]
    for context in [PROMPT, *(PROMPT + length for length in options.lengths)]:
        engine.generate(options.sequences, context, 1)  # fills the prefix cache
        seconds = [engine.decode_seconds(options.sequences, context, STEPS) for _ in range(options.repetitions)]
        found["step_s"][context] = statistics.median(seconds) / STEPS
    engine.stop()
    return found


def rollout_seconds(found: dict, length: int) -> float:
    """Prefill and ``length`` decoding steps, the seconds of a step interpolated between the measured contexts."""
    contexts, steps = list(found["step_s"]), list(found["step_s"].values())

    def step(context: int) -> float:
        right = min(max(bisect_left(contexts, context), 1), len(contexts) - 1)
        left = right - 1
        share = (context - contexts[left]) / (contexts[right] - contexts[left])
        return steps[left] + share * (steps[right] - steps[left])

    return found["prefill_s"] + sum(step(PROMPT + i) for i in range(length))


def optimizer_seconds(config: Qwen3Config) -> float:
    """AdamW on FP32 masters of the whole model, from a 36th of them."""
    parameters = sum(values.numel() for _, values in random_weights(config))
    master = torch.nn.Parameter(torch.zeros(parameters // 36, device=DEVICE))
    master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW([master], fused=True)
    optimizer.step()
    return 36 * statistics.median(timed(optimizer.step) for _ in range(5))


def export_seconds(precision: str, weights: dict[str, torch.Tensor], config: Qwen3Config) -> float:
    """Making what the rollout loads, every tensor dropped as soon as it is made."""

    def drain() -> None:
        options = OPTIONS[precision]
        stream = ((name, value.clone()) for name, value in weights.items())
        if options is not None:
            stream = quantize_stream(weights.items(), plan_linears(config), options.scale_rule, options.rollout)
        for _ in stream:
            pass

    with torch.no_grad():
        drain()
        return statistics.median(timed(drain) for _ in range(3))


def training(config: Qwen3Config, options: argparse.Namespace) -> dict[str, dict]:
    """Seconds per token of both passes at every length, seconds of the export, peak memory."""
    precisions = options.precisions
    models = build_models(config, precisions)
    weights = dict(models[precisions[0]].named_parameters())
    found = {precision: {"old_log_prob": {}, "update": {}, "peak_gib": {}} for precision in precisions}
    for length in options.lengths:
        tokens = PROMPT + length
        ids = torch.randint(1, config.vocab_size, (max(options.tokens // tokens, 1), tokens), device=DEVICE)
        seconds = {precision: ([], []) for precision in precisions}

        def old(precision: str, ids: torch.Tensor = ids) -> None:
            drop_qdata(models[precision])
            with torch.no_grad():
                log_probs(precision, models[precision], ids)

        def update(precision: str, ids: torch.Tensor = ids) -> None:
            drop_qdata(models[precision])
            log_probs(precision, models[precision], ids).mean().backward()

        for precision in precisions:
            old(precision)
            update(precision)
        for _ in range(options.repetitions):
            for precision in precisions:
                held = 0
                if DEVICE == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                seconds[precision][0].append(timed(lambda precision=precision: old(precision)))
                seconds[precision][1].append(timed(lambda precision=precision: update(precision)))
                if DEVICE == "cuda":
                    found[precision]["peak_gib"][length] = (torch.cuda.max_memory_allocated() - held) / GIB
        for precision in precisions:
            for phase, values in zip(("old_log_prob", "update"), seconds[precision], strict=True):
                found[precision][phase][length] = statistics.median(values) / ids.numel()
    for precision in precisions:
        found[precision]["export_s"] = export_seconds(precision, weights, config)
    return found


def steps(result: dict) -> list[dict]:
    """A row per precision and length: seconds of each phase and the share of rollout."""
    rows = []
    for length in result["lengths"]:
        tokens = result["sequences"] * (PROMPT + length)
        for precision in result["rollout"]:
            engine, trainer = result["rollout"][precision], result["training"][precision]
            phases = {
                "rollout": rollout_seconds(engine, length),
                "log_prob": trainer["old_log_prob"][length] * tokens,
                "update": trainer["update"][length] * tokens + result["optimiser_s"],
                "sync": trainer["export_s"] + engine["load_s"],
            }
            total = sum(phases.values())
            rows.append(
                {"length": length, "precision": precision, **phases, "step": total, "share": phases["rollout"] / total}
            )
    return rows


def print_report(result: dict) -> None:
    precisions = list(result["rollout"])
    table = Table(title=f"a step of {result['sequences']} sequences, seconds", box=SIMPLE_HEAD)
    for heading in (
        "response",
        "precision",
        "rollout",
        "log-prob",
        "update",
        "sync",
        "step",
        "rollout share",
        f"to {precisions[0]}",
    ):
        table.add_column(heading, justify="right")
    stock = {row["length"]: row["step"] for row in result["steps"] if row["precision"] == precisions[0]}
    for row in result["steps"]:
        numbers = (f"{row[phase]:.2f}" for phase in ("rollout", "log_prob", "update", "sync", "step"))
        speed = f"{stock[row['length']] / row['step']:.2f}x"
        table.add_row(str(row["length"]), row["precision"], *numbers, f"{row['share']:.0%}", speed)
    console.print(table)
    table = Table(title="decoding speed with context, tokens/s; training peak, GiB", box=SIMPLE_HEAD)
    contexts = list(result["rollout"][precisions[0]]["step_s"])
    for heading in ("precision", *(f"{context}" for context in contexts), "peak at longest", "KV cache"):
        table.add_column(heading, justify="right")
    for precision in precisions:
        found = result["rollout"][precision]
        rates = (f"{result['sequences'] / found['step_s'][context]:.0f}" for context in contexts)
        peak = result["training"][precision]["peak_gib"].get(result["lengths"][-1], float("nan"))
        table.add_row(precision, *rates, f"{peak:.1f}", f"{found['kv_gib']:.1f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16896, help="of a micro-batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--precisions", nargs="+", choices=OPTIONS, default=PRECISIONS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try this out")
    options = parser.parse_args()
    config = shape(options.layers, options.tiny)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"layers": options.layers, "sequences": options.sequences, "lengths": options.lengths, "prompt": PROMPT}
    result |= {"build": provenance(), "tokens": options.tokens, "torch": torch.__version__}
    result["rollout"] = {}
    for precision in options.precisions:
        result["rollout"][precision] = rollout(precision, config, options)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    result["device"] = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    result["optimiser_s"] = optimizer_seconds(config)
    result["training"] = training(config, options)
    result["steps"] = steps(result)
    print_report(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
