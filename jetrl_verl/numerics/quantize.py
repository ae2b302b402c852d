# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Reference quantisers: 1x128 groups, 128x128 blocks, and the 128x1 re-layout that WGrad contracts over.

``code = e4m3(clamp(x / s, +-448))``: IEEE division in FP32, then one round-to-nearest-even into E4M3. The input is
taken at its own precision (BF16 tensors between operators, the BF16 cast of the master weight) and widened to FP32.

Layouts. A GEMM of the contract is always NT: both operands are stored with the contraction dimension last. So WGrad's
operands, contracted along tokens, are the *transposed* tensors with groups along tokens, ``[features, tokens]``.
A 128x128 block is square, hence a weight and its transpose share codes and scales (:func:`transpose_128x128`); a 1x128
group is not, so saved activations pass through :func:`relayout_128x1`, which dequantises in FP32, takes a fresh maximum
per 128 tokens and rounds a second time (Jet-RL, arXiv 2601.14243, section 4.2). A zero group stays zero and scale 1
whatever the old scale was: the maximum is always of values, never of old scales.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from jetrl_verl.numerics.formats import BLOCK, E4M3_MAX, E4M3_NAN_CODE, FP8_DTYPE, ScaleRule
from jetrl_verl.numerics.scales import INF_BITS, amax_bits, scale_from_amax_bits


class BlockQuantized(NamedTuple):
    """E4M3 codes and their FP32 scales; which block shape they follow is the producing function's contract."""

    codes: torch.Tensor
    scales: torch.Tensor


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _encode(groups: torch.Tensor, rule: ScaleRule) -> BlockQuantized:
    """Quantise ``groups`` ``[..., G]`` FP32 with one scale per last dimension."""
    bits = amax_bits(groups)
    scales = scale_from_amax_bits(bits, rule)
    codes = (groups / scales.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)
    codes.view(torch.uint8).masked_fill_((bits >= INF_BITS).unsqueeze(-1), E4M3_NAN_CODE)
    return BlockQuantized(codes, scales)


def quantize_1x128(x: torch.Tensor, rule: ScaleRule) -> BlockQuantized:
    """Quantise along the last dimension in groups of 128; the last group may be shorter.

    Args:
        x: ``[..., K]`` BF16, FP16 or FP32.
        rule: scale rule.

    Returns:
        codes ``[..., K]`` E4M3 and scales ``[..., ceil(K/128)]`` FP32, both contiguous.

    Raises:
        ValueError: unknown ``rule``.
    """
    *lead, k = x.shape
    groups_k = _ceil_div(k, BLOCK)
    padded = F.pad(x.float(), (0, groups_k * BLOCK - k))
    if padded.numel() == 0:
        return BlockQuantized(
            torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device),
            torch.empty((*lead, groups_k), dtype=torch.float32, device=x.device),
        )
    codes, scales = _encode(padded.reshape(*lead, groups_k, BLOCK), rule)
    return BlockQuantized(codes.reshape(*lead, groups_k * BLOCK)[..., :k].contiguous(), scales)


def quantize_128x1(x: torch.Tensor, rule: ScaleRule) -> BlockQuantized:
    """Quantise the columns of ``x`` in groups of 128 rows and store the transpose.

    Args:
        x: ``[M, N]`` BF16, FP16 or FP32.
        rule: scale rule.

    Returns:
        codes ``[N, M]`` E4M3 and scales ``[N, ceil(M/128)]`` FP32: :func:`quantize_1x128` of ``x.T``.

    Raises:
        ValueError: unknown ``rule``.
    """
    return quantize_1x128(x.t().contiguous(), rule)


def quantize_128x128(w: torch.Tensor, rule: ScaleRule) -> BlockQuantized:
    """Quantise a matrix in 128x128 blocks; edge blocks may be smaller.

    Args:
        w: ``[N, K]`` BF16, FP16 or FP32.
        rule: scale rule.

    Returns:
        codes ``[N, K]`` E4M3 and scales ``[ceil(N/128), ceil(K/128)]`` FP32, both contiguous.

    Raises:
        ValueError: unknown ``rule``.
    """
    n, k = w.shape
    bn, bk = _ceil_div(n, BLOCK), _ceil_div(k, BLOCK)
    padded = F.pad(w.float(), (0, bk * BLOCK - k, 0, bn * BLOCK - n))
    if padded.numel() == 0:
        return BlockQuantized(
            torch.empty(w.shape, dtype=FP8_DTYPE, device=w.device),
            torch.empty((bn, bk), dtype=torch.float32, device=w.device),
        )
    blocks = padded.reshape(bn, BLOCK, bk, BLOCK).transpose(1, 2).reshape(bn, bk, BLOCK * BLOCK)
    codes, scales = _encode(blocks, rule)
    matrix = codes.view(torch.uint8).reshape(bn, bk, BLOCK, BLOCK).transpose(1, 2).reshape(bn * BLOCK, bk * BLOCK)
    return BlockQuantized(matrix[:n, :k].contiguous().view(FP8_DTYPE), scales)


def transpose_128x128(weight: BlockQuantized) -> BlockQuantized:
    """Codes and scales of ``W.T`` from those of ``W``, exact: blocks are square."""
    codes = weight.codes.view(torch.uint8).t().contiguous().view(FP8_DTYPE)
    return BlockQuantized(codes, weight.scales.t().contiguous())


def dequantize_1x128(q: BlockQuantized) -> torch.Tensor:
    """``code * scale`` in FP32 for codes ``[..., K]`` with scales ``[..., ceil(K/128)]``."""
    k = q.codes.shape[-1]
    return q.codes.float() * q.scales.repeat_interleave(BLOCK, dim=-1)[..., :k]


def dequantize_128x128(q: BlockQuantized) -> torch.Tensor:
    """``code * scale`` in FP32 for codes ``[N, K]`` with scales ``[ceil(N/128), ceil(K/128)]``."""
    n, k = q.codes.shape
    scales = q.scales.repeat_interleave(BLOCK, dim=0)[:n].repeat_interleave(BLOCK, dim=1)[:, :k]
    return q.codes.float() * scales


def relayout_128x1(q: BlockQuantized, rule: ScaleRule) -> BlockQuantized:
    """Turn 1x128 codes ``[M, K]`` into the token-grouped transpose that WGrad reads.

    Dequantises in FP32 (no rounding to BF16 in between), then quantises along tokens with fresh maxima. Under ``pow2``
    the second rounding is exact for every element that stays in the normal range of its new group.

    Args:
        q: codes ``[M, K]`` E4M3, scales ``[M, ceil(K/128)]`` FP32.
        rule: scale rule of the new groups.

    Returns:
        codes ``[K, M]`` E4M3 and scales ``[K, ceil(M/128)]`` FP32.

    Raises:
        ValueError: unknown ``rule``.
    """
    return quantize_128x1(dequantize_1x128(q), rule)


def quantize_1x128_and_128x1(x: torch.Tensor, rule: ScaleRule) -> tuple[BlockQuantized, BlockQuantized]:
    """Both quantisations that the backward pass takes of ``dY [M, N]``: along N for DGrad, along tokens for WGrad.

    Returns:
        :func:`quantize_1x128` of ``x`` and :func:`quantize_128x1` of ``x``; a fused kernel reads ``x`` once for both.
    """
    return quantize_1x128(x, rule), quantize_128x1(x, rule)


def quantize_128x128_and_transpose(w: torch.Tensor, rule: ScaleRule) -> tuple[BlockQuantized, BlockQuantized]:
    """:func:`quantize_128x128` of ``w [N, K]`` for FProp and its transpose ``[K, N]`` for DGrad."""
    weight = quantize_128x128(w, rule)
    return weight, transpose_128x128(weight)
