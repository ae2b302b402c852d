# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of the shared operations: what a decoder layer keeps of its forward for its recomputation
(``jetrl.checkpointing``, kernels/recomputation.py). Ranks choose apart: no bit and no exchange depends on it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from jetrl_verl import models
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.recomputation import LayerForward, LayerRecomputation, computed_once, layer_contexts
from jetrl_verl.kernels.views import as_rows

MARGIN = 0.1
"""Share of a GPU's memory that results never fill: fragments of free memory, and what lies outside of torch."""


class _Linear(torch.autograd.Function):
    """A BF16 linear layer with torch's own products, the forward's :func:`computed_once`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
        ctx.save_for_backward(x)
        keep(ctx, weight)
        return computed_once(F.linear, x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        (x,), (weight,) = ctx.saved_tensors, kept(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy = as_rows(gradient)
        dx = (dy @ weight).view(x.shape) if needs_x else None
        dw = dy.t() @ as_rows(x) if needs_weight else None
        return dx, dw, dy.sum(dim=0) if needs_bias else None


def _linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(input, self.weight, self.bias)


def checkpoint(model: nn.Module, context_fn: Callable[[], tuple[LayerForward, LayerRecomputation]]) -> None:
    """Recompute the decoder layers of ``model``, whose operations are shared.

    Args:
        context_fn: called for each layer of a forward; gives its :func:`layer_contexts`.
    """
    for layer, _ in models.family(model.config).named_layers(model):
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_linear_forward, module)
    # Without dropout, which shared operations refuse, there is no random state to restore.
    settings = dict(use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def memory_of_gpu() -> tuple[int, int, int, int]:
    """Bytes: allocated by torch, their peak, free on the GPU and in torch's cache, all of the GPU."""
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return allocated, torch.cuda.max_memory_allocated(), free + reserved - allocated, total


class Room:
    """Which layers of a micro-batch keep results: as many as leave a GPU the memory that full checkpointing needs.

    That need, beyond what is allocated when a pass starts, is measured: the first pass without gradients and the first
    that adds to them keep nothing. It is at most torch's peak, and grows no faster than the tokens of a pass.

    Args:
        memory: see :func:`memory_of_gpu`.

    Attributes:
        left: bytes that layers may still keep in this pass.
        layers: whether each layer kept results, of all passes since a reader cleared it.
    """

    def __init__(self, memory: Callable[[], tuple[int, int, int, int]] = memory_of_gpu) -> None:
        self._memory = memory
        self._need: dict[bool, tuple[int, int]] = {}  # with gradients or not -> (bytes, tokens) of a full pass
        self._measured: tuple[bool, int, int] | None = None  # the running full pass: gradients, bytes before, tokens
        self._bytes_per_token = 0.0  # of the largest layer
        self._tokens = 0
        self._layer: LayerForward | None = None
        self.left = 0.0
        self.layers: list[bool] = []

    def start(self, tokens: int, gradients: bool) -> None:
        """Begin the pass of a micro-batch. ``gradients``: whether an earlier one left any."""
        self.end()
        allocated, _, free, total = self._memory()
        self._layer, self._tokens, self.left = None, tokens, 0.0
        if gradients in self._need:
            need, of_tokens = self._need[gradients]
            self.left = free - need * max(1.0, tokens / of_tokens) - MARGIN * total
        else:
            self._measured = gradients, allocated, tokens

    def end(self) -> None:
        """End the running pass, if there is one."""
        if self._measured is not None:
            gradients, before, tokens = self._measured
            self._need[gradients], self._measured = (self._memory()[1] - before, tokens), None

    def contexts(self) -> tuple[LayerForward, LayerRecomputation]:
        """``context_fn`` of :func:`checkpoint`."""
        if not torch.is_grad_enabled():
            return layer_contexts(False)
        if self._layer is not None:
            size = self._layer.nbytes
            self._bytes_per_token = max(self._bytes_per_token, size / self._tokens)
            self.left -= size
            self._layer = None
        self.layers.append(self.left > self._bytes_per_token * self._tokens)
        self._layer, recomputation = layer_contexts(self.layers[-1])
        return self._layer, recomputation
