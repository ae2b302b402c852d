# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the shared operations cost: training step and decode of a Qwen3-8B shape with and without.

    python benchmarks/exact_cost_on_gpu.py --out benchmarks/results/exact_cost_h200.json

*Training.* Three models share one set of random BF16 weights and run interleaved on packed tokens: the forward that
yields old log-probabilities, then forward and backward with activation checkpointing. bf16 and jet_fp8 take them by
torch's cross entropy on BF16 logits (verl takes flash-attn's kernel, or without it a loop over rows that costs 0.3 s
per 8192 tokens and would flatter the third). No optimizer, no FSDP: both cost every precision the same. Medians of
interleaved repetitions; peak memory of each precision above weights and gradients.

*Decode.* One vLLM engine per precision, each in a process of its own with torch.compile and CUDA graphs and the same
weights in the precision's format, all alive at once and asked in turn: generated tokens per second at several batch
sizes and contexts. Prompts come from the prefix cache; a run of one token is subtracted. One GPU with 140 GB, four
minutes.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from qwen3_8b import (
    DEVICE,
    GIB,
    Engine,
    EngineSettings,
    build_models,
    decode_seconds,
    drop_qdata,
    log_probs,
    shape,
    timed,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

from jetrl_verl.tools.provenance import provenance

PRECISIONS = ("bf16", "jet_fp8_stock", "jet_fp8")
DECODE = ((16, 4096), (64, 1024), (256, 256))
"""Batch size and prompt length."""
NEW_TOKENS = 256
SETTINGS = EngineSettings(20 * GIB, max_model_len=8192, max_num_seqs=256, captured=[batch for batch, _ in DECODE])

console = Console(width=140)


def training(config: Qwen3Config, sequences: int, length: int, repetitions: int) -> dict[str, dict]:
    models = build_models(config, PRECISIONS)
    ids = torch.randint(1, config.vocab_size, (sequences, length), device=DEVICE)

    def old(precision: str) -> None:
        drop_qdata(models[precision])
        with torch.no_grad():
            log_probs(precision, models[precision], ids)

    def update(precision: str) -> None:
        drop_qdata(models[precision])
        log_probs(precision, models[precision], ids).mean().backward()

    for precision in PRECISIONS:
        update(precision)  # compiles, and allocates the gradients
    held = torch.cuda.memory_allocated()
    seconds: dict[str, dict[str, list[float]]] = {
        precision: {"old_log_prob": [], "update": []} for precision in PRECISIONS
    }
    peaks = dict.fromkeys(PRECISIONS, 0)
    for _ in range(repetitions):
        for precision in PRECISIONS:
            torch.cuda.reset_peak_memory_stats()
            seconds[precision]["old_log_prob"].append(timed(lambda precision=precision: old(precision)))
            seconds[precision]["update"].append(timed(lambda precision=precision: update(precision)))
            peaks[precision] = torch.cuda.max_memory_allocated() - held
    return {
        precision: {
            **{phase: statistics.median(values) for phase, values in seconds[precision].items()},
            "step": statistics.median(map(sum, zip(*seconds[precision].values(), strict=True))),
            "peak_gib": peaks[precision] / GIB,
        }
        for precision in PRECISIONS
    }


def decode(config: Qwen3Config, logs: Path, repetitions: int) -> dict[str, dict]:
    """Seconds to start and tokens per second of every precision's engine; the engines are alive together."""
    engines = {
        precision: Engine(precision, config, SETTINGS, logs.with_suffix(f".{precision}.log"))
        for precision in PRECISIONS
    }
    for engine in engines.values():
        engine.begin()
    engines = {precision: engine for precision, engine in engines.items() if engine.wait()}
    found: dict[str, dict] = {precision: {"engine_start_s": e.start_s, "rates": {}} for precision, e in engines.items()}
    for batch, length in DECODE:
        for precision, values in decode_seconds(engines, batch, length, NEW_TOKENS, repetitions).items():
            rate = batch * NEW_TOKENS / statistics.median(values)
            found[precision]["rates"][f"{batch} x {length}"] = {"tokens_per_s": rate, "seconds": values}
    for engine in engines.values():
        engine.stop()
    return found


def print_report(result: dict) -> None:
    table = Table(title="training step, seconds", box=SIMPLE_HEAD)
    for heading in ("precision", "old log-prob", "update", "step", "to bf16", "to stock", "peak GiB"):
        table.add_column(heading, justify="right")
    for precision, found in result["training"].items():
        ratios = [found["step"] / result["training"][other]["step"] for other in PRECISIONS[:2]]
        numbers = [found["old_log_prob"], found["update"], found["step"], *ratios]
        table.add_row(precision, *(f"{x:.3f}" for x in numbers), f"{found['peak_gib']:.1f}")
    console.print(table)
    if not result["decode"]:
        return
    table = Table(title="decode, tokens per second (to bf16, to stock)", box=SIMPLE_HEAD)
    for heading in ("precision", "engine start s", *(f"{batch} x {length}" for batch, length in DECODE)):
        table.add_column(heading, justify="right")
    for precision, found in result["decode"].items():
        cells = []
        for name, rate in found["rates"].items():
            others = [result["decode"].get(other, {}).get("rates", {}).get(name) for other in PRECISIONS[:2]]
            ratios = [f"{rate['tokens_per_s'] / other['tokens_per_s']:.3f}" for other in others if other]
            cells.append(f"{rate['tokens_per_s']:.0f} ({', '.join(ratios)})")
        table.add_row(precision, f"{found['engine_start_s']:.0f}", *cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--no-decode", action="store_true", help="training alone")
    options = parser.parse_args()
    config = shape(options.layers)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"build": provenance(), "layers": options.layers}
    result |= {"tokens": options.sequences * options.length, "sequences": options.sequences}
    result["decode"] = {} if options.no_decode else decode(config, options.out, options.repetitions)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    result |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result["training"] = training(config, options.sequences, options.length, options.repetitions)
    print_report(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
