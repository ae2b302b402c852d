# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reference block-scaled GEMM ``Y = A B^T``; a row has the same bits in every batch.

The partial sum of a 128-wide K block is exact and rounded once to FP32: a product of two E4M3 values is a multiple of
2^-18 below 2^18, so a sum of 128 needs at most 43 bits, and float64 holds it in any order, whatever the BLAS.
Then ``acc += (s_a * s_b) * partial`` in FP32, K blocks ascending; bias in FP32; one rounding into the output type.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from jetrl_verl.reference.constants import BLOCK, FP8_DTYPE
from jetrl_verl.reference.quantize import dequantize_1x128, dequantize_128x128
from jetrl_verl.reference.tensor import QuantizedTensor

_ROWS = 512
"""Rows of A at a time: temporaries that stay in the cache are three times as fast."""


class GemmCall(NamedTuple):
    """One product ``A B^T``, checked when it is made: what every backend of a GEMM reads.

    Attributes:
        a: qdata ``[M, K]`` E4M3, 1x128 scales ``[M, ceil(K/128)]``.
        b: qdata ``[N, K]`` E4M3, scales ``[ceil(N/b_scale_rows), ceil(K/128)]``.
        b_scale_rows: rows of B per scale, 128 in a weight (FProp, DGrad), 1 in WGrad.
        bias: ``[N]`` or None, added in FP32 before the rounding.
        out_dtype: BF16 or FP32.
        ranks: equal slices of K, whose products are rounded to BF16 and added.
        static_weight: ``b`` and ``bias`` may be read before the previous kernel ends; see ``kernels.gemm_nt``.
    """

    a: QuantizedTensor
    b: QuantizedTensor
    m: int
    n: int
    k: int
    b_scale_rows: int
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    ranks: int
    static_weight: bool

    @classmethod
    def by_weight(
        cls,
        a: QuantizedTensor,
        weight: QuantizedTensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        static_weight: bool = False,
    ) -> "GemmCall":
        """FProp or DGrad: a weight has 128x128 scales. ValueError: operands that do not fit."""
        m, n, k = _checked_sizes("gemm_nt", a, weight, BLOCK)
        if bias is not None and bias.shape != (n,):
            raise ValueError(f"gemm_nt: bias has shape {tuple(bias.shape)}, expected ({n},)")
        return cls(a, weight, m, n, k, BLOCK, bias, out_dtype, 1, static_weight)

    @classmethod
    def over_ranks(
        cls, a: QuantizedTensor, weight: QuantizedTensor, ranks: int, bias: torch.Tensor | None = None
    ) -> "GemmCall":
        """:meth:`by_weight`, added over ``ranks``. ValueError: also slices of K that are no multiples of 128."""
        call = cls.by_weight(a, weight, bias)
        check_k_slices(call.k, ranks)
        return call._replace(ranks=ranks)

    @classmethod
    def by_tokens(cls, dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16) -> "GemmCall":
        """WGrad: both operands have 1x128 scales along tokens. ValueError: operands that do not fit."""
        return cls(dy, x, *_checked_sizes("wgrad", dy, x, 1), 1, None, out_dtype, 1, False)


def _checked_sizes(operation: str, a: QuantizedTensor, b: QuantizedTensor, b_scale_rows: int) -> tuple[int, int, int]:
    """M, N and K."""
    (m, k), (n, k_of_b) = a.qdata.shape, b.qdata.shape
    blocks = -(-k // BLOCK)
    fit = k_of_b == k and a.scales.shape == (m, blocks) and b.scales.shape == (-(-n // b_scale_rows), blocks)
    if not fit or a.qdata.dtype != FP8_DTYPE or b.qdata.dtype != FP8_DTYPE:
        raise ValueError(
            f"{operation}: A {a.qdata.dtype} {tuple(a.qdata.shape)} scales {tuple(a.scales.shape)} does not fit "
            f"B {b.qdata.dtype} {tuple(b.qdata.shape)} scales {tuple(b.scales.shape)}; expected E4M3, "
            f"1x{BLOCK} scales on A and {b_scale_rows}x{BLOCK} on B"
        )
    return m, n, k


def multiply(call: GemmCall) -> torch.Tensor:
    """``[M, N]`` of ``out_dtype``."""
    if call.ranks > 1:
        slices = enumerate(zip(k_slices(call.a, call.ranks), k_slices(call.b, call.ranks), strict=True))
        return sum_of_ranks([gemm_nt(x, w, None if rank else call.bias) for rank, (x, w) in slices])
    a, b, m, n, k = call[:5]
    b64 = b.qdata.double().t().contiguous()
    b_scales = b.scales.repeat_interleave(call.b_scale_rows, dim=0)[:n]
    y = torch.empty(m, n, dtype=call.out_dtype, device=a.qdata.device)
    for start in range(0, m, _ROWS):
        rows = slice(start, start + _ROWS)
        a64, a_scales = a.qdata[rows].double(), a.scales[rows]
        acc = torch.zeros(a64.shape[0], n, dtype=torch.float32, device=a.qdata.device)
        for block in range(a_scales.shape[1]):
            cols = slice(block * BLOCK, min((block + 1) * BLOCK, k))
            partial = (a64[:, cols] @ b64[cols]).float()
            acc += (a_scales[:, block, None] * b_scales[None, :, block]) * partial
        if call.bias is not None:
            acc += call.bias.float()
        y[rows] = acc
    return y


def gemm_nt(
    a: QuantizedTensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``A W^T + bias`` with 128x128 scales on W, FProp and DGrad; arguments and errors of :meth:`GemmCall.by_weight`.

    Returns:
        ``[M, N]`` of ``out_dtype``.
    """
    return multiply(GemmCall.by_weight(a, weight, bias, out_dtype))


def wgrad(dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``dY X^T`` of qdata ``[N, tokens]`` and ``[K, tokens]`` with 1x128 scales on both; errors of
    :meth:`GemmCall.by_tokens`.

    Returns:
        The weight's gradient ``[N, K]`` of ``out_dtype``.
    """
    return multiply(GemmCall.by_tokens(dy, x, out_dtype))


def sum_of_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``((p_0 + p_1) + p_2) + ...`` in FP32, rounded to BF16 once, of the BF16 products of tensor-parallel ranks."""
    acc = parts[0].float()
    for part in parts[1:]:
        acc += part.float()
    return acc.to(torch.bfloat16)


def check_k_slices(k: int, count: int) -> None:
    """Raise ``ValueError`` unless ``count`` equal slices of K are multiples of 128."""
    if k % (count * BLOCK):
        raise ValueError(f"K = {k} does not divide into {count} slices of multiples of {BLOCK}")


def k_slices(x: QuantizedTensor, count: int) -> list[QuantizedTensor]:
    """Views of the ``count`` equal slices of K of an operand ``[..., K]``, one a tensor-parallel rank.

    Raises:
        ValueError: slices of K that are no multiples of 128.
    """
    k = x.qdata.shape[-1]
    check_k_slices(k, count)
    width, groups = k // count, k // count // BLOCK
    return [
        QuantizedTensor(
            x.qdata[..., rank * width : (rank + 1) * width], x.scales[..., rank * groups : (rank + 1) * groups]
        )
        for rank in range(count)
    ]


def gemm_nt_of_ranks(
    a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``A B^T`` over tensor-parallel ranks with equal slices of K: :func:`gemm_nt` of each, then :func:`sum_of_ranks`.

    Args:
        a: qdata ``[M, K]``, 1x128 scales. b: qdata ``[N, K]``, 128x128 scales.
        ranks: number of slices.
        bias: ``[N]`` or None, in the product of rank 0.

    Returns:
        ``[M, N]`` BF16.

    Raises:
        ValueError: shapes that do not fit, or slices of K that are no multiples of 128.
    """
    return multiply(GemmCall.over_ranks(a, b, ranks, bias))


def gemm_nt_float64(a: QuantizedTensor, weight: QuantizedTensor) -> torch.Tensor:
    """:func:`gemm_nt` of the dequantized operands in float64, to measure errors against."""
    return dequantize_1x128(a).double() @ dequantize_128x128(weight).double().t()


def wgrad_float64(dy: QuantizedTensor, x: QuantizedTensor) -> torch.Tensor:
    """:func:`wgrad` of the dequantized operands in float64, to measure errors against."""
    return dequantize_1x128(dy).double() @ dequantize_1x128(x).double().t()
