# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The one way to register a torch operator ``jetrl::<name>``, and the checks that operators share.

An operator stays whole under torch.compile, so no compiler fuses half of it into a neighbour on one side only, and CUDA
graphs may capture it: it allocates by shape alone and never waits for the device. It has no gradient of its own; an
operation's ``autograd.Function`` calls it from inside.
"""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("jetrl", "FRAGMENT")


def operator(schema: str, *, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: define ``jetrl::<schema>``, computed by the decorated function on CPU and CUDA tensors.

    Args:
        schema: as in native_functions, for example ``"rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"``.
        fake: shapes and types of the results, for tracing.

    Returns:
        The operator, ``torch.ops.jetrl.<name>``, in the function's place.
    """
    name = schema.partition("(")[0]

    def register(function: Callable) -> Callable:
        _LIBRARY.define(schema)
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)
        torch.library.register_fake(f"jetrl::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.jetrl, name)

    return register


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
