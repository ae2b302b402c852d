# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantized data with their scales."""

from collections.abc import Iterator
from typing import Any

import torch


class QuantizedTensor:
    """Quantized data and their scales, in the block shape of the function that made them; unpacks as both.

    Norms and activations that quantize their output return one instead of a tensor, and linear layers accept it, in the
    trainer and in vLLM. It is neither a tuple nor a dataclass: FSDP's mixed precision casts floating-point tensors
    inside those to BF16, E4M3 data included.

    Attributes:
        qdata: ``[M, K]`` E4M3 or INT8.
        scales: FP32, ``x ~ qdata * scales``.
        source: the tensor ``[..., K]`` whose BF16 value was quantized, for autograd or a recorder; else None.
        colwise: what the layers that read ``source`` share in backward (``nn.linear.SharedColwise``); else None.
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

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: pickle writes E4M3 tensors and cannot read them; torch.save can do both.
        return vars(self) | {"qdata": (self.qdata.view(torch.uint8), self.qdata.dtype)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data, dtype = state["qdata"]
        vars(self).update(state | {"qdata": data.view(dtype)})

    @property
    def shape(self) -> torch.Size:
        """Shape of ``source`` if there is one, else ``[M, K]``."""
        return self.qdata.shape if self.source is None else self.source.shape

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.qdata.dtype}, {tuple(self.qdata.shape)}, scales {tuple(self.scales.shape)})"
