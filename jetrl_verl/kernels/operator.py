# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Declare an operation: its backends, and a torch operator ``jetrl::<name>``, which torch.compile keeps whole and CUDA
graphs capture; shared checks. Where torch need not see the operator, its function is called directly: torch's dispatch
costs about 10 us.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch

from jetrl_verl.kernels.dispatch import TRITON, Backends, Operation, declare, lookup
from jetrl_verl.reference import QuantizedTensor

_LIBRARY = torch.library.Library("jetrl", "FRAGMENT")
_QUANTIZED = "Quantized"


def operator(
    schema: str, *, fake: Callable, backends: Backends | None = TRITON, **properties: Any
) -> Callable[[Callable], Callable]:
    """Decorator: declare an operation and define ``jetrl::<schema>``, computed by the decorated function on CPU and
    CUDA tensors.

    Args:
        schema: as in native_functions, with one more type: ``"quantize_1x128(Tensor x, str rule) -> Quantized"``. A
            ``Quantized q`` is a :class:`QuantizedTensor` to the function, and ``q_qdata, q_scales`` to torch.
        fake: the function for tracing; its results have shapes and types only.
        backends: of the operation, registered above (``implements``), by default the reference on the CPU and Triton on
            a GPU; None for an operator that calls operations.
        properties: others of ``dispatch.Operation``.

    Returns:
        A function that calls ``torch.ops.jetrl.<name>`` where a compiler, a mode or autograd needs to see it, and the
        decorated function elsewhere. Quantized arguments are positional.
    """
    signature, _, returned = schema.partition(" -> ")
    name, _, listed = signature.removesuffix(")").partition("(")
    arguments, results = listed.split(", "), returned.removeprefix("(").removesuffix(")").split(", ")
    takes, gives = (tuple(kind.startswith(_QUANTIZED) for kind in kinds) for kinds in (arguments, results))
    one = not returned.startswith("(")

    def flatten(values: Any) -> Any:
        if one:
            return tuple(values) if gives[0] else values
        return None if values is None else tuple(_flatten_values(values, gives))

    def unflatten(values: Any) -> Any:
        if one:
            return QuantizedTensor(*values) if gives[0] else values
        return _unflatten_values(values, gives) if any(gives) else values

    def register(function: Callable) -> Callable:
        if backends is not None:
            declare(name, Operation(backends, **properties))
        _LIBRARY.define(f"{name}({_torch_schema_args(arguments)}) -> {_torch_schema_results(results, one)}")
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, lambda *flat: flatten(function(*_unflatten_values(flat, takes))), key)
        torch.library.register_fake(
            f"jetrl::{name}", lambda *flat: flatten(fake(*_unflatten_values(flat, takes))), lib=_LIBRARY
        )
        registered = getattr(torch.ops.jetrl, name)

        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if _needs_torch_dispatch():
                return unflatten(registered(*_flatten_values(args, takes), **named))
            return function(*args, **named)

        return call

    return register


def dispatched(schema: str, **declaration: Any) -> Callable:
    """An :func:`operator` of the same arguments that only looks up the operation's backend, by its first tensor."""
    name = schema.partition("(")[0]

    def run(first: torch.Tensor, *rest: Any) -> Any:
        return lookup(name, first.device, first, *rest)(first, *rest)

    return operator(schema, **declaration)(run)


def _torch_schema_args(arguments: Iterable[str]) -> str:
    pairs = ((argument, argument.removeprefix(f"{_QUANTIZED} ")) for argument in arguments)
    return ", ".join(arg if arg == name else f"Tensor {name}_qdata, Tensor {name}_scales" for arg, name in pairs)


def _torch_schema_results(results: Sequence[str], one: bool) -> str:
    kinds = ", ".join("Tensor, Tensor" if kind == _QUANTIZED else kind for kind in results)
    return kinds if one and results[0] != _QUANTIZED else f"({kinds})"


def _unflatten_values(flat: Iterable[Any], quantized: Sequence[bool]) -> tuple[Any, ...]:
    """The values of an operator's arguments or results from torch's flat ones."""
    flat = list(flat)
    values = []
    for is_quantized in quantized:
        if not flat:  # torch leaves out trailing arguments that have the schema's default
            break
        values.append(QuantizedTensor(flat.pop(0), flat.pop(0)) if is_quantized else flat.pop(0))
    return tuple(values)


def _flatten_values(values: Iterable[Any], quantized: Sequence[bool]) -> list[Any]:
    flat = []
    for value, is_quantized in zip(values, quantized, strict=False):
        flat += (value.qdata, value.scales) if is_quantized else (value,)
    return flat


# Looked up once, since every call of an operator needs them.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack


def _needs_torch_dispatch() -> bool:
    """Whether autograd, a compiler, a mode or a functorch transform needs to see calls of operators now."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transform() is not None
    )


def require_shape(operation: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ``tensor`` has this shape: kernels read the shape of one operand only."""
    if tensor.shape != shape:
        raise ValueError(
            f"{operation}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}; nothing is broadcast here"
        )


def require_bf16(operation: str, **tensors: torch.Tensor) -> None:
    """Raise ``TypeError`` unless every tensor is BF16, the type of activations between operations on both sides."""
    _require_type(operation, torch.bfloat16, tensors)


def require_fp32(operation: str, **tensors: torch.Tensor) -> None:
    """Raise ``TypeError`` unless every tensor is FP32."""
    _require_type(operation, torch.float32, tensors)


def _require_type(operation: str, dtype: torch.dtype, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise TypeError(f"{operation}: {name} is {tensor.dtype}, expected {dtype}; cast it where it is made")
