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
"""Which implementation of the contract runs where: one table, read by everything above this room.

Every function here has the signature and the meaning of its namesake in :mod:`jetrl_verl.numerics`; only the speed
differs. ``BACKENDS`` maps operation -> platform -> backends in order of preference: the first whose conditions hold for
the call's shapes serves it, and the last one has no conditions. Two backends stand in one entry only if their results
are equal in every bit (tests/kernels prove it on a GPU): which of them runs must never be visible in a result. What
operations of ``ops`` quantise on the way is not in the table; the one with a native kernel asks it first
(``ops/silu_mul.py``).

On a GPU the 1x128 scales ``[M, ceil(K/128)]`` come out column-major, stride ``(1, M)``, because every Hopper GEMM reads
them along M; values and shape are the contract's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch

from jetrl_verl.numerics import BlockQuantized, ScaleRule

_GPU_QUANTISERS = {"cpu": ("numerics",), "sm89": ("triton",), "sm90": ("triton",), "sm100": ("triton",)}
_OF_CODES = _GPU_QUANTISERS | {"sm90": ("native", "triton")}

BACKENDS: dict[str, dict[str, tuple[str, ...]]] = {
    "quantize_1x128": _GPU_QUANTISERS,
    "quantize_128x1": _GPU_QUANTISERS,
    "quantize_1x128_and_128x1": _GPU_QUANTISERS,
    "quantize_128x128": _GPU_QUANTISERS,
    "quantize_128x128_and_transpose": _GPU_QUANTISERS,
    "relayout_128x1": _OF_CODES,
    "transpose_128x128": _OF_CODES,
    # FProp and DGrad: 128x128 scales on B. All three have one result on an H200 in every bit (docs/LOG.md).
    "gemm_nt_128x128": {
        "cpu": ("numerics",),
        "sm89": ("triton",),
        "sm90": ("native", "vllm_cutlass", "triton"),
        "sm100": ("triton",),
    },
    # WGrad: 1x128 scales on both operands.
    "gemm_nt_1x128": {"cpu": ("numerics",), "sm89": ("triton",), "sm90": ("native", "triton"), "sm100": ("triton",)},
    # The INT8 rollout. Sums are exact, so every backend has one result; vLLM's CUTLASS build has no INT8 for Blackwell.
    "quantize_int8": _GPU_QUANTISERS,
    "gemm_int8": {
        "cpu": ("numerics",),
        "sm89": ("vllm_cutlass_int8", "triton"),
        "sm90": ("vllm_cutlass_int8", "triton"),
        "sm100": ("triton",),
    },
}

_BACKEND_PATHS = {
    "numerics": "jetrl_verl.numerics",
    "triton": "jetrl_verl.kernels.triton_kernels",
    "native": "jetrl_verl.kernels.native",
    "vllm_cutlass": "jetrl_verl.kernels.external_gemm:vllm_cutlass",
    "vllm_cutlass_int8": "jetrl_verl.kernels.external_gemm:vllm_cutlass_int8",
    "cublaslt": "jetrl_verl.kernels.external_gemm:cublaslt",
    "deep_gemm": "jetrl_verl.kernels.external_gemm:deep_gemm",
}

_overrides: dict[str, str] = {}


@cache
def platform_of(device: torch.device) -> str:
    """Name of the table's column for ``device``: ``cpu``, ``sm89`` (Ada), ``sm90`` (Hopper) or ``sm100`` (later).

    Raises:
        RuntimeError: a GPU without FP8 matrix instructions (compute capability below 8.9), or another kind of device.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise RuntimeError(f"FP8 kernels run on CPU and NVIDIA GPUs, not on {device.type!r}; use precision=bf16.")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]} and no FP8 "
            "matrix instructions (8.9 and later have them); use precision=bf16 or another GPU."
        )
    return "sm89" if capability < (9, 0) else "sm90" if capability < (10, 0) else "sm100"


@cache
def backend_of(name: str) -> Any:
    """The module or object that implements backend ``name``, imported on first use."""
    module, _, attribute = _BACKEND_PATHS[name].partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


def _candidates(operation: str, device: torch.device) -> tuple[str, ...]:
    if operation in _overrides:
        return (_overrides[operation],)
    return BACKENDS[operation][platform_of(device)]


def _quantiser(operation: str, device: torch.device):
    return getattr(backend_of(_candidates(operation, device)[0]), operation)


def _of_codes(operation: str, q: BlockQuantized):
    *conditional, last = _candidates(operation, q.codes.device)
    backend = next((name for name in conditional if backend_of(name).serves_codes(operation, q)), last)
    return getattr(backend_of(backend), operation)


def quantize_1x128(x: torch.Tensor, rule: ScaleRule) -> BlockQuantized:
    """See :func:`jetrl_verl.numerics.quantize_1x128`."""
    return _quantiser("quantize_1x128", x.device)(x, rule)


def quantize_128x1(x: torch.Tensor, rule: ScaleRule) -> BlockQuantized:
    """See :func:`jetrl_verl.numerics.quantize_128x1`."""
    return _quantiser("quantize_128x1", x.device)(x, rule)


def quantize_1x128_and_128x1(x: torch.Tensor, rule: ScaleRule) -> tuple[BlockQuantized, BlockQuantized]:
    """See :func:`jetrl_verl.numerics.quantize_1x128_and_128x1`; on a GPU ``x`` is read once."""
    return _quantiser("quantize_1x128_and_128x1", x.device)(x, rule)


def quantize_128x128(w: torch.Tensor, rule: ScaleRule) -> BlockQuantized:
    """See :func:`jetrl_verl.numerics.quantize_128x128`."""
    return _quantiser("quantize_128x128", w.device)(w, rule)


def quantize_128x128_and_transpose(w: torch.Tensor, rule: ScaleRule) -> tuple[BlockQuantized, BlockQuantized]:
    """See :func:`jetrl_verl.numerics.quantize_128x128_and_transpose`; on a GPU ``w`` is read once."""
    return _quantiser("quantize_128x128_and_transpose", w.device)(w, rule)


def relayout_128x1(q: BlockQuantized, rule: ScaleRule) -> BlockQuantized:
    """See :func:`jetrl_verl.numerics.relayout_128x1`."""
    return _of_codes("relayout_128x1", q)(q, rule)


def transpose_128x128(weight: BlockQuantized) -> BlockQuantized:
    """See :func:`jetrl_verl.numerics.transpose_128x128`."""
    return _of_codes("transpose_128x128", weight)(weight)


def gemm_nt(
    a: BlockQuantized,
    b: BlockQuantized,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    add_to: torch.Tensor | None = None,
    static_weight: bool = False,
) -> torch.Tensor:
    """See :func:`jetrl_verl.numerics.gemm_nt`, and for ``static_weight``, a promise about the kernel right before this
    call, :func:`jetrl_verl.kernels.native.gemm_nt`; backends other than ``native`` have no use for it."""
    operation = "gemm_nt_128x128" if b_block_scaled else "gemm_nt_1x128"
    call = {"b_block_scaled": b_block_scaled, "bias": bias, "out_dtype": out_dtype}
    if add_to is not None:  # unknown to other packages' GEMMs, which serve 128x128 scales alone
        call["add_to"] = add_to
    *conditional, last = _candidates(operation, a.codes.device)
    backend = next((name for name in conditional if backend_of(name).serves(a, b, **call)), last)
    if backend == "native":
        call["static_weight"] = static_weight
    return backend_of(backend).gemm_nt(a, b, **call)


def quantize_int8(x: torch.Tensor) -> BlockQuantized:
    """See :func:`jetrl_verl.numerics.quantize_int8`."""
    return _quantiser("quantize_int8", x.device)(x)


def gemm_int8(
    a: BlockQuantized,
    b: BlockQuantized,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """See :func:`jetrl_verl.numerics.gemm_int8`."""
    *conditional, last = _candidates("gemm_int8", a.codes.device)
    for backend in conditional:
        served_by = backend_of(backend)
        if served_by.serves(a, b, bias=bias, out_dtype=out_dtype):
            return served_by.gemm_int8(a, b, bias=bias, out_dtype=out_dtype)
    return backend_of(last).gemm_int8(a, b, bias=bias, out_dtype=out_dtype)


def describe_backends(device: torch.device | str) -> dict[str, str]:
    """What serves each operation on ``device``, for logs and ``jetrl doctor``: ``{"gemm_nt_128x128": "triton", ...}``.

    Several names, in order of preference, are joined by ``", else "``. Raises as :func:`platform_of`.
    """
    return {operation: ", else ".join(_candidates(operation, torch.device(device))) for operation in BACKENDS}


@contextmanager
def override_backend(operation: str, backend: str) -> Iterator[None]:
    """Serve ``operation`` by ``backend`` alone inside the block, whatever the table says. For tests and benchmarks.

    Raises:
        ValueError: a name that the table does not know.
    """
    if operation not in BACKENDS or backend not in _BACKEND_PATHS:
        raise ValueError(
            f"no backend {backend!r} for {operation!r}; operations: {', '.join(BACKENDS)}; "
            f"backends: {', '.join(_BACKEND_PATHS)}"
        )
    previous = _overrides.get(operation)
    _overrides[operation] = backend
    try:
        yield
    finally:
        if previous is None:
            del _overrides[operation]
        else:
            _overrides[operation] = previous
