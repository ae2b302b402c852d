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
"""Quantisers, and operations that quantise their result, on one GPU: bytes, microseconds, share of the copy bandwidth.

    PYTHONPATH=. python3 benchmarks/quantisers_on_gpu.py --out quantisers.json       # about 2 minutes
    ... --sweep              also other numbers of warps and registers for every kernel on a 128 x 128 tile

Qwen3-8B: tokens of hidden size 4096 through the norms, of intermediate size 12288 through SiLU-mul, the four weights.
Each row counts the bytes that the operation cannot avoid moving. An operation stands beside what it replaces, ``a + b``
being two calls; what it replaces is charged with its own bytes, so a higher share is not a shorter time. Contenders
take turns, with a copy of the same tensor among them, on buffers that rotate through more than four times the L2 cache;
medians of 30 turns. Shares are of that copy, read plus written.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from kernels_on_gpu import QWEN3_8B, Timer, normal
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl import kernels, ops
from jetrl_verl.numerics import BLOCK
from jetrl_verl.ops.rms_norm import add_rms_norm_quantize_1x128, rms_norm_quantize_1x128
from jetrl_verl.ops.silu_mul import silu_mul_backward_quantize, silu_mul_quantize
from jetrl_verl.ops.triton_kernels import silu_mul_backward

TOKENS = (8192, 16384)
HIDDEN, INTERMEDIATE = 4096, 12288
EPS = 1e-6
LAUNCHES = ((4, None), (8, None), (8, 128), (8, 80), (16, None), (16, 64))
"""Warps, and the most registers a thread may have."""

SCALE = 4 / BLOCK
"""Bytes of scales an element, per 1x128 or 128x1 result."""

Contenders = dict[str, tuple[float, Callable[[], Callable[[], object]]]]
"""Name -> bytes an element, and a maker of the call on fresh buffers."""

console = Console(width=120)


def quantisers(m: int, k: int, rule: str) -> Contenders:
    def on_values(name: str) -> Callable:
        return lambda: partial(getattr(kernels, name), normal(m, k), rule)

    return {
        "quantize_1x128": (3 + SCALE, on_values("quantize_1x128")),
        "quantize_1x128_and_128x1": (4 + 2 * SCALE, on_values("quantize_1x128_and_128x1")),
        "relayout_128x1": (
            2 + 2 * SCALE,
            lambda: partial(kernels.relayout_128x1, kernels.quantize_1x128(normal(m, k), rule), rule),
        ),
    }


def weights(m: int, k: int, rule: str) -> Contenders:
    def on_values(name: str) -> Callable:
        return lambda: partial(getattr(kernels, name), normal(m, k), rule)

    return {
        "quantize_128x128": (3, on_values("quantize_128x128")),
        "quantize_128x128_and_transpose": (4, on_values("quantize_128x128_and_transpose")),
        "transpose_128x128": (
            2,
            lambda: partial(kernels.transpose_128x128, kernels.quantize_128x128(normal(m, k), rule)),
        ),
    }


def norms(m: int, k: int, rule: str) -> Contenders:
    weight = normal(1, k)[0]

    def plain(x: torch.Tensor) -> object:
        return kernels.quantize_1x128(ops.rms_norm(x, weight, EPS), rule)

    def plain_added(x: torch.Tensor, residual: torch.Tensor) -> object:
        y, total = ops.add_rms_norm(x, residual, weight, EPS)
        return kernels.quantize_1x128(y, rule), total

    def added(with_normed: bool) -> Callable:
        operands = (normal(m, k), normal(m, k), weight, EPS, rule)
        return partial(add_rms_norm_quantize_1x128, *operands, with_normed=with_normed)

    return {
        "rms_norm + quantize_1x128": (7 + SCALE, lambda: partial(plain, normal(m, k))),
        "rms_norm_quantize_1x128, row in BF16 too": (
            5 + SCALE,
            lambda: partial(rms_norm_quantize_1x128, normal(m, k), weight, EPS, rule),
        ),
        "add_rms_norm + quantize_1x128": (11 + SCALE, lambda: partial(plain_added, normal(m, k), normal(m, k))),
        "add_rms_norm_quantize_1x128": (7 + SCALE, lambda: added(False)),
        "add_rms_norm_quantize_1x128, row in BF16 too": (9 + SCALE, lambda: added(True)),
    }


def activations(m: int, k: int, rule: str) -> Contenders:
    def plain(gate: torch.Tensor, up: torch.Tensor, both: bool) -> object:
        product = ops.silu_mul(gate, up)
        return kernels.quantize_1x128_and_128x1(product, rule) if both else kernels.quantize_1x128(product, rule)

    def plain_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> object:
        return [kernels.quantize_1x128_and_128x1(d, rule) for d in silu_mul_backward(dy, gate, up)]

    def fused(with_product: bool, with_columns: bool) -> Callable:
        options = {"with_product": with_product, "with_columns": with_columns}
        return lambda: partial(silu_mul_quantize, normal(m, k), normal(m, k), rule, **options)

    def on(function: Callable, operands: int, *args) -> Callable:
        return lambda: partial(function, *(normal(m, k) for _ in range(operands)), *args)

    return {
        "silu_mul + quantize_1x128": (9 + SCALE, on(plain, 2, False)),
        "silu_mul_quantize": (5 + SCALE, fused(False, False)),
        "silu_mul_quantize, product in BF16 too": (7 + SCALE, fused(True, False)),
        "silu_mul + quantize_1x128_and_128x1": (10 + 2 * SCALE, on(plain, 2, True)),
        "silu_mul_quantize, both layouts": (6 + 2 * SCALE, fused(False, True)),
        "silu_mul backward + 2 quantize_1x128_and_128x1": (18 + 4 * SCALE, on(plain_backward, 3)),
        "silu_mul_backward_quantize": (10 + 4 * SCALE, on(silu_mul_backward_quantize, 3, rule)),
    }


def rotated(make: Callable[[], Callable], bytes_moved: float) -> list[Callable]:
    """As many calls on buffers of their own as it takes to be out of L2 when the first one's turn comes again."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return [make() for _ in range(max(1, round(4 * l2 / bytes_moved + 0.5)))]


def time_contenders(timer: Timer, contenders: Contenders, m: int, k: int, rule: str) -> list[dict]:
    contenders = {"copy": (4, lambda: partial(torch.clone, normal(m, k)))} | contenders
    with torch.no_grad():
        times = timer.interleaved({name: rotated(make, size * m * k) for name, (size, make) in contenders.items()})
    rates = {name: contenders[name][0] * m * k / (us * 1e-6) for name, us in times.items()}
    return [
        {
            "operation": name,
            "m": m,
            "k": k,
            "rule": rule,
            "bytes": round(contenders[name][0] * m * k),
            "us": us,
            "gb_per_s": rates[name] / 1e9,
            "share_of_copy": rates[name] / rates["copy"],
        }
        for name, us in times.items()
    ]


def sweep(timer: Timer) -> list[dict]:
    """Microseconds of each kernel on a tile of 128 x 128 under other numbers of warps and registers, for choosing its
    ``_LAUNCH``."""
    m, k = TOKENS[-1], HIDDEN
    of_kernels, of_operations = "jetrl_verl.kernels.triton_kernels.", "jetrl_verl.ops.triton_kernels."
    constants = {
        "quantize_1x128_and_128x1": (of_kernels + "quantize_1x128_and_128x1", "_LAUNCH"),
        "relayout_128x1": (of_kernels + "relayout_128x1", "_LAUNCH"),
        "quantize_128x128": (of_kernels + "quantize_128x128", "_LAUNCH"),
        "quantize_128x128_and_transpose": (of_kernels + "quantize_128x128", "_LAUNCH"),
        "silu_mul_quantize, both layouts": (of_operations + "silu_mul_quantize", "_LAUNCH_BOTH"),
        "silu_mul_backward_quantize": (of_operations + "silu_mul_quantize", "_LAUNCH_BACKWARD"),
    }
    contenders = quantisers(m, k, "fp32") | weights(m, k, "fp32") | activations(m, k, "fp32")
    records = []
    for name, (module_name, constant) in constants.items():
        module, (size, make) = import_module(module_name), contenders[name]
        own, times = getattr(module, constant), {}
        for warps, registers in LAUNCHES:
            setattr(module, constant, {"num_warps": warps} | ({"maxnreg": registers} if registers else {}))
            label = f"{warps} warps" + (f", {registers} registers" if registers else "")
            times |= timer.interleaved({label: rotated(make, size * m * k)})
        setattr(module, constant, own)
        records.append({"operation": name, "now": own, "us": times})
    return records


def print_report(result: dict) -> None:
    shapes = dict.fromkeys((r["m"], r["k"], r["rule"]) for r in result["operations"])
    for m, k, rule in shapes:
        table = Table(title=f"{m} x {k}, rule {rule}", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("operation")
        for heading in ("MB", "us", "GB/s", "% of copy"):
            table.add_column(heading, justify="right")
        for r in result["operations"]:
            if (r["m"], r["k"], r["rule"]) == (m, k, rule):
                figures = (r["bytes"] / 1e6, r["us"], r["gb_per_s"], 100 * r["share_of_copy"])
                table.add_row(r["operation"], *(f"{figure:.1f}" for figure in figures))
        console.print(table)
    for r in result["launches"]:
        times = "; ".join(f"{launch}: {us:.1f}" for launch, us in sorted(r["us"].items(), key=lambda item: item[1]))
        console.print(f"{r['operation']} (now {r['now']}), us: {times}", highlight=False, markup=False)
    console.print(f"{result['device']}, torch {result['torch']}, triton {result['triton']}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--repeats", type=int, default=30, help="turns per contender")
    parser.add_argument("--rules", nargs="+", default=["fp32", "pow2"], help="scale rules")
    parser.add_argument("--sweep", action="store_true", help="also sweep warps and registers")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/quantisers_on_gpu.py needs an NVIDIA GPU and torch finds none.")

    torch.manual_seed(0)
    timer = Timer(args.repeats)
    records = []
    for rule in args.rules:
        for m in TOKENS:
            for k, groups in ((HIDDEN, (quantisers, norms)), (INTERMEDIATE, (quantisers, activations))):
                contenders = {name: each for group in groups for name, each in group(m, k, rule).items()}
                records += time_contenders(timer, contenders, m, k, rule)
        for n, k in QWEN3_8B.values():
            records += time_contenders(timer, weights(n, k, rule), n, k, rule)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "operations": records,
        "launches": sweep(timer) if args.sweep else [],
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print_report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
