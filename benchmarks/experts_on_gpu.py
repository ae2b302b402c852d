# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a mixture at Qwen3-30B-A3B's shape (H 2048, I 768, 128 experts, 8 a token): decoding and training.

    PYTHONPATH=. python3 benchmarks/experts_on_gpu.py --out benchmarks/results/experts_h200.json

*Decode*, replays of CUDA graphs in turns: the rollout's block behind the norm, which hands over BF16 rows and their
qdata (router logits, choice and rows, both products, the sum), against vLLM's own in BF16 and in block FP8
(vllm_experts.py; its two products alone where its compiled operators are absent, named ``products`` in the table). As
many draws of tokens and of their experts take turns as put three times the L2 between two uses of a weight. The floor
is the time of the FP8 weights of the experts that are hit, at the copy bandwidth measured in the same run.

*Training*, plain calls: forward and all gradients of the experts, weights quantized again in each step, against
transformers' ``grouped_mm`` experts in BF16, with the most that a step allocates.

Tokens are normal, so that experts are hit about evenly. ``--timeline`` adds what every kernel of ours takes, on the
profiler's clock. Some 90 seconds, most of them compilation. Exit code 1 if a result is further from BF16 than
quantization takes it.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import silu

from benchmarks.vllm_experts import Layer, Products, blocks, missing_operators, source_folder
from jetrl_verl import formats, kernels
from jetrl_verl.models.families.base import Experts
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.bench import BenchError, reason_of
from jetrl_verl.tools.bench.linear import MOST_DISTANCE, peak_bytes
from jetrl_verl.tools.bench.machine import Machine, this_machine
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.bench.timeline import kernels_of, steps_of

DECODE, TRAINING, RULE = (1, 16, 64, 256), (8192, 32768), "fp32"
REPLAYS = 5  # that the timeline looks at
FLOW = formats.get(formats.FLOW)

console = Console(width=140)


class Shape(NamedTuple):
    """Of a layer."""

    experts: int = 128
    per_token: int = 8
    hidden: int = 2048
    inner: int = 768


class Draw(NamedTuple):
    """Tokens of one decode step: BF16 ``[T, H]``, and what the norm quantizes of them."""

    x: torch.Tensor
    quantized: QuantizedTensor


def draw_layer(shape: Shape, device: torch.device) -> Layer:
    def weight(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device=device).mul_(0.02)

    gate_up = weight(shape.experts, 2 * shape.inner, shape.hidden)
    down = weight(shape.experts, shape.hidden, shape.inner)
    fp8 = FLOW.quantize_weight(gate_up, RULE), FLOW.quantize_weight(down, RULE)
    return Layer(weight(shape.experts, shape.hidden), (gate_up, down), fp8)


def tokens_of(shape: Shape, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, device=device)


def ours(layer: Layer, k: int, draw: Draw) -> torch.Tensor:
    """What ``rollout.experts.SharedMixture`` does, and the sum of a token's rows, which the norm behind it adds."""
    logits = kernels.logits(draw.x, layer.gate)
    weights, segments, rows = kernels.route_and_permute(logits, draw.quantized, k, True)
    y, *_ = FLOW.experts(rows, weights, segments, *layer.fp8, RULE, static_weight=True)
    return kernels.combine(y, segments.row)


def in_bf16(layer: Layer, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """FP32 sums of BF16 operands, expert by expert, ``[T, H]`` FP32."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in chosen.unique().tolist():
        token, slot = torch.where(chosen == expert)
        gate, up = (x[token].float() @ layer.bf16[0][expert].float().t()).chunk(2, dim=1)
        rows = (silu(gate) * up * weights[token, slot, None]) @ layer.bf16[1][expert].float().t()
        out.index_add_(0, token, rows)
    return out


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


# --- decode -----------------------------------------------------------------------------------------------------------


def decode(
    machine: Machine, shape: Shape, layer: Layer, tokens: int, products: Products | None, whole: bool, timeline: bool
) -> dict:
    """The record of one batch size."""
    device, k = machine.device, shape.per_token
    bytes_of_expert = sum(q.qdata[0].nbytes + q.scales[0].nbytes for q in layer.fp8)
    hit_at_least = k * bytes_of_expert
    draws, hit, calls, errors, refused = [], [], defaultdict(list), {}, {}

    def make() -> Draw:
        x = tokens_of(shape, tokens, device)
        return Draw(x, FLOW.quantize_activation(x, RULE))

    draws = machine.timer.rotated(make, hit_at_least)
    of_vllm = blocks(layer, k) if whole else {}
    for draw in draws:
        chosen, weights = kernels.route(kernels.logits(draw.x, layer.gate), k, True)
        hit.append(len(chosen.unique()))
        calls["jet_fp8"].append(partial(ours, layer, k, draw))
        for name, block in of_vllm.items():
            calls[name].append(partial(block, draw.x))
        if products is not None:
            for name, call in products.calls(layer, draw.x, chosen, weights).items():
                calls[f"{name} products"].append(call)
    chosen, weights = kernels.route(kernels.logits(draws[0].x, layer.gate), k, True)
    want = in_bf16(layer, draws[0].x, chosen, weights)
    for name in list(calls):
        try:
            got = calls[name][0]()
            if "products" not in name:
                errors[name] = distance(got, want)
        except Exception as error:  # what another package raises is named, ours fails the command
            if name == "jet_fp8":
                raise
            refused[name] = reason_of(error)
            del calls[name]
    # Two contenders in a row have other tokens: weights of a few experts, which they share, would stay in the L2.
    calls = {name: of[turn % len(of) :] + of[: turn % len(of)] for turn, (name, of) in enumerate(calls.items())}
    spreads = machine.timer.interleaved(calls)
    floor_us = 1e6 * sum(hit) / len(hit) * bytes_of_expert / machine.bandwidth
    record = {"tokens": tokens, "hit": sum(hit) / len(hit), "floor_us": floor_us, "error": errors, "refused": refused}
    record["us"] = {name: spread._asdict() for name, spread in spreads.items()}
    mine = spreads["jet_fp8"].median
    others = {name: spread.median for name, spread in spreads.items() if name != "jet_fp8"}
    record["to_best"] = mine / min(others.values()) if others else None
    record["to_floor"] = mine / floor_us
    record["wrong"] = [name for name, error in errors.items() if not error < MOST_DISTANCE]
    if timeline:
        found = kernels_of(machine.timer.clock.capture(calls["jet_fp8"][0]), REPLAYS)
        record["timeline"] = [step._asdict() for step in steps_of(found, len(found) // REPLAYS)]
    return record


# --- training ---------------------------------------------------------------------------------------------------------


def grouped_mm(shape: Shape, layer: Layer) -> nn.Module:
    """transformers' experts in BF16."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=shape.experts,
        num_experts_per_tok=shape.per_token,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inner,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = (nn.Parameter(weight) for weight in layer.bf16)
    return module


def jet_fp8(layer: Layer) -> JetExperts:
    module = nn.Module()
    module.gate_up_proj, module.down_proj = (nn.Parameter(weight) for weight in layer.bf16)
    return JetExperts.replace(module, Experts(), scale_rule=RULE)


def step(
    module: nn.Module, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Output, and the gradients of ``x``, of the routing weights and of both weights."""
    if isinstance(module, JetExperts):
        module.drop_qdata()
    out = module(x, chosen, weights)
    return out.detach(), *torch.autograd.grad(out, (x, weights, module.gate_up_proj, module.down_proj), dy)


RESULTS = "output", "dx", "dweights", "dgate_up", "ddown"


def training(machine: Machine, shape: Shape, layer: Layer, tokens: int, timeline: bool) -> dict:
    """The record of one number of tokens."""
    device = machine.device
    x = tokens_of(shape, tokens, device)
    chosen, weights = kernels.route(kernels.logits(x, layer.gate), shape.per_token, True)
    dy = tokens_of(shape, tokens, device).mul_(2**-10)
    x.requires_grad_()
    calls, refused, record = {}, {}, {"tokens": tokens, "error": {}, "peak_bytes": {}, "us": {}}
    makers = {"bf16 grouped_mm": partial(grouped_mm, shape, layer), "jet_fp8": partial(jet_fp8, layer)}
    want = None
    for name, maker in makers.items():
        try:
            module = maker()
            stock = name != "jet_fp8"
            shares = (weights.bfloat16() if stock else weights).detach().requires_grad_()
            call = partial(step, module, x, chosen.long() if stock else chosen, shares, dy)
            got = call()
            record["peak_bytes"][name] = peak_bytes(call, device)
            calls[name] = [call]
        except Exception as error:  # as above
            if name == "jet_fp8":
                raise
            refused[name] = reason_of(error)
            continue
        if want is None:
            want = got
        else:
            record["error"] = {key: distance(a, b) for key, a, b in zip(RESULTS, got, want, strict=True)}
        del got
    del want
    machine.clear()
    repeats, machine.timer.repeats = machine.timer.repeats, max(5, machine.timer.repeats // 4)
    spreads = machine.timer.interleaved(calls, graphs=False)
    machine.timer.repeats = repeats
    record |= {"us": {name: spread._asdict() for name, spread in spreads.items()}, "refused": refused}
    record["gain"] = spreads["bf16 grouped_mm"].median / spreads["jet_fp8"].median if len(spreads) > 1 else None
    record["wrong"] = [f"{key}" for key, error in record["error"].items() if not error < MOST_DISTANCE]
    if timeline:
        record["timeline"] = shares_of(calls["jet_fp8"][0])
    return record


def shares_of(call: Callable[[], object]) -> list[dict]:
    """Kernels of one call by name, the longest first: how often, and us together."""
    found, times = defaultdict(lambda: [0, 0.0]), 3
    for kernel in kernels_of(call, times):
        found[kernel.name][0] += 1
        found[kernel.name][1] += kernel.end - kernel.begin
    rows = [{"name": name, "calls": count / times, "us": us / times} for name, (count, us) in found.items()]
    return sorted(rows, key=lambda row: -row["us"])


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(first, no_wrap=True, max_width=80)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_decode(records: list[dict]) -> None:
    names = list(dict.fromkeys(name for record in records for name in record["us"]))
    headings = "hit", "floor", *names, "x floor", "x best of vLLM's", "off BF16"
    table = _table("decode of the block: us of a graph's replay", "tokens", *headings)
    for record in records:
        us = [f"{record['us'][name]['median']:.1f}" if name in record["us"] else "-" for name in names]
        best = "-" if record["to_best"] is None else f"{record['to_best']:.2f}"
        off = f"{100 * record['error']['jet_fp8']:.1f}%"
        table.add_row(
            str(record["tokens"]),
            f"{record['hit']:.0f}",
            f"{record['floor_us']:.1f}",
            *us,
            f"{record['to_floor']:.2f}",
            best,
            off,
        )
    console.print(table)


def print_training(records: list[dict]) -> None:
    names = list(dict.fromkeys(name for record in records for name in record["us"]))
    title = "forward and backward of the experts, weights quantized in each: ms, peak MiB"
    table = _table(title, "tokens", *names, "BF16 / jet_fp8", "furthest from BF16")
    for record in records:
        cells = []
        for name in names:
            peak = record["peak_bytes"].get(name)
            memory = "" if peak is None else f" {peak / 2**20:.0f}"
            cells.append(f"{record['us'][name]['median'] / 1000:.2f}{memory}" if name in record["us"] else "-")
        gain = "-" if record["gain"] is None else f"{record['gain']:.2f}"
        worst = max(record["error"].items(), key=lambda item: item[1], default=None)
        table.add_row(
            str(record["tokens"]), *cells, gain, "-" if worst is None else f"{worst[0]} {100 * worst[1]:.1f}%"
        )
    console.print(table)


def print_timelines(result: dict) -> None:
    for record in result["decode"]:
        table = _table(f"{record['tokens']} tokens, jet_fp8: us", "kernel", "takes", "behind the one in front", "share")
        total = sum(row["adds"] for row in record.get("timeline", ()))
        for row in record.get("timeline", ()):
            cells = (f"{row[key]:.2f}" for key in ("duration", "gap"))
            table.add_row(row["name"], *cells, f"{100 * row['adds'] / total:.0f}%")
        if total:
            console.print(table, markup=False)
    for record in result["training"]:
        table = _table(f"{record['tokens']} tokens, a step of jet_fp8: us", "kernel", "calls", "together", "share")
        total = sum(row["us"] for row in record.get("timeline", ()))
        for row in record.get("timeline", ()):
            table.add_row(row["name"], f"{row['calls']:.0f}", f"{row['us']:.0f}", f"{100 * row['us'] / total:.1f}%")
        if total:
            console.print(table, markup=False)


def print_report(result: dict) -> None:
    if result["decode"]:
        print_decode(result["decode"])
    if result["training"]:
        print_training(result["training"])
    print_timelines(result)
    console.print(
        f"{result['device']}: copy {result['copy_bandwidth'] / 1e12:.2f} TB/s, two events alone "
        f"{result['event_us']:.1f} us a replay"
    )
    for why in result["absent"]:
        console.print(f"absent: {why}", markup=False, soft_wrap=True)
    for record in (*result["decode"], *result["training"]):
        for name, why in record["refused"].items():
            console.print(f"refused at {record['tokens']} tokens: {name}: {why}", markup=False, soft_wrap=True)
        if record["wrong"]:
            console.print(f"WRONG at {record['tokens']} tokens: {', '.join(record['wrong'])}", markup=False)


def run(machine: Machine, shape: Shape, options: argparse.Namespace) -> int:
    """Measure, print, save; 1 if something is wrong."""
    facts = machine.facts() | {"shape": shape._asdict(), "absent": [], "decode": [], "training": []}
    result = Result(options.out, facts)
    layer = draw_layer(shape, machine.device)
    why = missing_operators() if options.decode else None
    products = None
    if why is not None:
        folder = source_folder(options.vllm_source)
        result["absent"].append(f"vLLM's whole block: {why}")
        try:
            products = Products(folder, shape.experts, shape.inner) if folder else None
        except OSError as error:
            result["absent"].append(f"vLLM's products: {error}")
        if folder is None:
            result["absent"].append("vLLM's products: no source of vLLM (--vllm-source)")
    for tokens in options.decode:
        with torch.no_grad():
            record = decode(machine, shape, layer, tokens, products, why is None, options.timeline)
        result["decode"].append(record)
        machine.clear()
        result.save()
    for tokens in options.training:
        result["training"].append(training(machine, shape, layer, tokens, options.timeline))
        machine.clear()
        result.save()
    print_report(result)
    return 1 if any(record["wrong"] for record in (*result["decode"], *result["training"])) else 0


def arguments(doc: str, repeats: int, help: str) -> argparse.ArgumentParser:
    """What the benchmarks of experts take: ``--out`` and ``--repeats``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--repeats", type=int, default=repeats, help=help)
    return parser


def run_here(run: Callable[[Machine, Shape, argparse.Namespace], int], options: argparse.Namespace) -> int:
    """``run`` on this machine's GPU with Qwen3-30B-A3B's shape; ends with a sentence where there is none."""
    try:
        return run(this_machine(options.repeats), Shape(), options)
    except BenchError as error:
        sys.exit(str(error))


def main() -> int:
    parser = arguments(__doc__, 60, "replays of each contender; a quarter of it in training")
    parser.add_argument("--decode", type=int, nargs="*", default=list(DECODE), help="tokens of a decode step")
    parser.add_argument("--training", type=int, nargs="*", default=list(TRAINING), help="tokens of a training step")
    parser.add_argument("--vllm-source", type=Path, help="vLLM's fused_moe folder, where vLLM itself is not installed")
    parser.add_argument("--timeline", action="store_true", help="kernel by kernel, too")
    return run_here(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
