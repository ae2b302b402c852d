# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``@jit``: Triton's, with a launch that costs the host less than half.

At each launch Triton 3.6 compares every global constant that the kernel and its device functions read with what it was
at compilation, writes the launch's options into a string, and describes the launch for profilers that are not there:
some 15 us, where a decoder layer has 38 launches in a step and a small batch keeps the GPU for a few microseconds each.
Here a kernel that has run before for the same types, alignments, constants and options is launched at once; whatever
else is asked, the first launch included, is Triton's own.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels run under Triton's interpreter, which knows no inline assembly and some arithmetic otherwise."""


class _Kernel(JITFunction):
    """A kernel of Triton's; ``kernel[grid](...)`` calls :meth:`run`."""

    _launched: dict[tuple, Any]

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        watched = knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
        if warmup or watched or self.pre_run_hooks:
            return super().run(*args, grid=grid, warmup=warmup, **options)
        device = driver.active.get_current_device()
        bound, specialization, launch = self.device_caches[device][4](*args, **options)
        key = (device, *specialization, *launch.items())
        compiled = self._launched.get(key)
        if compiled is None:
            compiled = self._launched[key] = super().run(*args, grid=grid, warmup=False, **options)
            return compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        nobody = None, None, None
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, *nobody, *bound.values())
        return compiled


def jit(function: Callable | None = None, **options: Any) -> Any:
    """``triton.jit`` for kernels that the host launches with a tuple as their grid, and for what they call.

    Another version of Triton than the one whose launch this is keeps its own, and so does its interpreter.
    """
    if function is None:
        return lambda function: jit(function, **options)
    kernel = triton.jit(function, **options)
    if triton.__version__ == "3.6.0" and type(kernel) is JITFunction:
        kernel.__class__ = _Kernel
        kernel._launched = {}
    return kernel
