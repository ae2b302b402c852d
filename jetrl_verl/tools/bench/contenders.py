# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Who computes a GEMM: BF16 cuBLAS, ours, and what other packages bring. Each says why it is absent, if it is.

A contender turns operands into a call without arguments. What a caller would do once and keep, such as the layout of
a weight's scales or the allocation of a gradient, is done when the call is made; what every call costs is in it.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch, native
from jetrl_verl.kernels.gemm_nt import native_gemm_nt, native_supports_gemm_nt
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.bench import BenchError, data, deep_gemm
from jetrl_verl.tools.bench.shapes import Problem

GemmCall = Callable[[], torch.Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp32+=": torch.float32}
OURS = ("native", "triton")


class Refused(ValueError):
    """A contender does not compute this problem; the message says why."""


@dataclass(frozen=True)
class Operands:
    """Of one problem.

    Attributes:
        left, right: BF16 ``[M, K]`` and ``[N, K]``, strided as a training step has them.
        a, b: their qdata and scales. start: FP32 ``[M, N]`` that is added to, or None.
    """

    left: torch.Tensor
    right: torch.Tensor
    a: QuantizedTensor
    b: QuantizedTensor
    start: torch.Tensor | None

    def copy(self, quantized: bool) -> "Operands":
        """The same values in fresh buffers: the qdata, or the BF16 tensors."""
        if quantized:
            a, b = (QuantizedTensor(q.qdata.clone(), q.scales.clone()) for q in (self.a, self.b))
            return Operands(self.left, self.right, a, b, self.start)
        return Operands(self.left.clone(), self.right.clone(), self.a, self.b, self.start)


def draw(problem: Problem, device: torch.device) -> Operands:
    """Operands of ``problem`` under the FP32 scale rule."""
    m, n, k = problem.m, problem.n, problem.k
    start = 0.01 * torch.randn(m, n, device=device) if problem.out == "fp32+=" else None
    if problem.what == "wgrad":
        dy, x = data.gradients(k, m, device), data.activations(k, n, device)
        a, b = kernels.quantize_128x1(dy, "fp32"), kernels.quantize_128x1(x, "fp32")
        return Operands(dy.t(), x.t(), a, b, start)
    if problem.what == "dgrad":
        dy, w = data.gradients(m, k, device), data.weights(k, n, device)
        b = kernels.transpose_128x128(kernels.quantize_128x128(w, "fp32"))
        return Operands(dy, w.t(), kernels.quantize_1x128(dy, "fp32"), b, start)
    x, w = data.activations(m, k, device), data.weights(n, k, device)
    return Operands(x, w, kernels.quantize_1x128(x, "fp32"), kernels.quantize_128x128(w, "fp32"), start)


def _poisoned(problem: Problem, x: Operands) -> torch.Tensor:
    """Where a product goes: NaN, so that an element that nobody writes shows; or what it is added to."""
    if x.start is not None:
        return x.start.clone()
    return torch.full((problem.m, problem.n), torch.nan, dtype=DTYPES[problem.out], device=x.left.device)


def _bf16(problem: Problem, x: Operands) -> GemmCall:
    left, right = x.left, x.right.t()
    if problem.out == "bf16":
        return partial(torch.matmul, left, right)
    if problem.out == "fp32":
        return partial(torch.mm, left, right, out_dtype=torch.float32)
    # Into the buffer itself, as a trainer accumulates a gradient: without `out` addmm would write a second one.
    added_to = _poisoned(problem, x)
    return partial(torch.addmm, added_to, left, right, out_dtype=torch.float32, out=added_to)


def _operation_of(problem: Problem) -> str:
    return "gemm_nt_128x128" if problem.b_block_scaled else "gemm_nt_1x128"


def _of_backend(name: str) -> Callable[[Problem, Operands], GemmCall]:
    def make(problem: Problem, x: Operands) -> GemmCall:
        options = {"b_block_scaled": problem.b_block_scaled, "out_dtype": DTYPES[problem.out]}
        if x.start is not None:
            if name != "triton":
                raise Refused("adds to no output")
            options["add_to"] = _poisoned(problem, x)
        return partial(dispatch.implementation(_operation_of(problem), name), x.a, x.b, **options)

    return make


def _external(name: str) -> Callable[[Problem, Operands], GemmCall]:
    def make(problem: Problem, x: Operands) -> GemmCall:
        call = _of_backend(name)(problem, x)
        if not dispatch.supports(_operation_of(problem), name, **_call_of(problem, x)):
            raise Refused("does not support this shape, kind of scales or output")
        return call

    return make


def _call_of(problem: Problem, x: Operands) -> dict:
    return {"a": x.a, "b": x.b, "b_block_scaled": problem.b_block_scaled, "out_dtype": DTYPES[problem.out]}


def _native(problem: Problem, x: Operands) -> GemmCall:
    call = _call_of(problem, x)
    if not native_supports_gemm_nt(**call):
        raise Refused("does not support this shape")
    return partial(native_gemm_nt, **call, **{"out" if x.start is None else "add_to": _poisoned(problem, x)})


def _deep_gemm(problem: Problem, x: Operands) -> GemmCall:
    if not deep_gemm.supports(problem):
        raise Refused("its WGrad kernel writes FP32 only")
    a = deep_gemm.align_scales(x.a)
    b = x.b if problem.b_block_scaled else deep_gemm.align_scales(x.b)
    call = partial(deep_gemm.gemm_nt, a, b, _poisoned(problem, x), b_block_scaled=problem.b_block_scaled)
    if problem.out != "fp32":
        return call

    def overwrite() -> torch.Tensor:
        call.args[2].zero_()
        return call()

    return overwrite


def _torchao(problem: Problem, x: Operands) -> GemmCall:
    from torchao.prototype.blockwise_fp8_training import kernels as theirs

    if problem.out == "fp32+=":
        raise Refused("adds to no output")
    gemm = theirs.triton_fp8_gemm_1x128_128x128 if problem.b_block_scaled else theirs.triton_fp8_gemm_1x128_128x1
    return partial(gemm, x.a.qdata, x.b.qdata.t(), x.a.scales, x.b.scales.t(), out_dtype=DTYPES[problem.out])


@dataclass(frozen=True)
class Contender:
    """Attributes:
    name: of the column. missing: why this machine does not have it, or None. make: the call on given operands, or
    :class:`Refused`. quantized: whether it reads the qdata rather than the BF16 tensors. version_of: the contender of
    which it is another build.
    """

    name: str
    missing: Callable[[], str | None]
    make: Callable[[Problem, Operands], GemmCall]
    quantized: bool = True
    version_of: str | None = None


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("bf16", lambda: None, _bf16, quantized=False),
        Contender("native", native.unavailable, _native),
        Contender("triton", lambda: None, _of_backend("triton")),
        Contender("vllm_cutlass", partial(dispatch.unavailable, "vllm_cutlass"), _external("vllm_cutlass")),
        Contender("deep_gemm", partial(dispatch.unavailable, "deep_gemm"), _deep_gemm),
        Contender("cublaslt", partial(dispatch.unavailable, "cublaslt"), _external("cublaslt")),
        Contender("torchao", lambda: None if find_spec("torchao") else "torchao is not installed", _torchao),
    )
}


def version_of_native(name: str, library: Path) -> Contender:
    """Another build of the native kernels, to be timed beside the one in the package.

    Args:
        name: of the contender and, below ``torch.ops``, of its operators.
        library: as ``scripts/build_csrc.py --operators NAME`` makes it.

    Raises:
        BenchError: no native kernel runs here, the library does not load, or its operators are not those that
            the operations' files call.
    """
    if (why := native.unavailable()) is not None:
        raise BenchError(f"--beside {name}: {why}.")
    # A library whose operators have the name of loaded ones ends its process, so that another one tries it first.
    script = "import sys, torch; [torch.ops.load_library(path) for path in sys.argv[1:]]"
    command = [sys.executable, "-c", script, *sorted(torch.ops.loaded_libraries), str(library)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode < 0:
        raise BenchError(f"--beside {name}: its operators have the name of others; build it with --operators {name}.")
    if tried.returncode != 0:
        raise BenchError(f"--beside {name}: {library} does not load here: {tried.stderr.strip().splitlines()[-1]}.")
    torch.ops.load_library(str(library))
    if (why := native.mismatch(name, library)) is not None:
        raise BenchError(f"--beside {name}: {why}.")

    def make(problem: Problem, x: Operands) -> GemmCall:
        call = _native(problem, x)

        def run() -> torch.Tensor:
            with native.using(name):
                return call()

        return run

    return Contender(name, lambda: None, make, version_of="native")
