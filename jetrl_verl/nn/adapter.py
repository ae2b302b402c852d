# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter as part of the weight that a layer multiplies with.

The weight is W + scale * B A, rounded to BF16 (kernels/merge_adapter.py), which a quantized layer then quantizes. The
weight sync and the export compute the same bits. dA and dB follow from the gradient of the whole weight.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jetrl_verl import kernels
from jetrl_verl.kernels.views import as_type


class _Merged(torch.autograd.Function):
    """The weight with its term, or an alias of it without; its gradient is passed on to the factors."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, added: bool) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return kernels.merge_adapter(as_type(weight, torch.bfloat16), a, b, scale) if added else weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dw: torch.Tensor):
        a, b = ctx.saved_tensors
        da = (b.t() @ as_type(dw, b.dtype)).mul_(ctx.scale) if ctx.needs_input_grad[1] else None
        db = (as_type(dw, a.dtype) @ a.t()).mul_(ctx.scale) if ctx.needs_input_grad[2] else None
        return None, da, db, None, None


class Factor(nn.Linear):
    """A or B. Called without input it returns its BF16 value, a copy: FSDP1 shards a factor after its call.

    Attributes:
        state: address and version of the parameter at the last call.
    """

    state: tuple[int, int] = (0, 0)

    def forward(self) -> torch.Tensor:
        self.state = self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version
        return self.weight.to(torch.bfloat16, copy=True)


class Adapter:
    """The adapter of one layer.

    Args:
        layer: peft's layer, in whose place it stands in the model. name: of the adapter.

    Attributes:
        factors: A ``[r, K]`` and B ``[N, r]``, BF16, of the last forward; None while it is disabled, and after a pass.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.factors: tuple[torch.Tensor, torch.Tensor] | None = None
        self.scale = float(layer.scaling[name])
        self._layer, self._name = layer, name
        self._states: tuple = ()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which has no part in the pass."""
        return vars(self) | {"factors": None, "_states": ()}

    def read(self) -> bool:
        """Read the factors; whether they may be others than the last time."""
        before, self._states, self.factors = self._states, (), None
        if not self._layer.disable_adapters:
            # Looked up each time: FSDP1 puts modules of its own there.
            both = self._layer.lora_A[self._name], self._layer.lora_B[self._name]
            self.factors = both[0](), both[1]()
            self._states = tuple(factor.state for factor in both)
        return before != self._states

    def attached(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` for a layer that adds the term itself (:meth:`added`); the gradient goes to the factors."""
        if self.factors is None or not torch.is_grad_enabled():
            return weight
        return _Merged.apply(weight, *self.factors, self.scale, False)

    def added(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` with the term, BF16; unchanged while the adapter is disabled."""
        return weight if self.factors is None else _Merged.apply(weight, *self.factors, self.scale, True)
