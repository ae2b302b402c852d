# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 data of a gathered weight, kept exactly as long as the weight itself.

Quantizing a weight more often than it changes would be waste, keeping qdata longer than the weight would be a leak.
FSDP decides how long a gathered weight lives. FSDP2 puts a gathered or sharded tensor in place by setting the module's
attribute, and that assignment drops the cache (``__setattr__`` of the layers). FSDP1 sets it at each gather only, so
its qdata live until the next gather or the end of the pass, where the engine drops them (train/engine.py). Between two
assignments FProp, a recomputed FProp and DGrad share one quantization; under ``jetrl.gathered=batch`` those of all
micro-batches do (train/gathered.py). An in-place change (an optimizer step on an unsharded module) shows in the
version counter. A write that bypasses it, through ``weight.data`` or by address, does not show: whoever writes so calls
``drop_qdata`` of the layer.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Generic, NamedTuple, TypeVar

import torch

from jetrl_verl.kernels.views import as_type

_T = TypeVar("_T")


class _WeightData(NamedTuple, Generic[_T]):
    """Valid while the storage in place is this one at this version."""

    address: int
    version: int
    qdata: _T


class WeightCache(Generic[_T]):
    """Of one weight: what was made of it, qdata alone or with their transpose.

    Attributes:
        quantizations: how often the weight has been quantized.
        held: what is kept now, None for nothing.
    """

    def __init__(self) -> None:
        self.quantizations = 0
        self.held: _WeightData[_T] | None = None

    def drop(self) -> None:
        """Forget the qdata; the next use quantizes again."""
        self.held = None

    def amend(self, made: _T, more: _T) -> None:
        """Keep ``more`` in the place of ``made``, which :meth:`get` has returned, if it is still kept."""
        if self.held is not None and self.held.qdata is made:
            self.held = self.held._replace(qdata=more)

    def get(self, weight: torch.Tensor, quantize: Callable[[torch.Tensor], _T]) -> _T:
        """``quantize`` of the BF16 value of ``weight``, made at most once while the tensor stays in place unchanged."""
        held = self.held
        counted = not weight.is_inference()  # else nothing would show that it changed
        # By address, not identity: activation checkpointing hands backward a detached alias of the same weight.
        if counted and held is not None and (held.address, held.version) == (weight.data_ptr(), weight._version):
            return held.qdata
        # Inside an autograd function gradients are off, and saying so again is two calls for each of a layer's weights.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            qdata = quantize(as_type(weight, torch.bfloat16))
        self.quantizations += 1
        if counted:
            self.held = _WeightData(weight.data_ptr(), weight._version, qdata)
        return qdata
