# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The grouped products of a mixture's experts at Qwen3-30B-A3B's shape, against other kernels in the same run.

    PYTHONPATH=. python3 benchmarks/experts_gemm_on_gpu.py --out benchmarks/results/experts_gemm_h200.json

FProp, DGrad and WGrad of both projections, segments aligned to 128 rows, tokens routed evenly and unevenly; decoding, a
few rows an expert, where the weights of the experts hit are what is read; and the down projection with the sum of a
token's rows, as the trainer runs it with a rollout over two ranks. Contenders take turns:

- *native*, *triton*: the backends of kernels/grouped_gemm.py. Bits must be equal; exit code 1 if they are not.
- *native, contiguous*: DGrad of a W^T whose experts lie below each other; the flow's transpose has them beside each
  other.
- *deep_gemm*: its contiguous and its k-grouped GEMM, from the vLLM wheel. It compiles each shape first, in a pool of
  processes. Its bits are compared; its weight gradient is FP32, is added to, and wants the tokens of an expert
  contiguous and their counts on the host, none of which is timed.
- *bf16*: torch._grouped_mm.
- *slices*: of ranks, a product and a sum of a token's rows for each, and the sum of these.
- *whole*: of ranks, what a rollout over one asks for: other bits, the time that ranks cost more than.

TFLOP/s count the rows of tokens, not those that fill up a segment. Of ranks the time over *whole*'s is shown.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from jetrl_verl import formats, kernels
from jetrl_verl.kernels import dispatch
from jetrl_verl.kernels.vllm_kernels import no_deep_gemm
from jetrl_verl.reference import BLOCK, FP8_DTYPE, QuantizedTensor, Segments, k_slices
from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.deep_gemm import MOST_PROCESSES, align_scales
from jetrl_verl.tools.bench.machine import Machine, this_machine
from jetrl_verl.tools.bench.report import Result

EXPERTS, PER_TOKEN, HIDDEN, INNER = 128, 8, 2048, 768
LAYERS = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
CONTENDERS = ("native", "native, contiguous", "triton", "deep_gemm", "bf16", "slices", "whole")
RANKS = 2
"""Over which the rollout splits the inner dimension: of four a slice would be no multiple of 128."""
UNEVEN = 1.5
"""Standard deviation of what an expert's logits are shifted by; tokens' own have 1."""

FLOW = formats.get("fp8")
DEVICE = torch.device("cuda")


class Case(NamedTuple):
    """One product of one layer: rows times ``[E, n, k]``, or the gradient of that matrix."""

    what: str
    layer: str
    tokens: int
    routing: str

    @property
    def decodes(self) -> bool:
        return self.what == "decode"

    @property
    def align(self) -> int:
        return 1 if self.decodes else BLOCK

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k) of the matrix that is multiplied with, or of the gradient."""
        n, k = LAYERS[self.layer]
        return (k, n) if self.what == "dgrad" else (n, k)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def routed(case: Case) -> Segments:
    """Segments of random tokens; the same for every contender."""
    generator = torch.Generator(device=DEVICE).manual_seed(case.tokens)
    logits = torch.randn(case.tokens, EXPERTS, device=DEVICE, generator=generator)
    if case.routing == "uneven":
        logits += UNEVEN * torch.randn(EXPERTS, device=DEVICE, generator=generator)
    chosen, _ = kernels.route(logits, PER_TOKEN, True)
    return kernels.segments(chosen, EXPERTS, case.align)


def deep_gemm():
    """The module, wherever vLLM finds it."""
    from vllm.utils.deep_gemm import _import_deep_gemm

    return _import_deep_gemm()


def deep_gemm_forward(x: QuantizedTensor, w: QuantizedTensor, experts_of: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.qdata.shape[0], w.qdata.shape[1], dtype=torch.bfloat16, device=DEVICE)
    deep_gemm().m_grouped_fp8_gemm_nt_contiguous(tuple(x), tuple(w), out, experts_of, disable_ue8m0_cast=True)
    return out


def by_expert(q: QuantizedTensor, counts: list[int]) -> QuantizedTensor:
    """Colwise qdata [N, R] as one row of memory in which each expert's [N, tokens] is contiguous."""
    parts = q.qdata.view(torch.uint8)[:, : sum(counts)].split(counts, dim=1)
    return QuantizedTensor(torch.cat([part.flatten() for part in parts]).view(FP8_DTYPE), q.scales)


def deep_gemm_wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, counts: list[int], on_device: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    deep_gemm().k_grouped_fp8_gemm_nt_contiguous(tuple(dy), tuple(x), out, counts, on_device, out)
    return out


def down_of_ranks(a: QuantizedTensor, w: QuantizedTensor, of: Segments, align: int) -> dict[str, Callable]:
    """Name -> the down projection of a layer over ``RANKS`` and the sum of each token's rows."""

    def in_one(product: Callable) -> torch.Tensor:
        return kernels.combine_of_ranks(product(a, w, of.start, RANKS, align), of.row)

    def by_slices() -> torch.Tensor:
        slices = zip(k_slices(a, RANKS), k_slices(w, RANKS), strict=True)
        return kernels.sum_of_ranks(
            [kernels.combine(kernels.grouped_gemm_nt(*operands, of.start, align), of.row) for operands in slices]
        )

    return {
        **{
            name: partial(in_one, dispatch.implementation("grouped_gemm_nt_of_ranks", name))
            for name in ("native", "triton")
        },
        "slices": by_slices,
        "whole": lambda: kernels.combine(kernels.grouped_gemm_nt(a, w, of.start, align), of.row),
    }


def make(case: Case, segments: Segments, contenders: list[str]) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> a call on fresh operands."""
    (n, k), rows, start = case.shape, len(segments.pair), segments.start
    held = (segments.pair >= 0)[:, None]
    if case.what == "ranks":
        a = FLOW.quantize_activation(normal(rows, k).masked_fill_(~held, 0), "fp32")
        calls = down_of_ranks(a, FLOW.quantize_weight(normal(EXPERTS, n, k) * 0.02, "fp32"), segments, case.align)
        return {name: call for name, call in calls.items() if name in contenders}
    bounds = start.tolist()
    counts = [last - first for first, last in zip(bounds, bounds[1:])]
    ends = start[1:].contiguous()
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    if case.what == "wgrad":
        dy, x = (normal(rows, columns).masked_fill_(~held, 0) for columns in (n, k))
        a, b = (FLOW.quantize_gradient(t, "fp32", rowwise=False, colwise=True)[1] for t in (dy, x))
        for name in ("native", "triton"):
            calls[name] = partial(dispatch.implementation("grouped_wgrad", name), a, b, start)
        if "deep_gemm" in contenders:
            used = start[-1].item() // BLOCK
            parts = [by_expert(QuantizedTensor(q.qdata, q.scales[:, :used]), counts) for q in (a, b)]
            on_device = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
            out = torch.zeros(EXPERTS, n, k, device=DEVICE)
            calls["deep_gemm"] = lambda: deep_gemm_wgrad(*parts, counts, on_device, out)
        if "bf16" in contenders:
            calls["bf16"] = lambda: torch._grouped_mm(dy.t(), x, offs=ends)
        return {name: call for name, call in calls.items() if name in contenders}
    x = normal(rows, k).masked_fill_(~held, 0)
    a = FLOW.quantize_activation(x, "fp32")
    # DGrad multiplies with the transpose, as the flow makes it.
    weight = normal(EXPERTS, *((k, n) if case.what == "dgrad" else (n, k))) * 0.02
    w = FLOW.quantize_weight(weight, "fp32")
    below = w
    if case.what == "dgrad":
        qdata, scales = kernels.transpose_128x128(QuantizedTensor(w.qdata.flatten(0, 1), w.scales.flatten(0, 1)))
        w = QuantizedTensor(
            qdata.view(n, EXPERTS, k).transpose(0, 1), scales.view(-1, EXPERTS, k // BLOCK).transpose(0, 1)
        )
        below = QuantizedTensor(w.qdata.view(torch.uint8).contiguous().view(FP8_DTYPE), w.scales.contiguous())
    for name in ("native", "triton"):
        calls[name] = partial(dispatch.implementation("grouped_gemm_nt", name), a, w, start, case.align)
    if case.what == "dgrad" and "native, contiguous" in contenders:
        native = dispatch.implementation("grouped_gemm_nt", "native")
        calls["native, contiguous"] = partial(native, a, below, start, case.align)
    if "deep_gemm" in contenders and not case.decodes:
        of_row = torch.full((rows,), -1, dtype=torch.int32)
        for expert, (first, last) in enumerate(zip(bounds, bounds[1:])):
            of_row[first:last] = expert
        aligned, of_row = align_scales(a), of_row.to(DEVICE)
        calls["deep_gemm"] = lambda: deep_gemm_forward(aligned, below, of_row)
    if "bf16" in contenders:
        right = weight if case.what == "dgrad" else weight.transpose(1, 2)
        calls["bf16"] = lambda: torch._grouped_mm(x, right, offs=ends)
    return {name: call for name, call in calls.items() if name in contenders}


def compile_one(case: Case) -> None:
    """In a process of the pool: DeepGEMM's kernel of one case, left in its folder."""
    make(case, routed(case), ["deep_gemm"])["deep_gemm"]()
    torch.cuda.synchronize()


def without_what_fails(calls: dict, failed: dict[str, str]) -> dict:
    """``calls`` without those that raise, whose reason goes to ``failed``."""
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except (RuntimeError, AttributeError, TypeError, AssertionError, ValueError) as error:
            failed[name] = str(error).strip().splitlines()[0]
    return found


def measure(machine: Machine, case: Case, contenders: list[str]) -> dict:
    segments = routed(case)
    start = segments.start
    used, (n, k), pairs = int(start[-1]), case.shape, case.tokens * PER_TOKEN
    hit = int((start[1:] > start[:-1]).sum())
    failed: dict[str, str] = {}
    calls = make(case, segments, contenders)
    found = without_what_fails(calls, failed)
    rows = slice(None) if case.what in ("wgrad", "ranks") else slice(used)
    same = {
        name: torch.equal(found["triton"][rows], found[name][rows].to(torch.bfloat16))
        for name in ("native", "native, contiguous", "deep_gemm", "slices")
        if name in found and "triton" in found
    }
    del found
    weights = hit * n * k
    touched = pairs * (n + k) + 2 * weights if case.what == "wgrad" else weights + pairs * (k + 2 * n)
    if case.what == "ranks":  # each rank's rows are written and read, a token's output is written
        touched = weights + pairs * (k + RANKS * 4 * n) + case.tokens * 2 * n
    # Buffers of its own for each contender, or one would warm the L2 for the next.
    names = [name for name in calls if name not in failed]
    del calls
    turns = {
        name: machine.timer.rotated(lambda name=name: make(case, segments, [name])[name], touched) for name in names
    }
    times = machine.timer.interleaved(turns)
    return {
        **case._asdict(),
        "n": n,
        "k": k,
        "rows": used,
        "experts_hit": hit,
        "most_rows": int((start[1:] - start[:-1]).max()),
        "us": {name: spread._asdict() for name, spread in times.items()},
        "tflops": {name: 2 * pairs * n * k / spread.median / 1e6 for name, spread in times.items()},
        "weights_tbps": {name: weights / spread.median / 1e6 for name, spread in times.items()},
        "bytes_us": 1e6 * touched / machine.bandwidth,
        "over_whole": {
            name: spread.median / times["whole"].median for name, spread in times.items() if "whole" in times
        },
        "same_bits": same,
        "failed": failed,
    }


def table(records: list[dict], contenders: list[str]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for heading in ("what", "layer", "tokens", "routing", "bytes us", *contenders, "bits"):
        shown.add_column(heading, justify="left" if heading in ("what", "layer", "routing", "bits") else "right")
    for record in records:
        decodes = record["what"] == "decode"
        rates = record["weights_tbps" if decodes else "tflops"]
        cells = [
            f"{record['us'][name]['median']:.1f} us {rates[name]:.2f} TB/s"
            if decodes and name in rates
            else f"{record['us'][name]['median']:.0f} us {record['over_whole'][name]:.2f} x"
            if name in record["over_whole"]
            else f"{record['us'][name]['median']:.0f} us {rates[name]:.0f} T"
            if name in rates
            else "-"
            for name in contenders
        ]
        differ = [name for name, same in record["same_bits"].items() if not same]
        bits = "differ: " + ", ".join(differ) if differ else "equal"
        names = (record["what"], record["layer"], str(record["tokens"]), record["routing"])
        shown.add_row(*names, f"{record['bytes_us']:.1f}", *cells, bits)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", default=["fprop", "dgrad", "wgrad", "decode", "ranks"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console, begin = Console(width=170), time.monotonic()
    try:
        machine = this_machine(args.repeats)
        result = Result(args.out, {"command": "experts_gemm", **machine.facts(), "absent": {}, "records": []})
    except BenchError as error:
        console.print(f"{error}")
        return 2
    contenders = list(args.contenders)
    trained = [what for what in args.what if what != "decode"]
    cases = [
        Case(what, layer, tokens, routing)
        for what in trained
        for layer in (["down"] if what == "ranks" else LAYERS)
        for tokens in args.tokens
        for routing in ("even", "uneven")
    ]
    if "decode" in args.what:
        cases += [Case("decode", layer, tokens, "even") for layer in LAYERS for tokens in args.decode]
    if "deep_gemm" in contenders:
        if reason := no_deep_gemm():
            result["absent"]["deep_gemm"] = reason
        else:
            jobs = [case for case in cases if case.routing == "even" and case.what not in ("decode", "ranks")]
            processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1, len(jobs)))
            with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
                errors = [made.exception() for made in [pool.submit(compile_one, job) for job in jobs]]
            if jobs and all(errors):
                result["absent"]["deep_gemm"] = str(errors[0]).strip().splitlines()[0]
        console.print(f"DeepGEMM's kernels: {time.monotonic() - begin:.0f} s")
    if not hasattr(torch, "_grouped_mm"):
        result["absent"]["bf16"] = "this torch has no _grouped_mm"
    contenders = [name for name in contenders if name not in result["absent"]]
    for case in cases:
        result["records"].append(measure(machine, case, contenders))
        machine.clear()
        result.save()
    console.print(table(result["records"], contenders))
    for name, reason in result["absent"].items():
        console.print(f"absent: {name}: {reason}", highlight=False, markup=False)
    failures = {f"{name}: {why}" for record in result["records"] for name, why in record["failed"].items()}
    for failure in sorted(failures):
        console.print(f"failed: {failure}", highlight=False, markup=False)
    result["seconds"] = time.monotonic() - begin
    result.save()
    console.print(f"copy {machine.bandwidth / 1e12:.2f} TB/s, {result['seconds']:.0f} s")
    ours = [
        same
        for record in result["records"]
        for name, same in record["same_bits"].items()
        if name.startswith(("native", "slices"))
    ]
    return 0 if ours and all(ours) else 1


if __name__ == "__main__":
    sys.exit(main())
