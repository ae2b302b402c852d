# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The library of csrc/, compiled for sm_90a by ``scripts/build_csrc.py``: loading, availability, plans.

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
"""Up to this many rows of A the decode kernel is chosen; it accepts any number."""

FEW_ROWS_OF_EXPERT = 32
"""Up to this many rows of A per expert, on average, the grouped decode kernel is chosen; it accepts any number."""

MOST_EXPERTS = 512
"""Most experts of the grouped weight gradient."""

ALIGNMENT = 16
"""Bytes: TMA needs rows of qdata that start at multiples, and copies and stores move as many at a time."""

ALIGNED_ROWS = 4
"""TMA reads scales from rows that are a multiple: 16 bytes."""

MOST = 2**31 - 1024
"""Bound of rows, columns and strides, which kernels count in 32 bits."""
MOST_COLUMNS = 65535 * BLOCK
"""Columns that the second dimension of a grid covers in tiles."""

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
    "delta_rule": "qkv b a a_log dt_bias states slots computed cu_seqlens out",
    "silu_mul_backward": "dy gate up dgate dgate_scales dgate_columns dgate_column_scales "
    "dup dup_scales dup_columns dup_column_scales pow2",
}
"""Operator of the library -> its arguments, as csrc/binding.cpp declares them."""


class Plan(NamedTuple):
    """How a call is computed, without effect on its bits. Zero: the kernel chooses.

    ``kernel``: which forward kernel; ignored for 1x128 scales on B and for products of ranks. ``block``: rows of B per
    tile in FProp (64, 128, 192 or 256; products of ranks 64 or 128) and in the decode kernel (16, 32, 48 or 64), rows
    of A per tile in WGrad (128 or 256); for experts 128 or 256, in their decode kernel 32, 64 or 128. ``cluster``:
    blocks that share a tile by multicast, 1 or 2, in the decode kernel 1; in decode attention blocks that share a
    request and KV head, 1, 2, 4 or 8.
    """

    kernel: Literal["", "fprop", "decode"] = ""
    block: int = 0
    cluster: int = 0


DEFAULT_PLAN = Plan()


def library_path() -> Path:
    """The path from which the library is loaded."""
    debug = os.environ.get("JETRL_NATIVE_DEBUG") == "1"
    return Path(__file__).with_name("libjetrl_sm90_debug.so" if debug else "libjetrl_sm90.so")


def library_sha256() -> str | None:
    """SHA-256 of the library, for records; None without one."""
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


def mismatch(namespace: str) -> str | None:
    """Why ``torch.ops.<namespace>`` of a loaded library does not fit this file, or None.

    Compares the names of arguments. A library of another version of csrc/ would fail minutes later, in a worker.
    """
    for name, arguments in _ARGUMENTS.items():
        operator = getattr(getattr(torch.ops, namespace), name, None)
        names = operator and " ".join(argument.name for argument in operator.default._schema.arguments)
        if names != arguments:
            return (
                f"{library_path().name} comes from another version of the kernels ({namespace}.{name} "
                f"{f'accepts {names}' if names else 'is not in it'}): run `python scripts/build_csrc.py` again, or "
                "install the package again"
            )
    return None


@contextmanager
def using(namespace: str) -> Iterator[None]:
    """Use the operators of another build, ``torch.ops.<namespace>``, within the context; for tests and benchmarks."""
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
    contiguous_rows = column == 1 and row >= x.shape[1]
    return contiguous_rows and row * x.itemsize % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0


def supports_qdata(q: QuantizedTensor, *, in_sixteens: int) -> bool:
    """Whether the kernels that transpose qdata accept ``q``: rows start on 16 bytes, ``in_sixteens`` is a multiple of
    16."""
    rows, k = q.qdata.shape
    fits = q.qdata.stride(0) < MOST and q.scales.stride(0) < MOST and rows < MOST and k <= MOST_COLUMNS
    return min(rows, k) > 0 and in_sixteens % ALIGNMENT == 0 and fits and aligned(q.qdata) and unavailable() is None


backend_needs("native", lambda: unavailable())
