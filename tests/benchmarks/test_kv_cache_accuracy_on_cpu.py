# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/kv_cache_accuracy.py compares: vLLM's FP8 attention as it is emulated, outliers, and the measures."""

import pytest
import torch
from tiny_models import tiny_model

from benchmarks import kv_cache_accuracy as benchmark

SCALE = 128**-0.5


@pytest.fixture
def operands():
    """Queries of four heads, keys and values of two, of 300 tokens: numbers that E4M3 holds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    return tuple(benchmark.with_scale(x, 1.0) for x in (q, k, v))


def test_equal_probabilities_are_exact_and_see_no_later_key(operands, monkeypatch):
    """All are 2^8, so a row is the mean of the values up to its own, whatever the blocks of keys and of queries."""
    monkeypatch.setitem(benchmark._AT_ONCE, "cpu", 2 * 4 * 96 * 100)
    q, k, v = operands
    found = benchmark.RULES["vLLM, 1.0"](torch.zeros_like(q), k, v, SCALE)
    counts = torch.arange(1, 301)[:, None]
    expected = (v.float().cumsum(dim=2) / counts).repeat_interleave(2, dim=1)
    assert torch.allclose(found, expected, rtol=0, atol=2**-18)


def test_what_is_rounded_of_probabilities_is_half_a_step_of_e4m3(operands):
    q, k, v = operands
    found, exact = (benchmark.RULES[name](q, k, v, SCALE) for name in ("vLLM, 1.0", "bf16"))
    # Three bits of mantissa, and below 2^-6 of 2^8 steps of 2^-9, of at most 300 keys.
    bound = benchmark.RULES["bf16"](q, k, v.abs(), SCALE) * 2**-4 + 300 * 2.0**-18 * v.float().abs().max()
    error = (found - exact).abs()
    assert (error <= bound).all() and error.max() > 1e-3
    # The first token has one key, whose probability is 1.
    assert torch.equal(found[:, :, 0], v[:, :, 0].float().repeat_interleave(2, dim=1))


def test_queries_are_rounded_too(operands):
    q, k, v = operands
    finer = q + q * 2**-5
    assert torch.equal(
        *(benchmark.RULES["vLLM, 1.0"](x, k, v, SCALE) for x in (finer, benchmark.with_scale(finer, 1.0)))
    )
    assert not torch.equal(*(benchmark.RULES["1.0"](x, k, v, SCALE) for x in (finer, q)))


def test_a_scale_of_vllms_calibration_is_of_the_whole_tensor(operands):
    q, k, v = operands
    assert benchmark.vllm_scales((q, k, v), True) == [
        x.abs().max().item() / bound for x, bound in zip((q, k, v), (200, 200, 100), strict=True)
    ]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_planted_outliers_leave_the_function_alone(family):
    model, ids = tiny_model(family).float(), torch.arange(40)[None] % 64
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        benchmark.plant_outliers(model)
        after = model(ids, use_cache=False).logits
    assert torch.allclose(before, after, atol=1e-4) and not torch.equal(before, after)


def test_a_rule_that_changes_nothing_measures_nothing_and_kl_is_of_the_whole_vocabulary(monkeypatch):
    monkeypatch.setattr(benchmark, "_LOGITS", 64 * 7)  # several pieces
    model, exact = tiny_model("qwen3"), torch.randn(2, 30, 256)
    assert all(not part.any() for part in benchmark.compared(model, exact, exact)[:2])
    other = exact + 0.1 * torch.randn_like(exact)
    error, kl, entropy, _ = benchmark.compared(model, exact, other)
    with torch.no_grad():
        ours, theirs = (torch.distributions.Categorical(logits=model.lm_head(x)) for x in (exact, other))
    assert torch.allclose(kl, torch.distributions.kl_divergence(ours, theirs), atol=1e-5)
    assert torch.allclose(entropy, ours.entropy(), atol=1e-4) and error.any()


def test_numbers_by_position_are_of_their_tokens():
    error = torch.zeros(1, 5000)
    error[:, 4096:] = 3.0
    numbers = benchmark.measured(error, error, error, error + 1)
    assert {name: part["rms"] for name, part in numbers["by_position"].items()} == {
        "0-1024": 0.0,
        "1024-4096": 0.0,
        "4096-5000": 3.0,
    }
    assert numbers["entropy"] == 1 and numbers["largest"] == 3


def test_a_context_of_pieces_is_sampled_by_the_model():
    model = tiny_model("qwen3").eval()
    ids = benchmark.sample(model, 2, 50, 20)
    assert ids.shape == (2, 50) and ids.max() < 64
    assert torch.equal(ids, benchmark.sample(model, 2, 50, 20))
