# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Time this package's FP8 kernels next to DeepGEMM, CUTLASS and cuBLAS on one NVIDIA GPU.

    python3 -m benchmarks.kernels                                  # all operations of Qwen3-8B, 4B and 30B-A3B
    python3 -m benchmarks.kernels --models qwen3-8b --what fprop --tokens 16384 --out kernels.json

``fprop``, ``dgrad``, ``wgrad``: the linears as training runs them, q/k/v and gate/up merged. ``decode``: FProp of few
rows. ``grouped``: FProp of a mixture's experts. ``quantize``: the quantizers, against a copy of the BF16 input.

- *jetrl*: the package's operation with the backend that it chooses on this GPU.
- *deep_gemm*, *cutlass*: DeepGEMM and CUTLASS's block-scaled GEMM of vLLM's wheel, on the same FP8 operands.
- *bf16*: cuBLAS on the BF16 tensors that these operands were quantized from (``torch._grouped_mm`` for ``grouped``).

Every result is checked before it is timed: a GEMM against the product of the same operands in float64 on 64 rows, a
quantizer byte for byte against ``jetrl_verl.reference``. ``triton.testing.do_bench`` times a call and flushes the L2
cache before each run; contenders take turns, ``--rounds`` times, and the median round counts. Only the call is timed:
what a caller does once and keeps, such as the layout of scales, is done before. WGrad writes FP32. DeepGEMM's WGrad
only adds, so its time includes the zeroing of the output. Exit status 1 if a result is wrong.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl import kernels, reference
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.tools.provenance import provenance

MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "qwen3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "qwen3-4b": {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)},
    "qwen3-30b-a3b": {"qkv": (5120, 2048), "o": (2048, 4096)},
}
"""Model -> linear layer -> (out, in)."""

EXPERTS: dict[str, dict[str, tuple[int, int]]] = {"qwen3-30b-a3b": {"gate_up": (1536, 2048), "down": (2048, 768)}}
"""Mixture -> linear layer of an expert -> (out, in)."""
NUMBER_OF_EXPERTS, EXPERTS_PER_TOKEN = 128, 8

RULE = "fp32"
WHAT = ("fprop", "dgrad", "wgrad", "decode", "grouped", "quantize")
TOKENS = (4096, 16384)
BATCHES = (1, 8, 32, 128)
CONTENDERS = ("jetrl", "deep_gemm", "cutlass", "bf16")
VLLM = find_spec("vllm") is not None

CHECKED_ROWS = 64
MAX_ERROR = {torch.bfloat16: 2.5e-3, torch.float32: 5e-4}
"""Relative distance from the float64 product. One rounding into BF16 is at most 2.3e-3; within 128 products a tensor
core keeps fewer bits than FP32; one wrong block of two hundred is 7e-2."""

Call = Callable[[], torch.Tensor]
Error = Callable[[str, torch.Tensor], float]
"""Contender and its result -> how far the result is off."""

console = Console(width=170)


class Case(NamedTuple):
    """One shape: ``[m, n] = A [m, k] B [n, k]^T``; of a quantizer ``[m, k]``."""

    what: str
    model: str
    layer: str
    m: int
    n: int
    k: int

    @property
    def names(self) -> dict[str, str]:
        shape = f"{self.m} x {self.n} x {self.k}"
        return {"what": self.what, "model": self.model, "layer": self.layer, "shape": shape}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every shape of the chosen models, once."""
    for model in options.models:
        for what in options.what:
            linears = EXPERTS.get(model, {}) if what == "grouped" else MODELS[model]
            if what == "quantize":
                linears = {layer: linears[layer] for layer in ("qkv", "down") if layer in linears}
            for layer, (out, into) in linears.items():
                for rows in options.batches if what == "decode" else options.tokens:
                    sizes = {"dgrad": (rows, into, out), "wgrad": (out, into, rows)}.get(what, (rows, out, into))
                    yield Case(what, model, layer, *sizes)


def draw(kind: str, *shape: int, device: torch.device) -> torch.Tensor:
    """BF16 of one of three kinds. ``weight``: normal. ``gradient``: heavy tails (kurtosis 21). ``activation``: heavy
    tails, and one channel in 512 is 20 to 60 times larger."""
    x = torch.randn(*shape, dtype=torch.bfloat16, device=device)
    if kind == "weight":
        return x.mul_(0.02)
    x.mul_(torch.randn_like(x).mul_(0.7).exp_())
    if kind == "gradient":
        return x.mul_(2**-10)
    channels = torch.randperm(shape[-1], device=device)[: max(1, shape[-1] // 512)]
    x[:, channels] *= torch.empty(len(channels), device=device).uniform_(20, 60).bfloat16()
    return x


class Operands(NamedTuple):
    """``a``, ``b``: quantized; ``left`` ``[m, k]``, ``right`` ``[n, k]``: the BF16 tensors that they were made from."""

    a: QuantizedTensor
    b: QuantizedTensor
    left: torch.Tensor
    right: torch.Tensor


def operands_of(case: Case, device: torch.device) -> Operands:
    """Operands of a GEMM, strided as a training step has them."""
    m, n, k = case.m, case.n, case.k
    if case.what == "wgrad":
        dy, x = draw("gradient", k, m, device=device), draw("activation", k, n, device=device)
        return Operands(kernels.quantize_128x1(dy, RULE), kernels.quantize_128x1(x, RULE), dy.t(), x.t())
    if case.what == "dgrad":
        dy, w = draw("gradient", m, k, device=device), draw("weight", k, n, device=device)
        b = kernels.transpose_128x128(kernels.quantize_128x128(w, RULE))
        return Operands(kernels.quantize_1x128(dy, RULE), b, dy, w.t())
    x, w = draw("activation", m, k, device=device), draw("weight", n, k, device=device)
    return Operands(kernels.quantize_1x128(x, RULE), kernels.quantize_128x128(w, RULE), x, w)


def distance(name: str, x: Operands, block_scaled: bool, result: torch.Tensor) -> float:
    """Relative distance of ``result`` from the float64 product of the operands that a contender reads."""
    if name == "bf16":
        expected = x.left.double() @ x.right.t().double()
    else:
        expected = (reference.gemm_nt_float64 if block_scaled else reference.wgrad_float64)(x.a, x.b)
    return ((result.double() - expected).norm() / expected.norm()).item()


def gemm(case: Case, device: torch.device) -> tuple[dict[str, Call], Error]:
    """The call of each contender that supports this case, and how far its result is off."""
    x, block_scaled = operands_of(case, device), case.what != "wgrad"
    dtype = torch.bfloat16 if block_scaled else torch.float32
    calls: dict[str, Call] = {
        "jetrl": partial(kernels.gemm_nt if block_scaled else kernels.wgrad, x.a, x.b, out_dtype=dtype),
        "bf16": partial(torch.mm, x.left, x.right.t(), **({} if block_scaled else {"out_dtype": dtype})),
    }
    if device.type == "cuda" and VLLM:
        from vllm._custom_ops import cutlass_scaled_mm

        out = torch.empty(case.m, case.n, dtype=dtype, device=device)
        calls["deep_gemm"] = deep_gemm_call(x, out, block_scaled)
        # With M no multiple of 4 the strides of A's scales are not aligned for CUTLASS.
        if block_scaled and case.m % 4 == 0:
            scales = {"scale_a": x.a.scales.t().contiguous().t(), "scale_b": x.b.scales.contiguous().t()}
            calls["cutlass"] = partial(cutlass_scaled_mm, x.a.qdata, x.b.qdata.t(), out_dtype=dtype, **scales)

    def error(name: str, result: torch.Tensor) -> float:
        rows = torch.linspace(0, case.m - 1, min(CHECKED_ROWS, case.m), device=device).round().long()
        qdata = x.a.qdata.view(torch.uint8)[rows].view(x.a.qdata.dtype)  # not every torch indexes E4M3 on a GPU
        part = Operands(QuantizedTensor(qdata, x.a.scales[rows]), x.b, x.left[rows], x.right)
        return distance(name, part, block_scaled, result[rows])

    return calls, error


def deep_gemm_call(x: Operands, out: torch.Tensor, block_scaled: bool) -> Call:
    from vllm.utils.deep_gemm import fp8_gemm_nt, get_col_major_tma_aligned_tensor

    a = (x.a.qdata, get_col_major_tma_aligned_tensor(x.a.scales))
    # Without the last argument vLLM's wrapper may replace FP32 scales by powers of two.
    options = {"recipe": (1, BLOCK, BLOCK) if block_scaled else (1, 1, BLOCK), "is_deep_gemm_e8m0_used": False}
    if block_scaled:
        b = (x.b.qdata, x.b.scales)
    else:
        b = (x.b.qdata, get_col_major_tma_aligned_tensor(x.b.scales))
        options["c"] = out
    product = partial(fp8_gemm_nt, a, b, out, **options)
    return (lambda: (product(), out)[1]) if block_scaled else lambda: (out.zero_(), product(), out)[2]


def grouped(case: Case, device: torch.device) -> tuple[dict[str, Call], Error]:
    """As :func:`gemm`: all experts' products, ``case.m`` tokens routed by random logits."""
    logits = torch.randn(case.m, NUMBER_OF_EXPERTS, device=device)
    segments = kernels.segments(kernels.route(logits, EXPERTS_PER_TOKEN, True)[0], NUMBER_OF_EXPERTS, BLOCK)
    bounds = segments.start.tolist()
    x = draw("activation", len(segments.pair), case.k, device=device).masked_fill_((segments.pair < 0)[:, None], 0)
    w = draw("weight", NUMBER_OF_EXPERTS, case.n, case.k, device=device)
    a, flat = kernels.quantize_1x128(x, RULE), kernels.quantize_128x128(w.flatten(0, 1), RULE)
    b = QuantizedTensor(flat.qdata.view(w.shape), flat.scales.view(NUMBER_OF_EXPERTS, -1, flat.scales.shape[1]))
    calls: dict[str, Call] = {
        "jetrl": partial(kernels.grouped_gemm_nt, a, b, segments.start, BLOCK),
        "bf16": partial(torch._grouped_mm, x, w.transpose(1, 2), offs=segments.start[1:].contiguous()),
    }
    if device.type == "cuda" and VLLM:
        from vllm.utils.deep_gemm import _import_deep_gemm, get_col_major_tma_aligned_tensor

        expert_of_row = torch.full((len(x),), -1, dtype=torch.int32)
        for expert in range(NUMBER_OF_EXPERTS):
            expert_of_row[bounds[expert] : bounds[expert + 1]] = expert
        left, right = (a.qdata, get_col_major_tma_aligned_tensor(a.scales)), (b.qdata, b.scales)
        out, expert_of_row = torch.zeros(len(x), case.n, dtype=torch.bfloat16, device=device), expert_of_row.to(device)
        product = _import_deep_gemm().m_grouped_fp8_gemm_nt_contiguous
        call = partial(product, left, right, out, expert_of_row, disable_ue8m0_cast=True)
        calls["deep_gemm"] = lambda: (call(), out)[1]

    def error(name: str, result: torch.Tensor) -> float:
        expert = max(range(NUMBER_OF_EXPERTS), key=lambda e: bounds[e + 1] - bounds[e])
        rows = slice(bounds[expert], min(bounds[expert] + CHECKED_ROWS, bounds[expert + 1]))
        left, right = QuantizedTensor(a.qdata[rows], a.scales[rows]), QuantizedTensor(b.qdata[expert], b.scales[expert])
        return distance(name, Operands(left, right, x[rows], w[expert]), True, result[rows])

    return calls, error


def quantizers(case: Case, device: torch.device) -> Iterator[tuple[str, Callable, tuple, Callable, float]]:
    """Name, function, operands, the reference's function, and bytes that it moves, scales included."""
    elements, group = case.m * case.k, 4 / BLOCK
    x, w = draw("activation", case.m, case.k, device=device), draw("weight", case.m, case.k, device=device)
    yield "quantize_1x128", kernels.quantize_1x128, (x,), reference.quantize_1x128, elements * (3 + group)
    both = kernels.quantize_1x128_and_128x1, (x,), reference.quantize_1x128_and_128x1
    yield "quantize_1x128_and_128x1", *both, elements * (4 + 2 * group)
    yield "quantize_128x128", kernels.quantize_128x128, (w,), reference.quantize_128x128, elements * 3
    q = kernels.quantize_1x128(x, RULE)
    yield "relayout_128x1", kernels.relayout_128x1, (q,), reference.relayout_128x1, elements * (2 + 2 * group)


def on_cpu(value: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
    return QuantizedTensor(*map(on_cpu, quantized_parts(value))) if isinstance(value, QuantizedTensor) else value.cpu()


def quantized_parts(value: QuantizedTensor | tuple) -> list[torch.Tensor]:
    """qdata and scales of one result, or of several."""
    if isinstance(value, QuantizedTensor):
        return [value.qdata, value.scales]
    return [tensor for part in value for tensor in quantized_parts(part)]


def equals_reference(function: Callable, operands: tuple, expected: Callable) -> bool:
    """Whether a quantizer's bytes are those of the reference on the CPU."""
    results = quantized_parts(function(*operands, RULE))
    references = quantized_parts(expected(*map(on_cpu, operands), RULE))
    pairs = zip(map(on_cpu, results), references, strict=True)
    return all(torch.equal(*(x.contiguous().view(torch.uint8) for x in pair)) for pair in pairs)


def microseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median round of each call's median; the L2 cache is flushed before every run."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(1e3 * do_bench(call, warmup=10, rep=50, return_mode="median"))
    return {name: statistics.median(values) for name, values in times.items()}


def measure_gemm(case: Case, options: argparse.Namespace, device: torch.device) -> dict:
    """Error, microseconds and TFLOP/s of each contender."""
    calls, error_of = (grouped if case.what == "grouped" else gemm)(case, device)
    errors, failed, wrong = {}, {}, []
    for name in sorted(calls, key=CONTENDERS.index):
        try:
            result = calls[name]()
            errors[name] = error_of(name, result)
        except Exception as error:  # another package may lack a shape; the benchmark goes on without it
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            wrong += [name] if name == "jetrl" else []
            continue
        wrong += [] if errors[name] < MAX_ERROR[result.dtype] else [name]  # a NaN is wrong, too
    us = microseconds({name: calls[name] for name in errors}, options.rounds)
    operations = 2 * case.m * case.n * case.k * (EXPERTS_PER_TOKEN if case.what == "grouped" else 1)
    tflops = {name: operations / time / 1e6 for name, time in us.items()}
    return {**case.names, "us": us, "tflops": tflops, "error": errors, "failed": failed, "wrong": wrong}


def measure_quantizers(case: Case, options: argparse.Namespace, device: torch.device) -> Iterator[dict]:
    """Microseconds and TB/s of each quantizer and of a copy of its BF16 input; checked on 256 rows."""
    source = draw("activation", case.m, case.k, device=device)
    target = torch.empty_like(source)
    checked = quantizers(case._replace(m=2 * BLOCK), device)
    for (name, function, operands, _, size), (*_, few, expected, _) in zip(quantizers(case, device), checked):
        calls = {"jetrl": partial(function, *operands, RULE), "copy": partial(target.copy_, source)}
        wrong = [] if equals_reference(function, few, expected) else ["jetrl"]
        us = microseconds(calls, options.rounds)
        tbps = {"jetrl": size / us["jetrl"] / 1e6, "copy": 2 * source.nbytes / us["copy"] / 1e6}
        yield {**case.names, "what": name, "us": us, "tbps": tbps, "failed": {}, "wrong": wrong}


def table_of(records: list[dict]) -> Table:
    """A row for each record: microseconds and rate of each contender."""
    names = [name for name in (*CONTENDERS, "copy") if any(name in record["us"] for record in records)]
    table = Table(box=SIMPLE_HEAD, title="us, in brackets TFLOP/s of GEMMs and TB/s of quantizers")
    columns = ("operation", "model", "layer", "m x n x k", *names, "speed over deep_gemm", "over bf16")
    for name in columns:
        table.add_column(name, justify="left" if name in columns[:3] else "right")
    for record in records:
        us, rates, digits = record["us"], record.get("tflops") or record["tbps"], 0 if "tflops" in record else 2
        cells = [f"{us[name]:.1f} ({rates[name]:.{digits}f})" if name in us else "" for name in names]
        both = [{name, "jetrl"} <= us.keys() for name in ("deep_gemm", "bf16")]
        ratios = [f"{us[name] / us['jetrl']:.2f}" if ok else "" for name, ok in zip(("deep_gemm", "bf16"), both)]
        table.add_row(record["what"], record["model"], record["layer"], record["shape"], *cells, *ratios)
    return table


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of a micro-batch")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="rows of a decode step")
    parser.add_argument("--rounds", type=int, default=3, help="of all contenders in turn")
    parser.add_argument("--out", type=Path, help="JSON with everything that the table shows")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU is visible. Run it on a machine with one.")
    return run(options, torch.device("cuda"))


def run(options: argparse.Namespace, device: torch.device) -> int:
    """Measure every case, print the table, write the JSON; 1 if a result is wrong, else 0."""
    torch.manual_seed(0)
    records: list[dict] = []
    for case in cases(options):
        if case.what == "quantize":
            records += measure_quantizers(case, options, device)
        else:
            records.append(measure_gemm(case, options, device))
    console.print(table_of(records))
    for record in records:
        name = f"{record['what']} {record['model']} {record['layer']} {record['shape']}"
        for contender in record["wrong"]:
            console.print(f"{name}: {contender} is wrong", markup=False, highlight=False)
        for contender, reason in record["failed"].items():
            console.print(f"{name}: {contender} failed: {reason}", markup=False, highlight=False)
    if options.out:
        result = {"build": provenance(), "rounds": options.rounds, "records": records}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(record["wrong"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
