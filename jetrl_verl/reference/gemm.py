# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reference block-scaled GEMM ``Y = A B^T``; a row has the same bits in every batch.

The partial sum of a 128-wide K block is exact and rounded once to FP32: a product of two E4M3 values is a multiple of
2^-18 below 2^18, so a sum of 128 needs at most 43 bits, and float64 holds it in any order, whatever the BLAS.
Then ``acc += (s_a * s_b) * partial`` in FP32, K blocks ascending; bias in FP32; one rounding into the output type.
"""

from collections.abc import Sequence

import torch

from jetrl_verl.reference.constants import BLOCK
from jetrl_verl.reference.quantize import dequantize_1x128, dequantize_128x128
from jetrl_verl.reference.tensor import QuantizedTensor

_ROWS = 512
"""Rows of A at a time: temporaries that stay in the cache are three times as fast."""


def check_gemm_shapes(a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool, bias: torch.Tensor | None) -> None:
    """Raise ``ValueError`` with the offending shapes unless ``a``, ``b`` and ``bias`` fit together."""
    m, k = a.qdata.shape
    n, kb = b.qdata.shape
    blocks_k = -(-k // BLOCK)
    rows_b = -(-n // BLOCK) if b_block_scaled else n
    if kb != k or a.scales.shape != (m, blocks_k) or b.scales.shape != (rows_b, blocks_k):
        raise ValueError(
            f"gemm_nt: A qdata {tuple(a.qdata.shape)} scales {tuple(a.scales.shape)} do not fit "
            f"B qdata {tuple(b.qdata.shape)} scales {tuple(b.scales.shape)} "
            f"({'128x128' if b_block_scaled else '1x128'} scales on B)"
        )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"gemm_nt: bias has shape {tuple(bias.shape)}, expected ({n},)")


def gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``A B^T`` of two quantized operands.

    Args:
        a: qdata ``[M, K]``, 1x128 scales ``[M, ceil(K/128)]``.
        b: qdata ``[N, K]``; scales ``[ceil(N/128), ceil(K/128)]`` if ``b_block_scaled`` (FProp, DGrad), else
            ``[N, ceil(K/128)]`` (WGrad).
        b_block_scaled: which of the two.
        bias: ``[N]`` or None, added in FP32 before the rounding.
        out_dtype: BF16 or FP32.

    Returns:
        ``[M, N]`` of ``out_dtype``.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_gemm_shapes(a, b, b_block_scaled, bias)
    m, k = a.qdata.shape
    n = b.qdata.shape[0]
    b64 = b.qdata.double().t().contiguous()
    b_scales = b.scales.repeat_interleave(BLOCK, dim=0)[:n] if b_block_scaled else b.scales
    y = torch.empty(m, n, dtype=out_dtype, device=a.qdata.device)
    for start in range(0, m, _ROWS):
        rows = slice(start, start + _ROWS)
        a64, a_scales = a.qdata[rows].double(), a.scales[rows]
        acc = torch.zeros(a64.shape[0], n, dtype=torch.float32, device=a.qdata.device)
        for block in range(a_scales.shape[1]):
            cols = slice(block * BLOCK, min((block + 1) * BLOCK, k))
            partial = (a64[:, cols] @ b64[cols]).float()
            acc += (a_scales[:, block, None] * b_scales[None, :, block]) * partial
        if bias is not None:
            acc += bias.float()
        y[rows] = acc
    return y


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
    check_gemm_shapes(a, b, True, bias)
    slices = enumerate(zip(k_slices(a, ranks), k_slices(b, ranks), strict=True))
    return sum_of_ranks([gemm_nt(x, w, b_block_scaled=True, bias=None if rank else bias) for rank, (x, w) in slices])


def gemm_nt_float64(a: QuantizedTensor, b: QuantizedTensor, *, b_block_scaled: bool) -> torch.Tensor:
    """``A B^T`` of the dequantized operands in float64, to measure errors against; operands as of :func:`gemm_nt`."""
    b_values = dequantize_128x128(b) if b_block_scaled else dequantize_1x128(b)
    return dequantize_1x128(a).double() @ b_values.double().t()
