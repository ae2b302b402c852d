# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""patches/log_probs.py on a CPU, see log_probs_checks.py."""

import pytest
import torch
from log_probs_checks import check
from patch_home import current, home

from jetrl_verl.patches.log_probs import LOG_PROBS


@pytest.mark.parametrize("shape", [(40, 104), (23, 512), (9, 151936), (3, 5, 97)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_give_the_bits_of_single_rows(dtype, autocast, shape, monkeypatch):
    check("cpu", dtype, autocast, shape, monkeypatch)


def test_verl_calls_the_patched_function():
    from verl.utils import torch_functional

    home(LOG_PROBS)
    assert "_CHUNK_ELEMENTS" in torch_functional.logprobs_from_logits_v2.__code__.co_names


def test_no_tokens_give_no_log_probabilities():
    empty = current(LOG_PROBS)(torch.empty(0, 8), torch.empty(0, dtype=torch.long))
    assert empty.shape == (0,)
