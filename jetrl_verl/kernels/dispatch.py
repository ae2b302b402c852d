# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs where: the mechanism. An operation's own file declares its backends.

The first backend of a platform that supports a call computes it; the last one supports every call, unless it is
``native`` (``NATIVE_ALONE``), which needs the library of csrc/. Backends of an operation agree in every bit
(tests/kernels, on a GPU), unless it says otherwise. ``reference`` is :mod:`jetrl_verl.reference` or CPU code of the
operation's file; ``composed`` calls other operations. Without ``sm90``, vLLM computes the operation on a GPU. GPUs
other than Hopper get the last backend of ``sm90``, untested, with a line on stderr.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from jetrl_verl.reference import GemmCall, QuantizedTensor

__all__ = ["OPERATIONS", "describe_backends", "override_backend", "platform_of"]

Backends = dict[str, tuple[str, ...]]
"""Platform -> backends in order of preference."""

CPU_ALONE: Backends = {"cpu": ("reference",)}
TRITON: Backends = {"cpu": ("reference",), "sm90": ("triton",)}
NATIVE: Backends = {"cpu": ("reference",), "sm90": ("native", "triton")}
NATIVE_ALONE: Backends = {"cpu": ("reference",), "sm90": ("native",)}
COMPOSED: Backends = {"cpu": ("composed",), "sm90": ("composed",)}


class Operation(NamedTuple):
    """What an operation's file declares (``operator`` in operator.py).

    Attributes:
        equal_bits: whether its backends agree in every bit. needs_fp8: whether it needs a GPU with FP8.
        probe: for a shared operation, its results on the ``ProbeInputs`` of probe_inputs.py, tensors of equally many
            rows, whose bits both sides compare.
        mixture_probe: as ``probe``, on ``MixtureInputs``, of models with a mixture of experts.
    """

    backends: Backends
    equal_bits: bool = True
    needs_fp8: bool = True
    probe: Callable[[Any], Any] | None = None
    mixture_probe: Callable[[Any], Any] | None = None


class Implementation(NamedTuple):
    """``run`` computes the operation. ``supports``, of the same arguments: whether it can (None: always); ``prefers``:
    whether it is chosen where it can (None: always)."""

    run: Callable
    supports: Callable[..., bool] | None = None
    prefers: Callable[..., bool] | None = None


OPERATIONS: dict[str, Operation] = {}
"""Every operation, as its file declares it."""

_implementations: dict[tuple[str, str], Implementation] = {}
_unavailable: dict[str, Callable[[], str | None]] = {}
_overrides: dict[str, tuple[str]] = {}


def implements(
    operation: str, backend: str, *, supports: Callable[..., bool] | None = None, prefers: Callable | None = None
) -> Callable:
    """Decorator: register the function as ``operation`` in ``backend``; the others as in :class:`Implementation`."""
    assert (operation, backend) not in _implementations, (operation, backend)

    def register(function: Callable) -> Callable:
        _implementations[operation, backend] = Implementation(function, supports, prefers)
        return function

    return register


def declare(name: str, operation: Operation) -> None:
    """Enter an operation whose backends have been registered."""
    assert name not in OPERATIONS and all(
        (name, backend) in _implementations for names in operation.backends.values() for backend in names
    ), name
    OPERATIONS[name] = operation


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
    columns, _, needs_fp8, _, _ = OPERATIONS[operation]
    if not needs_fp8 and device.type == "cuda":
        return columns["sm90"]
    platform = platform_of(device)
    if platform in columns:
        return columns[platform]
    if platform == "cpu" or "sm90" not in columns:
        raise RuntimeError(f"{operation} has no backend on {platform}. Use it on a CPU.")
    _warn_untested(torch.cuda.get_device_name(device))
    return columns["sm90"][-1:]


def implementation(operation: str, backend: str) -> Callable:
    """The function of a backend, which raises ``ValueError`` for a call that the backend does not support.

    An operation's arguments are positional. Keywords, for tests and benchmarks, are the backend's own, such as a plan.

    Raises:
        KeyError: the backend does not implement ``operation``.
    """
    run, supports, _ = _implementations[operation, backend]
    return run if supports is None else partial(_checked, operation, backend)


def _checked(operation: str, backend: str, *call, **options):
    run, supports, _ = _implementations[operation, backend]
    if not supports(*call):
        given = ", ".join(map(_described, call))
        missing = f" ({reason})" if (reason := unavailable(backend)) else ""
        last = OPERATIONS[operation].backends["sm90"][-1]
        remedy = "no other backend computes it" if last == backend else f"use backend {last}"
        raise ValueError(f"{backend} does not support {operation} of {given}{missing}; {remedy}.")
    return run(*call, **options)


def _described(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        offset = argument.data_ptr() % 16
        place = f", {offset} bytes after a multiple of 16" if offset else ""
        return f"{argument.dtype} {tuple(argument.shape)} strides {argument.stride()}{place}"
    if isinstance(argument, GemmCall):
        return ", ".join(f"{name} {_described(value)}" for name, value in argument._asdict().items())
    if isinstance(argument, QuantizedTensor):
        return f"({', '.join(map(_described, argument))})"
    return repr(argument)


def supports(operation: str, backend: str, *call) -> bool:
    """Whether ``backend`` computes ``operation`` for these arguments in this process."""
    predicate = _implementations[operation, backend].supports
    return predicate is None or predicate(*call)


def lookup(operation: str, device: torch.device, *call) -> Callable:
    """The first backend's function that supports ``operation`` for these arguments, else the last one's.

    The arguments are needed only where there are several backends.

    Raises:
        RuntimeError: as :func:`candidates`.
    """
    names = candidates(operation, device)
    if len(names) > 1:
        for backend in names[:-1]:
            run, supports, prefers = _implementations[operation, backend]
            if (prefers is None or prefers(*call)) and (supports is None or supports(*call)):
                return run
    run, supports, _ = _implementations[operation, names[-1]]
    return run if supports is None else partial(_checked, operation, names[-1])


def backends_on(device: torch.device) -> dict[str, tuple[str, ...]]:
    """The :func:`candidates` of every operation that ``device`` runs. Raises as :func:`platform_of`."""
    column = "cpu" if platform_of(device) == "cpu" else "sm90"
    return {name: candidates(name, device) for name, operation in OPERATIONS.items() if column in operation.backends}


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
            f"there is no backend {backend!r} for {operation!r}; operations: {', '.join(OPERATIONS)}; "
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
