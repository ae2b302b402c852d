# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""As test_log_probs_on_cpu.py, on a GPU."""

import pytest
import torch
from test_log_probs_on_cpu import check


@pytest.mark.parametrize("shape", [(40, 104), (23, 512), (9, 151936), (3, 5, 97)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_give_the_bits_of_single_rows(dtype, autocast, shape, monkeypatch):
    check("cuda", dtype, autocast, shape, monkeypatch)
