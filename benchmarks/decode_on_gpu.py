# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How fast vLLM decodes in INT8 and FP8 beside BF16, with memory to spare and with too little of it.

    python benchmarks/decode_on_gpu.py --out benchmarks/results/decode_h200.json
    python benchmarks/decode_on_gpu.py --model qwen3_30b_a3b --out benchmarks/results/decode_mixture_h200.json

A Qwen3-8B shape with random weights under ``bf16``, ``int8_rollout`` (FlashRL's format) and ``jet_fp8``, all engines
alive at once and asked in turn. A Qwen3-30B-A3B shape under ``bf16``, ``fp8_rollout`` and ``jet_fp8``, one engine after
the other, since two and a copy of the weights do not fit; seconds until an engine could serve stand beside it, and
there is no part with little memory. 4 minutes an engine at 48 layers, most of it the start and the copy.

*Ample*: decoding steps behind cached prompts, at several batch sizes and contexts. *Short*: weights and KV cache
together get ``--budget`` GiB, so a precision with smaller weights has more cache; ``--requests`` requests of 64 + 1024
tokens arrive at once, more than BF16's cache holds, and vLLM preempts. FlashRL reports over 3x for INT8 where BF16 runs
out of memory (its README); the ratio depends on the budget alone. About 5 minutes on one GPU with 140 GB at 8B.

*Behind the last layer*, with ``--behind-last-layer``: what runs between a step's last layer and its tokens, lm_head and
sampler, kernel by kernel, of each precision at each case. With

    python benchmarks/decode_on_gpu.py --precisions bf16 jet_fp8 --cases 256x384 --behind-last-layer --ample-only \\
        --out benchmarks/results/decode_behind_last_layer_h200.json

that is 3 minutes.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from behind_last_layer import print_shares
from qwen3_8b import DEVICE, GIB, OPTIONS, Engine, EngineSettings, decode_seconds, mixture_shape, random_weights, shape
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig

from jetrl_verl.models.plan import plan_linears, plan_of
from jetrl_verl.tools.bench.timeline import Share
from jetrl_verl.tools.provenance import provenance

PRECISIONS = {"qwen3_8b": ("bf16", "int8_rollout", "jet_fp8"), "qwen3_30b_a3b": ("bf16", "fp8_rollout", "jet_fp8")}
"""Model -> what it runs under; a mixture of experts has no INT8."""
AMPLE = {
    "qwen3_8b": ((1, 1024), (16, 4096), (64, 1024), (256, 256)),
    "qwen3_30b_a3b": ((1, 1024), (64, 1024), (256, 384)),
}
"""Model -> batch size and prompt length."""
CACHE = 20 * GIB
"""KV cache of an engine with memory to spare; more where a case needs more."""
STEPS = 12
"""Recorded behind the last layer."""
NEW_TOKENS = 256
SHORT = (64, 1024)
"""Prompt and response of a request where memory is short."""

console = Console(width=140)


def start(config: PretrainedConfig, settings: dict[str, EngineSettings], logs: Path) -> dict[str, Engine]:
    engines = {
        precision: Engine(precision, config, s, logs.with_suffix(f".{precision}.log"))
        for precision, s in settings.items()
    }
    if not all([engine.wait() for engine in engines.values()]):
        sys.exit(1)
    return engines


def cache_of(config: PretrainedConfig, cases: list[tuple[int, int]], new: int) -> int:
    """Bytes of a BF16 cache that holds each case, a block of 16 tokens more for each request, and a tenth."""
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return max(CACHE, *(int(1.1 * token * batch * (length + new + 16)) for batch, length in cases))


def ample(config: PretrainedConfig, options: argparse.Namespace) -> dict[str, dict]:
    """Tokens per second of each precision, batch size and prompt length."""
    cache, captured = cache_of(config, options.ample, options.new), [batch for batch, _ in options.ample]
    settings = EngineSettings(cache, max_model_len=8192, max_num_seqs=max(256, *captured), captured=captured)
    every = options.precisions
    found = {precision: {} for precision in every}
    for together in (every,) if options.model == "qwen3_8b" else [(precision,) for precision in every]:
        engines = start(config, dict.fromkeys(together, settings), options.out)
        for batch, length in options.ample:
            for precision, values in decode_seconds(engines, batch, length, options.new, options.repetitions).items():
                found[precision][f"{batch} x {length}"] = batch * options.new / statistics.median(values)
            for precision, engine in engines.items() if options.behind_last_layer else ():
                seen = engine.behind_last_layer(batch, length, STEPS)
                found[precision].setdefault("behind_last_layer", {})[f"{batch} x {length}"] = seen
        for precision, engine in engines.items():
            found[precision] |= {"start_s": engine.start_s, "load_s": engine.load_s}
            engine.stop()
    return found


def weight_bytes(precision: str, config: PretrainedConfig) -> int:
    """Of the precision's weights; scales are under a thousandth of them."""
    plans = plan_linears(config)
    total = 0
    for name, values in random_weights(config):
        quantized = OPTIONS[precision] is not None and (plan := plan_of(name, plans)) is not None and plan.quantized
        total += values.numel() * (1 if quantized else 2)
    return total


def short(config: PretrainedConfig, options: argparse.Namespace) -> dict[str, dict]:
    """Tokens per second and preemptions of each precision within one budget."""
    every = options.precisions
    weights = {precision: weight_bytes(precision, config) for precision in every}
    caches = {precision: int(options.budget * GIB) - weights[precision] for precision in every}
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
    ample, short = result["ample"], result.get("short")
    cases = [name for name in ample["bf16"] if name not in ("start_s", "load_s", "behind_last_layer")]
    for heading in ("precision", *cases, "start s", "load s"):
        table.add_column(heading, justify="right")
    for heading in (f"{result['budget_gib']} GiB in all", "preemptions", "KV GiB") if short else ():
        table.add_column(heading, justify="right")
    for precision, found in ample.items():
        pairs = [(found[case], ample["bf16"][case]) for case in cases]
        cells = [f"{rate:.0f} ({rate / stock:.2f})" for rate, stock in pairs]
        cells += [f"{found[name]:.1f}" for name in ("start_s", "load_s")]
        if short:
            rate, stock = (short[name]["tokens_per_s"] for name in (precision, "bf16"))
            cells += [f"{rate:.0f} ({rate / stock:.2f})", str(short[precision]["preemptions"])]
            cells.append(f"{short[precision]['kv_gib']:.1f}")
        table.add_row(precision, *cells)
    console.print(table)
    for case in cases:
        for precision, found in ample.items():
            if seen := found.get("behind_last_layer", {}).get(case):
                title = f"{precision}, {case}, behind the last layer, of a step of {seen['step_us']:.0f} us"
                print_shares(title, [Share(**share) for share in seen["shares"]], seen["span_us"])


def case_of(text: str) -> tuple[int, int]:
    """Batch size and prompt length of ``256x384``."""
    batch, length = map(int, text.split("x"))
    return batch, length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--model", choices=PRECISIONS, default="qwen3_8b")
    parser.add_argument("--precisions", nargs="+", choices=OPTIONS, help="bf16 and others, instead of the model's")
    parser.add_argument("--cases", nargs="+", type=case_of, help="such as 256x384, instead of the model's")
    parser.add_argument("--behind-last-layer", action="store_true", help="also record what a step does there")
    parser.add_argument("--ample-only", action="store_true", help="leave out the part with little memory")
    parser.add_argument("--layers", type=int, help="instead of the model's number")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--budget", type=float, default=18.5, help="GiB of weights and KV cache in the second part")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tiny", action="store_true", help="a small shape and few tokens, to try this out")
    options = parser.parse_args()
    options.ample, options.new = (AMPLE[options.model], NEW_TOKENS) if not options.tiny else (((2, 64),), 16)
    options.ample = options.cases or options.ample
    options.precisions = options.precisions or PRECISIONS[options.model]
    if "bf16" not in options.precisions:
        parser.error("--precisions without bf16 is not supported: it is what the others are compared with. Add bf16.")
    if options.behind_last_layer and DEVICE == "cpu":
        parser.error("--behind-last-layer is not supported without a GPU. Leave it out.")
    dense = options.model == "qwen3_8b"
    config = shape(options.layers or 36, options.tiny) if dense else mixture_shape(options.layers, options.tiny)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"build": provenance()}
    result |= {
        "model": options.model,
        "layers": config.num_hidden_layers,
        "budget_gib": options.budget,
        "requests": options.requests,
        "device": DEVICE,
    }
    result["ample"] = ample(config, options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if dense and not options.ample_only:
        result["short"] = short(config, options)
    print_report(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
