# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own all-reduce kernel with all ranks on one GPU has the bits of the trainer's sum at every size; more than two
ranks add in one stage.

All ranks are in one process, so their buffers are plain pointers. A kernel waits for those of the other ranks block by
block, so the blocks of all ranks but one, and one more, must be on the GPU at once. With 4 ranks these are 109 blocks
of 512 threads and 46 registers; with 8 ranks 253 with 70 registers, of which an H200 holds 132. So 8 ranks add few
rows."""

import model_like
import pytest
import torch

from jetrl_verl import kernels
from jetrl_verl.kernels.sum_of_ranks import products_of_ranks
from jetrl_verl.rollout.row_parallel import ALGORITHM, IN_ONE_STAGE

pytestmark = pytest.mark.timeout(60, method="thread")

BYTES = 2**23
ROWS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512, 1023)
"""Less than 8 MiB of 4096 BF16 columns, from which vLLM uses another all-reduce."""
FEW_ROWS = (1, 2, 7, 8, 16, 17, 18)
"""One block for each row: 7 * 18 + 1 blocks."""


@pytest.mark.parametrize(("ranks_of", "rows"), [(2, ROWS), (4, ROWS), (8, FEW_ROWS)])
def test_vllms_kernel_has_the_bits_of_the_trainers_sum_at_every_size(monkeypatch, ranks_of, rows):
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
        cases = products_of_ranks(device, ranks_of, [(n, 4096) for n in rows])
        cases += [[model_like.activations(n, 4096, device) for _ in range(ranks_of)] for n in rows]
        for parts in cases:
            results = [torch.full_like(part, torch.nan) for part in parts]
            copies = [buffer.view(torch.bfloat16)[: part.numel()] for buffer, part in zip(buffers, parts, strict=True)]
            copies = [place.view(part.shape).copy_(part) for place, part in zip(copies, parts, strict=True)]
            torch.cuda.synchronize()
            # One kernel a stream: a kernel must not be queued after one that waits for it.
            for rank, stream, part, out in zip(ranks, streams, copies, results, strict=True):
                with torch.cuda.stream(stream):
                    ops.all_reduce(rank, part, out, 0, 0)
            torch.cuda.synchronize()
            expected = kernels.sum_of_ranks(parts)
            assert all(torch.equal(out, expected) for out in results), tuple(expected.shape)
    finally:
        for rank in ranks:
            ops.dispose(rank)
