# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A column of the logits on a GPU has the same bits for any other columns of a tensor-parallel rank."""

import pytest
import torch

from jetrl_verl import kernels


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


@pytest.mark.parametrize("rows", [1, 63, 300])
@pytest.mark.parametrize("sizes", [(75968, 75968), (37984,) * 4, (1, 151900, 35)], ids=str)
def test_vocabulary_shards_match_the_whole_vocabulary(rows, sizes):
    hidden, weight = normal(rows, 2048, seed=0), normal(151936, 2048, seed=1)
    whole = kernels.logits(hidden, weight)
    assert torch.equal(torch.cat([kernels.logits(hidden, shard) for shard in weight.split(sizes)], dim=-1), whole)


def test_log_probs_do_not_depend_on_removed_padding():
    padded = normal(65, 32064, seed=2).float()
    tokens = torch.arange(65, device="cuda")[:, None] * 400
    for used in (32000, 31999):
        cut = padded[:, :used]
        expected = kernels.log_probs(cut.contiguous(), tokens, torch.ones(65, device="cuda"))
        assert torch.equal(kernels.log_probs(cut, tokens, torch.ones(65, device="cuda")), expected)
