# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels on one GPU: are the results right, may backends share an entry of the table, which tiles are best.

    PYTHONPATH=. python3 benchmarks/kernels_on_gpu.py --out kernels.json
    ... --deep-gemm          also compares vLLM's DeepGEMM, which compiles every shape first (minutes more)
    ... --skip-tests         bit comparisons only
    ... --sweep              also tiles of the Triton GEMM, warps and registers of the kernels on 128 x 128 tiles

Needs torch, triton and pytest; backends of packages that are missing are left out and named. How fast the kernels are,
beside what else is installed, is `jetrl bench`'s (docs/bench.md).

Checks are the tests of ``tests/kernels/*_on_gpu.py``, run in their own process. Bit comparisons then say, for every
backend, whether a row keeps its bits in every batch and whether they are the Triton kernel's: two backends may share an
entry of the dispatch table only where both say yes.

Exit code 1 if a test fails, if a backend of the table differs from its neighbours, or if nothing was tested.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch
from jetrl_verl.kernels.gemm_nt import TILES, triton_gemm_nt
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.bench import BenchError, data, quant
from jetrl_verl.tools.bench.contenders import Contender, draw
from jetrl_verl.tools.bench.gemm import rotated
from jetrl_verl.tools.bench.machine import Machine, this_machine
from jetrl_verl.tools.bench.shapes import MODELS, Problem

ROOT = Path(__file__).parents[1]
QWEN3_8B = MODELS["qwen3-8b"]
ROWS = (1, 2, 7, 8, 16, 33, 63, 64, 65, 128, 129, 1000, 4096)
BACKENDS = ("native", "vllm_cutlass", "cublaslt", "deep_gemm")
# Beside the kernel's own tiles: candidates (BLOCK_M, BLOCK_N, warps, stages) that might replace them.
EXTRA_TILES = ((128, 128, 8, 3), (128, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (64, 64, 4, 8), (64, 32, 4, 6))
LAUNCHES = ((4, None), (8, None), (8, 128), (8, 80), (16, None), (16, 64))
"""Warps, and the most registers a thread may have."""

console = Console(width=120)


def rows_of(q: QuantizedTensor, m: int) -> QuantizedTensor:
    """The first ``m`` rows in the memory layout of a batch of ``m``."""
    return QuantizedTensor(q.qdata[:m], q.scales[:m].t().contiguous().t())


def run_tests() -> dict:
    """Counts and failed names of ``tests/kernels/*_on_gpu.py``, run in their own process."""
    files = sorted(str(path) for path in (ROOT / "tests" / "kernels").glob("test_*_on_gpu.py"))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", *files]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            console.print(result.stdout[-3000:] + result.stderr[-3000:], markup=False)
            return {"passed": 0, "skipped": 0, "failed": ["pytest wrote no report"]}
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{c.get('classname')}::{c.get('name')}"
        for c in cases
        if c.find("failure") is not None or c.find("error") is not None
    ]
    skipped = sum(c.find("skipped") is not None for c in cases)
    if failed:
        console.print(result.stdout[-6000:], markup=False)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def compare_bits(name: str, operation: str, device: torch.device) -> dict:
    """Batch sizes at which a row's bits change under backend ``name``, and at which they are not Triton's."""
    gemm, b_block_scaled = dispatch.implementation(operation, name), operation == "gemm_nt_128x128"
    calls, changing, differing = 0, set(), set()
    for n, k in QWEN3_8B.values():
        quantize_b = kernels.quantize_128x128 if b_block_scaled else kernels.quantize_1x128
        a = kernels.quantize_1x128(data.activations(max(ROWS), k, device), "fp32")
        b = quantize_b(data.weights(n, k, device), "fp32")
        if not dispatch.supports(operation, name, a, b, b_block_scaled=b_block_scaled):
            continue
        want = triton_gemm_nt(a, b, b_block_scaled=b_block_scaled)
        own = gemm(a, b, b_block_scaled=b_block_scaled)
        for m in ROWS:
            part = rows_of(a, m)
            if not dispatch.supports(operation, name, part, b, b_block_scaled=b_block_scaled):
                continue
            calls += 1
            got = gemm(part, b, b_block_scaled=b_block_scaled)
            changing |= set() if torch.equal(got, own[:m]) else {m}
            differing |= set() if torch.equal(got, want[:m]) else {m}
    return {"calls": calls, "rows_change_at_m": sorted(changing), "differs_from_triton_at_m": sorted(differing)}


def compare_all_bits(names: list[str], device: torch.device) -> list[dict]:
    """One record per backend and operation; a backend that raises is recorded with its error, and the others go on."""
    records = []
    for operation in ("gemm_nt_128x128", "gemm_nt_1x128"):
        entry = kernels.BACKENDS[operation][kernels.platform_of(torch.device("cuda"))]
        for name in names:
            record = {"operation": operation, "backend": name, "in_table": name in entry}
            try:
                record |= compare_bits(name, operation, device)
            except (RuntimeError, ValueError, AssertionError) as error:
                record |= {"error": str(error).splitlines()[0][:200]}
            records.append(record)
    return records


def entry_holds(record: dict) -> bool:
    """A backend of the table gives every row Triton's bits in every batch."""
    return not (record.get("error") or record["rows_change_at_m"] or record["differs_from_triton_at_m"])


def available(name: str) -> bool:
    """Whether this machine has the backend."""
    return dispatch.unavailable(name) is None


def sweep_tiles(machine: Machine) -> list[dict]:
    """Microseconds of every tile shape of the Triton GEMM, for choosing ``TILES`` and the order they are tried in."""
    records = []
    for what, m, n, k in (
        ("decode", 8, 4096, 4096),
        ("decode", 64, 24576, 4096),
        ("fprop", 512, 4096, 12288),
        ("fprop", 16384, 6144, 4096),
        ("wgrad", 6144, 4096, 16384),
    ):
        problem = Problem(what, "", "", m, n, k)
        x, calls = draw(problem, machine.device), {}
        for tile in dict.fromkeys((*TILES, *EXTRA_TILES)):
            gemm = partial(triton_gemm_nt, b_block_scaled=problem.b_block_scaled, tile=tile)
            name = "x".join(map(str, tile))
            contender = Contender(name, lambda: None, lambda problem, x, gemm=gemm: partial(gemm, x.a, x.b))
            calls[name] = rotated(machine, contender, problem, x)
        times = machine.timer.interleaved(calls)
        records.append({"name": f"tiles {what} {m} x {n} x {k}", "us": {name: us.median for name, us in times.items()}})
        machine.clear()
    return records


def sweep_launches(machine: Machine) -> list[dict]:
    """Microseconds of each kernel on a tile of 128 x 128 under other numbers of warps and registers, for choosing its
    ``_LAUNCH``."""
    m, k = 16384, QWEN3_8B["qkv"][1]
    constants = {
        "quantize_1x128_and_128x1": ("quantize_1x128", "_LAUNCH_BOTH"),
        "relayout_128x1": ("relayout_128x1", "_LAUNCH"),
        "quantize_128x128": ("quantize_128x128", "_LAUNCH"),
        "quantize_128x128_and_transpose": ("quantize_128x128", "_LAUNCH"),
        "silu_mul_quantize, both layouts": ("silu_mul", "_LAUNCH_BOTH"),
        "silu_mul_backward_quantize": ("silu_mul", "_LAUNCH_BACKWARD"),
    }
    operations = {}
    for group in (quant.quantizers, quant.weights, quant.activations):
        operations |= group(m, k, "fp32", machine.device)
    records = []
    for name, (module_name, constant) in constants.items():
        module, operation = import_module(f"jetrl_verl.kernels.{module_name}"), operations[name]

        def make(operation: quant.Operation = operation):
            return partial(operation.run, *operation.operands())

        own, calls = getattr(module, constant), {}
        for warps, registers in LAUNCHES:
            setattr(module, constant, {"num_warps": warps} | ({"maxnreg": registers} if registers else {}))
            label = f"{warps} warps" + (f", {registers} registers" if registers else "")
            # A graph keeps the launch that it was captured with.
            calls[label] = machine.timer.captured(label, machine.timer.rotated(make, operation.bytes * m * k))
        setattr(module, constant, own)
        with torch.no_grad():
            times = machine.timer.interleaved(calls, graphs=False)
        records.append({"name": f"{name}, now {own}", "us": {label: us.median for label, us in times.items()}})
        machine.clear()
    return records


def print_report(result: dict) -> None:
    for record in result["sweeps"]:
        times = ", ".join(f"{name} {us:.1f}" for name, us in sorted(record["us"].items(), key=lambda item: item[1])[:6])
        console.print(f"{record['name']}, us: {times}", highlight=False, markup=False)
    for record in result["bits"]:
        line = f"bits {record['operation']} {record['backend']}{' (in the table)' if record['in_table'] else ''}: "
        if "error" in record:
            line += f"raises {record['error']}"
        else:
            line += f"{record['calls']} calls; a row changes at M {record['rows_change_at_m'] or 'never'}; "
            line += f"differs from triton at M {record['differs_from_triton_at_m'] or 'never'}"
        console.print(line, highlight=False, markup=False)
    tests = result["tests"]
    if tests is not None:
        console.print(f"tests: {tests['passed']} passed, {tests['skipped']} skipped, {len(tests['failed'])} failed")
        for name in tests["failed"][:10]:
            console.print(f"  FAILED {name}", markup=False)
    console.print(
        f"{result['device']}: copy {result['copy_bandwidth'] / 1e12:.2f} TB/s; "
        f"table entries hold: {result['entries_hold']}; backends missing: {result['missing'] or 'none'}",
        highlight=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of a sweep")
    parser.add_argument(
        "--deep-gemm", action="store_true", help="also DeepGEMM, which compiles every shape for minutes"
    )
    parser.add_argument("--skip-tests", action="store_true", help="leave the tests out")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles and launches")
    args = parser.parse_args()
    try:
        machine = this_machine(args.repeats)
    except BenchError as error:
        sys.exit(str(error))

    tests = None if args.skip_tests else run_tests()
    wanted = [name for name in BACKENDS if name != "deep_gemm" or args.deep_gemm]
    missing = [name for name in wanted if not available(name)]
    names = ["triton", *(name for name in wanted if name not in missing)]
    bits = compare_all_bits(names, machine.device)
    entries_hold = all(entry_holds(record) for record in bits if record["in_table"])
    result = machine.facts() | {
        "missing": missing,
        "tests": tests,
        "bits": bits,
        "entries_hold": entries_hold,
        "sweeps": [*sweep_tiles(machine), *sweep_launches(machine)] if args.sweep else [],
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print_report(result)
    tests_hold = tests is None or (tests["passed"] > 0 and not tests["failed"])
    return 0 if tests_hold and entries_hold else 1


if __name__ == "__main__":
    sys.exit(main())
