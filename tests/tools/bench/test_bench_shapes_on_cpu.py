# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes and floors: what is multiplied for which model, and how fast it could be."""

import pytest
import torch

from jetrl_verl.tools.bench import BenchError, data
from jetrl_verl.tools.bench.shapes import DECODE, FP8_RATE, MODELS, TOKENS, WHAT, Problem, choose, problem_of, problems


def test_linears_follow_from_the_models_sizes():
    sizes = {"qwen3-8b": (4096, 12288, 32, 8), "llama-3.1-8b": (4096, 14336, 32, 8)}
    sizes |= {"qwen2.5-7b": (3584, 18944, 28, 4), "qwen2.5-32b": (5120, 27648, 40, 8)}
    for model, (hidden, intermediate, heads, kv_heads) in sizes.items():
        assert MODELS[model] == {
            "qkv": (128 * (heads + 2 * kv_heads), hidden),
            "o": (hidden, 128 * heads),
            "gate_up": (2 * intermediate, hidden),
            "down": (hidden, intermediate),
        }


def test_every_gemm_of_a_step_contracts_over_its_last_dimension():
    found = {(p.what, p.out): (p.m, p.n, p.k) for p in problems(["qwen3-8b"], WHAT, [4096], [8]) if p.layer == "qkv"}
    assert found == {
        ("fprop", "bf16"): (4096, 6144, 4096),
        ("dgrad", "bf16"): (4096, 4096, 6144),
        ("wgrad", "bf16"): (6144, 4096, 4096),
        ("wgrad", "fp32"): (6144, 4096, 4096),
        ("wgrad", "fp32+="): (6144, 4096, 4096),
        ("decode", "bf16"): (8, 6144, 4096),
    }


def test_models_that_share_a_shape_share_its_row():
    found = problems(["llama-3.1-8b", "qwen3-8b"], ["fprop"], [4096], [])
    assert [(p.model, p.layer) for p in found] == [
        ("qwen3-8b+llama-3.1-8b", "qkv"),
        ("qwen3-8b+llama-3.1-8b", "o"),
        ("qwen3-8b", "gate_up"),
        ("qwen3-8b", "down"),
        ("llama-3.1-8b", "gate_up"),
        ("llama-3.1-8b", "down"),
    ]
    everything = problems(list(MODELS), WHAT, TOKENS, DECODE)
    shapes = [(p.what, p.layer, p.m, p.n, p.k, p.out) for p in everything]
    assert len(shapes) == len(set(shapes)) == 14 * (4 + 4 + 3 * 4 + 10)


def test_the_floor_of_a_large_product_is_its_operations_and_of_a_small_one_its_bytes():
    large = Problem("fprop", "", "", 16384, 6144, 4096)
    assert large.floor(4.2e12) == (pytest.approx(1e6 * 2 * 16384 * 6144 * 4096 / FP8_RATE), "operations")
    small = Problem("decode", "", "", 1, 6144, 4096)
    bytes_ = 4096 + 6144 * 4096 + 4 * (1 + 48) * 32 + 2 * 6144
    assert small.bytes == bytes_ and small.floor(4.2e12) == (pytest.approx(1e6 * bytes_ / 4.2e12), "bytes")


def test_an_fp32_gradient_costs_its_bytes_and_an_added_one_twice_that():
    moved = [Problem("wgrad", "", "", 256, 384, 1000, out).bytes for out in ("bf16", "fp32", "fp32+=")]
    operands = (256 + 384) * 1000 + 4 * (256 + 384) * 8
    assert moved == [operands + size * 256 * 384 for size in (2, 4, 8)]


def test_one_shape_can_be_named():
    assert problem_of("dgrad/qwen3-8b/down/16384") == Problem("dgrad", "qwen3-8b", "down", 16384, 12288, 4096)
    for words, out in (("", "bf16"), ("/fp32", "fp32"), ("/fp32+=", "fp32+=")):
        named = problem_of(f"wgrad/qwen3-8b/o/8192{words}")
        assert (named.what, named.layer, named.k, named.out) == ("wgrad", "o", 8192, out)
    with pytest.raises(BenchError, match="no output 'fp8'; choose from bf16, fp32, fp32"):
        problem_of("wgrad/qwen3-8b/o/8192/fp8")
    for words in ("fprop/qwen3-8b/o", "fprop/qwen3-8b/o/many", "wgrad/qwen3-8b/o/1/fp32/x"):
        with pytest.raises(BenchError, match="is no shape; write what/model/layer/rows"):
            problem_of(words)
    with pytest.raises(BenchError, match="no layer 'k'; choose from qkv, o, gate_up, down"):
        problem_of("fprop/qwen3-8b/k/16")


def test_what_is_not_known_is_refused_with_what_is():
    with pytest.raises(BenchError, match="no model 'gpt'; choose from qwen3-8b, llama"):
        problems(["gpt"], WHAT, [1], [1])
    with pytest.raises(BenchError, match="no kind of GEMM named; choose from fprop, dgrad, wgrad, decode"):
        problems(["qwen3-8b"], [], [1], [1])
    for tokens, batches in (([0], [1]), ([1], [4, -1]), ([], [1]), ([1], [])):
        with pytest.raises(BenchError, match="give numbers from 1 on"):
            problems(["qwen3-8b"], WHAT, tokens, batches)
    assert choose(["b", "a"], ["a", "b", "c"], "letter") == ["a", "b"]


def test_activations_have_few_large_channels_and_heavy_tails():
    torch.manual_seed(0)
    x = data.activations(2048, 1024, torch.device("cpu"))
    assert x.dtype == torch.bfloat16 and x.shape == (2048, 1024)
    level = x.float().pow(2).mean(0).sqrt()
    usual = level.median()
    large = level > 10 * usual
    assert large.sum() == 2 and bool((level[large] / usual > 15).all()) and bool((level[large] / usual < 80).all())
    rest = x.float()[:, ~large]
    assert (rest.pow(4).mean() / rest.pow(2).mean() ** 2) > 12  # a normal variable has 3
    assert data.gradients(64, 64, torch.device("cpu")).float().std() < 0.01
