# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The forward of an FP8 linear, ``jetrl::fprop``, called by trainer and vLLM: quantize, multiply, add bias, round.
``jetrl::fprop_quantized`` is the same for an input that is quantized already. No autograd: see nn/linear.py."""

import torch

from jetrl_verl.kernels.dispatch import COMPOSED, implements
from jetrl_verl.kernels.gemm_nt import gemm_nt
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.quantize_1x128 import quantize_1x128
from jetrl_verl.reference import FP8_DTYPE, QuantizedTensor

__all__ = ["fprop", "fprop_quantized"]


def check_linear(operation: str, x: torch.Tensor, w_qdata: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless ``x`` is BF16, the weight's qdata is of ``dtype``, and shapes fit."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"{operation}: x is {x.dtype}; activations are quantized from BF16 values, cast it first.")
    if w_qdata.dtype != dtype:
        raise ValueError(f"{operation}: weight qdata is {w_qdata.dtype}, expected {dtype}.")
    if x.shape[-1] != w_qdata.shape[1]:
        raise ValueError(f"{operation}: x {tuple(x.shape)} does not fit the weight {tuple(w_qdata.shape)}.")


def _fprop_fake(x: torch.Tensor, w_qdata: torch.Tensor, *_) -> torch.Tensor:
    check_linear("jetrl::fprop", x, w_qdata, FP8_DTYPE)
    return x.new_empty((*x.shape[:-1], w_qdata.shape[0]), dtype=torch.bfloat16)


@operator(
    "fprop(Tensor x, Tensor w_qdata, Tensor w_scales, Tensor? bias, str rule, bool static_weight=False) -> Tensor",
    fake=_fprop_fake,
    backends=COMPOSED,
)
@implements("fprop", "composed")
def fprop(
    x: torch.Tensor,
    w_qdata: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    rule: str,
    static_weight: bool = False,
) -> torch.Tensor:
    """``Y = X W^T + bias`` with X quantized in 1x128 groups on the way in.

    Args:
        x: ``[..., K]`` BF16. w_qdata: ``[N, K]`` E4M3. w_scales: ``[ceil(N/128), ceil(K/128)]`` FP32.
        bias: ``[N]`` or None, added in FP32 before the one rounding.
        rule: scale rule of X, ``"fp32"`` or ``"pow2"``; use the one W was quantized with.
        static_weight: weight and bias were written before the quantizer of X started (``kernels.gemm_nt``);
            changes the speed only.

    Returns:
        ``[..., N]`` BF16.

    Raises:
        ValueError: ``x`` or qdata of another type, shapes that do not fit, an unknown rule.
    """
    check_linear("jetrl::fprop", x, w_qdata, FP8_DTYPE)
    a = quantize_1x128(x.reshape(-1, x.shape[-1]), rule)
    b = QuantizedTensor(w_qdata, w_scales)
    y = gemm_nt(a, b, bias, static_weight=static_weight)
    return y.reshape(*x.shape[:-1], w_qdata.shape[0])


@operator(
    "fprop_quantized(Quantized x, Tensor w_qdata, Tensor w_scales, Tensor? bias, bool static_weight=False) -> Tensor",
    fake=lambda x, w_qdata, *_: x.qdata.new_empty((x.qdata.shape[0], w_qdata.shape[0]), dtype=torch.bfloat16),
    backends=COMPOSED,
)
@implements("fprop_quantized", "composed")
def fprop_quantized(
    x: QuantizedTensor,
    w_qdata: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    static_weight: bool = False,
) -> torch.Tensor:
    """:func:`fprop` of an input that is quantized already; the same bits for ``x = quantize_1x128(X, rule)``.

    Args:
        x: qdata ``[M, K]`` E4M3 and scales ``[M, K/128]`` FP32. The others as in :func:`fprop`.
        static_weight: as in ``kernels.gemm_nt``, where the previous kernel is the one that makes ``x``.

    Returns:
        ``[M, N]`` BF16.

    Raises:
        ValueError: qdata of another type, shapes that do not fit.
    """
    return gemm_nt(x, QuantizedTensor(w_qdata, w_scales), bias, static_weight=static_weight)
