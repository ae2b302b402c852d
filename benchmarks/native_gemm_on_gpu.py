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
"""The native Hopper GEMMs on one GPU: does every variant run, are its bits right, and how fast is it. About 90 s.

    PYTHONPATH=. timeout 300 python3 benchmarks/native_gemm_on_gpu.py --out native.json
    ... --deep-gemm      also vLLM's DeepGEMM, which compiles every shape first (minutes more)
    ... --sweep          also every plan on some shapes, for choosing tiles, clusters and turns
    ... --smoke-only     stop after the first part

First every variant once on a small problem, in a process of its own and with the debug build (bounded waits): a
variant that hangs or is wrong is named, with what its warps waited for, and nothing else is run. Then bits against
Triton's kernel on the four Qwen3-8B linears. Then times: medians of replays of a captured CUDA graph between events,
other data in the L2 cache before each, us and TFLOP/s, beside the floor: weight and activation bytes at the measured
copy bandwidth, or operations at the dense FP8 rate of the datasheet (1979 TFLOP/s), whichever is longer.

Exit code 1 if a variant fails, if bits differ, or if the library is missing.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch
from kernels_on_gpu import QWEN3_8B, Timer, copy_bandwidth, normal, operands, rows_of
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl import kernels
from jetrl_verl.kernels import native
from jetrl_verl.kernels.dispatch import backend_of
from jetrl_verl.kernels.native import Plan
from jetrl_verl.numerics import BlockQuantized

FP8_RATE = 1979e12
TILES = [(block_m, cluster, ordered) for block_m in (256, 128) for cluster in (1, 2) for ordered in (0, 1)]
DECODE_CLUSTERS = {8: (1,), 16: (1, 2), 32: (1, 2), 64: (1, 2, 4), 128: (1, 4)}
DECODE_ROWS = (16, 24, 32, 48, 64, 96, 128)
TRAINING_ROWS = (4096, 16384)
TOKENS = (8192, 16384)
DECODE_BATCHES = (1, 8, 16, 32, 64, 128)
CHECKED_ROWS = (1, 8, 33, 64, 65, 128, 129, 1000, 4096)

console = Console(width=140)


def variants() -> list[tuple[str, Plan, tuple[int, int, int]]]:
    """Operation, plan and a shape that makes every tile edge, every cluster and a second round of tiles occur."""
    found = [("fprop", Plan("fprop", *tile), (290, 264, 1040)) for tile in TILES]
    for tokens, clusters in DECODE_CLUSTERS.items():
        for cluster in clusters:
            for rows in (24, 64) if tokens == 128 else (24, 128):
                found.append(("fprop", Plan("decode", rows, cluster), (tokens - tokens // 4, 264, 1040)))
    found += [("wgrad", Plan("", *tile), (290, 264, 1040)) for tile in TILES]
    return found


def smoke_one(operation: str, plan: Plan, shape: tuple[int, int, int]) -> str:
    """``ok``, or what is wrong with the result of one call."""
    from jetrl_verl import numerics

    m, n, k = shape
    block_scaled = operation == "fprop"
    quantise_b = numerics.quantize_128x128 if block_scaled else numerics.quantize_1x128
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
    a, b = numerics.quantize_1x128(x, "fp32"), quantise_b(w, "fp32")
    want = numerics.gemm_nt_float64(a, b, b_block_scaled=block_scaled)
    a, b = (BlockQuantized(q.codes.cuda(), q.scales.cuda()) for q in (a, b))
    for out_dtype in (torch.bfloat16,) if block_scaled else (torch.bfloat16, torch.float32):
        out = torch.full((m, n), torch.nan, dtype=out_dtype, device="cuda")
        native.gemm_nt(a, b, b_block_scaled=block_scaled, out_dtype=out_dtype, out=out, plan=plan)
        got = out.double().cpu()
        error = ((got - want).norm() / want.norm()).item()
        if not error < 2.5e-3:
            wrong = ~((got - want).abs() < 0.02 * want.abs().max())
            where = wrong.nonzero()[:4].tolist()
            return f"{out_dtype} error {error:.3g}, {int(wrong.sum())} of {m * n} elements, first at {where}"
    return "ok"


def smoke_child(first: int) -> None:
    """Runs variants from ``first`` on, one line each before and after, so that the parent knows where it stopped."""
    reason = native.unavailable()
    if reason is not None:
        sys.exit(reason)
    for index, variant in list(enumerate(variants()))[first:]:
        print(f"start {index}", flush=True)
        print(f"done {index} {smoke_one(*variant)}", flush=True)


def smoke(seconds: int) -> list[dict]:
    """One record per variant; a new process goes on after one that hung or died, for a few times."""
    records, first, deaths = [], 0, 0
    everything = variants()
    while first < len(everything) and deaths < 5:
        environment = os.environ | {"JETRL_NATIVE_DEBUG": "1"}
        command = [sys.executable, __file__, "--smoke-child", str(first)]
        try:
            child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
            output, ended = child.stdout + child.stderr, f"exit code {child.returncode}"
        except subprocess.TimeoutExpired as expired:
            output = "".join((stream or b"").decode() for stream in (expired.stdout, expired.stderr))
            ended = f"no end after {seconds} s"
        results = dict(line.split(" ", 2)[1:] for line in output.splitlines() if line.startswith("done "))
        for index in range(first, len(everything)):
            operation, plan, shape = everything[index]
            result = results.get(str(index))
            records.append({"operation": operation, "plan": plan, "shape": shape, "result": result or ended})
            if result is None:
                said = [line for line in output.splitlines() if not line.startswith(("start ", "done "))]
                records[-1]["said"] = said[-25:]
                deaths += 1
                break
        if records and "said" in records[-1] and f"start {len(records) - 1}" not in output:
            break  # it did not even begin: no library, no GPU
        first = len(records)
    return records


def compare_bits() -> list[dict]:
    """Batch sizes at which native's bits are not Triton's; empty lists are what we want."""
    records = []
    for layer, (n, k) in QWEN3_8B.items():
        a, b = operands(max(CHECKED_ROWS), n, k, True)
        want = backend_of("triton").gemm_nt(a, b, b_block_scaled=True)
        differing = []
        for m in CHECKED_ROWS:
            got = native.gemm_nt(rows_of(a, m), b, b_block_scaled=True)
            differing += [] if torch.equal(got, want[:m]) else [m]
        a, b = operands(n, k, 2048, False)
        want = backend_of("triton").gemm_nt(a, b, b_block_scaled=False)
        wgrad = torch.equal(native.gemm_nt(a, b, b_block_scaled=False), want)
        records.append({"layer": layer, "differs_at_m": differing, "wgrad_equal": wgrad})
    return records


def floor_us(m: int, n: int, k: int, out_bytes: int, bandwidth: float) -> float:
    return 1e6 * max((m * k + n * k + m * n * out_bytes) / bandwidth, 2 * m * n * k / FP8_RATE)


def time_forward(timer: Timer, names: list[str], bandwidth: float, batches: tuple[int, ...]) -> list[dict]:
    records = []
    for layer, (n, k) in QWEN3_8B.items():
        w = normal(n, k)
        weight = kernels.quantize_128x128(w, "fp32")
        for m in batches:
            x = normal(m, k)
            a = kernels.quantize_1x128(x, "fp32")
            times = {"bf16": timer(torch.matmul, x, w.t())}
            for name in names:
                backend = backend_of(name)
                if name == "triton" or backend.serves(a, weight, b_block_scaled=True):
                    times[name] = timer(backend.gemm_nt, a, weight, b_block_scaled=True)
            times["native"] = timer(native.gemm_nt, a, weight, b_block_scaled=True)
            floor = floor_us(m, n, k, 2, bandwidth)
            records.append({"layer": layer, "m": m, "n": n, "k": k, "floor": floor, "us": times})
    return records


def time_wgrad(timer: Timer, bandwidth: float) -> list[dict]:
    records = []
    for layer, (n, k) in QWEN3_8B.items():
        for tokens in TOKENS:
            a, b = operands(n, k, tokens, False)
            buffer = torch.zeros(n, k, device="cuda")
            dy, x = normal(tokens, n), normal(tokens, k)
            times = {"bf16": timer(torch.matmul, dy.t(), x)}
            times["native bf16"] = timer(native.gemm_nt, a, b, b_block_scaled=False)
            fp32 = {"b_block_scaled": False, "out_dtype": torch.float32, "out": buffer}
            times["native fp32"] = timer(native.gemm_nt, a, b, **fp32)
            times["native fp32 +="] = timer(native.gemm_nt, a, b, **fp32, accumulate=True)
            floor = floor_us(n, k, tokens, 2, bandwidth)
            records.append({"layer": layer, "m": n, "n": k, "k": tokens, "floor": floor, "us": times})
    return records


def sweep(timer: Timer) -> list[dict]:
    """Microseconds of every plan, best first."""
    records = []
    for m, n, k in ((4096, 6144, 4096), (16384, 4096, 12288), (1024, 4096, 4096)):
        a, b = operands(m, n, k, True)
        plans = [Plan("fprop", *tile) for tile in TILES]
        times = {str(tuple(plan)): timer(native.gemm_nt, a, b, b_block_scaled=True, plan=plan) for plan in plans}
        records.append({"operation": "fprop", "m": m, "n": n, "k": k, "us": times})
    for m in (8, 32, 64, 128):
        for n, k in QWEN3_8B.values():
            a, b = operands(m, n, k, True)
            tiles = [rows for rows in DECODE_ROWS if m < 128 or rows <= 64]
            plans = [Plan("fprop"), Plan("decode")]
            plans += [Plan("decode", rows, cluster) for cluster in DECODE_CLUSTERS[m] for rows in tiles]
            times = {str(tuple(plan)): timer(native.gemm_nt, a, b, b_block_scaled=True, plan=plan) for plan in plans}
            records.append({"operation": "decode", "m": m, "n": n, "k": k, "us": times})
    a, b = operands(6144, 4096, 8192, False)
    times = {}
    for tile in TILES:
        times[str(tile)] = timer(native.gemm_nt, a, b, b_block_scaled=False, plan=Plan("", *tile))
    records.append({"operation": "wgrad", "m": 6144, "n": 4096, "k": 8192, "us": times})
    return records


def times_table(title: str, records: list[dict]) -> Table:
    names = list(dict.fromkeys(name for record in records for name in record["us"]))
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "M", "N", "K", "floor", *names, "% of floor"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for record in records:
        operations = 2 * record["m"] * record["n"] * record["k"]
        cells = []
        for name in names:
            us = record["us"].get(name)
            cells.append(f"{us:.1f} ({operations / us / 1e6:.0f})" if us else "-")
        shape = [str(record[dimension]) for dimension in ("m", "n", "k")]
        share = f"{100 * record['floor'] / record['us'].get('native', record['us'].get('native bf16')):.0f}"
        table.add_row(record["layer"], *shape, f"{record['floor']:.1f}", *cells, share)
    return table


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def print_report(result: dict) -> None:
    for title, key in (
        ("FProp / DGrad: us (TFLOP/s)", "forward"),
        ("decode: us (TFLOP/s)", "decode"),
        ("WGrad: us (TFLOP/s)", "wgrad"),
    ):
        console.print(times_table(title, result[key]))
    for name in ("deep_gemm", "vllm_cutlass"):
        for key in ("forward", "decode"):
            ratios = [r["us"][name] / r["us"]["native"] for r in result[key] if name in r["us"]]
            if ratios:
                speed = f"{geometric_mean(ratios):.3f}x the speed of {name} (worst {min(ratios):.3f}x)"
                console.print(f"{key}: {speed}", highlight=False)
    for record in result["sweep"]:
        best = sorted(record["us"].items(), key=lambda item: item[1])[:6]
        shape = f"{record['m']} x {record['n']} x {record['k']}"
        times = ", ".join(f"{plan} {us:.1f}" for plan, us in best)
        console.print(f"{record['operation']} {shape}: {times}", highlight=False)
    for record in result["bits"]:
        where = record["differs_at_m"] or "never"
        console.print(f"bits {record['layer']}: differ from triton at M {where}; WGrad equal: {record['wgrad_equal']}")


def print_smoke(records: list[dict]) -> bool:
    failed = [record for record in records if record["result"] != "ok"]
    for record in failed:
        call = f"{record['operation']} {tuple(record['plan'])} {record['shape']}"
        console.print(f"{call}: {record['result']}", markup=False)
        for line in record.get("said", []):
            console.print(f"    {line}", markup=False, highlight=False)
    console.print(f"smoke: {len(records) - len(failed)} of {len(variants())} variants ok")
    return not failed and len(records) == len(variants())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--repeats", type=int, default=20, help="replays per timing")
    parser.add_argument("--deep-gemm", action="store_true", help="also DeepGEMM, which compiles for minutes")
    parser.add_argument("--sweep", action="store_true", help="also every plan on some shapes")
    parser.add_argument("--smoke-only", action="store_true", help="only run every variant once")
    parser.add_argument("--smoke-seconds", type=int, default=60, help="after which a process counts as hung")
    parser.add_argument("--smoke-child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke_child is not None:
        smoke_child(args.smoke_child)
        return 0
    if not torch.cuda.is_available():
        sys.exit("benchmarks/native_gemm_on_gpu.py needs a Hopper GPU and torch finds no GPU.")
    if native.unavailable() is not None:
        sys.exit(native.unavailable())

    smoked = smoke(args.smoke_seconds)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "smoke": smoked}
    right = print_smoke(smoked)
    if right and not args.smoke_only:
        torch.manual_seed(0)
        timer = Timer(args.repeats)
        bandwidth = copy_bandwidth(timer)
        wanted = ["vllm_cutlass"] + (["deep_gemm"] if args.deep_gemm else [])
        names = ["triton", *(name for name in wanted if backend_of(name).available())]
        result |= {"copy_bandwidth": bandwidth, "bits": compare_bits()}
        result["forward"] = time_forward(timer, names, bandwidth, TRAINING_ROWS)
        result["decode"] = time_forward(timer, names, bandwidth, DECODE_BATCHES)
        result["wgrad"] = time_wgrad(timer, bandwidth)
        result["sweep"] = sweep(timer) if args.sweep else []
        print_report(result)
        right = all(record["wgrad_equal"] and not record["differs_at_m"] for record in result["bits"])
        bits = f"all bits Triton's: {right}"
        console.print(f"{result['device']}: copy {bandwidth / 1e12:.2f} TB/s; {bits}", highlight=False)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
