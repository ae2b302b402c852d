# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl bench gemm``: every GEMM of training and decoding, all contenders in turns.

For each shape: all results once, into poisoned outputs; their distance from a float64 product of the dequantized
operands on a few rows, for ``bf16`` of the BF16 operands; which results are equal in every bit; then the times, cold.
``fp32+=`` rows are judged by what was added. A result that is too far, or a kernel of ours that raises, makes the
command end with status 1; a contender from elsewhere that raises is named and left out of that row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import torch
from rich.console import Console

from jetrl_verl.reference import QuantizedTensor, gemm_nt_float64
from jetrl_verl.tools.bench import check_present, deep_gemm, reason_of
from jetrl_verl.tools.bench.contenders import (
    CONTENDERS,
    OURS,
    Contender,
    GemmCall,
    Operands,
    Refused,
    draw,
    version_of_native,
)
from jetrl_verl.tools.bench.machine import Machine
from jetrl_verl.tools.bench.report import Result, render_gemm
from jetrl_verl.tools.bench.shapes import DECODE, MODELS, TOKENS, WHAT, Problem, choose, problem_of, problems

MOST_ERROR = {"bf16": 2.5e-3, "fp32": 5e-4, "fp32+=": 5e-4}
"""Norm of the error over norm of the result, by output. One rounding to BF16 is between 1.1e-3 and 2.3e-3, as mantissas
fall; within 128 products a tensor core keeps fewer bits than FP32; a wrong block among two hundred is 7e-2."""

CHECKED_ROWS = 16
SUSTAINED_SHAPE = "fprop/qwen3-8b/gate_up/16384"


@dataclass(frozen=True)
class GemmOptions:
    """What is timed. The defaults take about a minute on an H200, half of it DeepGEMM's compilation.

    Attributes:
        batches: rows of a decode step. sustained: seconds per contender, 0 for none. sustained_shape: see
            :func:`~jetrl_verl.tools.bench.shapes.problem_of`. out: the JSON file, or None. beside: other builds of the
            native kernels, by name (:func:`~jetrl_verl.tools.bench.contenders.version_of_native`).
    """

    models: Sequence[str] = ("qwen3-8b",)
    what: Sequence[str] = WHAT
    tokens: Sequence[int] = (4096, 16384)
    batches: Sequence[int] = (1, 8, 16, 32, 64, 128)
    contenders: Sequence[str] = tuple(CONTENDERS)
    sustained: float = 0
    sustained_shape: str = SUSTAINED_SHAPE
    out: Path | None = None
    beside: Mapping[str, Path] = field(default_factory=dict)

    def full(self) -> "GemmOptions":
        """Every model and every count of rows."""
        return replace(self, models=tuple(MODELS), tokens=TOKENS, batches=DECODE)


def present(names: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """The chosen contenders that this machine has, and why it lacks the others."""
    chosen = [CONTENDERS[name] for name in choose(names, CONTENDERS, "contender")]
    absent = {contender.name: why for contender in chosen if (why := contender.missing()) is not None}
    return [contender for contender in chosen if contender.name not in absent], absent


def error_of(contender: Contender, problem: Problem, x: Operands, out: torch.Tensor) -> float:
    """Distance of ``out`` [M, N] from the product in float64, on a few rows; what ``out`` began with taken off."""
    rows = torch.linspace(0, problem.m - 1, min(CHECKED_ROWS, problem.m), device=out.device).round().long()
    if contender.quantized:
        qdata = x.a.qdata.view(torch.uint8)[rows].view(x.a.qdata.dtype)  # not every torch indexes E4M3 on a GPU
        part = QuantizedTensor(qdata, x.a.scales[rows])
        want = gemm_nt_float64(part, x.b, b_block_scaled=problem.b_block_scaled)
    else:
        want = x.left[rows].double() @ x.right.t().double()
    got = out[rows].double()
    if x.start is not None:
        got -= x.start[rows].double()
    return ((got - want).norm() / want.norm()).item()


def results(
    contenders: Sequence[Contender], problem: Problem, x: Operands
) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """What each contender computes, why others do not, and which of ours raised."""
    outputs, refused, failed = {}, {}, []
    for contender in contenders:
        try:
            outputs[contender.name] = contender.make(problem, x)()
            if x.left.device.type == "cuda":
                torch.cuda.synchronize()
        except Refused as reason:
            refused[contender.name] = str(reason)
        except Exception as error:  # other packages raise what they like, and a benchmark of one goes on without it
            refused[contender.name] = reason_of(error)
            failed += [contender.name] if (contender.version_of or contender.name) in OURS else []
    return outputs, refused, failed


def equal_bits(contenders: Sequence[Contender], outputs: Mapping[str, torch.Tensor]) -> dict[str, dict[str, bool]]:
    """For every FP8 result, whether it is Triton's, DeepGEMM's and, of another build, that of the build it varies."""
    bits = {}
    for contender in contenders:
        if contender.quantized and (mine := outputs.get(contender.name)) is not None:
            others = [name for name in ("triton", "deep_gemm", contender.version_of) if name != contender.name]
            bits[contender.name] = {name: torch.equal(mine, outputs[name]) for name in others if name in outputs}
    return bits


def rotated(machine: Machine, contender: Contender, problem: Problem, x: Operands) -> list[GemmCall]:
    """The call on as many copies of the operands as keep it out of the L2."""
    return machine.timer.rotated(lambda: contender.make(problem, x.copy(contender.quantized)), problem.bytes)


def measure(machine: Machine, contenders: Sequence[Contender], problem: Problem) -> dict:
    """The record of one shape; its key ``wrong`` lists what makes the command fail."""
    x = draw(problem, machine.device)
    outputs, refused, failed = results(contenders, problem, x)
    runnable = [contender for contender in contenders if contender.name in outputs]
    errors = {c.name: error_of(c, problem, x, outputs[c.name]) for c in runnable}
    bits = equal_bits(contenders, outputs)
    del outputs
    machine.clear()
    # NaN is not below the limit.
    wrong = failed + [name for name, error in errors.items() if not error < MOST_ERROR[problem.out]]
    times = machine.timer.interleaved({c.name: rotated(machine, c, problem, x) for c in runnable})
    floor, bound = problem.floor(machine.bandwidth)
    return problem._asdict() | {
        "floor_us": floor,
        "bound": bound,
        "us": {name: spread._asdict() for name, spread in times.items()},
        "percent_of_floor": {name: 100 * floor / spread.median for name, spread in times.items()},
        "error": errors,
        "bits": bits,
        "refused": refused,
        "wrong": wrong,
    }


def sustain(machine: Machine, contenders: Sequence[Contender], problem: Problem, seconds: float) -> dict:
    """Back-to-back runs of every contender, one after the other, after ``seconds`` of warming up by the first."""
    x = draw(problem, machine.device)
    outputs, refused, _ = results(contenders, problem, x)
    runnable = [contender for contender in contenders if contender.name in outputs]
    del outputs
    floor, bound = problem.floor(machine.bandwidth)
    record = problem._asdict() | {"floor_us": floor, "bound": bound, "seconds": seconds, "us": {}, "after": {}}
    for turn, contender in enumerate([*runnable[:1], *runnable]):
        machine.clear()
        calls = machine.timer.captured(contender.name, rotated(machine, contender, problem, x))
        spread = machine.timer.sustained(calls, seconds)
        if turn:
            record["us"][contender.name] = spread._asdict()
            record["after"][contender.name] = machine.clock_and_power()
    return record | {"refused": refused}


def run_gemm(options: GemmOptions, console: Console, machine: Machine) -> int:
    """Time everything, print the table, write the JSON; 1 if a result is wrong, else 0.

    Raises:
        BenchError: an option that names nothing known or a file that cannot be written, a library that is none, or
            nothing could be timed.
    """
    todo = problems(options.models, options.what, options.tokens, options.batches)
    steady = problem_of(options.sustained_shape) if options.sustained else None
    contenders, absent = present(options.contenders)
    contenders += [version_of_native(name, library) for name, library in options.beside.items()]
    check_present([contender.name for contender in contenders], absent)
    result = Result(options.out, {"command": "gemm", **machine.facts(), "absent": absent, "records": []})
    result["beside"] = {name: sha256(library.read_bytes()).hexdigest() for name, library in options.beside.items()}
    if any(contender.name == "deep_gemm" for contender in contenders):
        try:
            with console.status("DeepGEMM compiles"):
                result["deep_gemm_compile_s"] = deep_gemm.compile_all([*todo, *([steady] if steady else [])])
        except Exception as error:  # nvcc, its own assertions, a dead process of the pool
            absent["deep_gemm"] = f"its compilation {reason_of(error)}"
            contenders = [contender for contender in contenders if contender.name != "deep_gemm"]
            check_present([contender.name for contender in contenders], absent)
    with console.status("") as status:
        for index, problem in enumerate(todo):
            status.update(f"{index + 1} of {len(todo)}: {problem.name}")
            result["records"].append(measure(machine, contenders, problem))
            machine.clear()
            result.save()
        if steady:
            status.update(f"sustained: {steady.name}, {options.sustained:g} s per contender")
            result["sustained"] = sustain(machine, contenders, steady, options.sustained)
    result["not_captured"] = sorted(machine.timer.not_captured)
    result["wrong"] = [
        f"{name}: {Problem(**{key: record[key] for key in Problem._fields}).name}"
        for record in result["records"]
        for name in record["wrong"]
    ]
    render_gemm(result, console)
    result.save()
    result.check_timed()
    return 1 if result["wrong"] else 0
