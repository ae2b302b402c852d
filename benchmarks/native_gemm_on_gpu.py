# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The native Hopper GEMMs on one GPU, for a new kernel's first run: does every variant run, and which plan is fastest.

    PYTHONPATH=. timeout 300 python3 benchmarks/native_gemm_on_gpu.py --out native.json
    ... --sweep          also every plan on some shapes, for choosing tiles and clusters
    ... --profile wgrad --shape 6144x4096x8192 --to fp32   instead: three runs of one kernel and no other of its name,
                         for `ncu --kernel-name regex:sm90_wgrad`

Every variant once on a small problem, in a process of its own and with the debug build (bounded waits): a variant that
hangs or is wrong is named, with what its warps waited for, and nothing is timed. Bits at many row counts are
benchmarks/kernels_on_gpu.py's, times beside other packages `jetrl bench gemm`'s (docs/bench.md).

Exit code 1 if a variant fails or the library is missing.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from jetrl_verl.kernels import native
from jetrl_verl.kernels.gemm_nt import native_gemm_nt
from jetrl_verl.kernels.native import Plan
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.contenders import DTYPES, Contender, draw
from jetrl_verl.tools.bench.gemm import rotated
from jetrl_verl.tools.bench.machine import Machine, this_machine
from jetrl_verl.tools.bench.shapes import MODELS, OUTPUTS, Problem

WGRAD_TILES = [(block, cluster) for block in (256, 128) for cluster in (1, 2)]
FPROP_TILES = [(block, cluster) for block in (256, 192, 128, 64) for cluster in (1, 2)]
DECODE_TOKENS = (16, 32, 64, 128)
DECODE_ROWS = (16, 32, 48, 64)

console = Console(width=140)


def variants() -> list[tuple[str, Plan, tuple[int, int, int]]]:
    """Operation, plan and a shape that makes every tile edge, every cluster and a second round of tiles occur."""
    found = [("fprop", Plan("fprop", *tile), (290, 264, 1040)) for tile in FPROP_TILES]
    for tokens in DECODE_TOKENS:
        for rows in DECODE_ROWS:
            found.append(("fprop", Plan("decode", rows), (tokens - tokens // 4, 264, 1040)))
    found += [("wgrad", Plan("", *tile), (290, 264, 1040)) for tile in WGRAD_TILES]
    return found


def smoke_one(operation: str, plan: Plan, shape: tuple[int, int, int]) -> str:
    """``ok``, or what is wrong with the result of one call."""
    from jetrl_verl import reference

    m, n, k = shape
    block_scaled = operation == "fprop"
    quantize_b = reference.quantize_128x128 if block_scaled else reference.quantize_1x128
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
    a, b = reference.quantize_1x128(x, "fp32"), quantize_b(w, "fp32")
    want = reference.gemm_nt_float64(a, b, b_block_scaled=block_scaled)
    a, b = (QuantizedTensor(q.qdata.cuda(), q.scales.cuda()) for q in (a, b))
    for out_dtype in (torch.bfloat16,) if block_scaled else (torch.bfloat16, torch.float32):
        out = torch.full((m, n), torch.nan, dtype=out_dtype, device="cuda")
        native_gemm_nt(a, b, b_block_scaled=block_scaled, out_dtype=out_dtype, out=out, plan=plan)
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


def time_plans(machine: Machine, problem: Problem, plans: list[Plan]) -> dict:
    """Microseconds of each plan, in turns."""
    x, calls = draw(problem, machine.device), {}
    for plan in plans:
        gemm = partial(native_gemm_nt, b_block_scaled=problem.b_block_scaled, plan=plan)
        name = str(tuple(plan))
        contender = Contender(name, lambda: None, lambda problem, x, gemm=gemm: partial(gemm, x.a, x.b))
        calls[name] = rotated(machine, contender, problem, x)
    times = machine.timer.interleaved(calls)
    machine.clear()
    return problem._asdict() | {"us": {name: us.median for name, us in times.items()}}


def sweep(machine: Machine) -> list[dict]:
    """Every plan on some shapes."""
    records = []
    for m, n, k in ((4096, 6144, 4096), (16384, 4096, 12288), (1024, 4096, 4096)):
        plans = [Plan("fprop", *tile) for tile in FPROP_TILES]
        records.append(time_plans(machine, Problem("fprop", "", "", m, n, k), plans))
    for m in (1, 16, 32, 64, 128):
        for layer, (n, k) in MODELS["qwen3-8b"].items():
            plans = [Plan("fprop"), Plan("decode"), *(Plan("decode", rows) for rows in DECODE_ROWS)]
            records.append(time_plans(machine, Problem("decode", "qwen3-8b", layer, m, n, k), plans))
    plans = [Plan("", *tile) for tile in WGRAD_TILES]
    records.append(time_plans(machine, Problem("wgrad", "", "", 6144, 4096, 8192), plans))
    return records


def profile(operation: str, shape: str, out: str) -> None:
    """Three runs of one kernel."""
    m, n, k = (int(size) for size in shape.split("x"))
    x = draw(Problem(operation, "", "", m, n, k), torch.device("cuda"))
    y = torch.zeros(m, n, dtype=DTYPES[out if operation == "wgrad" else "bf16"], device="cuda")
    target = {"add_to" if operation == "wgrad" and out == "fp32+=" else "out": y}
    plan = Plan("fprop" if operation == "fprop" else "")
    torch.cuda.synchronize()
    for _ in range(3):
        native_gemm_nt(x.a, x.b, b_block_scaled=operation == "fprop", out_dtype=y.dtype, plan=plan, **target)
    torch.cuda.synchronize()


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
    parser.add_argument("--repeats", type=int, default=20, help="rounds of the sweep")
    parser.add_argument("--sweep", action="store_true", help="also time every plan on some shapes")
    parser.add_argument("--profile", choices=("wgrad", "fprop"), help="three runs of one kernel")
    parser.add_argument("--shape", default="6144x4096x8192", help="rows of A x rows of B x contracted; with --profile")
    parser.add_argument("--to", choices=tuple(OUTPUTS), default="bf16", help="output of the profiled WGrad kernel")
    parser.add_argument("--smoke-seconds", type=int, default=60, help="after which a process counts as hung")
    parser.add_argument("--smoke-child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke_child is not None:
        smoke_child(args.smoke_child)
        return 0
    if args.profile:
        if native.unavailable() is not None:
            sys.exit(native.unavailable())
        profile(args.profile, args.shape, args.to)
        return 0
    try:
        machine = this_machine(args.repeats)
    except BenchError as error:
        sys.exit(str(error))
    if native.unavailable() is not None:
        sys.exit(native.unavailable())

    smoked = smoke(args.smoke_seconds)
    right = print_smoke(smoked)
    result = machine.facts() | {"smoke": smoked, "sweep": sweep(machine) if right and args.sweep else []}
    for record in result["sweep"]:
        best = sorted(record["us"].items(), key=lambda item: item[1])[:6]
        times = ", ".join(f"{plan} {us:.1f}" for plan, us in best)
        shape = f"{record['m']} x {record['n']} x {record['k']}"
        console.print(f"{record['what']} {shape}: {times}", highlight=False, markup=False)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
