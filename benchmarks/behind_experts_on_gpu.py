# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a mixture's decode step gains where the norm behind its experts adds a token's rows, instead of a launch.

    PYTHONPATH=. python3 benchmarks/behind_experts_on_gpu.py --out benchmarks/results/behind_experts_h200.json

The end of a layer and the beginning of the next at Qwen3-30B-A3B's shape (H 2048, I 768, 128 experts, 8 a token), in
CUDA graphs that take turns:

- *apart*: down projection, sum of a token's rows, residual sum with RMSNorm and qdata;
- *together*: down projection, the latter two in one launch;
- *product*: the down projection alone.

All draws of tokens and experts have residuals and norms of their own, which a use finds in device memory as a step
does; rows are where the product left them. Both must have the same bits. ``apart_us`` and ``together_us`` of the report
are without the product; a layer gains their difference. ``--timeline`` adds what every kernel takes, on the profiler's
clock. Some 30 seconds. Exit code 1 if bits differ.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.experts_on_gpu import FLOW, REPLAYS, RULE, Shape, arguments, run_here
from benchmarks.experts_variants_on_gpu import taking_turns
from jetrl_verl import kernels
from jetrl_verl.reference import QuantizedTensor, Segments
from jetrl_verl.tools.bench.machine import Machine
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.bench.timeline import kernels_of, steps_of

TOKENS, EPS = (1, 16, 64, 256, 2048), 1e-6

console = Console(width=140)


class Draw(NamedTuple):
    """What the down projection reads ``[T k, I]``, where its rows lie, the residual ``[T, H]`` and a norm ``[H]``."""

    inner: QuantizedTensor
    segments: Segments
    residual: torch.Tensor
    norm: torch.Tensor


def draw_tokens(shape: Shape, tokens: int, device: torch.device) -> Draw:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device=device)

    chosen, _ = kernels.route(torch.randn(tokens, shape.experts, device=device), shape.per_token, True)
    inner = FLOW.quantize_activation(normal(tokens * shape.per_token, shape.inner), RULE)
    segments = kernels.segments(chosen, shape.experts, 1)
    return Draw(inner, segments, normal(tokens, shape.hidden), 1 + normal(shape.hidden).mul_(0.1))


def product(down: QuantizedTensor, draw: Draw) -> torch.Tensor:
    return kernels.grouped_gemm_nt(draw.inner, down, draw.segments.start)


def apart(down: QuantizedTensor, draw: Draw) -> tuple[QuantizedTensor, torch.Tensor]:
    x = kernels.combine(product(down, draw), draw.segments.row)
    return kernels.add_rms_norm_quantize_1x128(x, draw.residual, draw.norm, EPS, RULE, with_normed=False)


def together(down: QuantizedTensor, draw: Draw) -> tuple[QuantizedTensor, torch.Tensor]:
    behind = product(down, draw), draw.segments.row, draw.residual, draw.norm, EPS, RULE
    return kernels.combine_add_rms_norm_quantize_1x128(*behind, with_normed=False)


CONTENDERS: dict[str, Callable] = {"apart": apart, "together": together, "product": product}


def equal(got: tuple[QuantizedTensor, torch.Tensor], want: tuple[QuantizedTensor, torch.Tensor]) -> bool:
    """Every bit of qdata, scales and residual sums."""
    pairs = zip((*got[0], got[1]), (*want[0], want[1]), strict=True)
    return all(torch.equal(*(x.contiguous().view(torch.uint8) for x in pair)) for pair in pairs)


def measure(machine: Machine, shape: Shape, down: QuantizedTensor, tokens: int, timeline: bool) -> dict:
    """The record of one number of tokens."""
    of_expert = down.qdata[0].nbytes + down.scales[0].nbytes
    hit_at_least = shape.per_token * of_expert
    draws = machine.timer.rotated(partial(draw_tokens, shape, tokens, machine.device), hit_at_least)
    wrong = sum(not equal(together(down, draw), apart(down, draw)) for draw in draws)
    calls = {name: [partial(call, down, draw) for draw in draws] for name, call in CONTENDERS.items()}
    turns = {name: taking_turns(of, number) for number, (name, of) in enumerate(calls.items())}
    us = {name: spread._asdict() for name, spread in machine.timer.interleaved(turns).items()}
    alone = us["product"]["median"]
    record = {"tokens": tokens, "draws": len(draws), "wrong": wrong, "us": us}
    record |= {f"{name}_us": us[name]["median"] - alone for name in ("apart", "together")}
    record["gain_us"] = record["apart_us"] - record["together_us"]
    if timeline:
        record["timeline"] = {}
        for name in ("apart", "together"):
            found = kernels_of(machine.timer.clock.capture(calls[name][0]), REPLAYS)
            record["timeline"][name] = [step._asdict() for step in steps_of(found, len(found) // REPLAYS)]
    return record


def print_report(result: dict) -> None:
    table = Table(title="behind a layer's experts: us", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("tokens", "product", "sum, then norm", "in one launch", "gain", "a tenth below, above", "bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in result["records"]:
        spread = record["us"]["together"]
        cells = [record["us"]["product"]["median"], *(record[f"{name}_us"] for name in ("apart", "together", "gain"))]
        around = f"{spread['low'] - spread['median']:+.1f}, {spread['high'] - spread['median']:+.1f}"
        bits = f"{record['wrong']} of {record['draws']} differ" if record["wrong"] else "equal"
        table.add_row(str(record["tokens"]), *(f"{cell:.2f}" for cell in cells), around, bits)
    console.print(table)
    for record in result["records"]:
        for name, steps in record.get("timeline", {}).items():
            console.print(f"{record['tokens']} tokens, {name}: takes, behind the one in front, adds", markup=False)
            for step in steps:
                times = (f"{step[key]:.2f}" for key in ("duration", "gap", "adds"))
                console.print(f"  {step['name'][:70]:70} {'  '.join(times)}", markup=False)
    console.print(f"{result['device']}: copy {result['copy_bandwidth'] / 1e12:.2f} TB/s")


def run(machine: Machine, shape: Shape, options: argparse.Namespace) -> int:
    """Measure, print, save; 1 if bits differ."""
    result = Result(options.out, machine.facts() | {"shape": shape._asdict(), "records": []})
    size = shape.experts, shape.hidden, shape.inner
    weight = torch.randn(*size, dtype=torch.bfloat16, device=machine.device).mul_(0.02)
    down = FLOW.quantize_weight(weight, RULE)
    for tokens in options.tokens:
        with torch.no_grad():
            result["records"].append(measure(machine, shape, down, tokens, options.timeline))
        machine.clear()
        result.save()
    print_report(result)
    return 1 if any(record["wrong"] for record in result["records"]) else 0


def main() -> int:
    parser = arguments(__doc__, 100, "replays of each")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of a step")
    parser.add_argument("--timeline", action="store_true", help="kernel by kernel, too")
    return run_here(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
