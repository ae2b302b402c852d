# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What rounding to E4M3 loses of weights, activations and a KV cache."""

import torch

_SMALLEST_NORMAL_BITS = 0x08


def lost(qdata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(zero, subnormal) masks of E4M3 ``qdata``."""
    magnitude = qdata.contiguous().view(torch.uint8) & 0x7F
    return magnitude == 0, (magnitude > 0) & (magnitude < _SMALLEST_NORMAL_BITS)
