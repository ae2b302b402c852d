# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""patches/log_probs.py on a GPU, see log_probs_checks.py."""

import pytest
import torch
from log_probs_checks import check


@pytest.mark.parametrize("shape", [(40, 104), (23, 512), (9, 151936), (3, 5, 97)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_give_the_bits_of_single_rows(dtype, autocast, shape, monkeypatch):
    check("cuda", dtype, autocast, shape, monkeypatch)
