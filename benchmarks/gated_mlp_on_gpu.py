# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A gated MLP of the trainer, forward and backward: what it gains where its gradients exist as qdata alone.

    PYTHONPATH=. python3 benchmarks/gated_mlp_on_gpu.py --out benchmarks/results/gated_mlp_h200.json

gate, up, SiLU-mul and down of Qwen3-8B with the shared operations, as the trainer's decoder layers run them:

- *one step*: nn/gated_mlp.py, one function of autograd whose kernel writes the quantized gradients.
- *one by one*: the same modules as functions of their own, BF16 gradients between them. Every result must have the same
  bits.
- *bf16*: Hugging Face's MLP.

Weights are quantized in every step. Times are of plain calls that take turns. Exit code 1 if bits differ.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.tools.bench import BenchError, data
from jetrl_verl.tools.bench.machine import this_machine
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.bench.shapes import MODELS
from jetrl_verl.train import shared_operations

RULE = "fp32"


def make(shared: bool, weights: list[torch.Tensor]) -> nn.Module:
    """The MLP with copies of ``weights`` of gate, up and down."""
    wide, hidden = weights[0].shape
    mlp = Qwen3MLP(Qwen3Config(hidden_size=hidden, intermediate_size=wide)).to("meta")
    for layer, weight in zip((mlp.gate_proj, mlp.up_proj, mlp.down_proj), weights, strict=True):
        layer.weight = nn.Parameter(weight.clone())
        if shared:
            JetLinear.replace(layer, scale_rule=RULE, backward="fp8")
    if shared:
        mlp.forward = lambda x: shared_operations._mlp_forward(mlp, x)
    return mlp


def step(mlp: nn.Module, x: torch.Tensor, dy: torch.Tensor, spanned: bool | None) -> tuple[torch.Tensor, ...]:
    """Y, dX and the weights' gradients; ``spanned`` False keeps the three modules apart."""
    own = shared_operations.covers
    shared_operations.covers = own if spanned else lambda *call: False
    try:
        for layer in mlp.children():
            if isinstance(layer, JetLinear):
                layer.drop_qdata()
        y = mlp(x)
        return y.detach(), *torch.autograd.grad(y, (x, *mlp.parameters()), dy)
    finally:
        shared_operations.covers = own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    device = machine.device
    (both, hidden), (_, wide) = MODELS["qwen3-8b"]["gate_up"], MODELS["qwen3-8b"]["down"]
    assert both == 2 * wide
    weights = [data.weights(n, k, device) for n, k in ((wide, hidden), (wide, hidden), (hidden, wide))]
    result = Result(args.out, {"command": "gated_mlp", **machine.facts(), "records": []})
    same = True
    for m in args.tokens:
        calls, found = {}, {}
        for name, spanned in (("bf16", None), ("one by one", False), ("one step", True)):
            mlp = make(name != "bf16", weights)
            torch.manual_seed(m)  # the same operands for all, in memory of their own
            x = data.activations(m, hidden, device).requires_grad_()
            dy = data.gradients(m, hidden, device)
            calls[name] = [lambda mlp=mlp, x=x, dy=dy, spanned=spanned: step(mlp, x, dy, spanned)]
            found[name] = calls[name][0]()
        equal = [torch.equal(a, b) for a, b in zip(found["one by one"], found["one step"], strict=True)]
        distance = ((found["one step"][0] - found["bf16"][0]).norm() / found["bf16"][0].norm()).item()
        del found
        same &= all(equal)
        times = machine.timer.interleaved(calls, graphs=False)
        us = {name: spread._asdict() for name, spread in times.items()}
        result["records"].append({"m": m, "us": us, "same_bits": equal, "distance_to_bf16": distance})
        medians = {name: spread.median for name, spread in times.items()}
        console.print(
            f"{m} tokens: " + ", ".join(f"{name} {us / 1e3:.3f} ms" for name, us in medians.items()),
            f"| one step is {medians['one by one'] / medians['one step']:.3f} of one by one,",
            f"{medians['bf16'] / medians['one step']:.3f} of bf16; same bits: {all(equal)}; off bf16 by {distance:.3f}",
        )
        del calls
        machine.clear()
        result.save()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
