# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The INT8 contract of the rollout-only baselines (FlashRL; QuRL, arXiv 2602.13953), in plain torch.

One scale per row, symmetric, no zero point. A row is an output channel of a weight ``[N, K]`` or a token of an
activation ``[M, K]``:

    s = amax / 127          one IEEE division in FP32; amax over the row's bit patterns, as in ``scales.py``
    q = rne(x / s)          one IEEE division in FP32, then round to nearest, ties to even, into [-127, 127]
    y = bf16(fma(s_x, s_w acc, b))     acc = sum_k q_x q_w exact in INT32, then FP32; without b, fma is a product

* -128 is not used, so the qdata of -x are the negated qdata of x.
* A zero row has s = 1 and qdata 0. ``s >= 2^-63`` keeps products of two scales normal.
* INT8 has no NaN, so a row with an Inf or NaN has qdata 0 and scale NaN, and everything computed from it is NaN.
* With given scales (FlashRL's calibration) larger values saturate at 127; a row with an Inf or NaN has scale NaN.
* Values are taken at their own precision: BF16 activations, the BF16 cast of a master weight.

The sum cannot overflow up to K = (2^31 - 1) / 127^2 = 133144. Scales are FP32 ``[..., 1]``, as vLLM's loaders and
CUTLASS accept. The order of the two products and the fused bias are those of vLLM's CUTLASS kernels; the fused sum is
formed in float64 here, which differs from an FP32 fma only within 2^-29 of a tie.
"""

import torch

from jetrl_verl.reference.constants import MIN_SCALE
from jetrl_verl.reference.scales import INF_BITS, amax_bits
from jetrl_verl.reference.tensor import QuantizedTensor

INT8_MAX = 127
"""Largest magnitude of qdata."""

MAX_K = (2**31 - 1) // INT8_MAX**2
"""Longest contraction whose INT32 sum cannot overflow."""

_ROWS = 512
"""Rows of A at a time, so that the float64 temporaries stay small."""


def quantize_int8(x: torch.Tensor, scales: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantize every row (the last dimension) with one scale.

    Args:
        x: ``[..., K]`` BF16, FP16 or FP32.
        scales: ``[..., 1]`` FP32, positive, instead of the rows' own.

    Returns:
        qdata ``[..., K]`` INT8 and scales ``[..., 1]`` FP32, both contiguous.
    """
    if x.shape[-1] == 0:
        return QuantizedTensor(
            torch.empty(x.shape, dtype=torch.int8, device=x.device),
            torch.ones((*x.shape[:-1], 1), dtype=torch.float32, device=x.device),
        )
    x = x.float()
    bits = amax_bits(x).unsqueeze(-1)
    if scales is None:
        scales = (bits.view(torch.float32) / INT8_MAX).clamp_min(MIN_SCALE)
        scales = torch.where(bits == 0, torch.ones_like(scales), scales)
    not_finite = bits >= INF_BITS
    qdata = (x / scales).round_().clamp_(-INT8_MAX, INT8_MAX)
    qdata = qdata.masked_fill_(not_finite, 0.0).to(torch.int8)
    return QuantizedTensor(qdata, scales.masked_fill(not_finite, torch.nan))


def dequantize_int8(q: QuantizedTensor) -> torch.Tensor:
    """``qdata * scale`` in FP32; qdata ``[..., K]``, scales ``[..., 1]``."""
    return q.qdata.float() * q.scales


def check_int8_gemm_shapes(a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None) -> None:
    """Raise ``ValueError`` with the offending shapes unless ``a``, ``b`` and ``bias`` fit together."""
    m, k = a.qdata.shape
    n, kb = b.qdata.shape
    if kb != k or k > MAX_K or tuple(a.scales.shape) != (m, 1) or tuple(b.scales.shape) != (n, 1):
        raise ValueError(
            f"gemm_int8: A qdata {tuple(a.qdata.shape)} scales {tuple(a.scales.shape)} do not fit "
            f"B qdata {tuple(b.qdata.shape)} scales {tuple(b.scales.shape)} (one scale a row, K at most {MAX_K})"
        )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"gemm_int8: bias has shape {tuple(bias.shape)}, expected ({n},)")


def gemm_int8(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """``A B^T + bias`` of two quantized operands, with an exact sum over K.

    Args:
        a: qdata ``[M, K]``, scales ``[M, 1]``. b: qdata ``[N, K]``, scales ``[N, 1]``.
        bias: ``[N]`` or None, added in FP32 before the rounding.
        out_dtype: BF16 or FP32.

    Returns:
        ``[M, N]`` of ``out_dtype``.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_int8_gemm_shapes(a, b, bias)
    b64 = b.qdata.double().t().contiguous()
    y = torch.empty(a.qdata.shape[0], b.qdata.shape[0], dtype=out_dtype, device=a.qdata.device)
    for start in range(0, len(y), _ROWS):
        rows = slice(start, start + _ROWS)
        scaled = b.scales.t() * (a.qdata[rows].double() @ b64).float()
        if bias is None:
            y[rows] = a.scales[rows] * scaled
        else:
            y[rows] = (a.scales[rows].double() * scaled.double() + bias.double()).float()
    return y
