# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``native_library``, and a seed for every test; inputs come from ``tests/reference/contract_inputs.py``."""

import pytest
import torch


@pytest.fixture(scope="session")
def native_library() -> None:
    """The native kernels: skips another GPU than theirs, fails where they are not built."""
    from jetrl_verl.kernels import native

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the native kernels are for Hopper GPUs")
    if native.unavailable() is not None:
        pytest.fail(native.unavailable())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Whatever a test draws without a generator of its own is the same in every run."""
    torch.manual_seed(0)
