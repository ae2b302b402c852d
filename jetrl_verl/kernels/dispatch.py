# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs where: one table over all operations of this package.

``BACKENDS`` maps operation -> platform -> backends in order of preference. :func:`lookup` returns the implementation of
the first backend that supports the call; the last backend of an entry supports every call. Two backends share an entry
only if their results are equal in every bit (tests/kernels proves it on a GPU): which one runs never shows in a result.
``UNEQUAL`` names the operations that nothing but the trainer computes, for which that is not promised. An operation's
file registers its implementations with :func:`implements`, and the operation as the torch operator of its name
(operator.py).

Backends that are no package's: ``reference``, which is :mod:`jetrl_verl.reference` or the CPU code of the operation's
file, and ``composed``: the operation is made of others of this table. A platform that an operation lacks is one where
nothing calls it: on a GPU vLLM attends to a BF16 cache itself but for decode steps that the native kernel computes, and
pages of FP8 data have operations of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

Table = dict[str, dict[str, tuple[str, ...]]]

_GPUS = ("sm89", "sm90", "sm100")
_ANY_GPU = ("sm80", *_GPUS)
_SDPA = {"cpu": ("sdpa",)}
_CPU_ALONE = {"cpu": ("reference",)}
_TRITON = _CPU_ALONE | dict.fromkeys(_GPUS, ("triton",))
_NATIVE = _TRITON | {"sm90": ("native", "triton")}
_ATTENTION = _CPU_ALONE | dict.fromkeys(_GPUS, ("flash_attention_3",))
_COMPOSED = dict.fromkeys(("cpu", *_GPUS), ("composed",))

BACKENDS: Table = {
    "quantize_1x128": _TRITON,
    "quantize_128x1": _TRITON,
    "quantize_1x128_and_128x1": _TRITON,
    "quantize_128x128": _TRITON,
    "quantize_128x128_and_transpose": _TRITON,
    "relayout_128x1": _NATIVE,
    "transpose_128x128": _NATIVE,
    # FProp and DGrad: 128x128 scales on B. All three have one result on an H200 in every bit (docs/log.md).
    "gemm_nt_128x128": _TRITON | {"sm90": ("native", "vllm_cutlass", "triton")},
    # WGrad: 1x128 scales on both operands.
    "gemm_nt_1x128": _NATIVE,
    # The forward of a linear, as vLLM calls it; the trainer takes its two steps one by one.
    "fprop": _COMPOSED,
    "fprop_quantized": _COMPOSED,
    # The INT8 rollout. Sums are exact, so every backend has one result; vLLM's CUTLASS build has no INT8 for Blackwell.
    "quantize_int8": _TRITON,
    "gemm_int8": _TRITON | dict.fromkeys(("sm89", "sm90"), ("vllm_cutlass_int8", "triton")),
    "fprop_int8": _COMPOSED,
    # Row-parallel layers of a rollout over several ranks: their sum, and in the trainer the ranks' products with it.
    "sum_of_ranks": _TRITON,
    "gemm_nt_of_ranks": _TRITON | {"sm90": ("native", "slices", "triton")},
    # A mixture of experts.
    "route": _TRITON,
    "segments": _TRITON,
    "route_and_permute": _TRITON,
    "gather_quantized": _TRITON,
    "gather_quantize_1x128_and_128x1": _TRITON,
    "gather_relayout_128x1": _TRITON,
    "grouped_gemm_nt": _NATIVE,
    "grouped_gemm_nt_of_ranks": _NATIVE,
    "grouped_wgrad": _NATIVE,
    "weighted_silu_mul_quantize": _TRITON,
    "weighted_silu_mul_backward_quantize": _TRITON,
    "combine": _TRITON,
    "combine_of_ranks": _TRITON,
    "combine_add_rms_norm": _TRITON,
    "combine_add_rms_norm_quantize_1x128": _TRITON,
    "rms_norm": _TRITON,
    "add_rms_norm": _TRITON,
    "rms_norm_quantize_1x128": _TRITON,
    "add_rms_norm_quantize_1x128": _TRITON,
    "rms_norm_backward": _TRITON,
    "silu_mul": _TRITON,
    "silu_mul_backward": _TRITON,
    "silu_mul_quantize": _TRITON,
    "silu_mul_backward_quantize": _NATIVE,
    "rotary": _TRITON,
    "norm_rotary": _TRITON,
    # With the write into a rollout's cache behind them.
    "norm_rotary_write": _TRITON,
    "norm_rotary_write_fp8": _TRITON,
    # The FP8 KV cache.
    "quantize_kv": _TRITON,
    "quantize_dequantize_kv": _TRITON,
    "dequantize_kv": _TRITON,
    "write_kv": _TRITON,
    "read_kv": _TRITON,
    "decode_attention": _ATTENTION | {"sm90": ("native", "flash_attention_3")},
    "chunk_attention": _ATTENTION,
    # A decode step over vLLM's own BF16 pages.
    "decode_attention_bf16": _ATTENTION | {"sm90": ("native", "flash_attention_3")},
    "paged_attention_fp8": _CPU_ALONE,
    "paged_attention": _CPU_ALONE,
    "attention": _ATTENTION,
    "attention_backward": _ATTENTION,
    # Stock modules of the trainer.
    "varlen_attention": _SDPA | dict.fromkeys(_ANY_GPU, ("flash_attention_3", "flash_attention_2")),
    "varlen_attention_backward": _SDPA | dict.fromkeys(_ANY_GPU, ("flash_attention_2",)),
    "logits": _TRITON,
    "log_probs": _TRITON,
    "log_probs_backward": _TRITON,
    "draw": _TRITON,
    "drawn_log_probs": _TRITON,
    # The contract check.
    "block_sums": _TRITON,
}

UNEQUAL = frozenset({"varlen_attention"})
"""Operations whose backends differ in the last bit."""


class Implementation(NamedTuple):
    """``run`` computes the operation; ``supports``, with the same arguments, says whether it can (None: always);
    ``unchecked`` is ``run`` for a caller who has asked that (None: ``run`` itself)."""

    run: Callable
    supports: Callable[..., bool] | None
    unchecked: Callable | None = None


_implementations: dict[tuple[str, str], Implementation] = {}
_unavailable: dict[str, Callable[[], str | None]] = {}
_overrides: dict[str, tuple[str]] = {}


def implements(
    operation: str,
    backend: str,
    *,
    supports: Callable[..., bool] | None = None,
    unchecked: Callable | None = None,
) -> Callable:
    """Decorator: the decorated function is the implementation of ``operation`` that ``backend`` stands for; the others
    as in :class:`Implementation`."""
    assert operation in BACKENDS and (operation, backend) not in _implementations, (operation, backend)

    def register(function: Callable) -> Callable:
        _implementations[operation, backend] = Implementation(function, supports, unchecked)
        return function

    return register


def backend_needs(backend: str, unavailable: Callable[[], str | None]) -> None:
    """Register what says why ``backend`` cannot run in this process (None: it can)."""
    _unavailable[backend] = unavailable


def unavailable(backend: str) -> str | None:
    """Why ``backend`` cannot run in this process, in a few words, or None."""
    return _unavailable[backend]() if backend in _unavailable else None


@cache
def column_of(device: torch.device) -> str:
    """As :func:`platform_of`, and ``sm80`` for NVIDIA GPUs without FP8, which few operations run on.

    Raises:
        RuntimeError: another kind of device.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise RuntimeError(f"FP8 kernels run on CPU and NVIDIA GPUs, not on {device.type!r}; use precision=bf16.")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return "sm80"
    return "sm89" if capability < (9, 0) else "sm90" if capability < (10, 0) else "sm100"


def platform_of(device: torch.device) -> str:
    """Name of the table's column for ``device``: ``cpu``, ``sm89`` (Ada), ``sm90`` (Hopper) or ``sm100`` (later).

    Raises:
        RuntimeError: a GPU without FP8 matrix instructions (compute capability below 8.9), or another kind of device.
    """
    if (column := column_of(device)) != "sm80":
        return column
    capability = torch.cuda.get_device_capability(device)
    raise RuntimeError(
        f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]} and no FP8 "
        "matrix instructions (8.9 and later have them); use precision=bf16 or another GPU."
    )


def _candidates(operation: str, device: torch.device) -> tuple[str, ...]:
    if operation in _overrides:
        return _overrides[operation]
    columns = BACKENDS[operation]
    try:
        return columns[column_of(device)]
    except KeyError:
        raise RuntimeError(f"{operation} has no backend on {platform_of(device)}. Use it on a CPU.") from None


def implementation(operation: str, backend: str) -> Callable:
    """The function that computes ``operation`` in ``backend``; KeyError where there is none."""
    return _implementations[operation, backend].run


def supports(operation: str, backend: str, *call, **options) -> bool:
    """Whether ``backend`` computes ``operation`` for these arguments in this process."""
    predicate = _implementations[operation, backend].supports
    return predicate is None or predicate(*call, **options)


def _chosen(operation: str, candidates: tuple[str, ...], call: tuple, options: dict) -> tuple[str, Callable]:
    *conditional, last = candidates
    for backend in conditional:
        found = _implementations[operation, backend]
        if found.supports is None or found.supports(*call, **options):
            return backend, found.unchecked or found.run
    return last, _implementations[operation, last].run


def choose(operation: str, device: torch.device, *call, **options) -> tuple[str, Callable]:
    """Name of the backend that computes ``operation`` for these arguments, the first to support them, else the last;
    and its implementation, which is not asked again whether it supports them.

    Raises:
        RuntimeError: a GPU without FP8 matrix instructions, another kind of device, or one that the operation lacks.
    """
    return _chosen(operation, _candidates(operation, device), call, options)


def lookup(operation: str, device: torch.device, *call, **options) -> Callable:
    """The implementation of ``operation`` on ``device`` for these arguments, which only ``supports`` predicates read.

    Raises:
        RuntimeError: as :func:`choose`.
    """
    candidates = _candidates(operation, device)
    if len(candidates) == 1:
        return _implementations[operation, candidates[0]].run
    return _chosen(operation, candidates, call, options)[1]


def describe_backends(device: torch.device | str) -> dict[str, str]:
    """What computes each operation on ``device``, for logs and ``jetrl doctor``: ``{"rms_norm": "triton", ...}``.

    Several names, in order of preference, are joined by ``", else "``. Raises as :func:`platform_of`.
    """
    device = torch.device(device)
    platform = platform_of(device)
    here = [operation for operation, platforms in BACKENDS.items() if platform in platforms]
    return {operation: ", else ".join(_candidates(operation, device)) for operation in here}


@contextmanager
def override_backend(operation: str, backend: str) -> Iterator[None]:
    """Compute ``operation`` by ``backend`` alone inside the block, whatever the table says. For tests and benchmarks.

    Raises:
        ValueError: an operation that is not in the table, or a backend that does not implement it.
    """
    if (operation, backend) not in _implementations:
        known = sorted(name for of, name in _implementations if of == operation)
        raise ValueError(
            f"there is no backend {backend!r} for {operation!r}; operations: {', '.join(BACKENDS)}; "
            f"backends of this one: {', '.join(known) or 'none'}"
        )
    previous = _overrides.get(operation)
    _overrides[operation] = (backend,)
    try:
        yield
    finally:
        if previous is None:
            del _overrides[operation]
        else:
            _overrides[operation] = previous
