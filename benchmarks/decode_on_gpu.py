# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How fast vLLM decodes in INT8 and FP8 beside BF16, with memory to spare and with too little of it.

    python benchmarks/decode_on_gpu.py --out benchmarks/results/decode_h200.json

A Qwen3-8B shape with random weights under ``bf16``, ``int8_rollout`` (FlashRL's format) and ``jet_fp8``, all engines
alive at once and asked in turn.

*Ample*: decoding steps behind cached prompts, at several batch sizes and contexts. *Short*: weights and KV cache
together get ``--budget`` GiB, so a precision with smaller weights has more cache; ``--requests`` requests of 64 + 1024
tokens arrive at once, more than BF16's cache holds, and vLLM preempts. FlashRL reports over 3x for INT8 where BF16 runs
out of memory (its README); the ratio depends on the budget alone. About 5 minutes on one GPU with 140 GB.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from qwen3_8b import DEVICE, GIB, OPTIONS, Engine, EngineSettings, decode_seconds, random_weights, shape
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

from jetrl_verl.models.plan import plan_linears, plan_of
from jetrl_verl.tools.provenance import provenance

PRECISIONS = ("bf16", "int8_rollout", "jet_fp8")
AMPLE = ((1, 1024), (16, 4096), (64, 1024), (256, 256))
"""Batch size and prompt length."""
NEW_TOKENS = 256
SHORT = (64, 1024)
"""Prompt and response of a request where memory is short."""

console = Console(width=140)


def start(config: Qwen3Config, settings: dict[str, EngineSettings], logs: Path) -> dict[str, Engine]:
    engines = {
        precision: Engine(precision, config, s, logs.with_suffix(f".{precision}.log"))
        for precision, s in settings.items()
    }
    if not all([engine.wait() for engine in engines.values()]):
        sys.exit(1)
    return engines


def ample(config: Qwen3Config, options: argparse.Namespace) -> dict[str, dict]:
    """Tokens per second of each precision, batch size and prompt length."""
    settings = EngineSettings(20 * GIB, max_model_len=8192, max_num_seqs=256, captured=[b for b, _ in options.ample])
    engines = start(config, dict.fromkeys(PRECISIONS, settings), options.out)
    found = {precision: {} for precision in PRECISIONS}
    for batch, length in options.ample:
        for precision, values in decode_seconds(engines, batch, length, options.new, options.repetitions).items():
            found[precision][f"{batch} x {length}"] = batch * options.new / statistics.median(values)
    for engine in engines.values():
        engine.stop()
    return found


def weight_bytes(precision: str, config: Qwen3Config) -> int:
    """Of the precision's weights; scales are under a thousandth of them."""
    plans = plan_linears(config)
    total = 0
    for name, values in random_weights(config):
        quantized = OPTIONS[precision] is not None and (plan := plan_of(name, plans)) is not None and plan.quantized
        total += values.numel() * (1 if quantized else 2)
    return total


def short(config: Qwen3Config, options: argparse.Namespace) -> dict[str, dict]:
    """Tokens per second and preemptions of each precision within one budget."""
    weights = {precision: weight_bytes(precision, config) for precision in PRECISIONS}
    caches = {precision: int(options.budget * GIB) - weights[precision] for precision in PRECISIONS}
    if min(caches.values()) <= 0:
        sys.exit(f"--budget {options.budget} GiB does not hold the weights of {max(weights, key=weights.get)}")
    captured = [8, 16, 32, 64, 128, 256]
    settings = {
        precision: EngineSettings(cache, max_model_len=sum(SHORT) + 16, max_num_seqs=256, captured=captured)
        for precision, cache in caches.items()
    }
    engines = start(config, settings, options.out.with_suffix(".short"))
    found = {}
    for precision, engine in engines.items():
        engine.generate(8, 16, 8)
        seconds, preemptions = engine.generate(options.requests, *SHORT)
        found[precision] = {"tokens_per_s": options.requests * SHORT[1] / seconds, "preemptions": preemptions}
        found[precision] |= {"weights_gib": weights[precision] / GIB, "kv_gib": caches[precision] / GIB}
        engine.stop()
    return found


def print_report(result: dict) -> None:
    table = Table(title="decode, tokens per second (to bf16)", box=SIMPLE_HEAD)
    cases = list(result["ample"]["bf16"])
    for heading in ("precision", *cases, f"{result['budget_gib']} GiB in all", "preemptions", "KV GiB"):
        table.add_column(heading, justify="right")
    for precision in PRECISIONS:
        pairs = [(result["ample"][precision][case], result["ample"]["bf16"][case]) for case in cases]
        pairs.append(tuple(result["short"][name]["tokens_per_s"] for name in (precision, "bf16")))
        found = result["short"][precision]
        rates = (f"{rate:.0f} ({rate / stock:.2f})" for rate, stock in pairs)
        table.add_row(precision, *rates, str(found["preemptions"]), f"{found['kv_gib']:.1f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--budget", type=float, default=18.5, help="GiB of weights and KV cache in the second part")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tiny", action="store_true", help="a small shape and few tokens, to try this out")
    options = parser.parse_args()
    options.ample, options.new = (AMPLE, NEW_TOKENS) if not options.tiny else (((2, 64),), 16)
    config = shape(options.layers, options.tiny)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"build": provenance()}
    result |= {"layers": options.layers, "budget_gib": options.budget, "requests": options.requests, "device": DEVICE}
    result["ample"] = ample(config, options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    result["short"] = short(config, options)
    print_report(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
