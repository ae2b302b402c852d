# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The forward of an INT8 linear, ``jetrl::fprop_int8``, for the INT8 rollout and the contract check's probes."""

import torch

from jetrl_verl.kernels.dispatch import implements
from jetrl_verl.kernels.gemm_int8 import gemm_int8
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.quantize_int8 import quantize_int8
from jetrl_verl.reference import QuantizedTensor


def _check(x: torch.Tensor, w_qdata: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(
            f"jetrl::fprop_int8: x is {x.dtype}; activations are quantized from BF16 values, cast it first."
        )
    if w_qdata.dtype != torch.int8:
        raise ValueError(f"jetrl::fprop_int8: weight qdata is {w_qdata.dtype}, expected torch.int8.")
    if x.shape[-1] != w_qdata.shape[1]:
        raise ValueError(f"jetrl::fprop_int8: x {tuple(x.shape)} does not fit the weight {tuple(w_qdata.shape)}.")


def _fprop_int8_fake(
    x: torch.Tensor, w_qdata: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    _check(x, w_qdata)
    return x.new_empty((*x.shape[:-1], w_qdata.shape[0]), dtype=torch.bfloat16)


@operator("fprop_int8(Tensor x, Tensor w_qdata, Tensor w_scales, Tensor? bias) -> Tensor", fake=_fprop_int8_fake)
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
        ValueError: another type of ``x`` or of the qdata, shapes that do not fit.
    """
    _check(x, w_qdata)
    a = quantize_int8(x.reshape(-1, x.shape[-1]))
    y = gemm_int8(a, QuantizedTensor(w_qdata, w_scales), bias=bias)
    return y.reshape(*x.shape[:-1], w_qdata.shape[0])
