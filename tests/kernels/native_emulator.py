# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The native kernels' own source on a CPU: built with g++ against csrc/emulator, called through ctypes.

`Emulator.run` takes the operands of ``numerics.gemm_nt`` and a seed; the seed picks the interleaving of a cluster's
threads and of its copies in flight. A protocol error (deadlock, surplus arrival, access outside shared memory) raises.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from jetrl_verl.numerics import BlockQuantized

CSRC = Path(__file__).parents[2] / "csrc"
KERNELS = {"fprop": 0, "decode": 1, "wgrad": 2}


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def build(folder: Path, csrc: Path = CSRC, kernels: str = "sm90_*", machine: Path | None = None) -> Path:
    """Compile the kernels and the machine into one library in ``folder``; about 15 s on one core for all three.

    ``machine``: an object file of the same machine, ``machine.o`` of an earlier folder, instead of compiling it.
    """
    library = folder / "libjetrl_emulated.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-DJETRL_EMULATE", "-Wno-unknown-pragmas", f"-I{csrc}"]
    sources, objects = sorted(csrc.glob(f"{kernels}.cu")), []
    if machine is None:
        sources.append(csrc / "emulator" / "machine.cpp")
    else:
        objects.append(machine)
    for source in sources:
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([compiler(), *flags, "-x", "c++", "-c", source, "-o", objects[-1]], check=True)
    subprocess.run([compiler(), "-shared", *objects, "-o", library], check=True)
    return library


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)


def _operand(q: BlockQuantized) -> tuple:
    """Codes, scales and their strides, as the C interface takes them."""
    strides = (ctypes.c_int64(stride) for stride in q.scales.stride())
    return _pointer(q.codes), ctypes.c_int64(q.codes.stride(0)), _pointer(q.scales), *strides


class Emulator:
    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._library.jetrl_error.restype = ctypes.c_char_p

    def run(
        self,
        kernel: str,
        a: BlockQuantized,
        b: BlockQuantized,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        block: int = 0,
        cluster: int = 0,
        multiprocessors: int = 4,
        seed: int = 0,
    ) -> None:
        """Write (or add) ``A B^T (+ bias)`` to ``out [M, N]``; raises ``RuntimeError`` with the machine's sentence."""
        failed = self._library.jetrl_run(
            KERNELS[kernel],
            *(a.codes.shape[0], b.codes.shape[0], a.codes.shape[1]),
            *_operand(a),
            *_operand(b),
            _pointer(bias),
            int(bias is not None and bias.dtype == torch.float32),
            _pointer(out),
            ctypes.c_int64(out.stride(0)),
            int(out.dtype == torch.float32),
            *(int(accumulate), block, cluster, multiprocessors),
            ctypes.c_uint32(seed),
        )
        self._check(failed)

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(self._library.jetrl_error().decode())

    def blocks(self) -> int:
        """Of the last call's grid."""
        return self._library.jetrl_blocks()

    def transpose(
        self, rule: str | None, q: BlockQuantized, out: torch.Tensor, out_scales: torch.Tensor, seed: int = 0
    ):
        """The re-layout of ``q`` under ``rule``, or without one the transpose of a weight, to ``out`` uint8 and
        ``out_scales``, both with columns of ``q`` as rows; raises as :meth:`run`."""
        failed = self._library.jetrl_transpose(
            {None: -1, "fp32": 0, "pow2": 1}[rule],
            *q.codes.shape,
            *_operand(q),
            _pointer(out),
            ctypes.c_int64(out.stride(0)),
            _pointer(out_scales),
            ctypes.c_uint32(seed),
        )
        self._check(failed)

    def silu_mul_backward(
        self, rule: str, operands: tuple[torch.Tensor, ...], results: list[torch.Tensor], seed: int = 0
    ) -> None:
        """The quantised gradients for ``operands`` dY, gate and up, to ``results``: for gate, then for up, row codes
        uint8, their scales [k / 128, rows], column codes uint8, their scales; raises as :meth:`run`."""
        rows, k = operands[0].shape
        strided = [part for x in operands for part in (_pointer(x), ctypes.c_int64(x.stride(0)))]
        failed = self._library.jetrl_silu_mul_backward(
            int(rule == "pow2"),
            *(rows, k),
            *strided,
            (ctypes.c_void_p * 8)(*(x.data_ptr() for x in results)),
            ctypes.c_int64(results[2].stride(0)),
            ctypes.c_uint32(seed),
        )
        self._check(failed)
