# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels for Hopper, and disassembles machine code, without a GPU."""

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import CompiledKernel

_NAMES = {
    "*i64": "positions slots tokens seeds counters",
    "*i32": "row pair start experts counts before totals source computed cu cu_lengths lengths places"
    " colwise_qdata dgate_colwise_qdata dup_colwise_qdata out_qdata",
    "*i16": "pairs rowwise_pairs dgate_pairs dup_pairs",
    "*u8": "qdata key key_scales value value_scales cache",
    "*fp32": "logits temperature chunk_highest chunk_sums highest log_sum weights dweights parts dw b a a_log norms"
    " gates db da of_heads scales_t",
}
TYPES = {f"{name}_ptr": kind for kind, names in _NAMES.items() for name in names.split()} | {"eps": "fp32"}
"""Types of most kernels' arguments, by their names; a pointer of another name is of BF16, a number an int32."""


def type_of(name: str) -> str:
    if name in TYPES or not name.endswith("_ptr"):
        return TYPES.get(name, "i32")
    return "*i32" if name.endswith("words_ptr") else "*fp32" if name.endswith(("scales_ptr", "rstd_ptr")) else "*bf16"


def module(name: str) -> ModuleType:
    """Of the kernels; the package's attribute of that name may be the operation."""
    return importlib.import_module(f"jetrl_verl.kernels.{name}")


def compiled(name: str, constants: dict[str, object], *, types=(), capability: int = 90, **options) -> CompiledKernel:
    """A kernel, named with its module, for sm_90 or another ``capability``, with all run-time arguments divisible by
    16, as they are for a real layer. ``types``: those of arguments that :data:`TYPES` has otherwise; ``options``:
    Triton's."""
    home, _, kernel = name.partition(".")
    kernel, types = getattr(module(home), kernel), dict(types)
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types.get(n, type_of(n)) for n in kernel.arg_names},
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in kernel.arg_names if name not in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def ptx_of(name: str, constants: dict[str, object], **options) -> str:
    """PTX of a kernel; arguments of :func:`compiled`."""
    return compiled(name, constants, **options).asm["ptx"]


def disassembled(file: Path) -> str:
    """Machine code of a compiled kernel or library."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([cuobjdump, "-sass", file], capture_output=True, text=True, check=True).stdout


def machine_code_of(kernel: CompiledKernel, folder: Path) -> str:
    """What Triton's assembler makes of the PTX, disassembled."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return disassembled(cubin)
