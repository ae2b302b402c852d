# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The linears of a decode step as vLLM replays them: what GEMMs gain that start while their input is being quantized.

    PYTHONPATH=. python3 benchmarks/decode_chain_on_gpu.py --out benchmarks/results/decode_chain_h200.json

`jetrl bench gemm` times calls one by one, with the GPU idle in front of each. A decode step is a chain of short kernels
in one CUDA graph, where launch, prologue and the first bytes of every kernel count. Here: the four linears of a
Qwen3-8B layer, each behind the kernel that makes its input in the rollout, attention left out,

    RMSNorm and qdata of [M, 4096]                   -> qkv      6144 x 4096
    qdata of [M, 4096]                               -> o        4096 x 4096
    residual sum, RMSNorm and qdata of [M, 4096]     -> gate_up 24576 x 4096
    SiLU-mul and qdata of [M, 24576]                 -> down     4096 x 12288

over as many layers, with weights of their own, as put three times the L2 between two uses of one. The replays of these
take turns:

- *static*: native with ``static_weight``, whose copies of W start under the kernel in front (programmatic dependent
  launch); *plain*: native without. Every output of the two must have the same bits.
- *deep_gemm*: the same kernels in front, DeepGEMM as vLLM brings it. It reads scales on a pitch of 16 bytes; where M is
  not a multiple of 4 it gets constants in that layout, as a quantizer of its own would spare it a kernel.
- *bf16*: four cuBLAS products and nothing in front of them, for what launches cost by themselves.

``--timeline`` adds what every kernel of *static* and *deep_gemm* takes, and adds to the chain, on the profiler's clock
(`jetrl_verl/tools/bench/timeline.py`), in a few more replays.

The floor is the time of the FP8 weights' bytes at the copy bandwidth measured in the same run. Times contain what two
events cost (``event_us``), once a replay. A minute or two, of which DeepGEMM compiles most. Exit code 1 if bits differ.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl import kernels
from jetrl_verl.kernels import native
from jetrl_verl.kernels.gemm_nt import native_gemm_nt
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.bench import BenchError, data, deep_gemm
from jetrl_verl.tools.bench.contenders import CONTENDERS
from jetrl_verl.tools.bench.machine import Machine, this_machine
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.bench.shapes import MODELS, problems
from jetrl_verl.tools.bench.timeline import kernels_of, steps_of
from jetrl_verl.tools.bench.timing import Spread

MODEL, RULE, EPS = "qwen3-8b", "fp32", 1e-6
KERNELS = 8  # of a layer
BATCHES = (1, 8, 16, 32, 64, 128)

Gemm = Callable[[QuantizedTensor, QuantizedTensor, torch.Tensor], object]
"""Multiplies qdata [M, K] with a weight [N, K] into a BF16 [M, N]."""

console = Console(width=140)


class Layer(NamedTuple):
    """FP8 data [N, K] and 128x128 scales of the four weights by name, and BF16 weights [hidden] of the two norms."""

    weights: dict[str, QuantizedTensor]
    norms: tuple[torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    """BF16 [M, hidden]: what enters the first layer, and what attention gives every o projection."""

    hidden: torch.Tensor
    attention: torch.Tensor


def draw_layer(device: torch.device, shapes: dict[str, tuple[int, int]]) -> Layer:
    weights = {name: kernels.quantize_128x128(data.weights(n, k, device), RULE) for name, (n, k) in shapes.items()}
    norms = (1 + 0.1 * torch.randn(2, shapes["qkv"][1], device=device)).bfloat16()
    return Layer(weights, tuple(norms))


def empty_outputs(m: int, layers: list[Layer]) -> list[dict[str, torch.Tensor]]:
    """A BF16 [M, N] of NaN for every linear."""
    return [
        {name: q.qdata.new_full((m, q.qdata.shape[0]), torch.nan, dtype=torch.bfloat16) for name, q in found.items()}
        for found, _ in layers
    ]


def chain(gemm: Gemm, layers: list[Layer], inputs: Inputs, outputs: list[dict[str, torch.Tensor]]) -> None:
    """All layers, one behind the other; every product is written to its place in ``outputs``."""
    x = inputs.hidden
    for (weights, (norm, post_norm)), y in zip(layers, outputs, strict=True):
        gemm(kernels.rms_norm_quantize_1x128(x, norm, EPS, RULE), weights["qkv"], y["qkv"])
        gemm(kernels.quantize_1x128(inputs.attention, RULE), weights["o"], y["o"])
        qdata, _ = kernels.add_rms_norm_quantize_1x128(y["o"], x, post_norm, EPS, RULE, with_normed=False)
        gemm(qdata, weights["gate_up"], y["gate_up"])
        gate, up = y["gate_up"].chunk(2, dim=-1)
        qdata, _ = kernels.silu_mul_quantize(gate, up, RULE, with_product=False, with_colwise=False)
        gemm(qdata, weights["down"], y["down"])
        x = y["down"]


def with_native(a: QuantizedTensor, b: QuantizedTensor, y: torch.Tensor, *, static_weight: bool) -> None:
    native_gemm_nt(a, b, b_block_scaled=True, out=y, static_weight=static_weight)


class WithDeepGemm:
    """Attributes:
    aligned: K -> scales [M, K/128] on a pitch of 16 bytes, where ours are not.
    """

    def __init__(self) -> None:
        self.aligned: dict[int, torch.Tensor] = {}

    def __call__(self, a: QuantizedTensor, b: QuantizedTensor, y: torch.Tensor) -> None:
        m, k = a.qdata.shape
        if m % 4:
            if k not in self.aligned:  # in the run before the capture
                ones = QuantizedTensor(a.qdata, torch.full_like(a.scales, 2**-8))
                self.aligned[k] = deep_gemm.align_scales(ones).scales
            a = QuantizedTensor(a.qdata, self.aligned[k])
        deep_gemm.gemm_nt(a, b, y, b_block_scaled=True)


def bf16_chain(
    m: int, weights: list[dict[str, torch.Tensor]], inputs: dict[int, torch.Tensor], outputs: dict[int, torch.Tensor]
) -> None:
    """``inputs``: K -> [M, K]. ``outputs``: N -> [M, N]."""
    for layer in weights:
        for w in layer.values():
            n, k = w.shape
            torch.mm(inputs[k], w.t(), out=outputs[n])


def poison(outputs: list[dict[str, torch.Tensor]]) -> None:
    for layer in outputs:
        for y in layer.values():
            y.fill_(torch.nan)


def unequal(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> list[str]:
    """Names of outputs that differ in a bit or are not finite."""
    return [
        f"layer {index} {name}"
        for index, (of_a, of_b) in enumerate(zip(a, b, strict=True))
        for name in of_a
        if not (of_a[name].isfinite().all() and torch.equal(of_a[name].view(torch.int16), of_b[name].view(torch.int16)))
    ]


def measure(
    machine: Machine,
    m: int,
    layers: list[Layer],
    bf16: list[dict[str, torch.Tensor]],
    *,
    with_deep_gemm: bool,
    with_timeline: bool,
) -> dict:
    """The record of one batch size."""
    hidden, device = layers[0].weights["qkv"].qdata.shape[1], machine.device
    inputs = Inputs(data.activations(m, hidden, device), data.activations(m, hidden, device))
    gemms: dict[str, Gemm] = {
        "static": partial(with_native, static_weight=True),
        "plain": partial(with_native, static_weight=False),
    }
    if with_deep_gemm:
        gemms["deep_gemm"] = WithDeepGemm()
    outputs = {name: empty_outputs(m, layers) for name in gemms}
    calls = {name: partial(chain, gemm, layers, inputs, outputs[name]) for name, gemm in gemms.items()}
    shapes = [w.shape for w in bf16[0].values()]
    wide = {k: data.activations(m, k, device) for _, k in shapes}
    products = {n: torch.empty(m, n, dtype=torch.bfloat16, device=device) for n, _ in shapes}
    calls["bf16"] = partial(bf16_chain, m, bf16, wide, products)

    replays = {name: machine.timer.clock.capture(call) for name, call in calls.items()}
    wrong = []
    for _ in range(2):  # the second time with qdata and outputs of the first in memory
        for name, output in outputs.items():
            poison(output)
            replays[name]()
        wrong += unequal(outputs["static"], outputs["plain"])
    spreads = machine.timer.interleaved({name: [replay] for name, replay in replays.items()}, graphs=False)
    wrong += unequal(outputs["static"], outputs["plain"])
    us = {name: Spread(*(value / len(layers) for value in spread)) for name, spread in spreads.items()}
    weight_bytes = sum(q.qdata.nbytes + q.scales.nbytes for q in layers[0].weights.values())
    timeline = {}
    if with_timeline:
        shown = [name for name in ("static", "deep_gemm") if name in gemms]
        timeline = {name: [step._asdict() for step in steps_of(kernels_of(replays[name]), KERNELS)] for name in shown}
    return {
        "m": m,
        "us": {name: spread._asdict() for name, spread in us.items()},
        "floor_us": 1e6 * weight_bytes / machine.bandwidth,
        "deep_gemm_to": {n: us["deep_gemm"].median / us[n].median for n in ("static", "plain") if "deep_gemm" in us},
        "plain_to_static": us["plain"].median / us["static"].median,
        "wrong": sorted(set(wrong)),
        "timeline": timeline,
    }


def print_timeline(record: dict) -> None:
    for name, steps in record["timeline"].items():
        table = Table(title=f"M = {record['m']}, {name}: us", title_justify="left", box=SIMPLE_HEAD)
        table.add_column("kernel", no_wrap=True, max_width=70)
        for heading in ("takes", "behind the one in front", "adds"):
            table.add_column(heading, justify="right", no_wrap=True)
        for step in steps:
            table.add_row(step["name"], *(f"{step[key]:.2f}" for key in ("duration", "gap", "adds")))
        table.add_row("layer", "", "", f"{sum(step['adds'] for step in steps):.2f}")
        console.print(table, markup=False)


def print_report(result: dict) -> None:
    title = f"{MODEL}, a layer's linears in a graph of {result['layers']} layers: us per layer (% of floor)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    names = list(result["records"][0]["us"])
    against = [f"deep_gemm / {name}" for name in result["records"][0]["deep_gemm_to"]]
    for heading in ("M", "floor", *names, "plain / static", *against, "bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in result["records"]:
        cells = []
        for name in names:
            median = record["us"][name]["median"]
            share = "" if name == "bf16" else f" ({100 * record['floor_us'] / median:.0f})"
            cells.append(f"{median:.1f}{share}")
        ratios = (f"{ratio:.3f}" for ratio in (record["plain_to_static"], *record["deep_gemm_to"].values()))
        bits = f"{len(record['wrong'])} differ" if record["wrong"] else "equal"
        table.add_row(str(record["m"]), f"{record['floor_us']:.1f}", *cells, *ratios, bits)
    console.print(table)
    console.print(
        f"{result['device']}: copy {result['copy_bandwidth'] / 1e12:.2f} TB/s, two events alone "
        f"{result['event_us']:.1f} us a replay; weights of {result['weight_mb']:.0f} MB, L2 of {result['l2_mb']:.0f} MB"
    )
    for why in result["absent"]:
        console.print(f"absent: {why}", markup=False)
    for record in result["records"]:
        print_timeline(record)
        if record["wrong"]:
            console.print(f"WRONG at M = {record['m']}: {', '.join(record['wrong'])}", markup=False, soft_wrap=True)


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--layers", type=int, default=8, help="at least; more where the L2 asks for it")
    parser.add_argument("--repeats", type=int, default=60, help="replays of each contender")
    parser.add_argument("--timeline", action="store_true", help="kernel by kernel, too")
    options = parser.parse_args()
    if native.unavailable() is not None:
        sys.exit(native.unavailable())
    try:
        machine = this_machine(options.repeats)
    except BenchError as error:
        sys.exit(str(error))
    shapes = MODELS[MODEL]
    layer_bytes = sum(n * k for n, k in shapes.values())
    count = max(options.layers, 1 + math.ceil(3 * machine.timer.l2_bytes / layer_bytes))
    layers = [draw_layer(machine.device, shapes) for _ in range(count)]
    bf16 = [{name: data.weights(n, k, machine.device) for name, (n, k) in shapes.items()} for _ in range(count)]
    facts = machine.facts() | {"model": MODEL, "layers": count, "absent": [], "records": []}
    facts |= {"weight_mb": count * layer_bytes / 1e6, "l2_mb": machine.timer.l2_bytes / 1e6}
    result = Result(options.out, facts)
    absent = CONTENDERS["deep_gemm"].missing()
    if absent is None:
        result["deep_gemm_compile_s"] = deep_gemm.compile_all(problems([MODEL], ["decode"], [1], options.batches))
    else:
        result["absent"].append(f"deep_gemm: {absent}")
    for m in options.batches:
        try:
            record = measure(machine, m, layers, bf16, with_deep_gemm=absent is None, with_timeline=options.timeline)
        except BenchError as error:
            sys.exit(str(error))
        result["records"].append(record)
        machine.clear()
        result.save()
    print_report(result)
    return 1 if any(record["wrong"] for record in result["records"]) else 0


if __name__ == "__main__":
    sys.exit(main())
