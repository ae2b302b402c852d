# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``native_library``, ``emulator``, ``on_a_cpu``, a seed for every test."""

import pytest
import torch


@pytest.fixture(scope="session")
def native_library() -> None:
    """Skips on a GPU other than Hopper, fails where the native kernels are not built."""
    from jetrl_verl.kernels import native

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the native kernels are for Hopper GPUs")
    if native.unavailable() is not None:
        pytest.fail(native.unavailable())


@pytest.fixture(scope="session")  # operators can be registered once in a process
def emulated():
    """The library's operators over the emulated kernels."""
    import native_emulator

    torch.ops.load_library(str(native_emulator.build(operators="jetrl_emulated")))
    return torch.ops.jetrl_emulated


@pytest.fixture(scope="session")
def emulator():
    """The emulated kernels."""
    import native_emulator

    return native_emulator.Emulator(native_emulator.build())


@pytest.fixture
def on_a_cpu(emulated, monkeypatch):
    """The native backend finds its operators and accepts tensors of the CPU."""
    from jetrl_verl.kernels import native

    monkeypatch.setattr(native, "unavailable", lambda: None)
    with native.using("jetrl_emulated"):
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draws without a generator are the same in every run."""
    torch.manual_seed(0)
