# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of grids and tiles on the host. Triton's helpers cost 2 us a call, and a layer makes about 70."""

from functools import cache

import torch


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up; ``b`` positive."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n``, which is positive."""
    return 1 << (n - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 of a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


HEADS_OF_A_PROGRAM = 4
"""Attention heads, a warp each, where a warp has a head: a multiprocessor holds 32 programs, and of one warp each they
would be half of the warps that it can."""
