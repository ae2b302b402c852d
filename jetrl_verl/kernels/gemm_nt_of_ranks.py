# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FProp of a row-parallel layer in the trainer: the products of the rollout's tensor-parallel ranks over slices of K,
each rounded to BF16 (gemm_nt.py), and their sum (sum_of_ranks.py). ``slices`` computes them one after another."""

import torch

from jetrl_verl import reference
from jetrl_verl.kernels import native
from jetrl_verl.kernels.dispatch import NATIVE, implements, lookup
from jetrl_verl.kernels.gemm_nt import gemm_nt, native_supports_gemm_nt, triton_gemm_nt
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sum_of_ranks import sum_of_ranks
from jetrl_verl.reference import QuantizedTensor, k_slices
from jetrl_verl.reference.gemm import check_gemm_shapes, check_k_slices

__all__ = ["gemm_nt_of_ranks"]

implements("gemm_nt_of_ranks", "reference")(reference.gemm_nt_of_ranks)


@implements("gemm_nt_of_ranks", "triton")
def triton_gemm_nt_of_ranks(
    a: QuantizedTensor,
    b: QuantizedTensor,
    ranks: int,
    bias: torch.Tensor | None = None,
    *,
    tile: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_nt_of_ranks`; ``tile`` as in :func:`triton_gemm_nt`."""
    return triton_gemm_nt(a, b, b_block_scaled=True, bias=bias, ranks=ranks, tile=tile)


def _native_runs(a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias: torch.Tensor | None = None) -> bool:
    return native.unavailable() is None


@implements("gemm_nt_of_ranks", "slices", supports=_native_runs)
def sliced_gemm_nt_of_ranks(
    a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_nt_of_ranks`; without the native library Triton's kernel is faster."""
    slices = zip(k_slices(a, ranks), k_slices(b, ranks), strict=True)
    return sum_of_ranks(
        [gemm_nt(x, w, b_block_scaled=True, bias=None if rank else bias) for rank, (x, w) in enumerate(slices)]
    )


def native_supports_gemm_nt_of_ranks(
    a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias: torch.Tensor | None = None
) -> bool:
    """Whether :func:`native_gemm_nt_of_ranks` accepts this call: as :func:`native_supports_gemm_nt`, without a bias."""
    return bias is None and native_supports_gemm_nt(a, b, b_block_scaled=True)


@implements("gemm_nt_of_ranks", "native", supports=native_supports_gemm_nt_of_ranks)
def native_gemm_nt_of_ranks(
    a: QuantizedTensor,
    b: QuantizedTensor,
    ranks: int,
    bias: torch.Tensor | None = None,
    *,
    plan: native.Plan | None = None,
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_nt_of_ranks`; ``plan`` as in :func:`native_gemm_nt`.

    Raises:
        ValueError: a call that is not supported (:func:`native_supports_gemm_nt_of_ranks`).
    """
    if not native_supports_gemm_nt_of_ranks(a, b, ranks, bias):
        raise ValueError(
            f"native does not support A {tuple(a.qdata.shape)} strides {a.qdata.stride()}, B {tuple(b.qdata.shape)} "
            f"strides {b.qdata.stride()} over {ranks} ranks with {'a' if bias is not None else 'no'} bias"
            f"{native.why()}; use backend triton."
        )
    out = torch.empty(a.qdata.shape[0], b.qdata.shape[0], dtype=torch.bfloat16, device=a.qdata.device)
    _, block, cluster = plan or native.Plan()
    native.operators().fprop_of_ranks(a.qdata, a.scales, b.qdata, b.scales, ranks, out, block, cluster)
    return out


def _fake(a: QuantizedTensor, b: QuantizedTensor, *_) -> torch.Tensor:
    return a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=torch.bfloat16)


@operator(
    "gemm_nt_of_ranks(Quantized a, Quantized b, int ranks, Tensor? bias=None) -> Tensor",
    fake=_fake,
    backends=NATIVE | {"sm90": ("native", "slices", "triton")},
)
def gemm_nt_of_ranks(
    a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`jetrl_verl.reference.gemm_nt_of_ranks`."""
    check_gemm_shapes(a, b, True, bias)
    check_k_slices(a.qdata.shape[1], ranks)
    return lookup("gemm_nt_of_ranks", a.qdata.device, a, b, ranks, bias)(a, b, ranks, bias)
