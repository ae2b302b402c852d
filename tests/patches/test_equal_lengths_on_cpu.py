# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Position ids of mRoPE keep their rows when verl splits a batch whose sequences have one length."""

import pytest
import torch
from patch_home import current, home
from tensordict import TensorDict

from jetrl_verl.patches.equal_lengths import EQUAL_LENGTHS


@pytest.mark.parametrize("lengths", [(7,), (4,), (7, 7), (8, 8), (7, 5), (2, 2), (1, 3)], ids=str)
def test_a_batch_is_split_into_its_sequences(lengths):
    from verl.utils.tensordict_utils import index_select_tensor_dict

    home(EQUAL_LENGTHS)
    sequences = [torch.arange(4 * length).view(4, length) for length in lengths]
    nested = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    batch = TensorDict({"position_ids": nested}, batch_size=[len(lengths)])
    for _ in range(2):  # verl calls it for a batch and again for each mini-batch
        current(EQUAL_LENGTHS)(batch)
        batch = index_select_tensor_dict(batch, [*range(len(lengths))])
    assert torch.equal(batch["position_ids"].values(), torch.cat(sequences, dim=1))
