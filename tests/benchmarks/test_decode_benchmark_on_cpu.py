# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/decode_on_gpu.py gives each engine: bytes of a cache, and which engines live at once."""

import math
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import decode_on_gpu

    return decode_on_gpu


def test_a_token_of_an_fp8_cache_has_129_bytes_a_head_for_256(benchmark):
    config = benchmark.shape()
    sizes = {name: benchmark.token_bytes(name, config) for name in benchmark.PRECISIONS["qwen3_8b"]}
    assert sizes.pop("jet_fp8_kv_fp8") == 36 * 8 * 2 * 129
    assert set(sizes.values()) == {36 * 8 * 2 * 256}


def test_a_cache_holds_the_largest_case_with_what_is_decoded(benchmark):
    config, cases = benchmark.shape(), [(256, 384), (32, 16384)]
    for precision in ("bf16", "jet_fp8_kv_fp8"):
        tokens = benchmark.cache_of(precision, config, cases, 64) / benchmark.token_bytes(precision, config)
        assert 32 * (16384 + 64) < tokens < 1.2 * 32 * (16384 + 64)


def test_the_weights_of_a_mixture_are_counted_without_a_tensor_of_them(benchmark):
    config = benchmark.mixture_shape()
    sizes = {name: benchmark.weight_bytes(name, config) for name in ("bf16", "jet_fp8")}
    assert sizes["bf16"] == pytest.approx(2 * 30.5e9, rel=0.01) and sizes["jet_fp8"] < 0.53 * sizes["bf16"]


def test_engines_live_at_once_where_they_fit_in_order(benchmark):
    needs = {"a": 30 * GIB, "b": 30 * GIB, "c": 105 * GIB, "d": 10 * GIB}
    assert benchmark.groups(needs, math.inf) == [["a", "b", "c", "d"]]
    assert benchmark.groups(needs, 140 * GIB) == [["a", "b"], ["c"], ["d"]]
    assert benchmark.groups(needs, 1) == [["a"], ["b"], ["c"], ["d"]]
