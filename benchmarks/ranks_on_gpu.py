# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FProp of row-parallel layers in the trainer: what it costs to round where the ranks of a rollout do.

    PYTHONPATH=. python3 benchmarks/ranks_on_gpu.py --out benchmarks/results/ranks_h200.json

o and down of each model, for every number of ranks whose slices of K are multiples of 128:

- *whole*: the product without ranks, as it is with a rollout of TP 1.
- *native*, *triton*: kernels/gemm_nt_of_ranks.py, one kernel.
- *slices*: a product for each rank, written as BF16, and their sum.

An update with activation checkpointing runs both layers twice: beside each row stands what an update gains or loses
by it in milliseconds, for all layers of the model. Backends must have the same bits. Exit code 1 if they do not.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.tools.bench import BenchError, data
from jetrl_verl.tools.bench.machine import Machine, this_machine
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.bench.shapes import MODELS
from jetrl_verl.tools.bench.timing import Call

Product = Callable[[QuantizedTensor, QuantizedTensor], torch.Tensor]

LAYERS = {"qwen3-8b": 36, "llama-3.1-8b": 32, "qwen2.5-7b": 28, "qwen2.5-32b": 64}
RANKS = (2, 4, 8)
BACKENDS = ("native", "slices", "triton")
FORWARDS = 2
"""Of an update: one, and one more that activation checkpointing repeats."""


def copies(machine: Machine, a: QuantizedTensor, b: QuantizedTensor, call: Product) -> list[Call]:
    """``call`` on as many copies of the operands as keep them out of the L2."""
    size = sum(x.numel() * x.itemsize for q in (a, b) for x in (q.qdata, q.scales))
    size += 2 * a.qdata.shape[0] * b.qdata.shape[0]

    def one():
        x, w = (QuantizedTensor(q.qdata.clone(), q.scales.clone()) for q in (a, b))
        return lambda: call(x, w)

    return machine.timer.rotated(one, size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=["qwen3-8b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console = Console(width=140)
    try:
        machine = this_machine(args.repeats)
    except BenchError as error:
        console.print(f"{error}")
        return 2
    result = Result(args.out, {"command": "ranks", **machine.facts(), "records": []})
    same = True
    for model in args.models:
        for layer in ("o", "down"):
            n, k = MODELS[model][layer]
            b = kernels.quantize_128x128(data.weights(n, k, machine.device), "fp32")
            for m in args.tokens:
                a = kernels.quantize_1x128(data.activations(m, k, machine.device), "fp32")
                calls = {"whole": copies(machine, a, b, lambda x, w: kernels.gemm_nt(x, w, b_block_scaled=True))}
                equal = {}
                for ranks in (ranks for ranks in RANKS if k % (ranks * BLOCK) == 0):
                    found = {}
                    for name in BACKENDS:
                        if not dispatch.supports("gemm_nt_of_ranks", name, a, b, ranks):
                            continue
                        run = dispatch.implementation("gemm_nt_of_ranks", name)
                        found[name] = run(a, b, ranks)
                        calls[f"{name} {ranks}"] = copies(machine, a, b, lambda x, w, f=run, r=ranks: f(x, w, r))
                    equal[ranks] = all(torch.equal(found["triton"], other) for other in found.values())
                    same &= equal[ranks]
                    del found
                times = machine.timer.interleaved(calls)
                us = {name: spread._asdict() for name, spread in times.items()}
                whole = times["whole"].median
                result["records"].append(
                    {"model": model, "layer": layer, "m": m, "n": n, "k": k, "us": us, "same_bits": equal}
                )
                console.print(f"{model} {layer} {m} x {n} x {k}: whole {whole:.1f} us; same bits: {equal}")
                for name in (name for name in times if name != "whole"):
                    more = FORWARDS * LAYERS[model] * (times[name].median - whole) / 1e3
                    ratio = times[name].median / whole
                    console.print(
                        f"    {name}: {times[name].median:.1f} us, {ratio:.3f} of whole, {more:+.2f} ms an update"
                    )
                del calls
                machine.clear()
                result.save()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
