# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A weight's quantized data, cached exactly as long as the weight stays in place unchanged.

FSDP2 puts a gathered or sharded tensor in place by setting the module's attribute, which drops the cache
(``__setattr__`` of the layers). FSDP1 sets it at each gather only, and the engine drops the cache at the end of a pass
(train/features.py). In-place changes show in the version counter; a write through ``weight.data`` does not,
and has to be followed by the layer's ``drop_qdata``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Generic, NamedTuple, TypeVar

import torch

from jetrl_verl.kernels.views import as_type

_T = TypeVar("_T")


class _WeightData(NamedTuple, Generic[_T]):
    """Valid while the weight has this address and version."""

    address: int
    version: int
    qdata: _T


class WeightCache(Generic[_T]):
    """qdata of one weight, with or without their transpose.

    Attributes:
        quantizations: how often the weight has been quantized.
        entry: what is cached, or None.
    """

    def __init__(self) -> None:
        self.quantizations = 0
        self.entry: _WeightData[_T] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()  # empty in a copy, whose weight lies elsewhere

    def drop(self) -> None:
        """Drop the qdata; the next use quantizes again."""
        self.entry = None

    def amend(self, old: _T, new: _T) -> None:
        """Cache ``new`` instead of ``old``, which :meth:`get` returned, unless it has been dropped."""
        if self.entry is not None and self.entry.qdata is old:
            self.entry = self.entry._replace(qdata=new)

    def get(self, weight: torch.Tensor, quantize: Callable[[torch.Tensor], _T]) -> _T:
        """``quantize`` of the BF16 value of ``weight``, at most once while the tensor stays in place unchanged."""
        entry = self.entry
        has_version = not weight.is_inference()
        # By address, not identity: activation checkpointing hands backward a detached alias of the same weight.
        if has_version and entry is not None and (entry.address, entry.version) == (weight.data_ptr(), weight._version):
            return entry.qdata
        # Gradients are off inside an autograd function; no_grad would cost host time for each weight.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            qdata = quantize(as_type(weight, torch.bfloat16))
        self.quantizations += 1
        if has_version:
            self.entry = _WeightData(weight.data_ptr(), weight._version, qdata)
        return qdata
