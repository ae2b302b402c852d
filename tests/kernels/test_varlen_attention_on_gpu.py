# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Packed attention of stock modules on a GPU, by FlashAttention 3 and by torch's FlashAttention 2: both are right."""

import pytest
import reference_operations as reference
import torch

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch, vllm_kernels
from jetrl_verl.kernels.attention import PackedAttention, flash_attention_3, flash_attention_backward
from jetrl_verl.kernels.varlen_attention import torch_flash_attention, varlen_attention

LENGTHS = (130, 1, 64, 1000, 1, 257)
BF16_STEP = 2**-8

FORWARDS = {"flash_attention_3": flash_attention_3, "torch": torch_flash_attention}


def operands(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads + head_dim)
    shapes = [(sum(lengths), count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_values_and_gradients_match_float32_sdpa(head_dim, heads, kv_heads, dtype, name):
    if name == "flash_attention_3" and (reason := vllm_kernels.no_flash_attention_3()):
        pytest.skip(reason)
    leaves, scale = operands(heads, kv_heads, head_dim, dtype), head_dim**-0.5
    exact = [x.detach().float().requires_grad_() for x in leaves]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    out = PackedAttention.apply(*leaves, cu, max(LENGTHS), scale, FORWARDS[name], flash_attention_backward)
    want = reference.attention(*exact, cu, scale)
    assert out.dtype == dtype and out.shape == want.shape
    gradient = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    out.backward(gradient)
    want.backward(gradient.float())
    assert (out.float() - want).norm() <= BF16_STEP * want.norm()
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == dtype
        assert (leaf.grad.float() - exact_leaf.grad).norm() <= 2 * BF16_STEP * exact_leaf.grad.norm()


def test_the_operation_runs_the_selected_forward():
    leaves = operands(8, 2, 128, torch.bfloat16)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    out = varlen_attention(*leaves, cu, max(LENGTHS), 128**-0.5)
    run = dispatch.lookup("varlen_attention", cu.device)
    expected, _ = run(*(x.detach() for x in leaves), cu, max(LENGTHS), 128**-0.5)
    assert torch.equal(out, expected)


def test_long_sequences_allocate_no_mask():
    """A mask [T, T] of 65,536 tokens would take 4 GiB at one byte each."""
    q, k, v = (torch.randn(65536, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 1, 1))
    cu = torch.tensor([0, 30000, 65536], device="cuda", dtype=torch.int32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert varlen_attention(q, k, v, cu, 35536, 128**-0.5).isfinite().all()
    assert torch.cuda.max_memory_allocated() - before < 2**30


OF_RANKS = (1000, 1, 333, 64, 129, 2048)
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


def of_rank(rank: int, ranks: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rank's operands after the exchange of train/sequence_parallel.py: views of one tensor, copied key heads."""
    copies = max(1, ranks // k.shape[1])
    parts = [x.repeat_interleave(n, dim=1).chunk(ranks, dim=1)[rank] for x, n in ((q, 1), (k, copies), (v, copies))]
    return torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)


def check_every_rank(attend, heads: int, kv_heads: int, head_dim: int, ranks: int) -> None:
    cu = torch.tensor([0, *OF_RANKS]).cumsum(0).to("cuda", torch.int32)
    whole = [x.detach() for x in operands(heads, kv_heads, head_dim, torch.bfloat16, OF_RANKS)]
    expected = attend(*whole, cu, max(OF_RANKS), head_dim**-0.5)
    for rank, part in enumerate(expected.chunk(ranks, dim=1)):
        got = attend(*of_rank(rank, ranks, *whole), cu, max(OF_RANKS), head_dim**-0.5)
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
    """Over a Ulysses rank's heads every bit is that of the call with all heads. The kernel packs the query heads of a
    key head into its tiles, so a rank's tile has other tokens."""
    check_every_rank(attend, heads, kv_heads, head_dim, ranks)
