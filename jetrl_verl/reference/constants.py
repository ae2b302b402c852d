# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The number format and the two names of scale rules; every constant of the contract that is not a formula."""

from typing import Literal, get_args

import torch

FP8_DTYPE = torch.float8_e4m3fn
"""Format of all qdata: 4 exponent bits, 3 mantissa bits, no infinities, one NaN pattern per sign."""

E4M3_MAX = 448.0
"""Largest finite E4M3 value, 1.75 * 2^8; larger quotients saturate to it."""

E4M3_NAN_BITS = 0x7F
"""Bit pattern of the NaN that a group holding an Inf or NaN is filled with."""

BLOCK = 128
"""Group length of 1x128 quantization, block side of 128x128 quantization and K extent of one FP32 partial sum."""

MIN_SCALE = 2.0**-63
"""Smallest scale. ``1 / s`` and the product of two scales stay normal FP32 numbers above it."""

ScaleRule = Literal["fp32", "pow2"]
SCALE_RULES: tuple[str, ...] = get_args(ScaleRule)


def check_rule(rule: str) -> None:
    """Raise ``ValueError`` unless ``rule`` names one of the two scale rules."""
    if rule not in SCALE_RULES:
        raise ValueError(f"unknown scale rule {rule!r}; choose one of {', '.join(SCALE_RULES)}")
