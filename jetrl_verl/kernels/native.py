# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The library of csrc/, compiled ahead of time for sm_90a by ``scripts/build_csrc.py``: loading, availability, plans.

Without it, or on another GPU, :func:`unavailable` says why and the next backend runs. No :class:`Plan` changes a bit.
``JETRL_NATIVE_DEBUG=1`` loads the debug build, which reports a wait of more than a second and stops the kernel.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from jetrl_verl.kernels.dispatch import backend_needs
from jetrl_verl.reference import BLOCK, QuantizedTensor

FEW_ROWS = 128
"""Most rows of A that the decode kernel is chosen for; it accepts any number."""

FEW_ROWS_OF_EXPERT = 32
"""Most rows of A an expert, on average over all experts, that the grouped decode kernel is chosen for; it accepts any
number."""

MOST_EXPERTS = 512
"""Most experts of the grouped weight gradient."""

ALIGNMENT = 16
"""Bytes that TMA wants rows of qdata to start on, and that copies and stores move at a time."""

ALIGNED_ROWS = 4
"""Rows whose multiples TMA can read scales from: 16 bytes of them."""

MOST = 2**31 - 1024
"""Rows, columns and strides that kernels count in 32 bits stay below it."""
MOST_COLUMNS = 65535 * BLOCK
"""What the second dimension of a grid covers in tiles."""

_operators = torch.ops.jetrl_native
_FORWARD = "x x_scales w w_scales bias y block cluster"
_GROUPED = "x x_scales w w_scales start aligned slices y block cluster"
_TRANSPOSE = "qdata scales out out_scales"
_ARGUMENTS = {
    "fprop": _FORWARD,
    "fprop_of_ranks": "x x_scales w w_scales ranks y block cluster",
    "decode": f"{_FORWARD} static_weight",
    "wgrad": "a a_scales b b_scales dw block cluster",
    "grouped_fprop": _GROUPED,
    "grouped_decode": f"{_GROUPED} static_weight static_segments",
    "grouped_wgrad": "a a_scales b b_scales start dw block cluster",
    "relayout": f"{_TRANSPOSE} pow2",
    "transpose": _TRANSPOSE,
    "decode_attention": "q cache lengths block_table scale units out cluster",
    "decode_attention_bf16": "q keys values lengths block_table scale out cluster",
    "silu_mul_backward": "dy gate up dgate dgate_scales dgate_columns dgate_column_scales "
    "dup dup_scales dup_columns dup_column_scales pow2",
}
"""Operator of the library -> its arguments, as csrc/binding.cpp declares them."""


class Plan(NamedTuple):
    """How a call is computed. Zero: the kernel's choice.

    ``kernel``: which of the forward kernels (ignored for 1x128 scales on B, and for ranks' products). ``block``: rows
    per tile of B in FProp, 64, 128, 192 or 256, for ranks' products 64 or 128, and of A in WGrad, 128 or 256, beside
    128 of the other; of B in the decode kernel, 16, 32, 48 or 64. ``cluster``: blocks that share a tile by multicast, 1
    or 2; always 1 in the decode kernel. In the products of experts ``block`` is 128 or 256, in their decode kernel 32,
    64 or 128. In decode attention ``cluster`` is 1, 2, 4 or 8: blocks that share a request and KV head.
    """

    kernel: Literal["", "fprop", "decode"] = ""
    block: int = 0
    cluster: int = 0


def library_path() -> Path:
    """Where the library is looked for."""
    debug = os.environ.get("JETRL_NATIVE_DEBUG") == "1"
    return Path(__file__).with_name("libjetrl_sm90_debug.so" if debug else "libjetrl_sm90.so")


def library_sha256() -> str | None:
    """SHA-256 of the library, by which records name it; None without one."""
    library = library_path()
    return sha256(library.read_bytes()).hexdigest() if library.is_file() else None


@cache
def unavailable() -> str | None:
    """Why the kernels cannot run here, in one sentence, or None."""
    if not library_path().exists():
        return (
            f"{library_path().name} is not built: install a wheel that has it (`make wheel` where there is an nvcc), "
            "or run `python scripts/build_csrc.py` in a checkout"
        )
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "the native kernels are for Hopper GPUs (compute capability 9.0)"
    try:
        torch.ops.load_library(str(library_path()))
    except OSError as error:
        return f"{library_path().name} does not load ({error}): build it on this machine"
    return mismatch("jetrl_native")


def mismatch(namespace: str, library: Path | None = None) -> str | None:
    """Why the operators of a loaded ``library`` (the package's), ``torch.ops.<namespace>``, are not those that this
    file calls, or None.

    By the names of their arguments. A library that was built from another version of csrc/ would fail at its first
    call, in a worker, minutes later.
    """
    for name, arguments in _ARGUMENTS.items():
        operator = getattr(getattr(torch.ops, namespace), name, None)
        found = operator and " ".join(argument.name for argument in operator.default._schema.arguments)
        if found != arguments:
            return (
                f"{(library or library_path()).name} comes from another version of the kernels ({namespace}.{name} "
                f"{f'accepts {found}' if found else 'is not in it'}): run `python scripts/build_csrc.py` again, or "
                "install the package again"
            )
    return None


@contextmanager
def using(namespace: str) -> Iterator[None]:
    """The operators of another build, ``torch.ops.<namespace>``, inside: for tests, and for benchmarks of versions."""
    global _operators
    before, _operators = _operators, getattr(torch.ops, namespace)
    try:
        yield
    finally:
        _operators = before


def operators():
    """The library's operators; :func:`unavailable` has loaded them."""
    return _operators


def aligned(x: torch.Tensor) -> bool:
    """Whether ``x`` is a matrix of contiguous rows that start on 16 bytes and do not overlap."""
    if x.ndim != 2:
        return False
    row, column = x.stride()
    in_rows = column == 1 and row >= x.shape[1]
    return in_rows and row * x.itemsize % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0


def supports_qdata(q: QuantizedTensor, *, in_sixteens: int) -> bool:
    """Whether the kernels that transpose qdata accept ``q``: rows on 16-byte steps, and ``in_sixteens``, what must be a
    multiple of 16, is one."""
    rows, k = q.qdata.shape
    fits = q.qdata.stride(0) < MOST and q.scales.stride(0) < MOST and rows < MOST and k <= MOST_COLUMNS
    return min(rows, k) > 0 and in_sixteens % ALIGNMENT == 0 and fits and aligned(q.qdata) and unavailable() is None


def refused_qdata(operation: str, q: QuantizedTensor) -> str:
    """The error message for qdata that :func:`supports_qdata` refuses."""
    return (
        f"native does not support {operation} of qdata {tuple(q.qdata.shape)} strides {q.qdata.stride()}"
        f"{why()}; use backend triton."
    )


def why() -> str:
    """For an error message: why no kernel runs here, in brackets; empty if they do."""
    return "" if unavailable() is None else f" ({unavailable()})"


backend_needs("native", lambda: unavailable())
