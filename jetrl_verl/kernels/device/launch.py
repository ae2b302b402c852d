# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``@jit``: Triton's, with repeated launches in less than half of the 15 us of Triton's own.

A kernel that has run with the same types, alignments, constants and options is launched directly, without Triton's
checks of global constants and its description for profilers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels run under Triton's interpreter, which has no inline assembly and computes some operations wrongly."""

_FOLLOWED = ("3.6.0", "3.7.1")
"""Versions of Triton whose launch is re-made here: those of torch 2.11 and 2.13."""

_NO_HOOKS = None, None, None  # a launch's description and the two hooks that would read it


class _Kernel(JITFunction):
    """A Triton kernel, launched by ``kernel[grid](...)``.

    ``_launched``: device, types, alignments, constants and options -> compiled kernel and results of :func:`_again`.
    """

    _launched: dict[tuple, tuple[Any, Callable, tuple, bool]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        runtime = knobs.runtime
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or self.pre_run_hooks:
            return self.run(*args, grid=grid, warmup=False, **options)
        active = driver.active
        device = active.get_current_device()
        bound, specialization, launch = self.device_caches[device][4](*args, **options)
        key = (device, *specialization, *launch.items())
        launched = self._launched.get(key)
        if launched is None:
            compiled = self.run(*args, grid=grid, warmup=False, **options)
            if compiled is not None:  # None where a hook prevents compilation
                self._launched[key] = compiled, *_again(compiled)
            return compiled
        compiled, again, fixed, in_a_tuple = launched
        x, y, z = (*grid, 1, 1)[:3]
        values = (tuple(bound.values()),) if in_a_tuple else bound.values()
        again(x, y, z, active.get_current_stream(device), *fixed, *values)
        return compiled


def _again(compiled: Any) -> tuple[Callable, tuple, bool]:
    """(function that launches a compiled kernel, its arguments between the stream and the kernel's own, whether it
    takes the kernel's own in a tuple)."""
    from triton.backends.nvidia.driver import CudaLauncher

    launcher, of_kernel = compiled.run, (compiled.packed_metadata, *_NO_HOOKS)
    if isinstance(launcher, CudaLauncher) and not (launcher.global_scratch_size or launcher.profile_scratch_size):
        # The function that the launcher calls after it has allocated scratch memory, which is not needed here.
        options, no_scratch = (launcher.launch_cooperative_grid, launcher.launch_pdl), (None, None)
        if hasattr(launcher, "arg_annotations"):  # since Triton 3.7: one launcher, told about the arguments by these
            types = launcher.arg_annotations, launcher.kernel_signature
            return launcher.launch, (compiled.function, *options, *of_kernel, *no_scratch, *types), True
        return launcher.launch, (compiled.function, *options, *no_scratch, *of_kernel), False
    return launcher, (compiled.function, *of_kernel), False


def jit(function: Callable | None = None, **options: Any) -> Any:
    """``triton.jit`` for kernels launched with a tuple as grid, and for their functions.

    The interpreter and versions of Triton not in ``_FOLLOWED`` keep Triton's launch (:func:`slow_launches`).
    """
    if function is None:
        return lambda function: jit(function, **options)
    kernel = triton.jit(function, **options)
    if triton.__version__ in _FOLLOWED and type(kernel) is JITFunction:
        kernel.__class__ = _Kernel
        kernel._launched = {}
    return kernel


def slow_launches() -> str:
    """Why launches of kernels take Triton's time, in one sentence; empty where they are direct."""
    if knobs.runtime.interpret:
        return "Triton's interpreter runs kernels"
    if triton.__version__ not in _FOLLOWED:
        direct = " or ".join(_FOLLOWED)
        return f"Triton {triton.__version__} launches kernels itself, in twice the host time: direct needs {direct}"
    return ""
