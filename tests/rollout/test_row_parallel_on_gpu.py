# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own all-reduce kernel, all its ranks on one GPU: it has the bits of the trainer's sum at every size, of more
than two ranks in one stage.

Its ranks read each other's memory by pointers, which handles of other processes give it in an engine. Here one process
holds all ranks, so they are plain pointers. A kernel waits for those of the other ranks: 36 blocks each, which fit on
the GPU side by side. Its other all-reduces need a GPU for each rank.
"""

import pytest
import torch

from jetrl_verl import kernels
from jetrl_verl.rollout.row_parallel import ALGORITHM, IN_ONE_STAGE
from jetrl_verl.sync.operations_probe import products_of_ranks
from jetrl_verl.tools.bench import data

pytestmark = pytest.mark.timeout(60, method="thread")

BYTES = 2**23
ROWS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512, 1023)
"""Below 8 MiB of 4096 BF16 columns, where vLLM goes on to another all-reduce."""


@pytest.mark.parametrize("ranks_of", [2, 4, 8])
def test_vllms_kernel_has_the_bits_of_the_trainers_sum_at_every_size(monkeypatch, ranks_of):
    monkeypatch.setenv(ALGORITHM, IN_ONE_STAGE)
    from vllm import _custom_ops as ops

    device = torch.device("cuda", 0)

    def memory(size: int) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks_of)]

    signals, buffers, tables = memory(ops.meta_size() + BYTES), memory(BYTES), memory(BYTES)
    ranks = [
        ops.init_custom_ar([x.data_ptr() for x in signals], table, rank, True) for rank, table in enumerate(tables)
    ]
    streams = [torch.cuda.Stream() for _ in range(ranks_of)]
    try:
        for rank in ranks:
            ops.register_buffer(rank, [buffer.data_ptr() for buffer in buffers])
        cases = products_of_ranks(device, ranks_of)
        cases += [[data.activations(m, 4096, device) for _ in range(ranks_of)] for m in ROWS]
        for parts in cases:
            found = [torch.full_like(part, torch.nan) for part in parts]
            torch.cuda.synchronize()
            for rank, stream, part, out, buffer in zip(ranks, streams, parts, found, buffers, strict=True):
                with torch.cuda.stream(stream):
                    ops.all_reduce(rank, part, out, buffer.data_ptr(), BYTES)
            torch.cuda.synchronize()
            expected = kernels.sum_of_ranks(parts)
            assert all(torch.equal(out, expected) for out in found), tuple(expected.shape)
    finally:
        for rank in ranks:
            ops.dispose(rank)
