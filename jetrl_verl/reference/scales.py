# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scales from group maxima.

A maximum is taken over the bit patterns of ``|x|``: finite values keep their order, and Inf and NaN sort above them,
where a floating-point maximum may drop a NaN.

``fp32``: ``s = amax / 448``, one IEEE division; the maximum becomes exactly 448.
``pow2``: ``s = 2^ceil(log2(amax / 448))``. With ``amax = m * 2^e`` and ``448 = 1.75 * 2^8`` this is ``2^(e-8)`` for
``m <= 1.75``, else ``2^(e-7)``: adding ``0x1FFFFF`` to the bits carries into the exponent exactly when the mantissa
bits exceed those of 1.75, ``0x600000``.
"""

import torch

from jetrl_verl.reference.constants import E4M3_MAX, MIN_SCALE, ScaleRule, check_rule

INF_BITS = 0x7F800000
_MIN_SCALE_EXPONENT = 127 - 63
_CARRY_ABOVE_1_75 = 0x7FFFFF - 0x600000


def amax_bits(groups: torch.Tensor) -> torch.Tensor:
    """Bit pattern of ``max |x|`` over the last dimension.

    Args:
        groups: ``[..., G]`` FP32, ``G >= 1``.

    Returns:
        ``[...]`` int32, ``>= 0x7F800000`` for a group with an Inf or NaN.
    """
    return (groups.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(dim=-1)


def scale_from_amax_bits(bits: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """Scale of each group under ``rule``.

    Args:
        bits: int32, from :func:`amax_bits`.
        rule: ``"fp32"`` or ``"pow2"``.

    Returns:
        FP32, same shape, finite and ``>= 2^-63``; 1 for a zero group and for a group with an Inf or NaN.

    Raises:
        ValueError: unknown ``rule``.
    """
    check_rule(rule)
    special = (bits == 0) | (bits >= INF_BITS)
    if rule == "fp32":
        # A tensor, since CUDA multiplies by the rounded reciprocal of a Python number instead of dividing.
        amax = bits.view(torch.float32)
        scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(MIN_SCALE)
    else:
        exponent = ((bits + _CARRY_ABOVE_1_75) >> 23) - 8
        scale = (exponent.clamp_min(_MIN_SCALE_EXPONENT) << 23).view(torch.float32)
    return torch.where(special, torch.ones_like(scale), scale)
