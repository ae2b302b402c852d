# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: the quantizers of a rollout's linears, and a delta net's convolution, let the next
kernel start early.

The decode GEMM with ``static_weight`` and the delta rule are launched with the attribute: they start when all programs
of the previous kernel have called :func:`launch_dependents` or ended, and wait before they read what it writes. The
callers are launched without the attribute, so no other kernel can be unfinished then.
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from jetrl_verl.kernels.device.e4m3 import target_capability
from jetrl_verl.kernels.device.launch import INTERPRETED, jit

_FIRST_CAPABILITY = 90  # Hopper; Ada's assembler rejects the instruction


@tl.core.extern
def _launch_dependents(_semantic=None):
    if target_capability(_semantic) >= _FIRST_CAPABILITY:
        gdc_launch_dependents(_semantic=_semantic)


@jit
def launch_dependents():
    """The next kernel may start once every program has passed here. No effect before Hopper and when interpreted."""
    if not INTERPRETED:
        _launch_dependents()
