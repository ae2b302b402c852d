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
"""Registers an operation's forward as a torch operator ``jetrl::<name>``.

As an operator it stays whole under torch.compile, so no compiler fuses half of it into a neighbour on one side only,
and it may be captured into a CUDA graph. Gradients are the business of each operation's ``autograd.Function``, which
calls the operator from inside.
"""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("jetrl", "FRAGMENT")


def operator(schema: str, *, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: define ``jetrl::<schema>``, served by the decorated function on CPU and CUDA tensors.

    Args:
        schema: as in native_functions, for example ``"rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"``.
        fake: shapes and types of the results, for tracing.
    """
    name = schema.partition("(")[0]

    def register(function: Callable) -> Callable:
        _LIBRARY.define(schema)
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)
        torch.library.register_fake(f"jetrl::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.jetrl, name)

    return register


def triton_kernels():
    """The Triton kernels of this room, imported on first use: a machine without a GPU need not have Triton."""
    from jetrl_verl.ops import triton_kernels

    return triton_kernels


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
