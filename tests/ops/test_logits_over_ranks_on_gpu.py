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
"""On a GPU too a column of the logits has its bits whatever columns a tensor-parallel rank holds beside it."""

import pytest
import torch

from jetrl_verl import ops


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


@pytest.mark.parametrize("rows", [1, 63, 300])
@pytest.mark.parametrize("sizes", [(75968, 75968), (37984,) * 4, (1, 151900, 35)], ids=str)
def test_shards_of_the_vocabulary_together_have_the_bits_of_the_whole(rows, sizes):
    hidden, weight = normal(rows, 2048, seed=0), normal(151936, 2048, seed=1)
    whole = ops.logits(hidden, weight)
    assert torch.equal(torch.cat([ops.logits(hidden, shard) for shard in weight.split(sizes)], dim=-1), whole)


def test_log_probabilities_do_not_see_the_padding_that_was_cut_off():
    padded = normal(65, 32064, seed=2).float()
    tokens = torch.arange(65, device="cuda")[:, None] * 400
    for used in (32000, 31999):
        cut = padded[:, :used]
        expected = ops.log_probs(cut.contiguous(), tokens, torch.ones(65, device="cuda"))
        assert torch.equal(ops.log_probs(cut, tokens, torch.ones(65, device="cuda")), expected)
