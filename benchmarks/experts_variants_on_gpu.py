# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which sizes and launches a mixture's decode step is fastest by: one changed at a time, all equal in every bit.

    PYTHONPATH=. python3 benchmarks/experts_variants_on_gpu.py --out benchmarks/results/experts_variants_h200.json

The block of experts_on_gpu.py, router logits to sum, in CUDA graphs. A variant is the block with other constants of one
kernel's module, other tiles of a product, or other launches: products that start under the kernel in front, or wait for
it. Variants take turns with the block as it is, and no two in a row on the same tokens: 38 MB of weights at one token
would stay in the L2. ``gain`` is what a variant takes less than the block as it is, in us; the spread of a variant's
own runs says what is noise. A variant with other bits is named and has no gain.

*The floor by launches* is a graph of as many kernels as the block has, each of one warp that does nothing, one after
the other: what no block of so many launches can be below, beside its bytes.

Some 60 seconds, half of them compilation. Exit code 1 if a variant has other bits.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.experts_on_gpu import FLOW, RULE, Draw, Shape, arguments, draw_layer, run_here, tokens_of
from benchmarks.vllm_experts import Layer
from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch, grouped_gemm, weighted_silu_mul
from jetrl_verl.kernels.logits import Tile
from jetrl_verl.kernels.native import Plan
from jetrl_verl.tools.bench.machine import Machine
from jetrl_verl.tools.bench.report import Result

# The package has functions of these names.
COMBINE, PERMUTE, ROUTER = (
    import_module(f"jetrl_verl.kernels.{n}") for n in ("combine", "route_and_permute", "logits")
)
TOKENS = (1, 16, 64, 256)
AS_IT_IS = "as it is"
SUMS = ((2048, 8), (2048, 4), (1024, 4), (512, 2), (512, 1), (256, 1))
"""Columns of a program of ``combine``, warps."""
ACTIVATIONS = ((32, 4), (16, 4), (16, 2), (8, 4), (8, 2), (4, 1))
"""Groups of a program of the activation's quantizer, warps."""
ROWS = ((512, 512, 4), (1024, 512, 4), (512, 512, 8), (2048, 512, 8), (512, 512, 2))
"""Pairs compared and words copied at a time in ``route_and_permute``, warps."""
CHOSEN_BY_ALL = (0, 4, 8, 16)
"""Most tokens that every program of it chooses for."""
LOGITS = (Tile(64, 16, 256, 4, 3), Tile(64, 16, 256, 4, 4), Tile(64, 16, 512, 4, 2), Tile(64, 16, 128, 4, 6))
COLUMNS = (32, 64, 128)
"""Rows of W of a tile of a product."""

console = Console(width=140)


class Launches(NamedTuple):
    """Which products may start under the kernel in front."""

    gate_up: bool = True
    down: bool = True


class Variant(NamedTuple):
    """Attributes:
    module, constants: of it, instead of its own. launches: of the products. gate_up, down: their tiles' rows of W.
    """

    module: Any = None
    constants: dict[str, Any] = {}
    launches: Launches = Launches()
    gate_up: int = 0
    down: int = 0


def variants(tokens: int) -> dict[str, Variant]:
    """Those that can differ from the block as it is with so many tokens, by name."""
    found = {
        "no product starts early": Variant(launches=Launches(False, False)),
        "gate and up start early alone": Variant(launches=Launches(True, False)),
        "down starts early alone": Variant(launches=Launches(False, True)),
    }
    for columns in COLUMNS:
        found[f"gate and up: tiles of {columns}"] = Variant(gate_up=columns)
        found[f"down: tiles of {columns}"] = Variant(down=columns)
    for size in SUMS:
        found["sum: {} columns, {} warps".format(*size)] = Variant(COMBINE, {"_MANY": size, "_FEW": size})
    for groups, warps in ACTIVATIONS:
        constants = {"_GROUPS_OF_MANY": groups, "_GROUPS_OF_FEW": groups, "_WARPS": warps}
        found[f"activation: {groups} groups, {warps} warps"] = Variant(weighted_silu_mul, constants)
    for pairs, words, warps in ROWS:
        constants = {"_PAIRS": pairs, "_TILE": words, "_WARPS": warps}
        found[f"rows: {pairs} pairs, {words} words, {warps} warps"] = Variant(PERMUTE, constants)
    for most in CHOSEN_BY_ALL if tokens <= max(CHOSEN_BY_ALL) else ():
        found[f"rows: chosen by all up to {most}"] = Variant(PERMUTE, {"_TOKENS_CHOSEN_BY_ALL": most})
    for tile in LOGITS:
        name = f"logits: {tile.m} x {tile.n} x {tile.k}, {tile.warps} warps, {tile.stages} stages"
        found[name] = Variant(ROUTER, {"ROUTER_TILES": {512: tile}})
    return found


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """The variant's constants in their module."""
    before = {name: getattr(variant.module, name) for name in variant.constants}
    for name, value in variant.constants.items():
        setattr(variant.module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(variant.module, name, value)


def product(a, b, start: torch.Tensor, columns: int, **static: bool) -> torch.Tensor:
    """A product of the experts by the library's operator, or where it cannot run by the table's choice."""
    if columns == 0 or dispatch.choose("grouped_gemm_nt", start.device, a, b, start)[0] != "native":
        return kernels.grouped_gemm_nt(a, b, start, **static)
    return grouped_gemm.native_grouped_gemm_nt(a, b, start, plan=Plan("decode", columns), **static)


def block(layer: Layer, k: int, draw: Draw, variant: Variant) -> torch.Tensor:
    """What ``experts_on_gpu.ours`` does, by a variant."""
    with applied(variant):
        logits = kernels.logits(draw.x, layer.gate)
        weights, segments, rows = kernels.route_and_permute(logits, draw.quantized, k, True)
        gate_up, down = layer.fp8
        early = variant.launches
        both = product(rows, gate_up, segments.start, variant.gate_up, static_weight=early.gate_up)
        inner = kernels.weighted_silu_mul_quantize(both, weights, segments.pair, RULE)
        static = {"static_weight": early.down, "static_segments": early.down}
        return kernels.combine(product(inner, down, segments.start, variant.down, **static), segments.row)


@triton.jit
def _nothing_kernel():
    pass


def launches_alone(count: int) -> None:
    for _ in range(count):
        _nothing_kernel[(1,)](num_warps=1)


def launches_of(tokens: int) -> int:
    """Of the block as it is: logits, choice and rows, two products, the activation, the sum."""
    return 6 + (tokens > PERMUTE._TOKENS_CHOSEN_BY_ALL)


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.int16), want.view(torch.int16))


def taking_turns(calls: list[Callable], number: int) -> list[Callable]:
    """The calls of contender ``number``, which begins with another draw than its neighbours."""
    shift = number % len(calls)
    return calls[shift:] + calls[:shift]


def measure(machine: Machine, shape: Shape, layer: Layer, tokens: int, only: str) -> dict:
    """The record of one number of tokens."""
    device, k = machine.device, shape.per_token

    def make() -> Draw:
        x = tokens_of(shape, tokens, device)
        return Draw(x, FLOW.quantize_activation(x, RULE))

    bytes_of_expert = sum(q.qdata[0].nbytes + q.scales[0].nbytes for q in layer.fp8)
    draws = machine.timer.rotated(make, min(k * tokens, shape.experts) * bytes_of_expert / 2)
    chosen = {AS_IT_IS: Variant()} | {name: v for name, v in variants(tokens).items() if only in name}
    want, calls, other_bits = [block(layer, k, draw, Variant()) for draw in draws], {}, []
    for number, (name, variant) in enumerate(chosen.items()):
        of_draws = [partial(block, layer, k, draw, variant) for draw in draws]
        if all(equal(call(), result) for call, result in zip(of_draws, want, strict=True)):
            calls[name] = taking_turns(of_draws, number)
        else:
            other_bits.append(name)
    launches = launches_of(tokens)
    calls["launches"] = [partial(launches_alone, launches)]
    spreads = {name: spread._asdict() for name, spread in machine.timer.interleaved(calls).items()}
    hit = [len(kernels.route(kernels.logits(d.x, layer.gate), k, True)[0].unique()) for d in draws]
    record = {"tokens": tokens, "launches": launches, "launches_us": spreads.pop("launches")["median"]}
    record["bytes_us"] = 1e6 * sum(hit) / len(hit) * bytes_of_expert / machine.bandwidth
    return record | {"us": spreads, "other_bits": other_bits}


def print_report(result: dict) -> None:
    for record in result["variants"]:
        base = record["us"][AS_IT_IS]["median"]
        title = (
            f"{record['tokens']} tokens: as it is {base:.1f} us, its bytes {record['bytes_us']:.1f} "
            f"({base / record['bytes_us']:.2f}x), {record['launches']} launches alone {record['launches_us']:.1f}"
        )
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for heading in ("variant", "us", "a tenth below, above", "gain"):
            table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=True)
        for name, us in sorted(record["us"].items(), key=lambda item: item[1]["median"]):
            spread = f"{us['low']:.1f}, {us['high']:.1f}"
            table.add_row(name, f"{us['median']:.1f}", spread, f"{base - us['median']:+.1f}")
        console.print(table)
        for name in record["other_bits"]:
            console.print(f"OTHER BITS at {record['tokens']} tokens: {name}", markup=False)
    console.print(f"{result['device']}: copy {result['copy_bandwidth'] / 1e12:.2f} TB/s")


def run(machine: Machine, shape: Shape, options: argparse.Namespace) -> int:
    """Measure, print, save; 1 if a variant has other bits."""
    result = Result(options.out, machine.facts() | {"shape": shape._asdict(), "variants": []})
    layer = draw_layer(shape, machine.device)
    for tokens in options.tokens:
        with torch.no_grad():
            result["variants"].append(measure(machine, shape, layer, tokens, options.only))
        machine.clear()
        result.save()
    print_report(result)
    return 1 if any(record["other_bits"] for record in result["variants"]) else 0


def main() -> int:
    parser = arguments(__doc__, 60, "replays of each variant")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of a decode step")
    parser.add_argument("--only", default="", help="variants whose name has this")
    return run_here(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
