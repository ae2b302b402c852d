# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``device.launch.jit`` chooses the compiled kernel that Triton chooses and passes it the same arguments.

A fake driver stands for the GPU and records compilations.
"""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from jetrl_verl import kernels  # noqa: F401
from jetrl_verl.kernels.device.launch import _FOLLOWED, jit
from jetrl_verl.kernels.rms_norm import _rms_norm_kernel

pytestmark = pytest.mark.skipif(triton.__version__ not in _FOLLOWED, reason=f"device.launch follows {_FOLLOWED}")


def _kernel(x_ptr, y_ptr, count, always, WIDE: tl.constexpr, scale=2.0):
    pass


class Compiled:
    function, packed_metadata = "function", "packed"

    def __init__(self) -> None:
        self.runs: list[tuple] = []

    def launch_metadata(self, grid: Any, stream: int, *values: Any) -> str:
        return "metadata"

    def run(self, *call: Any) -> None:
        self.runs.append(call)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[SimpleNamespace]:
    state = SimpleNamespace(device=0, compiled=[])

    def compiled(kernel, key, signature, device, *_):
        kernel_of_key = kernel.device_caches[device][0][key] = Compiled()
        state.compiled.append(kernel_of_key)
        return kernel_of_key

    fake = SimpleNamespace(
        get_current_device=lambda: state.device,
        get_current_stream=lambda device: 100 + device,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    yield state


STORAGE = torch.zeros(64, dtype=torch.bfloat16)
POINTERS = (STORAGE, STORAGE[1:], STORAGE[8:], STORAGE.view(torch.int16), torch.zeros(4))
OPTIONS = ({}, {"num_warps": 8}, {"num_warps": 8, "num_stages": 2}, {"scale": 1.5})
COUNTS = (1, 16, 17, 32, 2**40, True)
CALLS = [
    ((x, STORAGE, count, always), dict(WIDE=wide, **options))
    for x, count, always, wide, options in itertools.product(
        POINTERS,
        COUNTS,
        (3, 16),
        (1, 2, "a"),
        ({}, {"num_warps": 8}, {"num_warps": 8, "num_stages": 2}, {"scale": 1.5}),
    )
]


def test_calls_share_compiled_kernels_as_with_triton(gpu):
    wrapped = jit(_kernel, do_not_specialize=["always"])
    stock = triton.jit(_kernel, do_not_specialize=["always"])
    assert type(wrapped) is not type(stock) and isinstance(wrapped, JITFunction)
    chosen = [(id(wrapped[(1,)](*call, **named)), id(stock[(1,)](*call, **named))) for call, named in CALLS * 2]
    of_wrapped, of_stock = zip(*chosen)
    assert len(set(of_wrapped)) == len(set(of_stock)) == len(set(chosen)) > 50


def test_a_second_launch_passes_what_triton_passes_except_hooks(gpu):
    wrapped, stock = jit(_kernel), triton.jit(_kernel)
    for kernel in (wrapped, stock):
        for grid in ((7,), (7, 5), (7, 5, 3)):
            kernel[grid](STORAGE, POINTERS[1], 17, 16, WIDE=2)
    of_wrapped, of_stock = (compiled.runs for compiled in gpu.compiled)
    assert len(gpu.compiled) == 2 and len(of_wrapped) == len(of_stock) == 3
    for a, b in zip(of_wrapped, of_stock):
        assert a[:6] == b[:6] and a[:3] in ((7, 1, 1), (7, 5, 1), (7, 5, 3)) and a[3] == 100
        assert len(a) == len(b) and all(x is y or x == y for x, y in zip(a[9:], b[9:]))
    assert of_wrapped[0][6:9] == of_stock[0][6:9], "the first launch is Triton's own"
    assert of_wrapped[1][6:9] == (None, None, None)


@pytest.mark.parametrize("scratch", [(0, 0), (16, 0), (0, 16)])
def test_a_second_launch_skips_allocators_without_scratch_memory(gpu, scratch):
    """It calls the launcher's function with the launcher's arguments, and the launcher itself with scratch memory."""
    launched, asked = [], []
    launcher = CudaLauncher.__new__(CudaLauncher)
    launcher.global_scratch_size, launcher.profile_scratch_size = scratch
    launcher.global_scratch_align = launcher.profile_scratch_align = launcher.num_ctas = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    launcher.launch = lambda *call: launched.append(call)
    if triton.__version__ != "3.6.0":
        launcher.arg_annotations, launcher.kernel_signature = "annotations", b"signature"
    wrapped = jit(_kernel)
    wrapped[(1,)](STORAGE, STORAGE, 17, 3, WIDE=1)
    wrapped._launched.clear()
    gpu.compiled[0].run = launcher
    memory = triton.runtime._allocation
    with (
        mock.patch.object(memory, "_allocator", SimpleNamespace(get=lambda: lambda *call: asked.append(call))),
        mock.patch.object(memory, "_profile_allocator", SimpleNamespace(get=lambda: lambda *call: asked.append(call))),
    ):
        for _ in range(3):
            wrapped[(7, 5)](STORAGE, STORAGE, 17, 3, WIDE=1)
    tritons, *again = launched
    assert len(again) == 2 and len(asked) == (0 if scratch == (0, 0) else 3)
    for call in again:
        assert call[:7] == tritons[:7] == (7, 5, 1, 100, "function", False, True)
        hooks = tritons.index("metadata")
        assert call[hooks : hooks + 3] == (None, None, None)
        assert [*call[:hooks], *call[hooks + 3 :]] == [*tritons[:hooks], *tritons[hooks + 3 :]]


def test_each_device_has_its_own_kernels(gpu):
    wrapped = jit(_kernel)
    for device in (0, 1, 0, 1):
        gpu.device = device
        wrapped[(1,)](STORAGE, STORAGE, 17, 3, WIDE=1)
    assert [[run[3] for run in compiled.runs] for compiled in gpu.compiled] == [[100, 100], [101, 101]]


def test_a_profilers_hook_sees_every_launch(gpu):
    wrapped, seen = jit(_kernel), []
    wrapped[(1,)](STORAGE, STORAGE, 17, 3, WIDE=1)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        wrapped[(1,)](STORAGE, STORAGE, 17, 3, WIDE=1)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    (compiled,) = gpu.compiled
    metadata, enter, leave = compiled.runs[1][6:9]
    assert metadata == "metadata" and enter is knobs.runtime.launch_enter_hook
    assert leave is knobs.runtime.launch_exit_hook


def test_the_package_launches_its_kernels_with_this_decorator():
    assert type(_rms_norm_kernel).__module__ == "jetrl_verl.kernels.device.launch"
