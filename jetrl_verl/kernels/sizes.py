# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of grids and tiles on the host. Triton's helpers cost 2 us a call, and a layer makes about 70."""

from functools import cache

import torch


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up; ``b`` positive."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two of at least ``n``; ``n`` positive."""
    return 1 << (n - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


HEADS_OF_A_PROGRAM = 4
"""Heads per program, one warp each. A multiprocessor runs at most 32 programs; with one warp each it would reach only
half of its 64 warps."""
