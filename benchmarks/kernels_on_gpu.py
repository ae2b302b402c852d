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
"""The kernels room on one GPU: are the results right, and how far from the hardware's limits are the times.

    PYTHONPATH=. python3 benchmarks/kernels_on_gpu.py --out kernels.json           # about 6 minutes
    ... --deep-gemm          also times vLLM's DeepGEMM, which compiles every shape first (minutes more)
    ... --skip-tests         timings and bit comparisons only

Needs torch, triton and pytest; backends of packages that are missing are left out of the tables and named.

Checks are the tests of ``tests/kernels/*_on_gpu.py``, run in their own process. Bit comparisons then say, for every
backend, whether a row keeps its bits in every batch and whether they are the Triton kernel's: two backends may share an
entry of the dispatch table only where both say yes. Times are medians of replays of a captured CUDA graph between
device events, with other data in the L2 cache before each. Quantisers count the bytes that they must move, against a
copy of 1 GiB by the multiprocessors in the same run; GEMMs count 2 M N K operations, against the BF16 product.

Exit code 1 if a test fails, if a backend of the table differs from its neighbours, or if nothing was tested.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl import kernels
from jetrl_verl.kernels.dispatch import backend_of
from jetrl_verl.numerics import BlockQuantized

ROOT = Path(__file__).parents[1]
QWEN3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
ROWS = (1, 2, 7, 8, 16, 63, 64, 65, 128, 129, 1000, 4096)
TIMED_ROWS = (8, 64, 4096, 16384)
TIMED_TOKENS = (4096, 16384)
EXTERNAL = ("vllm_cutlass", "cublaslt", "deep_gemm")
# Beside the kernel's own tiles: candidates (BLOCK_M, BLOCK_N, warps, stages) that might replace them.
EXTRA_TILES = ((128, 128, 8, 3), (128, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (64, 64, 4, 8), (64, 32, 4, 6))

console = Console(width=120)


def capture(function: Callable, *args, **kwargs) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph; its results live as long as the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*args, **kwargs)  # compiles, and lets libraries allocate their workspaces outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*args, **kwargs)
    return graph


class Timer:
    """Median microseconds of a call, cold in L2: replays of its CUDA graph between events."""

    def __init__(self, repeats: int):
        self.repeats = repeats
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(4 * l2, dtype=torch.uint8, device="cuda")

    def _measure(self, replays: dict[str, Callable[[int], None]], before: Callable[[], object]) -> dict[str, float]:
        """Medians over ``repeats`` rounds in which every contender has its turn; ``before`` runs before each turn."""
        events = {
            name: [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
            for name in replays
        }
        for warm_up in range(3):
            for replay in replays.values():
                replay(warm_up)
        for turn in range(self.repeats):
            for name, replay in replays.items():
                start, end = events[name][turn]
                before()
                start.record()
                replay(turn)
                end.record()
        torch.cuda.synchronize()
        return {
            name: 1000 * statistics.median(start.elapsed_time(end) for start, end in pairs)
            for name, pairs in events.items()
        }

    def __call__(self, function: Callable, *args, **kwargs) -> float:
        graph = capture(function, *args, **kwargs)
        return self._measure({"": lambda turn: graph.replay()}, self.flush.zero_)[""]

    def interleaved(self, contenders: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
        """Medians of several contenders in turns, each a list of one call on buffers of its own.

        Nothing is flushed, since dirty lines that a flush leaves would be written back while the contender runs: the
        buffers of a list must be so many that one is out of L2 when its turn comes again.
        """
        graphs = {name: [capture(call) for call in calls] for name, calls in contenders.items()}

        def replay_of(own: list[torch.cuda.CUDAGraph]) -> Callable[[int], None]:
            return lambda turn: own[turn % len(own)].replay()

        return self._measure({name: replay_of(own) for name, own in graphs.items()}, lambda: None)


def normal(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, dtype=torch.bfloat16, device="cuda")


def operands(m: int, n: int, k: int, b_block_scaled: bool) -> tuple[BlockQuantized, BlockQuantized]:
    quantise_b = kernels.quantize_128x128 if b_block_scaled else kernels.quantize_1x128
    return kernels.quantize_1x128(normal(m, k), "fp32"), quantise_b(normal(n, k), "fp32")


def rows_of(q: BlockQuantized, m: int) -> BlockQuantized:
    """The first ``m`` rows in the memory layout of a batch of ``m``."""
    return BlockQuantized(q.codes[:m], q.scales[:m].t().contiguous().t())


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


def compare_bits(name: str, operation: str) -> dict:
    """Batch sizes at which a row's bits change under backend ``name``, and at which they are not Triton's."""
    backend, b_block_scaled = backend_of(name), operation == "gemm_nt_128x128"
    served, changing, differing = 0, set(), set()
    for n, k in QWEN3_8B.values():
        a, b = operands(max(ROWS), n, k, b_block_scaled)
        if name != "triton" and not backend.serves(a, b, b_block_scaled=b_block_scaled):
            continue
        want = backend_of("triton").gemm_nt(a, b, b_block_scaled=b_block_scaled)
        own = backend.gemm_nt(a, b, b_block_scaled=b_block_scaled)
        for m in ROWS:
            part = rows_of(a, m)
            if name != "triton" and not backend.serves(part, b, b_block_scaled=b_block_scaled):
                continue
            served += 1
            got = backend.gemm_nt(part, b, b_block_scaled=b_block_scaled)
            changing |= set() if torch.equal(got, own[:m]) else {m}
            differing |= set() if torch.equal(got, want[:m]) else {m}
    return {"served": served, "rows_change_at_m": sorted(changing), "differs_from_triton_at_m": sorted(differing)}


def compare_all_bits(names: list[str]) -> list[dict]:
    """One record per backend and operation; a backend that raises is recorded with its error, and the others go on."""
    records = []
    for operation in ("gemm_nt_128x128", "gemm_nt_1x128"):
        entry = kernels.BACKENDS[operation][kernels.platform_of(torch.device("cuda"))]
        for name in names:
            record = {"operation": operation, "backend": name, "in_table": name in entry}
            try:
                record |= compare_bits(name, operation)
            except (RuntimeError, ValueError, AssertionError) as error:
                record |= {"error": str(error).splitlines()[0][:200]}
            records.append(record)
    return records


def entry_holds(record: dict) -> bool:
    """A backend of the table gives every row Triton's bits in every batch."""
    return not (record.get("error") or record["rows_change_at_m"] or record["differs_from_triton_at_m"])


def copy_bandwidth(timer: Timer) -> float:
    """Bytes per second, read plus written, of an elementwise kernel over 1 GiB.

    Not ``copy_``: inside a graph that is the copy engine's, which is slower than the multiprocessors (2.76 TB/s).
    """
    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timer(torch.bitwise_not, source, out=target) * 1e-6)


def time_quantisers(timer: Timer, bandwidth: float) -> list[dict]:
    records = []
    for m, k in ((16384, 4096), (16384, 12288), (16000, 4096), (64, 4096)):
        x = normal(m, k)
        for rule in ("fp32", "pow2"):
            q = kernels.quantize_1x128(x, rule)
            weight = kernels.quantize_128x128(x, rule)
            calls = {
                "quantize_1x128": (3, x, rule),
                "quantize_128x1": (3, x, rule),
                "quantize_1x128_and_128x1": (4, x, rule),
                "relayout_128x1": (2, q, rule),
                "quantize_128x128": (3, x, rule),
                "quantize_128x128_and_transpose": (4, x, rule),
                "transpose_128x128": (2, weight),
            }
            for operation, (bytes_per_element, *arguments) in calls.items():
                microseconds = timer(getattr(kernels, operation), *arguments)
                share = bytes_per_element * m * k / (microseconds * 1e-6) / bandwidth
                records.append(
                    {"operation": operation, "m": m, "k": k, "rule": rule, "us": microseconds, "share": share}
                )
    return records


def time_gemms(timer: Timer, names: list[str]) -> list[dict]:
    """FProp / DGrad shapes, BF16 out; ``linear`` is the forward as called: quantise X, then the table's backend."""
    records = []
    for layer, (n, k) in QWEN3_8B.items():
        w = normal(n, k)
        weight = kernels.quantize_128x128(w, "fp32")
        for m in TIMED_ROWS:
            x = normal(m, k)
            a = kernels.quantize_1x128(x, "fp32")
            times = {"bf16": timer(torch.matmul, x, w.t())}
            for name in names:
                backend = backend_of(name)
                if name == "triton" or backend.serves(a, weight, b_block_scaled=True):
                    times[name] = timer(backend.gemm_nt, a, weight, b_block_scaled=True)
            times["linear"] = timer(kernels.fprop, x, weight.codes, weight.scales, None, "fp32")
            records.append({"layer": layer, "m": m, "n": n, "k": k, "us": times})
    return records


def time_wgrad(timer: Timer, names: list[str]) -> list[dict]:
    records = []
    for layer, (n, k) in QWEN3_8B.items():
        for tokens in TIMED_TOKENS:
            dy, x = normal(tokens, n), normal(tokens, k)
            a, b = kernels.quantize_128x1(dy, "fp32"), kernels.quantize_128x1(x, "fp32")
            times = {"bf16": timer(torch.matmul, dy.t(), x)}
            for name in names:
                backend = backend_of(name)
                if name == "triton" or backend.serves(a, b, b_block_scaled=False):
                    times[name] = timer(backend.gemm_nt, a, b, b_block_scaled=False)
            records.append({"layer": layer, "m": n, "n": k, "k": tokens, "us": times})
    return records


def sweep_tiles(timer: Timer) -> list[dict]:
    """Microseconds of every tile shape of the Triton GEMM, for choosing ``TILES`` and the order they are tried in."""
    triton_kernels = backend_of("triton")
    records = []
    for b_block_scaled, m, n, k in (
        (True, 8, 4096, 4096),
        (True, 64, 24576, 4096),
        (True, 512, 4096, 12288),
        (True, 16384, 6144, 4096),
        (False, 6144, 4096, 16384),
    ):
        a, b = operands(m, n, k, b_block_scaled)
        times = {}
        for tile in dict.fromkeys((*triton_kernels.TILES, *EXTRA_TILES)):
            microseconds = timer(triton_kernels.gemm_nt, a, b, b_block_scaled=b_block_scaled, tile=tile)
            times["x".join(map(str, tile))] = microseconds
        records.append({"b_block_scaled": b_block_scaled, "m": m, "n": n, "k": k, "us": times})
    return records


def gemm_table(title: str, records: list[dict]) -> Table:
    names = list(dict.fromkeys(name for record in records for name in record["us"]))
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "M", "N", "K", *names):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for record in records:
        operations = 2 * record["m"] * record["n"] * record["k"]
        cells = []
        for name in names:
            microseconds = record["us"].get(name)
            rate = f" ({operations / microseconds / 1e6:.0f})" if microseconds else ""
            cells.append(f"{microseconds:.1f}{rate}" if microseconds else "-")
        table.add_row(record["layer"], *(str(record[d]) for d in ("m", "n", "k")), *cells)
    return table


def print_report(result: dict) -> None:
    quantisers = Table(
        title="quantisers: us (% of copy bandwidth), fp32 rule | pow2 rule", box=SIMPLE_HEAD, pad_edge=False
    )
    shapes = list(dict.fromkeys((r["m"], r["k"]) for r in result["quantisers"]))
    for heading in ("operation", *(f"{m} x {k}" for m, k in shapes)):
        quantisers.add_column(heading)
    for operation in dict.fromkeys(r["operation"] for r in result["quantisers"]):
        cells = []
        for m, k in shapes:
            found = [r for r in result["quantisers"] if (r["operation"], r["m"], r["k"]) == (operation, m, k)]
            cells.append(" | ".join(f"{r['us']:.0f} ({100 * r['share']:.0f})" for r in found))
        quantisers.add_row(operation, *cells)
    console.print(quantisers)
    console.print(gemm_table("FProp / DGrad: us (TFLOP/s); linear = quantise X + the table's backend", result["gemms"]))
    console.print(gemm_table("WGrad: us (TFLOP/s)", result["wgrad"]))
    for record in result["tiles"]:
        times = ", ".join(f"{tile} {us:.1f}" for tile, us in sorted(record["us"].items(), key=lambda item: item[1])[:5])
        kind = "128x128" if record["b_block_scaled"] else "1x128"
        console.print(f"tiles {record['m']} x {record['n']} x {record['k']} ({kind}): {times}", highlight=False)
    for record in result["bits"]:
        line = f"bits {record['operation']} {record['backend']}{' (in the table)' if record['in_table'] else ''}: "
        if "error" in record:
            line += f"raises {record['error']}"
        else:
            line += f"{record['served']} calls; a row changes at M {record['rows_change_at_m'] or 'never'}; "
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
    parser.add_argument("--repeats", type=int, default=30, help="replays per timing")
    parser.add_argument(
        "--deep-gemm", action="store_true", help="also DeepGEMM, which compiles every shape for minutes"
    )
    parser.add_argument("--skip-tests", action="store_true", help="leave the tests out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels_on_gpu.py needs an NVIDIA GPU and torch finds none.")

    torch.manual_seed(0)
    tests = None if args.skip_tests else run_tests()
    wanted = [name for name in EXTERNAL if name != "deep_gemm" or args.deep_gemm]
    missing = [name for name in wanted if not backend_of(name).available()]
    names = ["triton", *(name for name in wanted if name not in missing)]
    timer = Timer(args.repeats)
    bandwidth = copy_bandwidth(timer)
    bits = compare_all_bits(names)
    entries_hold = all(entry_holds(record) for record in bits if record["in_table"])
    names = [name for name in names if not any("error" in r for r in bits if r["backend"] == name)]
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "vllm_present": find_spec("vllm") is not None,
        "backends": kernels.describe_backends("cuda"),
        "missing": missing,
        "tests": tests,
        "copy_bandwidth": bandwidth,
        "bits": bits,
        "entries_hold": entries_hold,
        "quantisers": time_quantisers(timer, bandwidth),
        "gemms": time_gemms(timer, names),
        "wgrad": time_wgrad(timer, names),
        "tiles": sweep_tiles(timer),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print_report(result)
    tests_hold = tests is None or (tests["passed"] > 0 and not tests["failed"])
    return 0 if tests_hold and entries_hold else 1


if __name__ == "__main__":
    sys.exit(main())
