# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The reference of the draw: random numbers of Philox, tokens of the softmax.

The Triton kernels draw the same tokens (operations_interpreter_cases.py).
"""

import pytest
import torch

from jetrl_verl import kernels
from jetrl_verl.kernels.draw import reference_uniforms

TEMPERATURE = 0.7


def chi_square(tokens: torch.Tensor, shares: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(shares)).double()
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draws(logits: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    bits = torch.randint(-(2**63), 2**63 - 1, (2, count), generator=torch.Generator().manual_seed(seed))
    rows = logits.expand(count, -1)
    return kernels.draw_tokens(rows, torch.full((count,), TEMPERATURE), *bits)[0]


def test_random_bits_match_philox():
    """First and third word of Random123's known answer for a counter and a key of zeros; then evenly spread."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert (reference_uniforms(zero, zero) * 2.0**32).long().tolist() == [[0x6627E8D5, 0xBC57AC4C]]
    uniforms = reference_uniforms(torch.zeros(20000, dtype=torch.int64), torch.arange(20000)).flatten()
    assert abs(float(uniforms.mean()) - 0.5) < 5 * (1 / 12 / 40000) ** 0.5
    assert abs(float(uniforms.var()) - 1 / 12) < 1e-3 and uniforms.unique().numel() == 40000
    seven = reference_uniforms(zero, zero + 7)
    assert torch.equal(reference_uniforms(zero, zero + 2**32 + 7), seven), "32 bits of a counter"
    assert not torch.equal(reference_uniforms(zero + 2**32, zero + 7), seven), "64 bits of a seed"


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_follow_the_softmax(seed):
    """Eleven degrees of freedom: above 50 has a probability below 1e-6, and a temperature 5% off does not pass."""
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(3))
    tokens = draws(logits, 100000, seed)
    assert chi_square(tokens, (logits.double() / TEMPERATURE).softmax(0)) < 50
    assert chi_square(tokens, (logits.double() / (1.05 * TEMPERATURE)).softmax(0)) > 100


def test_chunks_are_drawn_by_their_mass_and_columns_within_them():
    """Three chunks, the last one partial, with mass on few columns at their edges."""
    logits = torch.full((8200,), -torch.inf)
    places = torch.tensor([0, 4095, 4096, 6000, 8191, 8192, 8199])
    logits[places] = torch.tensor([0.0, 1.0, -1.0, 0.3, 0.5, -0.4, 1.2])
    tokens = draws(logits, 3000, 5)
    indices = torch.searchsorted(places, tokens)
    assert torch.equal(places[indices], tokens), "of masked columns none"
    assert chi_square(indices, (logits[places].double() / TEMPERATURE).softmax(0)) < 40


def test_tokens_and_log_probs_depend_on_their_row_alone():
    logits = 3 * torch.randn(9, 5000, generator=torch.Generator().manual_seed(1))
    before, seeds, counters = logits.clone(), torch.arange(9), torch.arange(9) * 5
    temperature = torch.linspace(0.3, 2, 9)
    tokens, normalized = kernels.draw_tokens(logits, temperature, seeds, counters)
    got, ranks = kernels.drawn_log_probs(logits, tokens, temperature, normalized)
    assert torch.equal(logits, before)
    assert torch.equal(got, kernels.log_probs(logits, tokens[:, None], temperature))
    assert torch.equal(ranks, (logits >= logits.gather(1, tokens[:, None])).sum(dim=1))
    for rows in ([4], [8, 0, 4], [1, 2, 3, 5, 6, 7, 8]):
        again, of = kernels.draw_tokens(logits[rows], temperature[rows], seeds[rows], counters[rows])
        assert torch.equal(again, tokens[rows])
        assert torch.equal(kernels.drawn_log_probs(logits[rows], again, temperature[rows], of)[0], got[rows])
    others, _ = kernels.draw_tokens(logits, temperature, seeds, counters + 1)
    assert not torch.equal(others, tokens)


def test_drawing_from_an_empty_batch():
    empty = torch.empty(0, dtype=torch.int64)
    tokens, normalized = kernels.draw_tokens(torch.empty(0, 9), torch.empty(0), empty, empty)
    got, ranks = kernels.drawn_log_probs(torch.empty(0, 9), tokens, torch.empty(0), normalized)
    assert tokens.shape == (0,) and got.shape == (0, 1) and ranks.shape == (0,)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"logits": torch.zeros(2, 4).bfloat16()}, TypeError, "logits has type torch.bfloat16, expected torch.float32"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, TypeError, "seeds has type torch.int32, expected torch.int64"),
        ({"temperature": torch.ones(1)}, ValueError, r"temperature has shape \(1,\), expected \(2,\)"),
    ],
)
def test_wrong_inputs_raise(changed, error, message):
    given = dict(logits=torch.zeros(2, 4), temperature=torch.ones(2))
    given |= dict.fromkeys(("seeds", "counters"), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(error, match=message):
        kernels.draw_tokens(**(given | changed))
