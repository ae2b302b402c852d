# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Channel INT8, the rollout of the INT8 baselines (FlashRL; QuRL, arXiv 2602.13953): one scale per output channel of a
weight and per token of an activation. Rollout only; arithmetic: reference/int8.py."""

import torch

from jetrl_verl import kernels, reference
from jetrl_verl.formats.catalog import FORMATS
from jetrl_verl.formats.format import Format, QuantizedWeight
from jetrl_verl.reference import QuantizedTensor


class ChannelINT8(Format):
    """Symmetric INT8 with one FP32 scale per row, ``[N, 1]``."""

    traits = FORMATS["int8"]
    dtype = torch.int8
    rows_per_scale = 1
    columns_per_scale = None

    def quantize_weight(self, weight: torch.Tensor, rule: str, scales: torch.Tensor | None = None) -> QuantizedWeight:
        q = kernels.quantize_int8(weight) if scales is None else reference.quantize_int8(weight, scales)
        return QuantizedWeight(self, q.qdata, q.scales)

    def dequantize_weight(self, weight: QuantizedTensor) -> torch.Tensor:
        return reference.dequantize_int8(weight)

    def linear(self, x, weight, bias, rule: str, static_weight: bool = False) -> torch.Tensor:
        if isinstance(x, QuantizedTensor):
            raise TypeError("INT8 linear layers quantize their input themselves. Pass the BF16 tensor.")
        return kernels.fprop_int8(x, weight.qdata, weight.scales, bias)

    def nan_sample(self, qdata: torch.Tensor) -> torch.Tensor:
        return qdata.new_empty(0)  # INT8 has no NaN: a row that holds an Inf or NaN has scale NaN

    def is_nan(self, sample: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return ~scales.isfinite().all()


FORMAT = ChannelINT8()
