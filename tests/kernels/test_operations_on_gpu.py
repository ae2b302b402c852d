# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fake has the shapes, types and layouts of what runs on a GPU, for every operator."""

import operator_calls
import pytest
import torch

from jetrl_verl import kernels


@pytest.fixture(scope="module")
def calls():
    return operator_calls.calls("cuda")


NAMES = sorted(name for name, operation in kernels.OPERATIONS.items() if set(operation.backends) != {"cpu"})


@pytest.mark.parametrize("name", NAMES)
def test_fake_implementations_match_the_real_ones(calls, name):
    run = getattr(torch.ops.jetrl, name).default
    torch.library.opcheck(run, calls[name], test_utils=("test_faketensor",))
