# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The operator of a gated delta net in vLLM's forward context, step by step. Whole engines run it in
test_exact_rollout_on_cpu.py."""

from types import SimpleNamespace

import pytest
import torch

from jetrl_verl import kernels
from jetrl_verl.rollout import register, vllm_compat

LAYER, KEYS, VALUES, BLOCK = "layers.0.linear_attn", 1, 2, 64
CHANNELS = (2 * KEYS + VALUES) * 128
LENGTHS = (70, 1, 9, 130)
"""Tokens of the requests, prompt and response."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def engine(cpu_platform, monkeypatch):
    """A layer's states and its builder, as vLLM has them; ``run`` runs the operator for parts of requests."""
    register.register()
    from jetrl_verl.rollout import delta_net

    attention = SimpleNamespace(conv1d=SimpleNamespace(weight=normal(CHANNELS, 1, 4).bfloat16()))
    attention.A_log, attention.dt_bias = normal(VALUES), normal(VALUES).bfloat16()
    # States of one page one after the other, and NaN where nothing has been written.
    pages = torch.full((12, 3 * CHANNELS // 2 + VALUES * 193 * 128), torch.nan)
    conv, state = pages.split([3 * CHANNELS // 2, VALUES * 193 * 128], dim=1)
    attention.kv_cache = conv.view(torch.bfloat16).unflatten(1, (3, -1)), state.unflatten(1, (VALUES, 193, 128))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8), cache_config=SimpleNamespace(mamba_cache_mode="none")
    )
    builder = delta_net.RequestsBuilder(SimpleNamespace(block_size=BLOCK), [LAYER], config, torch.device("cpu"))
    for buffer in (value for value in vars(builder).values() if isinstance(value, torch.Tensor)):
        buffer.fill_(-7)  # as vLLM's sleep leaves it
    context = SimpleNamespace(attn_metadata=None, no_compile_layers={LAYER: attention})
    monkeypatch.setattr(vllm_compat, "get_forward_context", lambda: context)

    def metadata(pages: list[int], computed: list[int], new: list[int], tokens: int):
        starts, before = torch.tensor([0, *new]).cumsum(0).int(), torch.tensor(computed).int()
        tensors = dict(query_start_loc=starts, seq_lens=before + starts.diff())
        tensors["block_table_tensor"] = torch.tensor(pages, dtype=torch.int32)[:, None]
        step = SimpleNamespace(num_reqs=len(new), num_actual_tokens=tokens, max_query_len=max(new), **tensors)
        return builder.build(0, step)

    def run(rows: list[torch.Tensor], requests) -> torch.Tensor:
        context.attn_metadata = None if requests is None else {LAYER: requests}
        out = torch.full((len(rows[0]), VALUES, 128), torch.nan, dtype=torch.bfloat16)
        with torch.no_grad():
            delta_net.delta_net(*rows, out, LAYER)
        return out

    return SimpleNamespace(layer=attention, pages=pages, metadata=metadata, run=run)


TOTAL = sum(LENGTHS)
INPUTS = [normal(TOTAL, CHANNELS).bfloat16(), normal(TOTAL, VALUES), normal(TOTAL, VALUES).roll(1, dims=0)]
"""qkv, b and a of all tokens, request after request."""


@pytest.mark.parametrize("budget", [1, 13, 64, 512])
def test_steps_of_any_cut_have_the_bits_of_whole_sequences(engine, budget):
    """Requests advance by up to ``budget`` tokens in a step that they share, of every length from one on."""
    parts, layer = list(zip(*(x.split(LENGTHS) for x in INPUTS), strict=True)), engine.layer
    starts, done = torch.tensor([0, *LENGTHS]).cumsum(0).int(), [0] * len(LENGTHS)
    with torch.no_grad():
        qkv = kernels.causal_conv1d(INPUTS[0], layer.conv1d.weight[:, 0], starts)
        expected = kernels.gated_delta_rule(qkv, *INPUTS[1:], layer.A_log, layer.dt_bias, starts).split(LENGTHS)
    while running := [r for r, length in enumerate(LENGTHS) if done[r] < length]:
        left, new = budget, []
        for r in running:  # as vLLM: a token for each, the rest of the budget for the first that has more
            new.append(min(max(left - len(running) + len(new) + 1, 1), LENGTHS[r] - done[r]))
            left -= new[-1]
        now = [[x[done[r] : done[r] + n] for x in parts[r]] for r, n in zip(running, new, strict=True)]
        rows = [torch.cat(of_requests) for of_requests in zip(*now, strict=True)]
        requests = engine.metadata([r + 3 for r in running], [done[r] for r in running], new, sum(new))
        for r, n, out in zip(running, new, engine.run(rows, requests).split(new), strict=True):
            assert torch.equal(out, expected[r][done[r] : done[r] + n])
            done[r] += n
    assert engine.pages[:3].isnan().all(), "a page of no request"


@pytest.mark.parametrize("hit", [64, 80])
def test_a_copied_page_continues_anywhere_in_a_chunk(engine, hit):
    """As vLLM copies a state that a prefix hit reads."""
    rows, page = [x[-130:] for x in INPUTS], engine.metadata
    whole = engine.run(rows, page([3], [0], [130], 130))
    engine.run([x[:hit] for x in rows], page([4], [0], [hit], hit))
    engine.pages[5] = engine.pages[4]
    engine.run([x[:9] for x in rows], page([4], [hit], [9], 9))
    rest = engine.run([x[hit:] for x in rows], page([5], [hit], [130 - hit], 130 - hit))
    assert torch.equal(rest, whole[hit:])


def test_padded_rows_are_zero_and_write_nothing(engine):
    """A CUDA graph of 8 decodes with 4 requests, of which one has one token in all."""
    rows = [torch.cat([x[:4], torch.full_like(x[:4], torch.nan)]) for x in INPUTS]
    padded = engine.metadata([3, 4, 5, 6, 0, 0, 0, 0], [0] * 8, [1, 1, 1, 1, 0, 0, 0, 0], tokens=8)
    assert padded.slots.tolist() == [3, 4, 5, 6, -1, -1, -1, -1] and padded.cu_seqlens.tolist() == list(range(9))
    out = engine.run(rows, padded)
    assert torch.equal(out[:4], engine.run([x[:4] for x in rows], engine.metadata([7, 8, 9, 10], [0] * 4, [1] * 4, 4)))
    assert not out[4:].any() and engine.pages[[0, 1, 2, 11]].isnan().all()
    # A graph reads where it was captured.
    again = engine.metadata([9], [5], [1], tokens=1)
    for name in ("slots", "computed", "cu_seqlens"):
        assert getattr(again, name).data_ptr() == getattr(padded, name).data_ptr()
    # A mixed step in graphs of pieces is padded behind its last request.
    out = engine.run([x[:8] for x in rows], engine.metadata([3, 4], [0, 0], [1, 2], tokens=3))
    assert out[:3].isfinite().all() and not out[3:].any()
    assert not engine.run(rows, None).any(), "vLLM's memory profile"
