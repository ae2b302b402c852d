# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The one way to register a torch operator ``jetrl::<name>``, and the checks that operators share.

An operator stays whole under torch.compile, so no compiler fuses half of it into a neighbour on one side only, and CUDA
graphs may capture it: it allocates by shape alone and never waits for the device. It has no gradient of its own; an
operation's ``autograd.Function`` calls it from inside.

Called where nobody looks on, which is the trainer's way, an operator is its function: torch's way to a function that is
registered in Python takes the host some 10 us, as long as a small kernel.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_LIBRARY = torch.library.Library("jetrl", "FRAGMENT")


def operator(schema: str, *, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: define ``jetrl::<schema>``, computed by the decorated function on CPU and CUDA tensors.

    Args:
        schema: as in native_functions, for example ``"rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"``.
        fake: shapes and types of the results, for tracing.

    Returns:
        In the function's place what calls the operator, ``torch.ops.jetrl.<name>``, wherever a compiler, a mode or
        autograd would see it, and elsewhere the function itself.
    """
    name = schema.partition("(")[0]

    def register(function: Callable) -> Callable:
        _LIBRARY.define(schema)
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)
        torch.library.register_fake(f"jetrl::{name}", fake, lib=_LIBRARY)
        registered = getattr(torch.ops.jetrl, name)

        @wraps(function)
        def call(*args: Any) -> Any:
            return registered(*args) if _is_watched() else function(*args)

        return call

    return register


def _is_watched() -> bool:
    """Whether calls of operators mean anything to torch now: to autograd, a compiler, or a mode, which may give tensors
    without memory."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
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
