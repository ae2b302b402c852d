# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The forward of an INT8 linear, ``jetrl::fprop_int8``, for the INT8 rollout and the contract check's probes."""

import torch

from jetrl_verl.kernels.dispatch import COMPOSED, implements
from jetrl_verl.kernels.fprop import check_linear
from jetrl_verl.kernels.gemm_int8 import gemm_int8
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.quantize_int8 import quantize_int8
from jetrl_verl.reference import QuantizedTensor

__all__ = ["fprop_int8"]


def _fprop_int8_fake(x: torch.Tensor, w_qdata: torch.Tensor, *_) -> torch.Tensor:
    check_linear("jetrl::fprop_int8", x, w_qdata, torch.int8)
    return x.new_empty((*x.shape[:-1], w_qdata.shape[0]), dtype=torch.bfloat16)


@operator(
    "fprop_int8(Tensor x, Tensor w_qdata, Tensor w_scales, Tensor? bias) -> Tensor",
    fake=_fprop_int8_fake,
    backends=COMPOSED,
)
@implements("fprop_int8", "composed")
def fprop_int8(
    x: torch.Tensor, w_qdata: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``Y = X W^T + bias`` with X quantized per token on the way in.

    Args:
        x: ``[..., K]`` BF16. w_qdata: ``[N, K]`` INT8. w_scales: ``[N, 1]`` FP32.
        bias: ``[N]`` or None, added in FP32 before the one rounding.

    Returns:
        ``[..., N]`` BF16.

    Raises:
        ValueError: ``x`` or qdata of another type, shapes that do not fit.
    """
    check_linear("jetrl::fprop_int8", x, w_qdata, torch.int8)
    a = quantize_int8(x.reshape(-1, x.shape[-1]))
    y = gemm_int8(a, QuantizedTensor(w_qdata, w_scales), bias=bias)
    return y.reshape(*x.shape[:-1], w_qdata.shape[0])
