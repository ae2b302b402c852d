# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs where: operation -> platform -> backends in order of preference.

The first backend that supports a call computes it; the last one of an entry supports every call. Backends of an entry
agree in every bit (tests/kernels, on a GPU), except those of ``UNEQUAL``. ``reference`` is :mod:`jetrl_verl.reference`
or CPU code of the operation's file; ``composed`` calls other operations. Without ``sm90``, vLLM computes the operation
on a GPU. GPUs other than Hopper get the last backend of ``sm90``, untested, with a line on stderr.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

Table = dict[str, dict[str, tuple[str, ...]]]

_CPU_ALONE = {"cpu": ("reference",)}
_TRITON = {"cpu": ("reference",), "sm90": ("triton",)}
_NATIVE = {"cpu": ("reference",), "sm90": ("native", "triton")}
_ATTENTION = {"cpu": ("reference",), "sm90": ("flash_attention_3",)}
_DECODE_ATTENTION = {"cpu": ("reference",), "sm90": ("native", "flash_attention_3")}
_COMPOSED = {"cpu": ("composed",), "sm90": ("composed",)}

BACKENDS: Table = {
    "quantize_1x128": _TRITON,
    "quantize_128x1": _TRITON,
    "quantize_1x128_and_128x1": _TRITON,
    "quantize_128x128": _TRITON,
    "quantize_128x128_and_transpose": _TRITON,
    "relayout_128x1": _NATIVE,
    "transpose_128x128": _NATIVE,
    # FProp and DGrad: 128x128 scales on B.
    "gemm_nt_128x128": _TRITON | {"sm90": ("native", "vllm_cutlass", "triton")},
    # WGrad: 1x128 scales on both operands.
    "gemm_nt_1x128": _NATIVE,
    # The forward of a linear, as vLLM calls it; the trainer calls its two steps.
    "fprop": _COMPOSED,
    "fprop_quantized": _COMPOSED,
    # The INT8 rollout. Sums are exact, so all backends agree.
    "quantize_int8": _TRITON,
    "gemm_int8": _TRITON | {"sm90": ("vllm_cutlass_int8", "triton")},
    "fprop_int8": _COMPOSED,
    # Row-parallel layers: the sum of the ranks' products in a rollout, products and sum in the trainer.
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
    # With the write into a rollout's cache.
    "norm_rotary_write": _TRITON,
    "norm_rotary_write_fp8": _TRITON,
    # The FP8 KV cache.
    "quantize_kv": _TRITON,
    "quantize_dequantize_kv": _TRITON,
    "dequantize_kv": _TRITON,
    "write_kv": _TRITON,
    "read_kv": _TRITON,
    "decode_attention": _DECODE_ATTENTION,
    "chunk_attention": _ATTENTION,
    # A decode step over vLLM's own BF16 pages.
    "decode_attention_bf16": _DECODE_ATTENTION,
    "paged_attention_fp8": _CPU_ALONE,
    "paged_attention": _CPU_ALONE,
    "attention": _ATTENTION,
    "attention_backward": _ATTENTION,
    # Stock modules of the trainer.
    "varlen_attention": {"cpu": ("sdpa",), "sm90": ("flash_attention_3", "flash_attention_2")},
    "varlen_attention_backward": {"cpu": ("sdpa",), "sm90": ("flash_attention_2",)},
    "logits": _TRITON,
    "log_probs": _TRITON,
    "log_probs_backward": _TRITON,
    "draw": _TRITON,
    "drawn_log_probs": _TRITON,
    # The contract check.
    "block_sums": _TRITON,
}

UNEQUAL = frozenset({"varlen_attention"})
"""Operations, of the trainer alone, whose backends differ in the last bit."""

_WITHOUT_FP8 = frozenset({"varlen_attention", "varlen_attention_backward"})
"""Operations that also run on a GPU without FP8."""


class Implementation(NamedTuple):
    """``run`` computes the operation; ``supports``, of the same arguments, whether it can (None: always); ``unchecked``
    is ``run`` for calls that ``supports`` has allowed (None: ``run``)."""

    run: Callable
    supports: Callable[..., bool] | None
    unchecked: Callable | None = None


_implementations: dict[tuple[str, str], Implementation] = {}
_unavailable: dict[str, Callable[[], str | None]] = {}
_overrides: dict[str, tuple[str]] = {}


def implements(
    operation: str, backend: str, *, supports: Callable[..., bool] | None = None, unchecked: Callable | None = None
) -> Callable:
    """Decorator: register the function as ``operation`` in ``backend``; the others as in :class:`Implementation`."""
    assert operation in BACKENDS and (operation, backend) not in _implementations, (operation, backend)

    def register(function: Callable) -> Callable:
        _implementations[operation, backend] = Implementation(function, supports, unchecked)
        return function

    return register


def backend_needs(backend: str, unavailable: Callable[[], str | None]) -> None:
    """Register the function that returns why ``backend`` cannot run in this process, or None."""
    _unavailable[backend] = unavailable


def unavailable(backend: str) -> str | None:
    """Why ``backend`` cannot run in this process, in a few words, or None."""
    return _unavailable[backend]() if backend in _unavailable else None


@cache
def platform_of(device: torch.device) -> str:
    """``cpu``, ``sm90`` (Hopper) or ``gpu`` (another GPU with FP8 matrix instructions).

    Raises:
        RuntimeError: a GPU without FP8 matrix instructions (compute capability below 8.9), or another kind of device.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise RuntimeError(f"FP8 kernels run on CPU and NVIDIA GPUs, not on {device.type!r}; use precision=bf16.")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor} and no FP8 "
            "matrix instructions (8.9 and later have them); use precision=bf16 or another GPU."
        )
    return "sm90" if major == 9 else "gpu"


@cache
def _warn_untested(name: str) -> None:
    print(f"jetrl_verl: not tested on this GPU ({name}); Triton's kernels run.", file=sys.stderr)


def candidates(operation: str, device: torch.device) -> tuple[str, ...]:
    """Backends of ``operation`` on ``device``, in order of preference.

    Raises:
        RuntimeError: as :func:`platform_of`, or a GPU where the operation has no backend.
    """
    if operation in _overrides:
        return _overrides[operation]
    columns = BACKENDS[operation]
    if operation in _WITHOUT_FP8 and device.type == "cuda":
        return columns["sm90"]
    platform = platform_of(device)
    if platform in columns:
        return columns[platform]
    if platform == "cpu" or "sm90" not in columns:
        raise RuntimeError(f"{operation} has no backend on {platform}. Use it on a CPU.")
    _warn_untested(torch.cuda.get_device_name(device))
    return columns["sm90"][-1:]


def implementation(operation: str, backend: str) -> Callable:
    """The function that computes ``operation`` in ``backend``; KeyError where there is none."""
    return _implementations[operation, backend].run


def supports(operation: str, backend: str, *call, **options) -> bool:
    """Whether ``backend`` computes ``operation`` for these arguments in this process."""
    predicate = _implementations[operation, backend].supports
    return predicate is None or predicate(*call, **options)


def _chosen(operation: str, names: tuple[str, ...], call: tuple, options: dict) -> tuple[str, Callable]:
    *conditional, last = names
    for backend in conditional:
        implementation = _implementations[operation, backend]
        if implementation.supports is None or implementation.supports(*call, **options):
            return backend, implementation.unchecked or implementation.run
    return last, _implementations[operation, last].run


def choose(operation: str, device: torch.device, *call, **options) -> tuple[str, Callable]:
    """The first backend that supports ``operation`` for these arguments, else the last, and its implementation.

    Raises:
        RuntimeError: as :func:`candidates`.
    """
    return _chosen(operation, candidates(operation, device), call, options)


def lookup(operation: str, device: torch.device, *call, **options) -> Callable:
    """The implementation of :func:`choose`, which looks at the arguments only where there are several backends."""
    names = candidates(operation, device)
    if len(names) == 1:
        return _implementations[operation, names[0]].run
    return _chosen(operation, names, call, options)[1]


def backends_on(device: torch.device) -> dict[str, tuple[str, ...]]:
    """The :func:`candidates` of every operation that ``device`` runs. Raises as :func:`platform_of`."""
    column = "cpu" if platform_of(device) == "cpu" else "sm90"
    return {operation: candidates(operation, device) for operation, row in BACKENDS.items() if column in row}


def describe_backends(device: torch.device | str) -> dict[str, str]:
    """:func:`backends_on` for logs: ``{"rms_norm": "triton", ...}``, several names joined by ``", else "``."""
    return {operation: ", else ".join(names) for operation, names in backends_on(torch.device(device)).items()}


@contextmanager
def override_backend(operation: str, backend: str) -> Iterator[None]:
    """Compute ``operation`` with ``backend`` alone within the context; for tests and benchmarks.

    Raises:
        ValueError: ``backend`` does not implement ``operation``.
    """
    if (operation, backend) not in _implementations:
        known = sorted(name for implemented, name in _implementations if implemented == operation)
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
