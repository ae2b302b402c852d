# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Selective activation checkpointing: a layer's recomputation in backward takes the results of products, attention and
delta rules from its forward, and runs only the norms, rotary embeddings and activations between them.

torch's own (``create_selective_checkpoint_contexts``) sees every operator through a dispatch mode, which costs host
time for each. Here the forwards of autograd functions ask, so other operators cost nothing.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jetrl_verl.reference import QuantizedTensor


class _Running(threading.local):
    """Of this thread; autograd recomputes in threads of its own."""

    part: "LayerForward | LayerRecomputation | None" = None


_RUNNING = _Running()


def computed_once(function: Callable, *operands: Any) -> Any:
    """``function(*operands)``, which a recomputation of the layer takes from the layer's forward.

    For forwards of autograd functions, which both call in one order.

    Args:
        function: equal in both. Of its result, a tensor or a tuple, only the first tensor may become an output of the
            autograd function.
    """
    part = _RUNNING.part
    return function(*operands) if part is None else part.compute(function, operands)


def last_of_layer() -> None:
    """Say that the layer only adds its next result to the residual: no gradient reads it, so it is neither kept nor
    computed again, where it is a single tensor."""
    if (part := _RUNNING.part) is not None:
        part.last = True


class _Part:
    """Context of a layer's forward or recomputation.

    Attributes:
        results: of the layer in the order of its forward: a function, and its result or None if that is not kept.
        last: see :func:`last_of_layer`.
    """

    last = False

    def __init__(self, results: deque[tuple[Callable, Any]]) -> None:
        self.results = results

    def __enter__(self) -> None:
        self._outer, _RUNNING.part = _RUNNING.part, self

    def __exit__(self, *_: Any) -> None:
        _RUNNING.part = self._outer


class LayerForward(_Part):
    """Keeps results if it has ``room``."""

    def __init__(self, results: deque[tuple[Callable, Any]], room: bool) -> None:
        super().__init__(results)
        self.room = room

    def compute(self, function: Callable, operands: tuple) -> Any:
        result = function(*operands)
        change = _without_memory if self.last else torch.Tensor.detach  # an output holds the graph, which holds this
        kept = None
        if isinstance(result, torch.Tensor):
            kept = change(result) if self.room or self.last else None
        elif self.room:
            kept = change(result[0]), *result[1:]
        self.results.append((function, kept))
        return result

    @property
    def nbytes(self) -> int:
        """Memory of the results."""
        return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(tuple(kept for _, kept in self.results)))


class LayerRecomputation(_Part):
    """Gives each kept result back, once."""

    def compute(self, function: Callable, operands: tuple) -> Any:
        expected, result = self.results.popleft() if self.results else (None, None)
        if expected != function:
            other = "another one" if expected else "none, or an earlier backward took it"
            raise RuntimeError(
                f"the recomputation of a layer asks for the result of {getattr(function, '__qualname__', function)} "
                f"where its forward had {other}, so gradients would be wrong. Run one backward for each forward, or "
                "set actor_rollout_ref.model.enable_gradient_checkpointing=False."
            )
        return function(*operands) if result is None else result


def layer_contexts(room: bool) -> tuple[LayerForward, LayerRecomputation]:
    """Contexts of one layer for ``torch.utils.checkpoint``; the layer keeps results if it has ``room``."""
    results: deque[tuple[Callable, Any]] = deque()
    return LayerForward(results, room), LayerRecomputation(results)


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    """NaN in the shape of ``x``: a gradient that did read it would show."""
    return x.new_full((1,), torch.nan).expand(x.shape)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result if isinstance(result, tuple | QuantizedTensor) else ():
            yield from _tensors(part)
