# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a Ulysses rank's heads on a GPU matches the call with all heads, bit for bit.

The kernel packs the query heads of a key head into its tiles, so a rank's tile has other tokens.
"""

import pytest
import torch

from jetrl_verl import kernels
from jetrl_verl.kernels.varlen_attention import varlen_attention

LENGTHS = (1000, 1, 333, 64, 129, 2048)
"""Sequences that end within tiles of tokens, and one of a single token."""

SPLITS = [
    (32, 8, 2),
    (32, 8, 4),
    (32, 8, 8),
    (32, 4, 8),  # two ranks share a key head: 4 query heads to it instead of 8
    (32, 8, 16),
    (32, 8, 32),  # one query head and one key head, which are not packed
    (28, 4, 4),
    (64, 8, 8),
]
"""(query heads, key heads, ranks)."""


def operands(heads: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads + kv_heads + head_dim)
    shapes = [(sum(LENGTHS), count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes]


def of_rank(rank: int, ranks: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rank's operands after the exchange of train/sequence_parallel.py: views of one tensor, copied key heads."""
    copies = max(1, ranks // k.shape[1])
    parts = [x.repeat_interleave(n, dim=1).chunk(ranks, dim=1)[rank] for x, n in ((q, 1), (k, copies), (v, copies))]
    return torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)


def check_every_rank(attend, heads: int, kv_heads: int, head_dim: int, ranks: int) -> None:
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    whole = operands(heads, kv_heads, head_dim)
    expected = attend(*whole, cu, max(LENGTHS), head_dim**-0.5)
    for rank, part in enumerate(expected.chunk(ranks, dim=1)):
        got = attend(*of_rank(rank, ranks, *whole), cu, max(LENGTHS), head_dim**-0.5)
        assert got.shape == part.shape and torch.equal(got, part), f"rank {rank} of {ranks}"


@pytest.mark.parametrize(
    ("attend", "head_dim"),
    [
        *((kernels.attention, head_dim) for head_dim in kernels.HEAD_DIMS),
        (kernels.attention_fp8, 128),
        (varlen_attention, 96),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), SPLITS)
def test_a_ranks_heads(heads, kv_heads, ranks, attend, head_dim):
    check_every_rank(attend, heads, kv_heads, head_dim, ranks)
