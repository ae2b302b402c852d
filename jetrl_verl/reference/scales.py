# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scales from group maxima, in integer arithmetic where floating point would lose what matters.

A group's maximum is taken over the *bit patterns* of ``|x|``. For finite values the order is that of the values; Inf
and NaN sort above all of them, so one comparison finds them, where a floating-point maximum may drop a NaN.

``fp32``: ``s = amax / 448``, one IEEE-rounded division. The maximum lands exactly on 448.
``pow2``: ``s = 2^ceil(log2(amax / 448))``. With ``amax = m * 2^e`` and ``448 = 1.75 * 2^8`` this is ``2^(e-8)`` where
``m <= 1.75`` and ``2^(e-7)`` elsewhere: adding ``0x1FFFFF`` to the bits carries into the exponent exactly when the
23 mantissa bits exceed those of 1.75 (``0x600000``).
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
        ``[...]`` int32; ``>= 0x7F800000`` where the group holds an Inf or NaN.
    """
    return (groups.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(dim=-1)


def scale_from_amax_bits(bits: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """Scale of each group under ``rule``.

    Args:
        bits: int32, from :func:`amax_bits`.
        rule: ``"fp32"`` or ``"pow2"``.

    Returns:
        FP32, same shape, always finite and ``>= 2^-63``. A zero group has scale 1, and so has a group with an Inf or
        NaN, whose qdata are all NaN.

    Raises:
        ValueError: ``rule`` is neither name.
    """
    check_rule(rule)
    special = (bits == 0) | (bits >= INF_BITS)
    if rule == "fp32":
        # By a tensor: CUDA divides by a Python number as a product with its rounded reciprocal.
        amax = bits.view(torch.float32)
        scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(MIN_SCALE)
    else:
        exponent = ((bits + _CARRY_ABOVE_1_75) >> 23) - 8
        scale = (exponent.clamp_min(_MIN_SCALE_EXPONENT) << 23).view(torch.float32)
    return torch.where(special, torch.ones_like(scale), scale)
