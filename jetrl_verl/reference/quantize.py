# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reference quantizers: 1x128 groups, 128x128 blocks, and the 128x1 re-layout for WGrad.

``qdata = e4m3(clamp(x / s, +-448))``: IEEE division in FP32, then round to nearest even. Inputs are widened to FP32 at
their own precision: BF16 activations, the BF16 cast of a master weight.

All GEMMs are NT: both operands have the contraction dimension last. WGrad contracts along tokens, so its operands are
the transposed tensors ``[features, tokens]`` in groups along tokens. A 128x128 block is square, so a weight and its
transpose share qdata and scales. A 1x128 group is not: :func:`relayout_128x1` dequantizes saved activations in FP32,
takes fresh maxima of the values per 128 tokens and rounds again (Jet-RL, arXiv 2601.14243, section 4.2).
"""

import torch
import torch.nn.functional as F

from jetrl_verl.reference.constants import BLOCK, E4M3_MAX, E4M3_NAN_BITS, FP8_DTYPE, ScaleRule
from jetrl_verl.reference.scales import INF_BITS, amax_bits, scale_from_amax_bits
from jetrl_verl.reference.tensor import QuantizedTensor


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _encode(groups: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """Quantize ``groups [..., G]`` FP32, one scale each."""
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
    groups_k = _blocks(k)
    padded = F.pad(x.float(), (0, groups_k * BLOCK - k))
    qdata, scales = _encode(padded.reshape(*lead, groups_k, BLOCK), rule)
    return QuantizedTensor(qdata.reshape(*lead, groups_k * BLOCK)[..., :k].contiguous(), scales)


def quantize_128x1(x: torch.Tensor, rule: ScaleRule) -> QuantizedTensor:
    """:func:`quantize_1x128` of the transpose of ``x [M, N]``: qdata ``[N, M]``, scales ``[N, ceil(M/128)]``."""
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
    bn, bk = _blocks(n), _blocks(k)
    padded = F.pad(w.float(), (0, bk * BLOCK - k, 0, bn * BLOCK - n))
    blocks = padded.reshape(bn, BLOCK, bk, BLOCK).transpose(1, 2).reshape(bn, bk, BLOCK * BLOCK)
    qdata, scales = _encode(blocks, rule)
    matrix = qdata.view(torch.uint8).reshape(bn, bk, BLOCK, BLOCK).transpose(1, 2).reshape(bn * BLOCK, bk * BLOCK)
    return QuantizedTensor(matrix[:n, :k].contiguous().view(FP8_DTYPE), scales)


def transpose_128x128(weight: QuantizedTensor) -> QuantizedTensor:
    """qdata and scales of ``W.T`` from those of ``W``, exact: blocks are square."""
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

    Under ``pow2`` the second rounding is exact for elements that stay in the normal range of their new group.

    Args:
        q: qdata ``[M, K]`` E4M3, scales ``[M, ceil(K/128)]`` FP32.
        rule: scale rule of the new groups.

    Returns:
        qdata ``[K, M]`` E4M3 and scales ``[K, ceil(M/128)]`` FP32.
    """
    return quantize_128x1(dequantize_1x128(q), rule)


def quantize_1x128_and_128x1(x: torch.Tensor, rule: ScaleRule) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both quantizations of ``dY [M, N]``: :func:`quantize_1x128` for DGrad, :func:`quantize_128x1` for WGrad."""
    return quantize_1x128(x, rule), quantize_128x1(x, rule)


def quantize_128x128_and_transpose(w: torch.Tensor, rule: ScaleRule) -> tuple[QuantizedTensor, QuantizedTensor]:
    """:func:`quantize_128x128` of ``w [N, K]`` for FProp and its transpose ``[K, N]`` for DGrad."""
    weight = quantize_128x128(w, rule)
    return weight, transpose_128x128(weight)
