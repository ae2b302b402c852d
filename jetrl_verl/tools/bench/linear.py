# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl bench linear``: one step of a linear layer, forward and both gradients, quantization included.

Every contender starts from a BF16 weight, a BF16 input that wants a gradient and a BF16 output gradient, and goes
through ``torch.autograd.grad``. Weights are quantized again in each step, as after an optimizer step; the layer
stands alone, so nothing that a neighbour could share (the qdata of one input under q, k and v) is saved. Peak memory is
what one step allocates at most beyond weight, input and output gradient, results included. Times are of plain calls,
without CUDA graphs, as in training.

Results are judged by their distance from BF16's, which is quantization error: some 4% where everything is right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.tools.bench import check_present, data, reason_of
from jetrl_verl.tools.bench.machine import Machine
from jetrl_verl.tools.bench.report import Result, render_linear
from jetrl_verl.tools.bench.shapes import MODELS, check_rows, choose

MOST_DISTANCE = 0.1
"""Norm of the difference to BF16 over the norm of BF16's."""


def _jet(layer: nn.Linear, backward: str) -> Callable:
    layer = JetLinear.replace(layer, scale_rule="fp32", backward=backward)

    def forward(x: torch.Tensor) -> torch.Tensor:
        layer.drop_qdata()
        return layer(x)

    return forward


def _torchao_blockwise(layer: nn.Linear) -> Callable:
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

    return Float8BlockwiseLinear.from_float(layer)


def _torchao(layer: nn.Linear, recipe: str) -> Callable:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(layer)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    return torch.compile(model, dynamic=False)


CONTENDERS: dict[str, Callable[[nn.Linear], Callable]] = {
    "bf16": lambda layer: layer,
    "jet_fp8": partial(_jet, backward="fp8"),
    "jet_fp8_bf16_backward": partial(_jet, backward="bf16"),
    "torchao_blockwise": _torchao_blockwise,
    "torchao_tensorwise": partial(_torchao, recipe="tensorwise"),
    "torchao_rowwise": partial(_torchao, recipe="rowwise"),
}
"""Name -> a maker of the forward from an ``nn.Linear``, which it may change."""


@dataclass(frozen=True)
class LinearOptions:
    """What is timed; ``tokens`` are rows of the input, ``out`` the JSON file or None."""

    model: str = "qwen3-8b"
    tokens: Sequence[int] = (8192, 16384)
    contenders: Sequence[str] = tuple(CONTENDERS)
    out: Path | None = None


def step(forward: Callable, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Y [M, N], dX [M, K] and dW [N, K]."""
    y = forward(x)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def distances(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> dict[str, float]:
    """``y``, ``dx`` and ``dw``: norm of the difference over the norm of ``want``."""
    return {
        name: ((a.float() - b.float()).norm() / b.float().norm()).item()
        for name, a, b in zip(("y", "dx", "dw"), got, want)
    }


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most that one call has allocated at a time; None where memory is not counted."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(machine: Machine, names: Sequence[str], layer: str, m: int, n: int, k: int) -> dict:
    """The record of one layer at one number of rows."""
    device = machine.device
    weight = data.weights(n, k, device)
    x = data.activations(m, k, device).requires_grad_()
    dy = data.gradients(m, n, device)

    def linear() -> nn.Linear:
        made = nn.Linear(k, n, bias=False, device="meta")
        made.weight = nn.Parameter(weight.clone())
        return made

    record = {"model": "", "layer": layer, "m": m, "n": n, "k": k, "error": {}, "peak_bytes": {}, "refused": {}}
    plain = linear()
    want = step(plain, x, plain.weight, dy)
    calls, wrong = {}, []
    for name in names:
        try:
            # Buffers of its own, or it would find in the L2 what the contender before it read last.
            own, own_x, own_dy = linear(), x.detach().clone().requires_grad_(), dy.clone()
            call = partial(step, CONTENDERS[name](own), own_x, own.weight, own_dy)
            record["error"][name] = distances(call(), want)
            record["peak_bytes"][name] = peak_bytes(call, device)
            calls[name] = [call]
        except Exception as error:  # as in the GEMMs: what another package raises is named, ours fails the command
            record["refused"][name] = reason_of(error)
            wrong += [name] if name.startswith(("bf16", "jet")) else []
    for name, found in record["error"].items():
        wrong += [] if all(value < MOST_DISTANCE for value in found.values()) else [name]
    del want
    times = machine.timer.interleaved(calls, graphs=False)
    return record | {"us": {name: spread._asdict() for name, spread in times.items()}, "wrong": wrong}


def run_linear(options: LinearOptions, console: Console, machine: Machine) -> int:
    """Time everything, print the table, write the JSON; 1 if a result is wrong, else 0.

    Raises:
        BenchError: an option that names nothing known or a file that cannot be written, or nothing could be timed.
    """
    names = choose(options.contenders, CONTENDERS, "contender")
    layers = MODELS[choose([options.model], MODELS, "model")[0]]
    check_rows(options.tokens)
    absent = {}
    if find_spec("torchao") is None:
        absent = {name: "torchao is not installed" for name in names if name.startswith("torchao")}
        names = [name for name in names if name not in absent]
    check_present(names, absent)
    result = Result(options.out, {"command": "linear", **machine.facts(), "absent": absent, "records": []})
    with console.status("") as status:
        for m in options.tokens:
            for layer, (n, k) in layers.items():
                status.update(f"{options.model} {layer} at {m} rows")
                result["records"].append(measure(machine, names, layer, m, n, k) | {"model": options.model})
                if any(name.startswith("torchao") for name in names):
                    torch.compiler.reset()  # or the next layer is a recompilation, and dynamo stops at eight
                machine.clear()
                result.save()
    result["not_captured"] = []
    result["wrong"] = [f"{name}: {r['layer']} at {r['m']} rows" for r in result["records"] for name in r["wrong"]]
    render_linear(result, console)
    result.save()
    result.check_timed()
    return 1 if result["wrong"] else 0
