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
"""The native Hopper kernels of csrc/ as a backend, compiled ahead of time for sm_90a: block-scaled GEMMs, and what
makes the codes of a transpose, from codes and from the gradients of a gated MLP.

One library beside this file, made by ``scripts/build_csrc.py`` where there is an nvcc, loaded on first use; without it,
or on another GPU, :func:`unavailable` says why and nothing is served. Three GEMMs, one arithmetic (the contract's,
with a fused multiply-add per promotion, as in the Triton kernels): FProp/DGrad, the same for at most 128 rows with the
weights as narrow tiles, and WGrad. A :class:`Plan` overrides the kernel's own choice of tile and cluster; no plan
changes a bit of a result. The re-layout for WGrad and the transpose of a weight's codes have the bytes of ``numerics``.

``JETRL_NATIVE_DEBUG=1`` loads the debug build, in which a wait that lasts a second says what it waits for and stops the
kernel.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from jetrl_verl.kernels.results import empty_columns, empty_rows
from jetrl_verl.numerics import BLOCK, BlockQuantized, check_rule
from jetrl_verl.numerics.gemm import check_add_to, check_gemm_shapes

FEW_ROWS = 128
"""Most rows of A that the decode kernel is chosen for; it serves any number."""

_ALIGNMENT = 16
"""Bytes that TMA wants rows of codes to start on, and that copies and stores move at a time."""


_MOST = 2**31 - 1024
"""Rows, columns and strides that kernels count in 32 bits stay below it."""
_MOST_COLUMNS = 65535 * BLOCK
"""What the second dimension of a grid covers in tiles."""

_operators = torch.ops.jetrl_native
_FORWARD = "x x_scales w w_scales bias y block cluster"
_TRANSPOSE = "codes scales out out_scales"
_ARGUMENTS = {
    "fprop": _FORWARD,
    "decode": f"{_FORWARD} static_weight",
    "wgrad": "a a_scales b b_scales dw accumulate block cluster",
    "relayout": f"{_TRANSPOSE} pow2",
    "transpose": _TRANSPOSE,
    "silu_mul_backward": "dy gate up dgate dgate_scales dgate_columns dgate_column_scales "
    "dup dup_scales dup_columns dup_column_scales pow2",
}
"""Operator of the library -> its arguments, as csrc/binding.cpp declares them."""


class Plan(NamedTuple):
    """How a call is served. Zero: the kernel's choice.

    ``kernel``: which of the forward kernels (ignored for 1x128 scales on B). ``block``: rows per tile of B in FProp,
    64, 128, 192 or 256, and of A in WGrad, 128 or 256, beside 128 of the other; of B in the decode kernel, 16, 32, 48
    or 64. ``cluster``: blocks that share a tile by multicast, 1 or 2; always 1 in the decode kernel.
    """

    kernel: Literal["", "fprop", "decode"] = ""
    block: int = 0
    cluster: int = 0


def library_path() -> Path:
    """Where the library is looked for."""
    debug = os.environ.get("JETRL_NATIVE_DEBUG") == "1"
    return Path(__file__).with_name("libjetrl_sm90_debug.so" if debug else "libjetrl_sm90.so")


@cache
def unavailable() -> str | None:
    """Why the kernels cannot run here, in one sentence, or None."""
    if not library_path().exists():
        return (
            f"{library_path().name} is not built: where there is an nvcc, run `python scripts/build_csrc.py` in a "
            "checkout, or install the package with pip's --no-build-isolation"
        )
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "the native kernels are for Hopper GPUs (compute capability 9.0)"
    try:
        torch.ops.load_library(str(library_path()))
    except OSError as error:
        return f"{library_path().name} does not load ({error}): build it on this machine"
    return foreign("jetrl_native")


def foreign(namespace: str, library: Path | None = None) -> str | None:
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
                f"{(library or library_path()).name} is of another version of the kernels ({namespace}.{name} "
                f"{f'takes {found}' if found else 'is not in it'}): run `python scripts/build_csrc.py` again, or "
                "install the package anew"
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


def _aligned(x: torch.Tensor) -> bool:
    """Whether ``x`` is a matrix of contiguous rows that start on 16 bytes and do not overlap."""
    if x.dim() != 2 or x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        return False
    return x.stride(0) * x.itemsize % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0


def _why() -> str:
    return "" if unavailable() is None else f" ({unavailable()})"


def serves(
    a: BlockQuantized,
    b: BlockQuantized,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    add_to: torch.Tensor | None = None,
) -> bool:
    """Whether :func:`gemm_nt` takes this call: rows of codes and of ``add_to`` on 16-byte steps, rows of the output
    whole 16 bytes; with 128x128 scales BF16 out, with 1x128 scales no bias."""
    n = b.codes.shape[0]
    if add_to is not None and not _aligned(add_to):
        return False
    if min(*a.codes.shape, n) == 0 or (n * out_dtype.itemsize) % _ALIGNMENT != 0:
        return False
    fits = out_dtype == torch.bfloat16 if b_block_scaled else bias is None
    bias_fits = bias is None or (bias.dtype in (torch.bfloat16, torch.float32) and bias.is_contiguous())
    return fits and bias_fits and _aligned(a.codes) and _aligned(b.codes) and unavailable() is None


def gemm_nt(
    a: BlockQuantized,
    b: BlockQuantized,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
    plan: Plan | None = None,
    static_weight: bool = False,
) -> torch.Tensor:
    """As :func:`jetrl_verl.numerics.gemm_nt`; scales may have any strides.

    Args:
        out: ``[M, N]`` of ``out_dtype`` to write to, rows on 16-byte steps; None allocates it.
        add_to: instead of ``out``, to be added to.
        plan: instead of the choice by shape; for tests and benchmarks.
        static_weight: the decode kernel may begin to copy ``b`` while the previous kernel in the stream still runs
            (programmatic dependent launch), if that one allows it, as the quantisers of this tree do on their first
            line (``triton_kernels/_dependents.py``). Only the speed depends on it, provided that *the kernel right
            before this call writes neither* ``b`` *nor* ``bias``, *and that it allows nothing to start before all that
            was in front of it has ended*: it was launched without programmatic dependent launch, or waits before it
            allows. It may make ``a``, as a quantiser of this tree does, for which both hold. Hence it is for a rollout,
            whose parameters are constant during a forward and whose linears come behind such a quantiser: a weight
            sync writes them long before. A trainer quantises its weight right before it multiplies and must never pass
            it.

    Returns:
        ``out`` or ``add_to``, or the new tensor.

    Raises:
        ValueError: a call that is not served (:func:`serves`), or an ``add_to`` that takes no weight gradient.
    """
    check_gemm_shapes(a, b, b_block_scaled, bias)
    m, n = a.codes.shape[0], b.codes.shape[0]
    if add_to is not None:
        check_add_to(add_to, m, n, b_block_scaled, out_dtype)
        out = add_to
    if not serves(a, b, b_block_scaled=b_block_scaled, bias=bias, out_dtype=out_dtype, add_to=add_to):
        added = "" if add_to is None else f" added to rows of stride {add_to.stride(0)}"
        raise ValueError(
            f"native does not serve A {tuple(a.codes.shape)} strides {a.codes.stride()}, B {tuple(b.codes.shape)} "
            f"strides {b.codes.stride()} with {'128x128' if b_block_scaled else '1x128'} scales on B, "
            f"{'a' if bias is not None else 'no'} bias and {out_dtype} out{added}"
            f"{_why()}; use backend triton."
        )
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.codes.device)
    elif out.dtype != out_dtype:
        raise ValueError(f"native: out is {out.dtype} and out_dtype {out_dtype}; they must be the same.")
    plan = plan or Plan()
    operands = (a.codes, a.scales, b.codes, b.scales)
    if b_block_scaled:
        few = plan.kernel == "decode" if plan.kernel else m <= FEW_ROWS
        if few:
            _operators.decode(*operands, bias, out, *plan[1:], static_weight)
        else:
            _operators.fprop(*operands, bias, out, *plan[1:])
    else:
        _operators.wgrad(*operands, out, add_to is not None, *plan[1:])
    return out


def serves_codes(operation: str, q: BlockQuantized) -> bool:
    """Whether :func:`relayout_128x1` or :func:`transpose_128x128`, whichever ``operation`` names, takes ``q``: columns
    in sixteens, rows on 16-byte steps, and for the transpose rows in sixteens, too."""
    rows, k = q.codes.shape
    in_sixteens = k if operation == "relayout_128x1" else k | rows
    fits = q.codes.stride(0) < _MOST and q.scales.stride(0) < _MOST and rows < _MOST and k <= _MOST_COLUMNS
    return min(rows, k) > 0 and in_sixteens % _ALIGNMENT == 0 and fits and _aligned(q.codes) and unavailable() is None


def _check_codes(operation: str, q: BlockQuantized) -> None:
    if not serves_codes(operation, q):
        raise ValueError(
            f"native does not serve {operation} of codes {tuple(q.codes.shape)} strides {q.codes.stride()}"
            f"{_why()}; use backend triton."
        )


def relayout_128x1(q: BlockQuantized, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.relayout_128x1`; the codes are a view with padded rows.

    Raises:
        ValueError: codes that are not served (:func:`serves_codes`), or an unknown ``rule``.
    """
    check_rule(rule)
    _check_codes("relayout_128x1", q)
    out, words = empty_columns(*q.codes.shape, q.codes.device)
    _operators.relayout(*q, words.view(torch.uint8), out.scales.t(), rule == "pow2")
    return out


def transpose_128x128(weight: BlockQuantized) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.transpose_128x128`.

    Raises:
        ValueError: codes that are not served (:func:`serves_codes`).
    """
    _check_codes("transpose_128x128", weight)
    transposed = BlockQuantized(*(torch.empty(part.t().shape, dtype=part.dtype, device=part.device) for part in weight))
    _operators.transpose(*weight, transposed.codes.view(torch.uint8), transposed.scales)
    return transposed


def serves_silu_mul_backward(*operands: torch.Tensor) -> bool:
    """Whether :func:`silu_mul_backward_quantize` takes these: rows in whole groups of 128 that start on 16 bytes."""
    rows, k = operands[0].shape
    fits = rows <= _MOST_COLUMNS and k < _MOST and max(x.stride(0) for x in operands) < _MOST
    return all(map(_aligned, operands)) and min(rows, k) > 0 and k % BLOCK == 0 and fits and unavailable() is None


def silu_mul_backward_quantize(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str
) -> tuple[BlockQuantized, BlockQuantized, BlockQuantized, BlockQuantized]:
    """See :func:`jetrl_verl.ops.silu_mul_backward_quantize`; operands ``[M, I]``.

    Raises:
        ValueError: operands that are not served (:func:`serves_silu_mul_backward`), or an unknown ``rule``.
    """
    check_rule(rule)
    if not serves_silu_mul_backward(dy, gate, up):
        raise ValueError(
            f"native does not serve the gradients of a gated MLP {tuple(gate.shape)}, strides {gate.stride()}"
            f"{_why()}; use the Triton kernel."
        )
    results, memory = [], []
    for _ in range(2):
        rows, (columns, words) = empty_rows(*gate.shape, gate.device), empty_columns(*gate.shape, gate.device)
        results += [rows, columns]
        memory += [rows.codes.view(torch.uint8), rows.scales.t(), words.view(torch.uint8), columns.scales.t()]
    _operators.silu_mul_backward(dy, gate, up, *memory, rule == "pow2")
    return tuple(results)
