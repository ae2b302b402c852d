# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Constants of the contract: the number format, the block size and the names of the scale rules."""

from typing import Literal, get_args

import torch

FP8_DTYPE = torch.float8_e4m3fn
"""Type of all FP8 qdata: 4 exponent bits, 3 mantissa bits, no infinities, one NaN pattern per sign."""

E4M3_MAX = 448.0
"""Largest finite E4M3 value, 1.75 * 2^8; larger quotients saturate to it."""

E4M3_NAN_BITS = 0x7F
"""Bit pattern that fills a group which holds an Inf or NaN."""

BLOCK = 128
"""Length of a 1x128 group, side of a 128x128 block and K extent of one FP32 partial sum."""

MIN_SCALE = 2.0**-63
"""Smallest scale: ``1 / s`` and the product of two scales stay normal FP32 numbers."""

ScaleRule = Literal["fp32", "pow2"]
SCALE_RULES: tuple[str, ...] = get_args(ScaleRule)


def check_rule(rule: str) -> None:
    """Raise ``ValueError`` unless ``rule`` names one of the two scale rules."""
    if rule not in SCALE_RULES:
        raise ValueError(f"unknown scale rule {rule!r}; choose one of {', '.join(SCALE_RULES)}")
