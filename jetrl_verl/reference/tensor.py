# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The one type of quantized data: what the format stores, its scales, and what travels with both."""

from collections.abc import Iterator
from typing import Any

import torch


class QuantizedTensor:
    """Quantized data and their scales; which block shape they follow is the contract of the function that made them.

    A norm or an activation that quantizes what it writes returns one in the tensor's place, and the linears behind it
    accept it in the tensor's place, in the trainer and in vLLM.

    It unpacks as ``qdata, scales``. It is no tuple and no dataclass on purpose: hooks that cast every floating-point
    tensor among a module's inputs (FSDP's mixed precision) look into those, and E4M3 data would become BF16.

    Attributes:
        qdata: ``[M, K]`` E4M3 or INT8.
        scales: FP32, ``x ~ qdata * scales``.
        source: the tensor ``[..., K]`` whose BF16 value was quantized, where a reader needs it: for autograd, or to
            record it. None elsewhere.
        colwise: what the layers that read ``source`` share in backward (``nn.linear.SharedColwise``). None elsewhere.
    """

    def __init__(
        self, qdata: torch.Tensor, scales: torch.Tensor, source: torch.Tensor | None = None, colwise: Any = None
    ) -> None:
        self.qdata = qdata
        self.scales = scales
        self.source = source
        self.colwise = colwise

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.qdata, self.scales))

    @property
    def shape(self) -> torch.Size:
        """That of the tensor in whose place this stands: ``[..., K]`` where ``source`` is there, else ``[M, K]``."""
        return self.qdata.shape if self.source is None else self.source.shape

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.qdata.dtype}, {tuple(self.qdata.shape)}, scales {tuple(self.scales.shape)})"
