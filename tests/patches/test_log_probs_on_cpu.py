# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""patches/log_probs.py, see log_probs_checks.py."""

import pytest
import torch
from log_probs_checks import check


@pytest.mark.parametrize("shape", [(40, 104), (23, 512), (9, 151936), (3, 5, 97)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_give_the_bits_of_single_rows(dtype, autocast, shape, monkeypatch):
    check("cpu", dtype, autocast, shape, monkeypatch)


def test_verl_takes_it():
    from verl.utils import torch_functional

    from jetrl_verl.patches.log_probs import log_probs_of_rows

    assert torch_functional.logprobs_from_logits_v2 is log_probs_of_rows


def test_no_tokens_no_log_probabilities():
    from jetrl_verl.patches.log_probs import log_probs_of_rows

    assert log_probs_of_rows(torch.empty(0, 8), torch.empty(0, dtype=torch.long)).shape == (0,)
