# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FProp of a row-parallel layer in the trainer: the products of the rollout's tensor-parallel ranks over slices of K,
each rounded to BF16 (gemm_nt.py), and their sum (sum_of_ranks.py). ``slices`` computes them one after another."""

import torch

from jetrl_verl import reference
from jetrl_verl.kernels import native
from jetrl_verl.kernels.dispatch import NATIVE, implements, lookup
from jetrl_verl.kernels.gemm_nt import gemm_nt, native_supports_gemm_nt, triton_gemm
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sum_of_ranks import sum_of_ranks
from jetrl_verl.reference import GemmCall, QuantizedTensor, k_slices

__all__ = ["gemm_nt_of_ranks"]

implements("gemm_nt_of_ranks", "reference")(reference.multiply)
implements("gemm_nt_of_ranks", "triton")(triton_gemm)


@implements("gemm_nt_of_ranks", "slices", supports=lambda call: native.unavailable() is None)
def sliced_gemm_nt_of_ranks(call: GemmCall) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.multiply`; without the native library Triton's kernel is faster."""
    slices = enumerate(zip(k_slices(call.a, call.ranks), k_slices(call.b, call.ranks), strict=True))
    return sum_of_ranks([gemm_nt(x, w, None if rank else call.bias) for rank, (x, w) in slices])


def _native_supports(call: GemmCall) -> bool:
    return call.bias is None and native_supports_gemm_nt(call)


@implements("gemm_nt_of_ranks", "native", supports=_native_supports)
def native_gemm_nt_of_ranks(call: GemmCall, *, plan: native.Plan = native.DEFAULT_PLAN) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.multiply`; ``plan`` as in ``native_gemm_nt``."""
    a, b = call.a, call.b
    out = torch.empty(call.m, call.n, dtype=torch.bfloat16, device=a.qdata.device)
    native.operators().fprop_of_ranks(a.qdata, a.scales, b.qdata, b.scales, call.ranks, out, plan.block, plan.cluster)
    return out


@operator(
    "gemm_nt_of_ranks(Quantized a, Quantized b, int ranks, Tensor? bias=None) -> Tensor",
    fake=lambda a, b, *_: a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=torch.bfloat16),
    backends=NATIVE | {"sm90": ("native", "slices", "triton")},
)
def gemm_nt_of_ranks(
    a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`jetrl_verl.reference.gemm_nt_of_ranks`."""
    call = GemmCall.over_ranks(a, b, ranks, bias)
    return lookup("gemm_nt_of_ranks", a.qdata.device, call)(call)
