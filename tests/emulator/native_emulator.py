# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The native kernels' source on a CPU: built with g++ against tests/emulator, called through ctypes.

A seed chooses the interleaving of threads and copies; deadlocks, stray accesses and races in shared memory raise.
"""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from build_csrc import STABLE_ABI

from jetrl_verl.reference import BLOCK, FP8_DTYPE, QuantizedTensor

EMULATOR = Path(__file__).parent
CSRC = EMULATOR.parents[1] / "csrc"
CACHE = EMULATOR.parents[1] / "build" / "emulator"
KERNELS = {"fprop": 0, "decode": 1, "wgrad": 2, "fprop_of_ranks": 3}
NAN_CODE = 0x7F
SIGMA = {0.0: 0.5, 64.0: 1.0, -128.0: 0.0}
"""Gates whose exponential leaves no rounding to an implementation."""


def compiler() -> str:
    """The C++ compiler's path; without one ``RuntimeError``, since a suite that skips the kernels would pass unseen."""
    path = shutil.which("g++") or shutil.which("clang++")
    if path is None:
        raise RuntimeError("The kernels are not tested without a C++ compiler. Install g++ (apt-get install g++).")
    return path


_FLAGS = ["-std=c++17", "-ffp-contract=off", "-fPIC", "-DJETRL_EMULATE", "-Wno-unknown-pragmas"]
# The emulator sees each access of a kernel's own C++ by the calls that this sanitizer puts there, and is their run-time
# library; guards of the host code's statics would be calls that it does not have.
_KERNEL_FLAGS = ["-O1", "-fsanitize=thread,alignment", "-fno-threadsafe-statics"]


def build(
    kernels: str = "sm90_*", csrc: Path = CSRC, others: tuple[str, ...] = (), operators: str | None = None
) -> Path:
    """A library of the emulator with the kernels that match ``kernels``; compiled once, then taken from ``CACHE``.

    Args:
        csrc: the sources of ``kernels``, ``CSRC`` with one line changed for a planted fault.
        others: further kernels that calls of ``kernels`` need, from ``CSRC``.
        operators: adds csrc/binding.cpp, so that ``torch.ops.load_library``, once in a process, gives the operators on
            tensors of the CPU as ``torch.ops.<operators>``.
    """
    objects = [_compiled(source, csrc, _KERNEL_FLAGS) for source in sorted(csrc.glob(f"{kernels}.cu"))]
    objects += [_compiled(CSRC / f"{stem}.cu", CSRC, _KERNEL_FLAGS) for stem in others]
    objects += [_compiled(source, csrc, ["-O3"]) for source in sorted(EMULATOR.glob("*.cpp"))]
    libraries = []
    if operators is not None:
        installed = Path(torch.__file__).parent
        flags = ["-O1", STABLE_ABI, f"-DJETRL_OPERATORS={operators}", f"-I{installed / 'include'}"]
        objects.append(_compiled(csrc / "binding.cpp", csrc, flags))
        libraries = [f"-L{installed / 'lib'}", "-ltorch_cpu"]
    names = "".join(path.name for path in objects)
    return _made(_key(names, libraries) + ".so", ["-shared", *objects, *libraries])


def _compiled(source: Path, csrc: Path, flags: list[str]) -> Path:
    headers = [csrc.glob("*.cuh"), csrc.glob("*.h"), EMULATOR.glob("*.h")]
    if source.parent == EMULATOR:
        headers[0] = []  # which the machine does not include
    text = "".join(path.read_text() for paths in headers for path in sorted(paths))
    command = [*_FLAGS, *flags, f"-I{csrc}", f"-I{EMULATOR.parent}", "-x", "c++", "-c", source]
    return _made(_key(source.read_text() + text, [*_FLAGS, *flags]) + ".o", command)


def _key(text: str, flags: list[str]) -> str:
    return hashlib.sha256(f"{compiler()} {flags} {text}".encode()).hexdigest()[:24]


def _made(name: str, command: list) -> Path:
    """The file in ``CACHE``; compiled if it is not there, under a name of its own until it is whole."""
    path = CACHE / name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            unfinished = Path(folder) / name
            subprocess.run([compiler(), *command, "-o", unfinished], check=True)
            unfinished.rename(path)
    return path


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)


def _operand(q: QuantizedTensor) -> tuple:
    """FP8 data, scales and their strides, as the C interface takes them."""
    strides = (ctypes.c_int64(stride) for stride in q.scales.stride())
    return _pointer(q.qdata), ctypes.c_int64(q.qdata.stride(0)), _pointer(q.scales), *strides


class Emulator:
    """The kernels of a library of :func:`build`."""

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._library.jetrl_error.restype = ctypes.c_char_p

    def run(
        self,
        kernel: str,
        a: QuantizedTensor,
        b: QuantizedTensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        ranks: int = 1,
        block: int = 0,
        cluster: int = 0,
        multiprocessors: int = 4,
        seed: int = 0,
    ) -> None:
        """Write ``A B^T (+ bias)`` to ``out [M, N]``, for ``fprop_of_ranks`` the sum of ``ranks`` products.

        Raises ``RuntimeError`` with the emulator's message."""
        failed = self._library.jetrl_run(
            KERNELS[kernel],
            *(a.qdata.shape[0], b.qdata.shape[0], a.qdata.shape[1]),
            *_operand(a),
            *_operand(b),
            _pointer(bias),
            int(bias is not None and bias.dtype == torch.float32),
            _pointer(out),
            ctypes.c_int64(out.stride(0)),
            int(out.dtype == torch.float32),
            *(ranks, block, cluster, multiprocessors),
            ctypes.c_uint32(seed),
        )
        self._check(failed)

    def run_grouped(
        self,
        kernel: str,
        a: QuantizedTensor,
        b: QuantizedTensor,
        start: torch.Tensor,
        out: torch.Tensor,
        *,
        slices: int = 1,
        static_segments: bool = False,
        block: int = 0,
        cluster: int = 0,
        multiprocessors: int = 4,
        seed: int = 0,
    ) -> None:
        """``grouped_fprop`` or ``grouped_decode``, operands as those of ``reference.grouped_gemm_nt``, to ``out
        [slices * R, N]``, or ``grouped_wgrad``, as ``reference.grouped_wgrad``, to ``out [E * N, K]``; raises as
        :meth:`run`. A previous kernel writes ``a``, and ``start`` without ``static_segments``."""
        experts = len(start) - 1
        of_out = _pointer(start), _pointer(out), ctypes.c_int64(out.stride(0))
        plan = block, cluster, multiprocessors, ctypes.c_uint32(seed)
        if kernel == "grouped_wgrad":
            sizes = experts, a.qdata.shape[0], b.qdata.shape[0], a.qdata.shape[1]
            failed = self._library.jetrl_run_grouped_wgrad(*sizes, *_operand(a), *_operand(b), *of_out, *plan)
        else:
            (rows, k), n = a.qdata.shape, b.qdata.shape[1]
            failed = self._library.jetrl_run_grouped(
                ["grouped_fprop", "grouped_decode"].index(kernel),
                *(rows, experts, n, k),
                *_operand(a),
                *(_pointer(b.qdata), ctypes.c_int64(b.qdata.stride(0)), ctypes.c_int64(b.qdata.stride(1))),
                *(_pointer(b.scales), *(ctypes.c_int64(stride) for stride in b.scales.stride())),
                of_out[0],
                int((start % 4 == 0).all()),
                *(slices, int(static_segments)),
                *of_out[1:],
                *plan,
            )
        self._check(failed)

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(self._library.jetrl_error().decode())

    def blocks(self) -> int:
        """Of the last call's grid."""
        return self._library.jetrl_blocks()

    def transpose(
        self, rule: str | None, q: QuantizedTensor, out: torch.Tensor, out_scales: torch.Tensor, seed: int = 0
    ):
        """The re-layout of ``q`` under ``rule``, or without one the transpose of a weight, to ``out`` uint8 and
        ``out_scales``, both with columns of ``q`` as rows; raises as :meth:`run`."""
        failed = self._library.jetrl_transpose(
            {None: -1, "fp32": 0, "pow2": 1}[rule],
            *q.qdata.shape,
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
        """The quantized gradients for ``operands`` dY, gate and up, to ``results``: for gate, then for up, row qdata
        uint8, their scales [k / 128, rows], column qdata uint8, their scales; raises as :meth:`run`."""
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

    def decode_attention(
        self,
        q: torch.Tensor,
        cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        cluster: int = 1,
        multiprocessors: int = 4,
        seed: int = 0,
    ) -> None:
        """Arguments as of ``kernels.decode_attention``, or with keys and values as of
        ``kernels.decode_attention_bf16``, by clusters of that many blocks, on so many ``multiprocessors``; raises as
        :meth:`run`."""
        if isinstance(cache, tuple):
            keys, values = cache
            kv_heads, units = keys.shape[2], keys.shape[1] // 16
            of_pages = (ctypes.c_int * 3)(*(stride // 8 for stride in keys.stride()[:3]))
        else:
            keys, values, of_pages = cache, None, None
            kv_heads, units = cache.shape[1:3]
        strides = (ctypes.c_int64(x.stride(0)) for x in (q, out, block_table))
        for storage in (x.untyped_storage() for x in (keys, values) if x is not None):
            self._library.jetrl_give(ctypes.c_void_p(storage.data_ptr()), ctypes.c_int64(storage.nbytes()))
        failed = self._library.jetrl_decode_attention(
            *(_pointer(keys), _pointer(values), of_pages),
            *map(_pointer, (q, out, lengths, block_table)),
            *strides,
            *(len(q), kv_heads, q.shape[1] // kv_heads, units),
            ctypes.c_float(scale),
            *(cluster, multiprocessors),
            ctypes.c_uint32(seed),
        )
        self._check(failed)


def operand(rows: int, k: int, scale_rows: int, seed: int) -> QuantizedTensor:
    """FP8 data -4..4 in rows padded with NaN qdata to 16 bytes, column-major scales 1/4..4.

    By its seed // 2, a group's scales are padded to 16 bytes, as TMA wants them, or to what only cp.async can read.
    """
    generator = torch.Generator().manual_seed(seed)
    qdata = torch.full((rows, -(-k // 16) * 16 + 16), NAN_CODE, dtype=torch.uint8).view(FP8_DTYPE)
    qdata[:, :k] = torch.randint(-4, 5, (rows, k), generator=generator).float().to(FP8_DTYPE)
    padded = -(-scale_rows // 4) * 4 + seed // 2 % 2
    scales = torch.full((-(-k // BLOCK), padded), torch.nan)
    scales[:, :scale_rows] = 2.0 ** torch.randint(-2, 3, (-(-k // BLOCK), scale_rows), generator=generator).float()
    return QuantizedTensor(qdata[:, :k], scales[:, :scale_rows].t())


def operands(m: int, n: int, k: int, b_block_scaled: bool, seed: int = 0) -> tuple[QuantizedTensor, QuantizedTensor]:
    return operand(m, k, m, 2 * seed), operand(n, k, -(-n // BLOCK) if b_block_scaled else n, 2 * seed + 1)


def experts_operand(experts: int, n: int, k: int, seed: int, adjacent: bool) -> QuantizedTensor:
    """[E, N, K] with scales; experts one after the other, or adjacent within each row, as in a transpose."""
    flat = operand(experts * n, k, experts * n // BLOCK, 2 * seed + 1)
    qdata = flat.qdata.unflatten(0, (experts, n))
    scales = flat.scales.unflatten(0, (experts, n // BLOCK))
    if adjacent:
        around = torch.zeros(n, experts * k + 16, dtype=torch.uint8).view(qdata.dtype)
        placed = around[:, : experts * k].unflatten(1, (experts, k)).transpose(0, 1)
        placed.view(torch.uint8).copy_(qdata.view(torch.uint8))
        qdata = placed
    return QuantizedTensor(qdata, scales)


def product(a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool) -> torch.Tensor:
    n, k = b.qdata.shape
    b_scales = b.scales.repeat_interleave(BLOCK, dim=0)[:n] if b_block_scaled else b.scales
    wide_a, wide_b = (s.double().repeat_interleave(BLOCK, dim=1)[:, :k] for s in (a.scales, b_scales))
    return (a.qdata.double() * wide_a) @ (b.qdata.double() * wide_b).t()


def silu_operands(rows: int, k: int, seed: int) -> tuple[torch.Tensor, ...]:
    """dY, gate and up [rows, k] BF16, all in wider rows of NaN."""
    generator = torch.Generator().manual_seed(seed)
    around = torch.full((3, rows, k + 8), torch.nan, dtype=torch.bfloat16)
    around[..., :k] = torch.randn(3, rows, k, generator=generator)
    around[1, :, :k] = torch.tensor(list(SIGMA))[torch.randint(0, 3, (rows, k), generator=generator)]
    return tuple(around[..., :k])


def silu_gradients(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 gradients of silu(gate) * up for gate and up, where the gates are those of ``SIGMA``."""
    sigma = torch.zeros(gate.shape)
    for value, of_value in SIGMA.items():
        sigma[gate == value] = of_value
    dy, gate, up = dy.float(), gate.float(), up.float()
    return (dy * up * sigma * (1 + gate * (1 - sigma))).bfloat16(), (dy * gate * sigma).bfloat16()


def plant(folder: Path, kernels: str, file: str, line: str, wrong: str, others: tuple[str, ...] = ()) -> Emulator:
    """The emulator of ``kernels`` with ``line`` of ``file``, which is there once, replaced by ``wrong``."""
    planted = folder / "csrc"
    shutil.copytree(CSRC, planted)
    source = (planted / file).read_text()
    assert source.count(line) == 1
    (planted / file).write_text(source.replace(line, wrong))
    return Emulator(build(kernels, planted, others))
