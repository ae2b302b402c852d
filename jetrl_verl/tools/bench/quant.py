# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl bench quant``: every quantizer and every operation that quantizes its result, against a copy.

Each row counts the bytes that the operation cannot avoid moving. An operation stands beside what it replaces, ``a + b``
being two calls; what it replaces is charged with its own bytes, so a higher share is not a shorter time. The copy is an
elementwise kernel on a BF16 tensor of the same shape and takes its turn among the others; beside the operations that
read qdata stands a copy of qdata, too.

Before anything is timed, each runs on a few rows and must give, byte for byte, what ``reference`` gives on the CPU, or
for an operation that quantizes, what the operation and the quantizer give one after the other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from jetrl_verl import kernels, reference
from jetrl_verl.kernels import dispatch
from jetrl_verl.reference import BLOCK, SCALE_RULES
from jetrl_verl.tools.bench import data
from jetrl_verl.tools.bench.machine import Machine
from jetrl_verl.tools.bench.report import Result, render_quant
from jetrl_verl.tools.bench.shapes import MODELS, check_rows, choose

CHECKED_ROWS = 256
EPS = 1e-6
SCALE = 4 / BLOCK
"""Bytes of scales an element, per 1x128 or 128x1 result."""
COPY_OF_QDATA = "copy of qdata"
"""Beside the operations on qdata: it moves half of the copy's bytes, so what a launch costs weighs double."""


class Operation(NamedTuple):
    """Attributes:
    bytes: that an element of [M, K] costs. operands: draws them. run: on them. reference: what ``run`` must equal in
    every byte, from the same operands; None where ``run`` is itself a sequence of checked operations.
    """

    bytes: float
    operands: Callable[[], tuple]
    run: Callable
    reference: Callable | None = None


Operations = dict[str, Operation]


def _copy(m: int, k: int, device: torch.device) -> Operation:
    # Not clone: inside a graph that is the copy engine's (timing.copy_bandwidth).
    return Operation(4, _drawn(1, m, k, device), lambda x: torch.bitwise_not(x.view(torch.int32)))


def _copy_of_qdata(m: int, k: int, device: torch.device) -> Operation:
    return _copy(m, k // 2, device)._replace(bytes=2, reference=lambda x: ~x.cpu().view(torch.int32))


def _on_cpu(name: str) -> Callable:
    def on_cpu(x: torch.Tensor, *rule: str) -> object:
        return getattr(reference, name)(x.cpu(), *rule)

    return on_cpu


def _drawn(count: int, m: int, k: int, device: torch.device, *rest) -> Callable[[], tuple]:
    return lambda: (*(data.activations(m, k, device) for _ in range(count)), *rest)


def _of_values(names: dict[str, float], m: int, k: int, rule: str, device: torch.device) -> Operations:
    drawn = _drawn(1, m, k, device, rule)
    return {name: Operation(size, drawn, getattr(kernels, name), _on_cpu(name)) for name, size in names.items()}


def quantizers(m: int, k: int, rule: str, device: torch.device) -> Operations:
    """Of activations and output gradients."""

    def coded() -> tuple:
        return kernels.quantize_1x128(data.activations(m, k, device), rule), rule

    def relayout(q: reference.QuantizedTensor, rule: str) -> object:
        return reference.relayout_128x1(reference.QuantizedTensor(q.qdata.cpu(), q.scales.cpu()), rule)

    names = {"quantize_1x128": 3 + SCALE, "quantize_128x1": 3 + SCALE, "quantize_1x128_and_128x1": 4 + 2 * SCALE}
    int8 = Operation(3 + 4 / k, _drawn(1, m, k, device), kernels.quantize_int8, _on_cpu("quantize_int8"))
    return _of_values(names, m, k, rule, device) | {
        COPY_OF_QDATA: _copy_of_qdata(m, k, device),
        "relayout_128x1": Operation(2 + 2 * SCALE, coded, kernels.relayout_128x1, relayout),
        "quantize_int8": int8,
    }


def weights(m: int, k: int, rule: str, device: torch.device) -> Operations:
    """Of weights, in 128x128 blocks."""

    def coded() -> tuple:
        return (kernels.quantize_128x128(data.weights(m, k, device), rule),)

    def transpose(q: reference.QuantizedTensor) -> object:
        return reference.transpose_128x128(reference.QuantizedTensor(q.qdata.cpu(), q.scales.cpu()))

    names = {"quantize_128x128": 3, "quantize_128x128_and_transpose": 4}
    return _of_values(names, m, k, rule, device) | {
        COPY_OF_QDATA: _copy_of_qdata(m, k, device),
        "transpose_128x128": Operation(2, coded, kernels.transpose_128x128, transpose),
    }


def norms(m: int, k: int, rule: str, device: torch.device) -> Operations:
    """RMSNorm, with and without the residual sum, and the 1x128 qdata of its result."""
    weight = torch.rand(k, dtype=torch.bfloat16, device=device) + 0.5

    def plain(x: torch.Tensor) -> tuple:
        y = kernels.rms_norm(x, weight, EPS)
        return y, kernels.quantize_1x128(y, rule)

    def plain_added(x: torch.Tensor, residual: torch.Tensor, with_normed: bool = False) -> tuple:
        y, total = kernels.add_rms_norm(x, residual, weight, EPS)
        return y if with_normed else None, kernels.quantize_1x128(y, rule), total

    def fused(x: torch.Tensor) -> reference.QuantizedTensor:
        return kernels.rms_norm_quantize_1x128(x, weight, EPS, rule)

    def fused_added(with_normed: bool, x: torch.Tensor, residual: torch.Tensor) -> tuple:
        return kernels.add_rms_norm_quantize_1x128(x, residual, weight, EPS, rule, with_normed=with_normed)

    one, two = _drawn(1, m, k, device), _drawn(2, m, k, device)
    return {
        "rms_norm + quantize_1x128": Operation(7 + SCALE, one, plain),
        "rms_norm_quantize_1x128, row in BF16 too": Operation(5 + SCALE, one, fused, plain),
        "add_rms_norm + quantize_1x128": Operation(11 + SCALE, two, plain_added),
        "add_rms_norm_quantize_1x128": Operation(7 + SCALE, two, partial(fused_added, False), plain_added),
        "add_rms_norm_quantize_1x128, row in BF16 too": Operation(
            9 + SCALE, two, partial(fused_added, True), partial(plain_added, with_normed=True)
        ),
    }


def activations(m: int, k: int, rule: str, device: torch.device) -> Operations:
    """SiLU-mul, forward and backward, and the qdata of what it gives."""

    def plain(with_product: bool, with_colwise: bool, gate: torch.Tensor, up: torch.Tensor) -> tuple:
        product = kernels.silu_mul(gate, up)
        own = (product,) if with_product else ()
        if with_colwise:
            return *own, *kernels.quantize_1x128_and_128x1(product, rule)
        return *own, kernels.quantize_1x128(product, rule)

    def fused(with_product: bool, with_colwise: bool, gate: torch.Tensor, up: torch.Tensor) -> tuple:
        return kernels.silu_mul_quantize(gate, up, rule, with_product=with_product, with_colwise=with_colwise)

    def plain_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> list:
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        with torch.enable_grad():
            product = kernels.silu_mul(gate, up)
        grads = torch.autograd.grad(product, (gate, up), dy)
        return [kernels.quantize_1x128_and_128x1(grad, rule) for grad in grads]

    def fused_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple:
        return kernels.silu_mul_backward_quantize(dy, gate, up, rule)

    two, three = _drawn(2, m, k, device), _drawn(3, m, k, device)

    def row(size: float, with_product: bool, with_colwise: bool) -> Operation:
        wanted = (with_product, with_colwise)
        return Operation(size, two, partial(fused, *wanted), partial(plain, *wanted))

    def plain_kernels(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> list:
        silu_mul_backward = dispatch.lookup("silu_mul_backward", dy.device)
        return [kernels.quantize_1x128_and_128x1(grad, rule) for grad in silu_mul_backward(dy, gate, up)]

    on_gpu = {"silu_mul backward + 2 quantize_1x128_and_128x1": Operation(18 + 4 * SCALE, three, plain_kernels)}
    return {
        "silu_mul + quantize_1x128": Operation(9 + SCALE, two, partial(plain, False, False)),
        "silu_mul_quantize": row(5 + SCALE, False, False),
        "silu_mul_quantize, product in BF16 too": row(7 + SCALE, True, False),
        "silu_mul + quantize_1x128_and_128x1": Operation(10 + 2 * SCALE, two, partial(plain, False, True)),
        "silu_mul_quantize, both layouts": row(6 + 2 * SCALE, False, True),
        **(on_gpu if device.type == "cuda" else {}),
        "silu_mul_backward_quantize": Operation(10 + 4 * SCALE, three, fused_backward, plain_backward),
    }


def leaves(value: object) -> list[torch.Tensor]:
    """The tensors of nested tuples, in order, of quantized data the source first; None counts for nothing."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, reference.QuantizedTensor):
        return leaves((value.source, value.qdata, value.scales))
    return [tensor for part in value for tensor in leaves(part)]


def equal_bytes(got: object, want: object) -> bool:
    """Whether both hold the same tensors, byte for byte, NaN included, wherever they live."""

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        raw = [x.cpu().contiguous().view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)

    ours, theirs = leaves(got), leaves(want)
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


@dataclass(frozen=True)
class QuantOptions:
    """What is timed.

    Attributes:
        model: whose weights, hidden and intermediate size are taken. tokens: rows. rules: of scales. out: the JSON.
    """

    model: str = "qwen3-8b"
    tokens: Sequence[int] = (8192, 16384)
    rules: Sequence[str] = ("fp32",)
    out: Path | None = None


Group = Callable[[int, int, str, torch.device], Operations]


def cases(options: QuantOptions) -> Iterable[tuple[int, int, tuple[Group, ...]]]:
    """(M, K, groups of operations): tokens of hidden size, of intermediate size, and the weights."""
    layers = MODELS[choose([options.model], MODELS, "model")[0]]
    for m in options.tokens:
        yield m, layers["down"][0], (quantizers, norms)
        yield m, layers["down"][1], (quantizers, activations)
    for n, k in layers.values():
        yield n, k, (weights,)


def measure(machine: Machine, m: int, k: int, rule: str, groups: Sequence[Group]) -> list[dict]:
    """Records of all operations of ``groups`` on [M, K]; ``wrong`` where one is not its reference."""

    def collect(rows: int) -> Operations:
        return {name: each for group in groups for name, each in group(rows, k, rule, machine.device).items()}

    right = {}
    with torch.no_grad():
        for name, operation in collect(min(m, CHECKED_ROWS)).items():
            operands = operation.operands()
            reference = operation.reference
            right[name] = reference is None or equal_bytes(operation.run(*operands), reference(*operands))
        operations = {"copy": _copy(m, k, machine.device)} | collect(m)
        calls = {}
        for name, operation in operations.items():

            def make(operation: Operation = operation):
                return partial(operation.run, *operation.operands())

            calls[name] = machine.timer.rotated(make, operation.bytes * m * k)
        times = machine.timer.interleaved(calls)
    rates = {name: operations[name].bytes * m * k / (spread.median * 1e-6) for name, spread in times.items()}
    return [
        {
            "operation": name,
            "m": m,
            "k": k,
            "rule": rule,
            "bytes": round(operations[name].bytes * m * k),
            "us": spread._asdict(),
            "gb_per_s": rates[name] / 1e9,
            "share_of_copy": rates[name] / rates["copy"],
            "right": right.get(name, True),
        }
        for name, spread in times.items()
    ]


def run_quant(options: QuantOptions, console: Console, machine: Machine) -> int:
    """Time everything, print the tables, write the JSON; 1 if a result is wrong, else 0.

    Raises:
        BenchError: an option that names nothing known, or a file that cannot be written.
    """
    rules = choose(options.rules, SCALE_RULES, "scale rule")
    choose([options.model], MODELS, "model")
    check_rows(options.tokens)
    result = Result(options.out, {"command": "quant", **machine.facts(), "absent": {}, "records": []})
    with console.status("") as status:
        for rule in rules:
            for m, k, groups in cases(options):
                status.update(f"{m} x {k}, rule {rule}")
                result["records"] += measure(machine, m, k, rule, groups)
                machine.clear()
                result.save()
    result["not_captured"] = sorted(machine.timer.not_captured)
    result["wrong"] = [
        f"{record['operation']} of {record['m']} x {record['k']}, rule {record['rule']}: not its reference's bytes"
        for record in result["records"]
        if not record["right"]
    ]
    render_quant(result, console)
    result.save()
    return 1 if result["wrong"] else 0
