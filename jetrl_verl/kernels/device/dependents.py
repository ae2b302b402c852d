# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: the quantizers of a rollout's linears let the next kernel start early.

A kernel launched with the attribute (the decode GEMM with ``static_weight``) starts when all programs of the previous
kernel have called :func:`launch_dependents` or ended, and waits itself before it reads what that kernel writes. Other
launches wait for the whole kernel. The kernels that call it are launched without the attribute, so only what this one
kernel writes can be unfinished when the next one starts.
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from jetrl_verl.kernels.device.e4m3 import target_capability
from jetrl_verl.kernels.device.launch import INTERPRETED, jit

_FIRST_CAPABILITY = 90
"""Of a GPU that has the instruction, Hopper; Ada's assembler refuses it."""


@tl.core.extern
def _launch_dependents(_semantic=None):
    if target_capability(_semantic) >= _FIRST_CAPABILITY:
        gdc_launch_dependents(_semantic=_semantic)


@jit
def launch_dependents():
    """The next kernel may start once every program has passed here.

    Nothing on GPUs older than Hopper, nor under Triton's interpreter, which knows no inline assembly.
    """
    if not INTERPRETED:
        _launch_dependents()
