# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Layers split over the ranks of a rollout: what it costs to add the ranks' products in one order, on one GPU.

    PYTHONPATH=. python3 benchmarks/ranks_on_gpu.py --out benchmarks/results/ranks_h200.json
    PYTHONPATH=. python3 benchmarks/ranks_on_gpu.py --what trainer --models qwen2.5-32b qwen2.5-72b

*trainer*: FProp of o and down of each model, for every number of ranks whose slices of K are multiples of 128:

- *whole*: the product without ranks, as it is with a rollout of TP 1.
- *native*, *triton*: kernels/gemm_nt_of_ranks.py, one kernel.
- *slices*: a product for each rank, written as BF16, and their sum.

An update with activation checkpointing runs both layers twice: beside each row stands what an update gains or loses
by it in milliseconds, for all layers of the model. Backends must have the same bits. Exit code 1 if they do not.

*rollout*: what one rank of each number of ranks runs of a layer of Qwen3-8B, attention and the wire left out, as many
layers in a CUDA graph as put three times the L2 between two uses of a weight:

- *stock*: vLLM's norms and SiLU-mul, then the FP8 linear layers, which quantize: a rank before its sums had an order.
- *shared*: the norms and SiLU-mul of both sides, which quantize; sums left to vLLM's all-reduce, as with two ranks.
- *ordered*: the same, and behind o and down the sum of the ranks' gathered products, as with more ranks; of a batch
  above rollout/row_parallel.py's limit the sum of this rank's share of the rows.
- *by output*: the other design that has one order: o and down are split by output, their quantized input and their
  output are gathered. No sums, and the trainer needs no slices; what a collective brings, rank behind rank, is put
  into rows by a copy.
- *by output, in rows*: the same without these copies, as if both collectives wrote rows: what no kernel can beat.

Beside each rank's record stand the bytes that it receives in a layer and the kernels and collectives that it starts.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

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

SHAPES = MODELS | {"qwen2.5-72b": {"o": (8192, 8192), "down": (8192, 29568)}}
LAYERS = {"qwen3-8b": 36, "llama-3.1-8b": 32, "qwen2.5-7b": 28, "qwen2.5-32b": 64, "qwen2.5-72b": 80}
RANKS = (2, 4, 8)
BACKENDS = ("native", "slices", "triton")
FORWARDS = 2
"""Of an update: one, and one more that activation checkpointing repeats."""

ROLLOUT_MODEL, RULE, EPS = "qwen3-8b", "fp32", 1e-6
ROWS = (1, 8, 32, 64, 128, 4096)
console = Console(width=140)


def copies(machine: Machine, a: QuantizedTensor, b: QuantizedTensor, call: Product) -> list[Call]:
    """``call`` on as many copies of the operands as keep them out of the L2."""
    size = sum(x.numel() * x.itemsize for q in (a, b) for x in (q.qdata, q.scales))
    size += 2 * a.qdata.shape[0] * b.qdata.shape[0]

    def one():
        x, w = (QuantizedTensor(q.qdata.clone(), q.scales.clone()) for q in (a, b))
        return lambda: call(x, w)

    return machine.timer.rotated(one, size)


# --- the trainer's products -------------------------------------------------------------------------------------------


def measure_product(machine: Machine, model: str, layer: str, m: int) -> dict | None:
    """The record of one layer and number of rows; None where no number of ranks fits."""
    n, k = SHAPES[model][layer]
    fitting = [ranks for ranks in RANKS if k % (ranks * BLOCK) == 0]
    if not fitting:
        console.print(f"{model} {layer}: no slices of {k} over {RANKS} ranks are multiples of {BLOCK}")
        return None
    a = kernels.quantize_1x128(data.activations(m, k, machine.device), RULE)
    b = kernels.quantize_128x128(data.weights(n, k, machine.device), RULE)
    calls = {"whole": copies(machine, a, b, lambda x, w: kernels.gemm_nt(x, w, b_block_scaled=True))}
    equal = {}
    for ranks in fitting:
        found = {}
        for name in BACKENDS:
            if dispatch.supports("gemm_nt_of_ranks", name, a, b, ranks):
                run = dispatch.implementation("gemm_nt_of_ranks", name)
                found[name] = run(a, b, ranks)
                calls[f"{name} {ranks}"] = copies(machine, a, b, lambda x, w, f=run, r=ranks: f(x, w, r))
        first, *others = found.values()
        equal[ranks] = all(torch.equal(first, other) for other in others)
    times = machine.timer.interleaved(calls)
    whole = times["whole"].median
    console.print(f"{model} {layer} {m} x {n} x {k}: whole {whole:.1f} us; same bits: {equal}")
    for name in (name for name in times if name != "whole"):
        more = FORWARDS * LAYERS[model] * (times[name].median - whole) / 1e3
        ratio = times[name].median / whole
        console.print(f"    {name}: {times[name].median:.1f} us, {ratio:.3f} of whole, {more:+.2f} ms an update")
    us = {name: spread._asdict() for name, spread in times.items()}
    return {"model": model, "layer": layer, "m": m, "n": n, "k": k, "us": us, "same_bits": equal}


# --- a rank's layers in the rollout -----------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Weights of one rank by name, and the BF16 weights [hidden] of the two norms."""

    weights: dict[str, QuantizedTensor]
    norms: tuple[torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    """BF16. hidden: [M, hidden], what enters the first layer. attention: [M, features of this rank], what enters o.
    gathered: all ranks' products, [ranks, rows that this rank adds, hidden]."""

    hidden: torch.Tensor
    attention: torch.Tensor
    gathered: torch.Tensor


class InputsByOutput(NamedTuple):
    """What a rank of the design by output has, and what the wire brings it, rank behind rank.

    hidden, attention: as in ``Inputs``. o, down: qdata [ranks, M, K / ranks] and scales [ranks, M, K / ranks / 128] of
    what enters them. outputs: BF16 [ranks, M, hidden / ranks].
    """

    hidden: torch.Tensor
    attention: torch.Tensor
    o: QuantizedTensor
    down: QuantizedTensor
    outputs: torch.Tensor


def shapes_of_a_rank(ranks: int, *, by_output: bool = False) -> dict[str, tuple[int, int]]:
    """[N, K] of the linears that a rank holds: rows of qkv and gate_up, columns of o and down, or rows of them, too."""
    columns = () if by_output else ("o", "down")
    whole = MODELS[ROLLOUT_MODEL]
    return {name: (n, k // ranks) if name in columns else (n // ranks, k) for name, (n, k) in whole.items()}


def draw_layer(device: torch.device, ranks: int, *, by_output: bool = False) -> Layer:
    shapes = shapes_of_a_rank(ranks, by_output=by_output)
    weights = {name: kernels.quantize_128x128(data.weights(n, k, device), RULE) for name, (n, k) in shapes.items()}
    return Layer(weights, tuple((1 + 0.1 * torch.randn(2, shapes["qkv"][1], device=device)).bfloat16()))


def draw_inputs(device: torch.device, ranks: int, m: int) -> Inputs:
    from jetrl_verl.rollout.row_parallel import GATHERED_BYTES

    hidden, attention = SHAPES[ROLLOUT_MODEL]["qkv"][1], shapes_of_a_rank(ranks)["o"][1]
    adds = m if 2 * m * hidden <= GATHERED_BYTES else -(-m // ranks)
    gathered = data.activations(ranks * adds, hidden, device).unflatten(0, (ranks, adds))
    return Inputs(data.activations(m, hidden, device), data.activations(m, attention, device), gathered)


def draw_inputs_by_output(device: torch.device, ranks: int, m: int) -> InputsByOutput:
    whole = MODELS[ROLLOUT_MODEL]

    def gathered(k: int) -> QuantizedTensor:
        x = kernels.quantize_1x128(data.activations(ranks * m, k // ranks, device), RULE)
        return QuantizedTensor(*(part.reshape(ranks, m, -1) for part in (x.qdata, x.scales)))

    hidden = whole["qkv"][1]
    return InputsByOutput(
        data.activations(m, hidden, device),
        data.activations(m, whole["o"][1] // ranks, device),
        gathered(whole["o"][1]),
        gathered(whole["down"][1]),
        data.activations(ranks * m, hidden // ranks, device).unflatten(0, (ranks, m)),
    )


def wire_of_a_rank(ranks: int, m: int) -> dict[str, dict[str, int]]:
    """Of one layer: bytes that a rank receives, and the collectives and kernels, attention left out, that it starts."""
    from jetrl_verl.rollout.row_parallel import GATHERED_BYTES

    whole = MODELS[ROLLOUT_MODEL]
    ordered, by_output, collectives = 0, 0, 0
    for n, k in (whole["o"], whole["down"]):
        small = 2 * m * n <= GATHERED_BYTES
        ordered += 2 * m * n * (ranks - 1) // (1 if small else ranks) + (
            0 if small else 2 * m * n * (ranks - 1) // ranks
        )
        by_output += (k + 4 * k // BLOCK + 2 * n) * m * (ranks - 1) // ranks
        collectives += 1 if small else 2
    # Norms twice, four products, a quantizer and SiLU-mul; then two sums, or copies of qdata, scales and outputs.
    return {
        "ordered": {"bytes": ordered, "collectives": collectives, "kernels": 8 + 2},
        # qdata and scales travel apart, or are packed by one more kernel each.
        "by output": {"bytes": by_output, "collectives": 6, "kernels": 8 + 6},
    }


def multiply(x: torch.Tensor | QuantizedTensor, w: QuantizedTensor) -> torch.Tensor:
    """As vLLM's linear method does: what is not quantized yet is."""
    if isinstance(x, QuantizedTensor):
        return kernels.fprop_quantized(x, w.qdata, w.scales, None, static_weight=True)
    return kernels.fprop(x, w.qdata, w.scales, None, RULE, static_weight=True)


def stock_layers(layers: list[Layer], inputs: Inputs) -> torch.Tensor:
    from vllm import _custom_ops as ops

    x, residual = inputs.hidden.clone(), torch.zeros_like(inputs.hidden)
    for weights, (norm, post_norm) in layers:
        ops.fused_add_rms_norm(x, residual, norm, EPS)
        multiply(x, weights["qkv"])
        x = multiply(inputs.attention, weights["o"])
        ops.fused_add_rms_norm(x, residual, post_norm, EPS)
        gate_up = multiply(x, weights["gate_up"])
        product = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        torch.ops._C.silu_and_mul(product, gate_up)
        x = multiply(product, weights["down"])
    return x


def shared_layers(layers: list[Layer], inputs: Inputs, *, ordered: bool) -> torch.Tensor:
    gathered = inputs.gathered.unbind(0)

    def reduced(product: torch.Tensor) -> torch.Tensor:
        if not ordered:
            return product
        total = kernels.sum_of_ranks(gathered)
        # The wire would bring the other ranks' shares of a large batch.
        return total if total.shape == product.shape else product

    x, residual = inputs.hidden, torch.zeros_like(inputs.hidden)
    for weights, (norm, post_norm) in layers:
        normed, residual = kernels.add_rms_norm_quantize_1x128(x, residual, norm, EPS, RULE, with_normed=False)
        multiply(normed, weights["qkv"])
        x = reduced(multiply(inputs.attention, weights["o"]))
        normed, residual = kernels.add_rms_norm_quantize_1x128(x, residual, post_norm, EPS, RULE, with_normed=False)
        gate, up = multiply(normed, weights["gate_up"]).chunk(2, dim=-1)
        product = kernels.silu_mul_quantize(gate, up, RULE, with_product=False, with_colwise=False)[0]
        x = reduced(multiply(product, weights["down"]))
    return x


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """[ranks, M, N] to [M, ranks * N], each row's parts beside each other: a copy."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def layers_by_output(layers: list[Layer], inputs: InputsByOutput, *, copies: bool) -> torch.Tensor:
    # Without copies the same memory is read as if it were rows: other numbers, as many bytes.
    rows = in_rows if copies else (lambda x: x.reshape(x.shape[1], -1))
    x, residual = inputs.hidden, torch.zeros_like(inputs.hidden)
    for weights, (norm, post_norm) in layers:
        normed, residual = kernels.add_rms_norm_quantize_1x128(x, residual, norm, EPS, RULE, with_normed=False)
        multiply(normed, weights["qkv"])
        kernels.quantize_1x128(inputs.attention, RULE)
        multiply(QuantizedTensor(*(rows(part) for part in inputs.o)), weights["o"])
        x = rows(inputs.outputs)
        normed, residual = kernels.add_rms_norm_quantize_1x128(x, residual, post_norm, EPS, RULE, with_normed=False)
        gate, up = multiply(normed, weights["gate_up"]).chunk(2, dim=-1)
        kernels.silu_mul_quantize(gate, up, RULE, with_product=False, with_colwise=False)
        multiply(QuantizedTensor(*(rows(part) for part in inputs.down)), weights["down"])
        x = rows(inputs.outputs)
    return x


def measure_rank(machine: Machine, layers: list[Layer], split_by_output: list[Layer], ranks: int, m: int) -> dict:
    """The record of one rank's layers at one number of rows; microseconds are of a layer."""
    inputs = draw_inputs(machine.device, ranks, m)
    other = draw_inputs_by_output(machine.device, ranks, m)
    calls = {
        "stock": partial(stock_layers, layers, inputs),
        "shared": partial(shared_layers, layers, inputs, ordered=False),
        "ordered": partial(shared_layers, layers, inputs, ordered=True),
        "by output": partial(layers_by_output, split_by_output, other, copies=True),
        "by output, in rows": partial(layers_by_output, split_by_output, other, copies=False),
    }
    times = machine.timer.interleaved({name: [call] for name, call in calls.items()})
    us = {name: {key: value / len(layers) for key, value in spread._asdict().items()} for name, spread in times.items()}
    stock, shared, ordered, by_output, in_place = (us[name]["median"] for name in calls)
    wire = wire_of_a_rank(ranks, m)
    kilobytes = " and ".join(f"{wire[design]['bytes'] / 1e3:.0f}" for design in wire)
    console.print(
        f"{ranks} ranks, {m} rows: stock {stock:.1f} us a layer, shared {shared:.1f}, ordered {ordered:.1f}: "
        f"{ordered - shared:+.1f} us by its two sums, {ordered / stock:.3f} of stock; by output {by_output:.1f}, "
        f"in rows {in_place:.1f}; received {kilobytes} kB"
    )
    return {"model": ROLLOUT_MODEL, "ranks": ranks, "m": m, "layers": len(layers), "us": us, "wire": wire}


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=("trainer", "rollout"), default=["trainer", "rollout"])
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=["qwen3-8b"], help="of the trainer's products")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384], help="of the trainer's products")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of the rollout's layers")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        machine = this_machine(args.repeats)
    except BenchError as error:
        console.print(f"{error}")
        return 2
    result = Result(args.out, {"command": "ranks", **machine.facts(), "records": [], "rollout": []})
    jobs = [(model, layer, m) for model in args.models for layer in ("o", "down") for m in args.tokens]
    for model, layer, m in jobs if "trainer" in args.what else ():
        if record := measure_product(machine, model, layer, m):
            result["records"].append(record)
        machine.clear()
        result.save()
    for ranks in RANKS if "rollout" in args.what else ():
        size = sum(n * k for n, k in shapes_of_a_rank(ranks).values())
        count = max(8, 1 + math.ceil(3 * machine.timer.l2_bytes / size))
        layers = [draw_layer(machine.device, ranks) for _ in range(count)]
        by_output = [draw_layer(machine.device, ranks, by_output=True) for _ in range(count)]
        for m in args.rows:
            result["rollout"].append(measure_rank(machine, layers, by_output, ranks, m))
            machine.clear()
            result.save()
    return 0 if all(all(record["same_bits"].values()) for record in result["records"]) else 1


if __name__ == "__main__":
    sys.exit(main())
