# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The draw on a GPU: tokens of the softmax, the trainer's log-probabilities bit for bit, no synchronization."""

import pytest
import torch
from test_draw_on_cpu import chi_square

from jetrl_verl import kernels

VOCABULARY = 151936


def rows_of(count: int, columns: int = VOCABULARY, deviation: float = 1.3) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(count + columns)
    return deviation * torch.randn(count, columns, generator=generator, device="cuda")


def bits(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.empty((2, count), dtype=torch.int64, device="cuda").random_(generator=generator)


@pytest.mark.parametrize("count", [1, 64, 256])
@pytest.mark.parametrize("columns", [VOCABULARY, 128256, 99])
def test_log_probs_match_the_trainer_and_ranks_are_counted(count, columns):
    for deviation in (1.3, 6.0):  # random weights, and a nearly deterministic policy
        logits = rows_of(count, columns, deviation)
        logits[:, columns - 5 :] = -torch.inf
        before, temperature = logits.clone(), torch.linspace(0.4, 1.6, count).cuda()
        temperature[count // 2 :] = 1.0
        tokens, normalized = kernels.draw_tokens(logits, temperature, *bits(count))
        got, ranks = kernels.drawn_log_probs(logits, tokens, temperature, normalized)
        assert torch.equal(logits, before)
        assert ((tokens >= 0) & (tokens < columns - 5)).all()
        assert torch.equal(got, kernels.log_probs(logits, tokens[:, None], temperature))
        with torch.enable_grad():
            trained = kernels.log_probs(logits.clone().requires_grad_(), tokens[:, None], temperature)
        assert torch.equal(got, trained.detach())
        assert torch.equal(ranks, (logits >= logits.gather(1, tokens[:, None])).sum(dim=1))


def test_tokens_and_log_probs_do_not_depend_on_the_batch():
    logits, temperature = rows_of(300), torch.linspace(0.4, 1.6, 300).cuda()
    seeds, counters = bits(300)
    tokens, normalized = kernels.draw_tokens(logits, temperature, seeds, counters)
    of_all, _ = kernels.drawn_log_probs(logits, tokens, temperature, normalized)
    wide = torch.zeros(300, VOCABULARY + 7, device="cuda")
    wide[:, 3:-4] = logits
    for some in ([17], list(range(0, 300, 7)), list(range(299, -1, -1))):
        for rows in (logits[some], wide[some][:, 3:-4]):
            again, of = kernels.draw_tokens(rows, temperature[some], seeds[some], counters[some])
            assert torch.equal(again, tokens[some])
            assert torch.equal(kernels.drawn_log_probs(rows, again, temperature[some], of)[0], of_all[some])


def test_the_cpu_draws_the_same_tokens():
    """Except where a uniform number falls between two roundings of cumulative FP32 sums: 4e-4 of the rows."""
    count, columns = 200, 20000
    logits, temperature, (seeds, counters) = rows_of(count, columns), torch.full((count,), 0.8).cuda(), bits(count)
    tokens, _ = kernels.draw_tokens(logits, temperature, seeds, counters)
    on_cpu, _ = kernels.draw_tokens(logits.cpu(), temperature.cpu(), seeds.cpu(), counters.cpu())
    assert (tokens.cpu() != on_cpu).sum() <= 2


def test_tokens_follow_the_softmax():
    """Eleven and 63 degrees of freedom: above 50 and 150 have a probability below 1e-6. One row, drawn many times."""
    count = 200_000
    row = 2 * torch.randn(12, generator=torch.Generator().manual_seed(3)).cuda()
    temperature = torch.full((count,), 0.7, device="cuda")
    tokens, _ = kernels.draw_tokens(row.expand(count, -1), temperature, *bits(count))
    assert chi_square(tokens, (row.double() / 0.7).softmax(0)) < 50
    assert chi_square(tokens, (row.double() / 0.735).softmax(0)) > 100
    row = rows_of(1)[0]
    tokens, _ = kernels.draw_tokens(row.expand(count, -1), temperature, *bits(count, seed=1))
    shares = (row.double() / 0.7).softmax(0)
    for groups in (torch.arange(VOCABULARY).cuda() % 64, torch.arange(VOCABULARY).cuda() * 64 // VOCABULARY):
        of_groups = torch.zeros(64, dtype=torch.float64, device="cuda").index_add_(0, groups, shares)
        assert chi_square(groups[tokens], of_groups) < 150
    order = row.argsort(descending=True).argsort() * 64 // VOCABULARY  # by rank
    of_groups = torch.zeros(64, dtype=torch.float64, device="cuda").index_add_(0, order, shares)
    counts = torch.bincount(order[tokens], minlength=64).double()
    expected = of_groups * count
    enough = expected > 5
    assert ((counts - expected)[enough] ** 2 / expected[enough]).sum() < 150


def test_each_replay_of_a_graph_draws_new_tokens():
    logits, temperature = rows_of(64), torch.ones(64, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.empty((2, 64), dtype=torch.int64, device="cuda").random_()
        tokens, normalized = kernels.draw_tokens(logits, temperature, *random)
        return tokens, kernels.drawn_log_probs(logits, tokens, temperature, normalized)[0]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, got = step()
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        graph.replay()
        assert torch.equal(got, kernels.log_probs(logits, tokens[:, None], temperature))
        seen.append(tokens.clone())
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    graph.replay()
    assert not torch.equal(tokens, seen[2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_softmax_gives_a_token_and_nan(value):
    logits = rows_of(3)
    logits[1] = value
    logits[2, 140_000] = value if value != float("-inf") else float("nan")
    tokens, normalized = kernels.draw_tokens(logits, torch.ones(3, device="cuda"), *bits(3))
    got, _ = kernels.drawn_log_probs(logits, tokens, torch.ones(3, device="cuda"), normalized)
    assert got[0].isfinite().all() and got[1:].isnan().all()
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
