# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reference quantizers: 1x128 groups, 128x128 blocks, and the 128x1 re-layout that WGrad contracts over.

``qdata = e4m3(clamp(x / s, +-448))``: IEEE division in FP32, then one round-to-nearest-even into E4M3. The input is
taken at its own precision (BF16 tensors between operators, the BF16 cast of the master weight) and widened to FP32.

Layouts. A GEMM of the contract is always NT: both operands are stored with the contraction dimension last. So WGrad's
operands, contracted along tokens, are the *transposed* tensors with groups along tokens, ``[features, tokens]``.
A 128x128 block is square, hence a weight and its transpose share qdata and scales (:func:`transpose_128x128`); a 1x128
group is not, so saved activations pass through :func:`relayout_128x1`, which dequantizes in FP32, takes a fresh maximum
per 128 tokens and rounds a second time (Jet-RL, arXiv 2601.14243, section 4.2). A zero group stays zero and scale 1
whatever the old scale was: the maximum is always of values, never of old scales.
"""

import torch
import torch.nn.functional as F

from jetrl_verl.reference.constants import BLOCK, E4M3_MAX, E4M3_NAN_BITS, FP8_DTYPE, ScaleRule
from jetrl_verl.reference.scales import INF_BITS, amax_bits, scale_from_amax_bits
from jetrl_verl.reference.tensor import QuantizedTensor


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _encode(groups: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """Quantize ``groups`` ``[..., G]`` FP32 with one scale per last dimension."""
    bits = amax_bits(groups)
    scales = scale_from_amax_bits(bits, rule)
    qdata = (groups / scales.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)
    qdata.view(torch.uint8).masked_fill_((bits >= INF_BITS).unsqueeze(-1), E4M3_NAN_BITS)
    return QuantizedTensor(qdata, scales)


def quantize_1x128(x: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """Quantize along the last dimension in groups of 128; the last group may be shorter.

    Args:
        x: ``[..., K]`` BF16, FP16 or FP32.
        rule: scale rule.

    Returns:
        qdata ``[..., K]`` E4M3 and scales ``[..., ceil(K/128)]`` FP32, both contiguous.

    Raises:
        ValueError: unknown ``rule``.
    """
    *lead, k = x.shape
    groups_k = _ceil_div(k, BLOCK)
    padded = F.pad(x.float(), (0, groups_k * BLOCK - k))
    if padded.numel() == 0:
        return QuantizedTensor(
            torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device),
            torch.empty((*lead, groups_k), dtype=torch.float32, device=x.device),
        )
    qdata, scales = _encode(padded.reshape(*lead, groups_k, BLOCK), rule)
    return QuantizedTensor(qdata.reshape(*lead, groups_k * BLOCK)[..., :k].contiguous(), scales)


def quantize_128x1(x: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """Quantize the columns of ``x`` in groups of 128 rows and store the transpose.

    Args:
        x: ``[M, N]`` BF16, FP16 or FP32.
        rule: scale rule.

    Returns:
        qdata ``[N, M]`` E4M3 and scales ``[N, ceil(M/128)]`` FP32: :func:`quantize_1x128` of ``x.T``.

    Raises:
        ValueError: unknown ``rule``.
    """
    return quantize_1x128(x.t().contiguous(), rule)


def quantize_128x128(w: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """Quantize a matrix in 128x128 blocks; edge blocks may be smaller.

    Args:
        w: ``[N, K]`` BF16, FP16 or FP32.
        rule: scale rule.

    Returns:
        qdata ``[N, K]`` E4M3 and scales ``[ceil(N/128), ceil(K/128)]`` FP32, both contiguous.

    Raises:
        ValueError: unknown ``rule``.
    """
    n, k = w.shape
    bn, bk = _ceil_div(n, BLOCK), _ceil_div(k, BLOCK)
    padded = F.pad(w.float(), (0, bk * BLOCK - k, 0, bn * BLOCK - n))
    if padded.numel() == 0:
        return QuantizedTensor(
            torch.empty(w.shape, dtype=FP8_DTYPE, device=w.device),
            torch.empty((bn, bk), dtype=torch.float32, device=w.device),
        )
    blocks = padded.reshape(bn, BLOCK, bk, BLOCK).transpose(1, 2).reshape(bn, bk, BLOCK * BLOCK)
    qdata, scales = _encode(blocks, rule)
    matrix = qdata.view(torch.uint8).reshape(bn, bk, BLOCK, BLOCK).transpose(1, 2).reshape(bn * BLOCK, bk * BLOCK)
    return QuantizedTensor(matrix[:n, :k].contiguous().view(FP8_DTYPE), scales)


def transpose_128x128(weight: QuantizedTensor) -> QuantizedTensor:
    """FP8 data and scales of ``W.T`` from those of ``W``, exact: blocks are square."""
    qdata = weight.qdata.view(torch.uint8).t().contiguous().view(FP8_DTYPE)
    return QuantizedTensor(qdata, weight.scales.t().contiguous())


def dequantize_1x128(q: QuantizedTensor) -> torch.Tensor:
    """``qdata * scale`` in FP32 for qdata ``[..., K]`` with scales ``[..., ceil(K/128)]``."""
    k = q.qdata.shape[-1]
    return q.qdata.float() * q.scales.repeat_interleave(BLOCK, dim=-1)[..., :k]


def dequantize_128x128(q: QuantizedTensor) -> torch.Tensor:
    """``qdata * scale`` in FP32 for qdata ``[N, K]`` with scales ``[ceil(N/128), ceil(K/128)]``."""
    n, k = q.qdata.shape
    scales = q.scales.repeat_interleave(BLOCK, dim=0)[:n].repeat_interleave(BLOCK, dim=1)[:, :k]
    return q.qdata.float() * scales


def relayout_128x1(q: QuantizedTensor, rule: ScaleRule) -> QuantizedTensor:
    """Turn 1x128 qdata ``[M, K]`` into the token-grouped transpose that WGrad reads.

    Dequantizes in FP32 (no rounding to BF16 in between), then quantizes along tokens with fresh maxima. Under ``pow2``
    the second rounding is exact for every element that stays in the normal range of its new group.

    Args:
        q: qdata ``[M, K]`` E4M3, scales ``[M, ceil(K/128)]`` FP32.
        rule: scale rule of the new groups.

    Returns:
        qdata ``[K, M]`` E4M3 and scales ``[K, ceil(M/128)]`` FP32.

    Raises:
        ValueError: unknown ``rule``.
    """
    return quantize_128x1(dequantize_1x128(q), rule)


def quantize_1x128_and_128x1(x: torch.Tensor, rule: ScaleRule) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both quantizations that the backward pass takes of ``dY [M, N]``: along N for DGrad, along tokens for WGrad.

    Returns:
        :func:`quantize_1x128` of ``x`` and :func:`quantize_128x1` of ``x``; a fused kernel reads ``x`` once for both.
    """
    return quantize_1x128(x, rule), quantize_128x1(x, rule)


def quantize_128x128_and_transpose(w: torch.Tensor, rule: ScaleRule) -> tuple[QuantizedTensor, QuantizedTensor]:
    """:func:`quantize_128x128` of ``w [N, K]`` for FProp and its transpose ``[K, N]`` for DGrad."""
    weight = quantize_128x128(w, rule)
    return weight, transpose_128x128(weight)
