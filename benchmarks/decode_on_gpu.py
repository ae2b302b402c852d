# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How fast vLLM decodes in INT8 and FP8 beside BF16, with memory to spare and with too little of it.

    python benchmarks/decode_on_gpu.py --out benchmarks/results/decode_h200.json
    python benchmarks/decode_on_gpu.py --model qwen3_30b_a3b --out benchmarks/results/decode_mixture_h200.json

A Qwen3-8B shape with random weights under ``bf16``, ``int8_rollout`` (FlashRL's format), ``jet_fp8`` and
``jet_fp8_kv_fp8``, which is ``jet_fp8`` with ``jetrl.kv_cache=fp8``: all engines alive at once and asked in turn where
they fit, else one after the other. A Qwen3-30B-A3B shape under ``bf16``, ``fp8_rollout`` and ``jet_fp8``, one engine
after the other, since two and a copy of the weights do not fit; there is no part with little memory. 4 minutes an
engine at 48 layers, most of it the start and the copy.

*Ample*: decoding steps behind cached prompts, at several batch sizes and contexts. *Short*: less cache than requests
fill, and vLLM preempts. ``--requests`` requests of 64 + 1024 tokens arrive at once. Weights and KV cache together get
``--budget`` GiB, so a precision with smaller weights has more cache: FlashRL reports over 3x for INT8 where BF16 runs
out of memory (its README); the ratio depends on the budget alone. Or the cache alone gets ``--cache`` GiB, the same for
all: then what counts is how many tokens these bytes hold.

``--precisions``, ``--cases`` and the parts choose. Seconds until an engine can serve, about 60 at 8B and 36 layers, are
most of a run. What an FP8 cache gives long responses, one engine after the other, 5 minutes, and what it gives where
the cache is short, four engines at once, 4 minutes:

    python benchmarks/decode_on_gpu.py --precisions bf16 jet_fp8 jet_fp8_kv_fp8 --cases 32x384 32x4096 32x16384 \\
        --new 64 --ample-only --out benchmarks/results/decode_kv_cache_h200.json
    python benchmarks/decode_on_gpu.py --precisions bf16 int8_rollout jet_fp8 jet_fp8_kv_fp8 --cache 4 --short-only \\
        --out benchmarks/results/decode_short_of_cache_h200.json

*Behind the last layer*, with ``--behind-last-layer``: what runs between a step's last layer and its tokens, lm_head and
sampler, kernel by kernel, of each precision at each case, and what runs in front of it by name. With

    python benchmarks/decode_on_gpu.py --precisions bf16 jet_fp8 --cases 256x384 --behind-last-layer --ample-only \\
        --out benchmarks/results/decode_behind_last_layer_h200.json

that is 3 minutes.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from behind_last_layer import print_shares
from qwen3_8b import (
    DEVICE,
    GIB,
    OPTIONS,
    Engine,
    EngineSettings,
    decode_seconds,
    mixture_shape,
    shape,
    token_bytes,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

from jetrl_verl.models.plan import plan_linears, plan_of
from jetrl_verl.tools.bench.timeline import Share
from jetrl_verl.tools.provenance import provenance

PRECISIONS = {
    "qwen3_8b": ("bf16", "int8_rollout", "jet_fp8", "jet_fp8_kv_fp8"),
    "qwen3_30b_a3b": ("bf16", "fp8_rollout", "jet_fp8"),
}
"""Model -> what it runs under; a mixture of experts has no INT8."""
AMPLE = {
    "qwen3_8b": ((1, 1024), (16, 4096), (64, 1024), (256, 256)),
    "qwen3_30b_a3b": ((1, 1024), (64, 1024), (256, 384)),
}
"""Model -> batch size and prompt length."""
BESIDE = 6 * GIB
"""Of an engine beside weights and cache: CUDA's context, graphs, activations of a prefill, FP32 logits."""
SPARE = 18 * GIB
"""For the copy of the weights that is loaded into an engine, BF16 at 8B."""
STEPS = 12
"""Recorded behind the last layer."""
NEW_TOKENS = 256
SHORT = (64, 1024)
"""Prompt and response of a request where memory is short."""

console = Console(width=140)


def started(
    config: PretrainedConfig, settings: dict[str, EngineSettings], together: list[list[str]], logs: Path
) -> Iterator[dict[str, Engine]]:
    """Engines of each group of ``together``, stopped before the next group begins.

    All processes are there from the start, so that a later engine's imports cost no time of the run.
    """
    engines = {
        precision: Engine(precision, config, s, logs.with_suffix(f".{precision}.log"))
        for precision, s in settings.items()
    }
    for group in together:
        held = {precision: engines[precision] for precision in group}
        for engine in held.values():
            engine.begin()
        if not all([engine.wait() for engine in held.values()]):
            sys.exit(1)
        yield held
        for engine in held.values():
            engine.stop()


def cache_of(precision: str, config: PretrainedConfig, cases: list[tuple[int, int]], new: int) -> int:
    """Bytes of a cache that holds each case, two blocks of 16 tokens more for each request, and a tenth."""
    tokens = max(batch * (length + new + 32) for batch, length in cases)
    return int(1.1 * token_bytes(precision, config) * tokens)


def groups(needs: dict[str, int], total: float) -> list[list[str]]:
    """Precisions whose engines live at once, in order, as many as fit.

    Args:
        needs: bytes of each one's weights and cache. total: of the GPU.
    """
    found: list[list[str]] = []
    for precision, need in needs.items():
        held = sum(needs[other] + BESIDE for other in found[-1]) if found else 0
        # What is loaded into an engine is a copy of its weights, with the last one's beside all others.
        if not found or held + need + BESIDE + SPARE > total:
            found.append([])
        found[-1].append(precision)
    return found


def gpu_bytes() -> float:
    return torch.cuda.get_device_properties(0).total_memory if DEVICE == "cuda" else float("inf")


def ample(config: PretrainedConfig, options: argparse.Namespace) -> Iterator[dict[str, dict]]:
    """Tokens per second of each precision, batch size and prompt length, after each engine or group of engines."""
    settings = {
        precision: EngineSettings(
            cache_of(precision, config, options.ample, options.new),
            max_model_len=max(length for _, length in options.ample) + options.new + 16,
            max_num_seqs=max(256, *(batch for batch, _ in options.ample)),
            captured=[batch for batch, _ in options.ample],
        )
        for precision in options.precisions
    }
    found = {precision: {} for precision in settings}
    needs = {precision: weight_bytes(precision, config) + s.kv_cache for precision, s in settings.items()}
    together = groups(needs, gpu_bytes()) if options.model == "qwen3_8b" else [[precision] for precision in settings]
    for engines in started(config, settings, together, options.out):
        for batch, length in options.ample:
            for precision, values in decode_seconds(engines, batch, length, options.new, options.repetitions).items():
                found[precision][f"{batch} x {length}"] = batch * options.new / statistics.median(values)
            for precision, engine in engines.items() if options.behind_last_layer else ():
                seen = engine.behind_last_layer(batch, length, STEPS)
                found[precision].setdefault("behind_last_layer", {})[f"{batch} x {length}"] = seen
        for precision, engine in engines.items():
            found[precision] |= {"start_s": engine.start_s, "load_s": engine.load_s}
            found[precision] |= {"kv_gib": settings[precision].kv_cache / GIB, "cache_tokens": engine.cache_tokens}
            found[precision] |= {"beside": [other for other in engines if other != precision]}
        yield {precision: values for precision, values in found.items() if values}


def weight_bytes(precision: str, config: PretrainedConfig) -> int:
    """Of the precision's weights; scales are under a thousandth of them."""
    plans = plan_linears(config)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    total = 0
    for name, values in shapes.items():
        quantized = OPTIONS[precision] is not None and (plan := plan_of(name, plans)) is not None and plan.quantized
        total += values.numel() * (1 if quantized else 2)
    return total


def short(config: PretrainedConfig, options: argparse.Namespace) -> dict[str, dict]:
    """Tokens per second and preemptions of each precision within one budget."""
    prompt, response = options.request
    weights = {precision: weight_bytes(precision, config) for precision in options.precisions}
    if options.cache is not None:
        caches = dict.fromkeys(weights, int(options.cache * GIB))
    else:
        caches = {precision: int(options.budget * GIB) - held for precision, held in weights.items()}
    if min(caches.values()) <= 0:
        sys.exit(f"--budget {options.budget} GiB does not hold the weights of {max(weights, key=weights.get)}")
    captured = [8, 16, 32, 64, 128, 256]
    settings = {
        precision: EngineSettings(cache, max_model_len=prompt + response + 16, max_num_seqs=256, captured=captured)
        for precision, cache in caches.items()
    }
    found = {}
    together = groups({precision: weights[precision] + caches[precision] for precision in settings}, gpu_bytes())
    for engines in started(config, settings, together, options.out.with_suffix(".short")):
        for precision, engine in engines.items():
            engine.generate(8, 16, 8)
            seconds, preemptions = engine.generate(options.requests, prompt, response)
            found[precision] = {"tokens_per_s": options.requests * response / seconds, "preemptions": preemptions}
            found[precision] |= {"weights_gib": weights[precision] / GIB, "kv_gib": caches[precision] / GIB}
            found[precision] |= {"cache_tokens": engine.cache_tokens}
    return found


def print_report(result: dict) -> None:
    ample, short = result.get("ample"), result.get("short")
    if ample:
        table = Table(title="decode, tokens per second (to bf16)", box=SIMPLE_HEAD)
        cases = [name for name in next(iter(ample.values())) if " x " in name]
        for heading in ("precision", *cases, "start s", "load s", "KV GiB"):
            table.add_column(heading, justify="right")
        for precision, found in ample.items():
            pairs = [(found[case], ample["bf16"][case] if "bf16" in ample else None) for case in cases]
            cells = [f"{rate:.0f}" + (f" ({rate / stock:.2f})" if stock else "") for rate, stock in pairs]
            table.add_row(precision, *cells, *(f"{found[name]:.1f}" for name in ("start_s", "load_s", "kv_gib")))
        console.print(table)
        for case in cases:
            for precision, found in ample.items():
                if seen := found.get("behind_last_layer", {}).get(case):
                    title = f"{precision}, {case}, behind the last layer, of a step of {seen['step_us']:.0f} us"
                    print_shares(title, [Share(**share) for share in seen["shares"]], seen["span_us"])
                    layers = [Share(**share) for share in seen["layers"]]
                    print_shares(f"{precision}, {case}, layers", layers, sum(share.us for share in layers))
    if short:
        prompt, response = result["request"]
        budget = f"{result['budget_gib']} GiB of weights and cache" if result["cache_gib"] is None else "the same cache"
        table = Table(title=f"{result['requests']} requests of {prompt} + {response} tokens, {budget}", box=SIMPLE_HEAD)
        for heading in ("precision", "weights GiB", "KV GiB", "tokens of cache", "preemptions", "tokens/s (to bf16)"):
            table.add_column(heading, justify="right")
        for precision, found in short.items():
            gain = f" ({found['tokens_per_s'] / short['bf16']['tokens_per_s']:.2f})" if "bf16" in short else ""
            table.add_row(
                precision,
                *(f"{found[name]:.2f}" for name in ("weights_gib", "kv_gib")),
                *(str(found[name]) for name in ("cache_tokens", "preemptions")),
                f"{found['tokens_per_s']:.0f}{gain}",
            )
        console.print(table)


def case_of(text: str) -> tuple[int, int]:
    """Batch size and prompt length of ``256x384``."""
    batch, length = map(int, text.split("x"))
    return batch, length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--model", choices=PRECISIONS, default="qwen3_8b")
    parser.add_argument("--precisions", nargs="+", choices=OPTIONS, help="instead of the model's")
    parser.add_argument("--cases", nargs="+", type=case_of, help="such as 256x384, instead of the model's")
    parser.add_argument("--new", type=int, help="decoding steps of a case, 256 where nothing is said")
    parser.add_argument("--behind-last-layer", action="store_true", help="also record what a step does there")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--ample-only", action="store_true", help="leave out the part with little memory")
    parts.add_argument("--short-only", action="store_true", help="leave out the part with memory to spare")
    parser.add_argument("--layers", type=int, help="instead of the model's number")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--budget", type=float, default=18.5, help="GiB of weights and KV cache in the second part")
    parser.add_argument("--cache", type=float, help="GiB of KV cache of each precision there, instead of --budget")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tiny", action="store_true", help="a small shape and few tokens, to try this out")
    options = parser.parse_args()
    options.ample, new = (AMPLE[options.model], NEW_TOKENS) if not options.tiny else (((2, 64),), 16)
    options.ample, options.new = options.cases or options.ample, options.new or new
    options.request = SHORT if not options.tiny else (16, 64)
    options.precisions = options.precisions or PRECISIONS[options.model]
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
        "cache_gib": options.cache,
        "requests": options.requests,
        "request": options.request,
        "device": DEVICE,
    }
    for found in () if options.short_only else ample(config, options):
        result["ample"] = found
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if dense and not options.ample_only:
        result["short"] = short(config, options)
    print_report(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
