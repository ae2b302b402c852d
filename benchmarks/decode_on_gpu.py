# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""How fast vLLM decodes in INT8 and FP8 beside BF16, with memory to spare and with too little of it.

    python benchmarks/decode_on_gpu.py --out benchmarks/results/decode_h200.json

A Qwen3-8B shape with random weights under ``bf16``, ``int8_rollout`` (FlashRL's format) and ``jet_fp8``, all engines
alive at once and asked in turn.

*Ample*: decoding steps behind cached prompts, at several batch sizes and contexts. *Short*: weights and KV cache
together get ``--budget`` GiB, so an arm with smaller weights has more cache; ``--requests`` requests of 64 + 1024
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

from jetrl_verl.layers import plan_linears, plan_of

ARMS = ("bf16", "int8_rollout", "jet_fp8")
AMPLE = ((1, 1024), (16, 4096), (64, 1024), (256, 256))
"""Batch size and prompt length."""
NEW_TOKENS = 256
SHORT = (64, 1024)
"""Prompt and response of a request where memory is short."""

console = Console(width=140)


def start(config: Qwen3Config, settings: dict[str, EngineSettings], logs: Path) -> dict[str, Engine]:
    engines = {arm: Engine(arm, config, s, logs.with_suffix(f".{arm}.log")) for arm, s in settings.items()}
    if not all([engine.wait() for engine in engines.values()]):
        sys.exit(1)
    return engines


def ample(config: Qwen3Config, options: argparse.Namespace) -> dict[str, dict]:
    """Tokens per second of each arm, batch size and prompt length."""
    settings = EngineSettings(20 * GIB, max_model_len=8192, max_num_seqs=256, captured=[b for b, _ in options.ample])
    engines = start(config, dict.fromkeys(ARMS, settings), options.out)
    found = {arm: {} for arm in ARMS}
    for batch, length in options.ample:
        for arm, values in decode_seconds(engines, batch, length, options.new, options.repetitions).items():
            found[arm][f"{batch} x {length}"] = batch * options.new / statistics.median(values)
    for engine in engines.values():
        engine.stop()
    return found


def weight_bytes(arm: str, config: Qwen3Config) -> int:
    """Of the arm's weights; scales are under a thousandth of them."""
    plans = plan_linears(config)
    total = 0
    for name, values in random_weights(config):
        quantised = OPTIONS[arm] is not None and (plan := plan_of(name, plans)) is not None and plan.quantised
        total += values.numel() * (1 if quantised else 2)
    return total


def short(config: Qwen3Config, options: argparse.Namespace) -> dict[str, dict]:
    """Tokens per second and preemptions of each arm within one budget."""
    weights = {arm: weight_bytes(arm, config) for arm in ARMS}
    caches = {arm: int(options.budget * GIB) - weights[arm] for arm in ARMS}
    if min(caches.values()) <= 0:
        sys.exit(f"--budget {options.budget} GiB does not hold the weights of {max(weights, key=weights.get)}")
    captured = [8, 16, 32, 64, 128, 256]
    settings = {
        arm: EngineSettings(cache, max_model_len=sum(SHORT) + 16, max_num_seqs=256, captured=captured)
        for arm, cache in caches.items()
    }
    engines = start(config, settings, options.out.with_suffix(".short"))
    found = {}
    for arm, engine in engines.items():
        engine.generate(8, 16, 8)
        seconds, preemptions = engine.generate(options.requests, *SHORT)
        found[arm] = {"tokens_per_s": options.requests * SHORT[1] / seconds, "preemptions": preemptions}
        found[arm] |= {"weights_gib": weights[arm] / GIB, "kv_gib": caches[arm] / GIB}
        engine.stop()
    return found


def print_report(result: dict) -> None:
    table = Table(title="decode, tokens per second (to bf16)", box=SIMPLE_HEAD)
    cases = list(result["ample"]["bf16"])
    for heading in ("arm", *cases, f"{result['budget_gib']} GiB in all", "preemptions", "KV GiB"):
        table.add_column(heading, justify="right")
    for arm in ARMS:
        pairs = [(result["ample"][arm][case], result["ample"]["bf16"][case]) for case in cases]
        pairs.append(tuple(result["short"][name]["tokens_per_s"] for name in (arm, "bf16")))
        found = result["short"][arm]
        rates = (f"{rate:.0f} ({rate / stock:.2f})" for rate, stock in pairs)
        table.add_row(arm, *rates, str(found["preemptions"]), f"{found['kv_gib']:.1f}")
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
    result = {"layers": options.layers, "budget_gib": options.budget, "requests": options.requests, "device": DEVICE}
    result["ample"] = ample(config, options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    result["short"] = short(config, options)
    print_report(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
