# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Register a torch operator ``jetrl::<name>``; checks that operators share.

An operator stays whole under torch.compile, so no compiler fuses half of it on one side only, and CUDA graphs can
capture it. Without autograd, compiler or mode an operator is a plain call of its function: torch's dispatch to Python
costs the host about 10 us.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch

from jetrl_verl.reference import QuantizedTensor

_LIBRARY = torch.library.Library("jetrl", "FRAGMENT")
_QUANTIZED = "Quantized"


def operator(schema: str, *, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: define ``jetrl::<schema>``, computed by the decorated function on CPU and CUDA tensors.

    Args:
        schema: as in native_functions, with one more type: ``"quantize_1x128(Tensor x, str rule) -> Quantized"``. A
            ``Quantized q`` is a :class:`QuantizedTensor` to the function, and ``q_qdata, q_scales`` to torch.
        fake: as the function, for tracing: results that have shapes and types alone.

    Returns:
        In the function's place what calls the operator, ``torch.ops.jetrl.<name>``, wherever a compiler, a mode or
        autograd would see it, and elsewhere the function itself. Arguments are positional.
    """
    signature, _, returned = schema.partition(" -> ")
    name, _, listed = signature.removesuffix(")").partition("(")
    arguments, results = listed.split(", "), returned.removeprefix("(").removesuffix(")").split(", ")
    takes, gives = (tuple(kind.startswith(_QUANTIZED) for kind in kinds) for kinds in (arguments, results))
    one = not returned.startswith("(")

    def taken_apart(values: Any) -> Any:
        if one:
            return tuple(values) if gives[0] else values
        return None if values is None else tuple(_apart(values, gives))

    def put_together(values: Any) -> Any:
        if one:
            return QuantizedTensor(*values) if gives[0] else values
        return _together(values, gives) if any(gives) else values

    def register(function: Callable) -> Callable:
        _LIBRARY.define(f"{name}({_in_torchs_words(arguments)}) -> {_results_in_torchs_words(results, one)}")
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, lambda *flat: taken_apart(function(*_together(flat, takes))), key)
        torch.library.register_fake(
            f"jetrl::{name}", lambda *flat: taken_apart(fake(*_together(flat, takes))), lib=_LIBRARY
        )
        packet, _, overload = name.partition(".")
        registered = getattr(torch.ops.jetrl, packet)
        registered = getattr(registered, overload) if overload else registered

        @wraps(function)
        def call(*args: Any) -> Any:
            if _is_watched():
                return put_together(registered(*_apart(args, takes)))
            return function(*args)

        return call

    return register


def _in_torchs_words(arguments: Iterable[str]) -> str:
    pairs = ((each, each.removeprefix(f"{_QUANTIZED} ")) for each in arguments)
    return ", ".join(each if each == name else f"Tensor {name}_qdata, Tensor {name}_scales" for each, name in pairs)


def _results_in_torchs_words(results: Sequence[str], one: bool) -> str:
    kinds = ", ".join("Tensor, Tensor" if kind == _QUANTIZED else kind for kind in results)
    return kinds if one and results[0] != _QUANTIZED else f"({kinds})"


def _together(flat: Iterable[Any], quantized: Sequence[bool]) -> tuple[Any, ...]:
    """Values, quantized ones where ``quantized`` says so, of tensors and other values one by one."""
    flat = list(flat)
    values = []
    for is_quantized in quantized:
        if not flat:  # torch leaves out last arguments that are the schema's defaults
            break
        values.append(QuantizedTensor(flat.pop(0), flat.pop(0)) if is_quantized else flat.pop(0))
    return tuple(values)


def _apart(values: Iterable[Any], quantized: Sequence[bool]) -> list[Any]:
    flat = []
    for value, is_quantized in zip(values, quantized, strict=False):
        flat += (value.qdata, value.scales) if is_quantized else (value,)
    return flat


# Looked up once: operators ask at each call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack


def _is_watched() -> bool:
    """Whether calls of operators mean anything to torch now: to autograd, a compiler, or a mode, which may give tensors
    without memory."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transform() is not None
    )


def require_shape(operation: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless a tensor has this shape: kernels go by one operand's, and nothing is broadcast."""
    if tensor.shape != shape:
        raise ValueError(
            f"{operation}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}; nothing is broadcast here"
        )


def require_bf16(operation: str, **tensors: torch.Tensor) -> None:
    """Raise ``TypeError`` unless every tensor is BF16: between operations activations have that type, on both sides."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{operation}: {name} is {tensor.dtype}, expected torch.bfloat16; cast it where it is made")
