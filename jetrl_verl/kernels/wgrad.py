# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""WGrad, ``dW = dY^T X`` with 1x128 scales along tokens on both operands; the Triton kernel is that of gemm_nt.py."""

import torch

from jetrl_verl import reference
from jetrl_verl.kernels import native
from jetrl_verl.kernels.dispatch import NATIVE, implements, lookup
from jetrl_verl.kernels.gemm_nt import native_supports_operands, triton_gemm
from jetrl_verl.kernels.operator import operator
from jetrl_verl.reference import GemmCall, QuantizedTensor

__all__ = ["wgrad"]

implements("wgrad", "reference")(reference.multiply)
implements("wgrad", "triton")(triton_gemm)


@implements("wgrad", "native", supports=native_supports_operands)
def native_wgrad(call: GemmCall, *, out=None, plan: native.Plan = native.DEFAULT_PLAN) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.multiply`; ``out`` of ``out_dtype`` and ``plan`` as in ``native_gemm_nt``."""
    a, b = call.a, call.b
    if out is None:
        out = torch.empty(call.m, call.n, dtype=call.out_dtype, device=a.qdata.device)
    native.operators().wgrad(a.qdata, a.scales, b.qdata, b.scales, out, plan.block, plan.cluster)
    return out


@operator(
    "wgrad(Quantized dy, Quantized x, ScalarType out_dtype=bfloat16) -> Tensor",
    fake=lambda dy, x, out_dtype=torch.bfloat16: dy.qdata.new_empty(
        (dy.qdata.shape[0], x.qdata.shape[0]), dtype=out_dtype
    ),
    backends=NATIVE,
)
def wgrad(dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """See :func:`jetrl_verl.reference.wgrad`."""
    call = GemmCall.by_tokens(dy, x, out_dtype)
    return lookup("wgrad", dy.qdata.device, call)(call)
