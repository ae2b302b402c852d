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
"""The number format and the two names of scale rules; every constant of the contract that is not a formula."""

from typing import Literal, get_args

import torch

FP8_DTYPE = torch.float8_e4m3fn
"""Format of all codes: 4 exponent bits, 3 mantissa bits, no infinities, one NaN pattern per sign."""

E4M3_MAX = 448.0
"""Largest finite E4M3 value, 1.75 * 2^8; larger quotients saturate to it."""

E4M3_NAN_CODE = 0x7F
"""Bit pattern of the NaN code that a group holding an Inf or NaN is filled with."""

BLOCK = 128
"""Group length of 1x128 quantisation, block side of 128x128 quantisation and K extent of one FP32 partial sum."""

MIN_SCALE = 2.0**-63
"""Smallest scale. ``1 / s`` and the product of two scales stay normal FP32 numbers above it."""

ScaleRule = Literal["fp32", "pow2"]
SCALE_RULES: tuple[str, ...] = get_args(ScaleRule)


def check_rule(rule: str) -> None:
    """Raise ``ValueError`` unless ``rule`` names one of the two scale rules."""
    if rule not in SCALE_RULES:
        raise ValueError(f"unknown scale rule {rule!r}; choose one of {', '.join(SCALE_RULES)}")
