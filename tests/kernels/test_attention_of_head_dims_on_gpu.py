# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 on Hopper: a query's bits are those of the trainer's packed sequences in
every chunk of a prompt, in decode steps, in pages of any size, and in CUDA graphs with a plan made ahead."""

import pytest
import torch
from tensors import different, normal, packed

from jetrl_verl import kernels
from jetrl_verl.kernels.probe_inputs import Variant
from jetrl_verl.kernels.vllm_kernels import stated_queries
from jetrl_verl.sync.operations_probe import stated_operations

LENGTHS = (9000, 1, 2, 63, 64, 65, 79, 80, 81, 127, 128, 129, 160, 191, 192, 193, 577, 1024, 2049, 4160)
"""Around the keys of a block (64 and 80, 128, 192) and a page."""
GROUPS = (1, 2, 4, 6, 7, 8)
PAGES = (16, 64, 528, 560, 576, 640, 832)
"""Tokens of a page: vLLM's own, those of hybrids, and multiples of 80 and 128, which FlashAttention copies whole."""
CHANGES = {
    "random": lambda x: x,
    "powers": lambda x: x * 2.0 ** (torch.arange(len(x), device=x.device) % 45 - 40)[:, None, None].to(x.dtype),
    "peaked": lambda x: x * 16,
    "equal": lambda x: x[:1].expand_as(x).contiguous(),
}


class Sequences:
    """Packed sequences, and the same in pages of any order. ``heads_first``: vLLM 0.29's layout, not 0.24's."""

    def __init__(self, head_dim, group, page_size, change="random", heads_first=False, kv_heads=2, fill=0.0):
        self.page_size, self.scale = page_size, head_dim**-0.5
        self.q = CHANGES[change](normal(sum(LENGTHS), (group + 2) * kv_heads, head_dim, device="cuda"))[
            :, : group * kv_heads
        ]
        shape = sum(LENGTHS), kv_heads, head_dim
        self.k, self.v = (CHANGES[change](normal(*shape, seed=i, device="cuda")) for i in (2, 3))
        self.starts = packed(*LENGTHS).cuda()
        counts = [-(-n // page_size) for n in LENGTHS]
        numbers = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(torch.int32).split(counts)
        self.table = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True).cuda()
        self.owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).cuda()
        self.position = torch.arange(len(self.q), device="cuda") - self.starts.long()[self.owner]
        slots = self.table[self.owner, self.position // page_size].long() * page_size + self.position % page_size
        self.pages = torch.full((sum(counts), 2, page_size, kv_heads, head_dim), fill, dtype=torch.bfloat16).cuda()
        for i, x in enumerate((self.k, self.v)):
            self.pages[slots // page_size, i, slots % page_size] = x
        if heads_first:
            self.pages = self.pages.permute(0, 3, 2, 1, 4).contiguous().permute(0, 3, 2, 1, 4)

    def whole(self) -> torch.Tensor:
        return kernels.attention(self.q, self.k, self.v, self.starts, max(LENGTHS), self.scale)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        lengths, table = (self.position[tokens] + 1).to(torch.int32), self.table[self.owner[tokens]]
        return kernels.decode_attention_bf16(self.q[tokens], *self.pages.unbind(1), lengths, table, self.scale)

    def chunks(self, requests: list[tuple[int, int, int]], planned: bool = False):
        """(Function that attends as vLLM's backend does, its result, tokens) of (sequence, first, end) each."""
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

        spans = [torch.arange(first, end, device="cuda") + self.starts[s] for s, first, end in requests]
        tokens, out = torch.cat(spans), torch.empty_like(self.q[torch.cat(spans)])
        q, table = self.q[tokens], self.table[[s for s, *_ in requests]]
        cu, lengths = (
            packed(*map(len, spans)).cuda(),
            torch.tensor([end for *_, end in requests], dtype=torch.int32).cuda(),
        )
        most, longest = stated_queries(q.shape[2], max(map(len, spans))), max(LENGTHS)
        plan = None
        if planned:
            shape = len(requests), most, longest, q.shape[1], self.k.shape[1], q.shape[2]
            kind = dict(page_size=self.page_size, causal=True, num_splits=1, qkv_dtype=torch.bfloat16)
            plan = get_scheduler_metadata(*shape, cache_seqlens=lengths, cu_seqlens_q=cu, **kind)

        def run() -> None:
            flash_attn_varlen_func(
                *(q, *self.pages.unbind(1), most, cu, longest),
                seqused_k=lengths,
                block_table=table,
                softmax_scale=self.scale,
                causal=True,
                out=out,
                scheduler_metadata=plan,
                num_splits=1,
                fa_version=3,
            )

        run()
        return run, out, tokens


def cut(step: int) -> list[tuple[int, int, int]]:
    """Every sequence in chunks of ``step`` tokens, the long ones last."""
    chunks = [(s, first, min(first + step, n)) for s, n in enumerate(LENGTHS) for first in range(0, n, step)]
    return sorted(chunks, key=lambda chunk: chunk[2])


def some_tokens(sequences: Sequences) -> torch.Tensor:
    """1,500 tokens: all of short sequences, and those around the ends of blocks and pages."""
    near = [(sequences.position + 1) % block <= 2 for block in (64, 80, 128, 192)]
    chosen = torch.stack([*near, sequences.position > 8900]).any(0).nonzero().squeeze(1)
    return chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(1))[:1500].cuda()]


def check(sequences: Sequences, counts: tuple[int, ...], steps: tuple[int, ...]) -> torch.Tensor:
    """Batches of ``counts`` decodes and chunks of ``steps`` tokens have the bits of whole sequences, the result."""
    whole, tokens = sequences.whole(), some_tokens(sequences)
    for count in counts:
        assert different(sequences.decode(tokens[:count]), whole[tokens[:count]]) == 0, f"{count} decodes"
    for step in steps:
        _, out, of = sequences.chunks(cut(step))
        assert different(out, whole[of]) == 0, f"chunks of {step}"
    return whole


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", kernels.HEAD_DIMS)
def test_every_way_to_a_query_has_the_trainers_bits(head_dim, group, change):
    sequences = Sequences(head_dim, group, 16, change)
    whole = check(sequences, (1, 3, 64, 500, 1500), (7, 64, 100, 2048))
    assert whole.isfinite().all()
    mixed = [*((s, n - 1, n) for s, n in enumerate(LENGTHS) if n > 64), (0, 4000, 4333), (18, 2048, 2049)]
    _, out, of = sequences.chunks(mixed)
    assert different(out, whole[of]) == 0, "decodes next to a chunk"
    for s, n in enumerate(LENGTHS):  # each sequence alone, in a batch of few queries
        span = slice(first := int(sequences.starts[s]), first + n)
        operands = [x[span] for x in (sequences.q, sequences.k, sequences.v)]
        alone = kernels.attention(*operands, packed(n).cuda(), n, sequences.scale)
        assert different(alone, whole[span]) == 0, f"{n} tokens alone"


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 7), (64, 4), (128, 8), (256, 4), (256, 6), (256, 1)])
def test_no_bit_depends_on_pages(head_dim, group, page_size, heads_first):
    check(Sequences(head_dim, group, page_size, heads_first=heads_first), (1500,), (50, 512))


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_pages_of_up_to_64_tokens_may_hold_anything_after_a_request(head_dim, page_size):
    """Memory of a hybrid's states becomes pages of keys: bits of a state can be NaN."""
    check(Sequences(head_dim, 4, page_size, fill=torch.nan), (1500,), (100,))


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 7), (64, 1), (256, 4), (256, 6)])
def test_in_a_cuda_graph_with_a_plan_made_ahead(head_dim, group, step):
    sequences = Sequences(head_dim, group, 16)
    whole = sequences.whole()
    requests = [(s, n - min(step, n), n) for s, n in enumerate(LENGTHS)]
    run, out, of = sequences.chunks(requests, planned=True)
    assert different(out, whole[of]) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert different(out, whole[of]) == 0


@pytest.mark.parametrize("variant", [Variant(64, 64), Variant(), Variant(256, 256), Variant(256, 64, True)])
def test_the_contract_checks_probe_passes(variant):
    device = torch.device("cuda")
    trainer, rollout = (stated_operations(device, "shared", rollout=side, variant=variant) for side in (False, True))
    assert trainer == rollout
