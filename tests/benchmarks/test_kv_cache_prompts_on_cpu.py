# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/kv_cache_prompts_on_gpu.py on a CPU at small shapes; FlashAttention 3 is the package's own attention."""

import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from jetrl_verl import kernels
from jetrl_verl.kernels.dispatch import lookup
from jetrl_verl.tools.bench.timing import Spread

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = {"2 x 40": (2, 0, (40,)), "in chunks": (1, 0, (20, 20, 7)), "behind 33": (1, 33, (16,))}
PACKED = {"17 + 5": [17, 5]}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tests/tools/bench"))
    import kv_cache_prompts_on_gpu as found

    def flash_attention(q, cache, lengths, table, longest, num_splits, cu_queries, most_queries):
        assert int(lengths.max()) == longest and int(cu_queries.diff().max()) == most_queries
        keys, values = (x.transpose(1, 2) for x in cache.unbind(1))
        return kernels.paged_attention(q, keys, values, cu_queries, lengths, table, found.SCALE)

    monkeypatch.setattr(found, "flash_attention", flash_attention)
    monkeypatch.setattr(found, "flash_attention_packed", lookup("attention", torch.device("cpu")))
    monkeypatch.setattr(found, "PROMPTS", PROMPTS)
    monkeypatch.setattr(found, "PACKED", PACKED)
    return found


def run(benchmark, out: Path) -> tuple[int, dict]:
    from bench_fakes import fake_machine

    status = benchmark.run(fake_machine(), out, Console(file=sys.stdout, width=200))
    return status, json.loads(out.read_text())


def test_every_shape_is_timed_beside_flash_attention(benchmark, tmp_path, capsys):
    status, result = run(benchmark, tmp_path / "prompts.json")
    assert status == 0 and not result["wrong"] and result["build"]["commit"]
    cases = [("prompts", shape, "fp8") for shape in PROMPTS]
    cases += [(what, "17 + 5", of) for what in ("forward", "backward") for of in ("fp8", "fp8, recomputed")]
    assert [(record["what"], record["shape"], record["of"]) for record in result["records"]] == cases
    names = {"prompts": {"fp8", "bf16", "bf16, any split"}}
    of_training = {"fp8", "fp8, recomputed", "bf16", "flash attention 3"}
    for record in result["records"]:
        assert set(record["us"]) == names.get(record["what"], of_training)
        # Each takes a microsecond of the clock that counts events.
        assert record["speed"] == 1.0 and record["met"]
    assert "bars met: 7 of 7" in capsys.readouterr().out


@pytest.mark.parametrize(("of", "wrong_ones"), [("prompts", ["fp8"]), ("forward", ["fp8", "fp8, recomputed"])])
def test_other_bits_fail(benchmark, tmp_path, monkeypatch, of, wrong_ones):
    name = {"prompts": "chunk_attention", "forward": "attention_fp8"}[of]
    stock = getattr(kernels, name)

    def wrong(*call, **options):
        if of == "forward":
            return stock(*call, **options) * 2
        stock(*call)
        call[-1][0, 0, 0] += 1

    monkeypatch.setattr(kernels, name, wrong)
    status, result = run(benchmark, tmp_path / "prompts.json")
    shapes = {"prompts": list(PROMPTS), "forward": list(PACKED)}[of]
    expected = [f"{of} of {shape}: {name} and bf16 have other bits" for shape in shapes for name in wrong_ones]
    assert status == 1 and result["wrong"] == expected


def test_a_bar_is_held_against_the_fastest_other(benchmark, capsys):
    times = {name: Spread(us, us, us) for name, us in (("fp8", 100.0), ("bf16", 95.0), ("bf16, any split", 89.0))}
    record = benchmark.judged("prompts", "2 x 40", times, ("bf16", "bf16, any split"), 0.90)
    assert record["against"] == "bf16, any split" and record["speed"] == pytest.approx(0.89) and not record["met"]
    assert benchmark.judged("prompts", "2 x 40", times, ("bf16",), 0.90)["met"]
    benchmark.report(record, Console(file=sys.stdout, width=200))
    assert "fp8: 0.890 of bf16, any split's speed, bar 0.90: MISSED" in capsys.readouterr().out


def test_backward_gives_every_gradient(benchmark):
    """What is timed as a backward depends on what is kept: the same gradients where the same is read."""
    forward, backward = benchmark.training([17, 5], torch.device("cpu"))
    ours, recomputed, theirs = (backward[name]() for name in ("fp8", "fp8, recomputed", "bf16"))
    assert all(torch.equal(a, b) for a, b in zip(recomputed, theirs, strict=True))
    assert [x.shape for x in ours] == [(22, 32, 128), (22, 8, 128), (22, 8, 128)]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(bool(x.abs().sum() > 0) for x in ours)
