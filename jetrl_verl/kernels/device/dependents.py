# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: the next kernel in the stream may start early. The first line of what quantizes the
inputs of an FP8 rollout's linears.

A kernel whose launch asks for it, as the native decode GEMM's does with ``static_weight``, starts when all programs of
the one in front have called :func:`launch_dependents` or have ended; it waits by itself before it reads what that one
writes. A launch that does not ask for it waits for the whole kernel as always, so the call changes no result.

The kernels that call it are launched without that attribute: when one of them runs, all that came before it has ended,
and a GEMM that starts under it can find nothing unfinished but what this one kernel writes.
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
