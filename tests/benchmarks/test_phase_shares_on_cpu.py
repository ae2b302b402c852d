# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/phase_shares_on_gpu.py on a CPU: the trainer's phases of a small shape; engines only say their times."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEP_S = {"bf16": 0.4, "jet_fp8": 0.2, "jet_fp8_kv_fp8": 0.1}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import phase_shares_on_gpu

    monkeypatch.setattr(phase_shares_on_gpu, "PROMPT", 16)
    return phase_shares_on_gpu


@pytest.fixture
def caches(benchmark, monkeypatch) -> dict[str, int]:
    """Precision -> bytes of the cache that its engine was given."""
    found = {}

    class Engine:
        start_s, load_s = 1.0, 2.0

        def __init__(self, precision, config, settings, log):
            self.precision = precision
            found[precision] = settings.kv_cache

        def begin(self) -> None: ...

        def wait(self) -> bool:
            return True

        def generate(self, batch, length, new) -> tuple[float, int]:
            return 3.0, 0

        def decode_seconds(self, batch, length, new) -> float:
            return new * STEP_S[self.precision]

        def stop(self) -> None: ...

    monkeypatch.setattr(benchmark, "Engine", Engine)
    return found


def run(benchmark, monkeypatch, out: Path, *arguments: str) -> dict:
    sizes = [
        "--tiny",
        "--layers",
        "1",
        "--sequences",
        "2",
        "--tokens",
        "48",
        "--repetitions",
        "1",
        "--lengths",
        "8",
        "16",
    ]
    monkeypatch.setattr(sys, "argv", ["phase_shares_on_gpu.py", "--out", str(out), *sizes, *arguments])
    assert benchmark.main() == 0
    return json.loads(out.read_text())


def test_each_precision_has_a_row_for_each_length(benchmark, caches, monkeypatch, tmp_path, capsys):
    result = run(benchmark, monkeypatch, tmp_path / "phases.json")
    assert [(row["length"], row["precision"]) for row in result["steps"]] == [(n, p) for n in (8, 16) for p in STEP_S]
    for row in result["steps"]:
        assert row["rollout"] == pytest.approx(3.0 + row["length"] * STEP_S[row["precision"]])
        assert row["log_prob"] > 0 and row["update"] > row["log_prob"] and row["sync"] > 2.0
        assert row["step"] == pytest.approx(sum(row[phase] for phase in ("rollout", "log_prob", "update", "sync")))
    printed = capsys.readouterr().out
    assert "jet_fp8_kv_fp8" in printed and "to bf16" in printed


def test_a_cache_of_fp8_holds_as_many_tokens_in_fewer_bytes(benchmark, caches, monkeypatch, tmp_path):
    run(benchmark, monkeypatch, tmp_path / "phases.json", "--precisions", "jet_fp8", "jet_fp8_kv_fp8")
    assert list(caches) == ["jet_fp8", "jet_fp8_kv_fp8"]
    assert caches["jet_fp8_kv_fp8"] == pytest.approx(caches["jet_fp8"] * 129 / 256, abs=1)


def test_the_trainer_of_an_fp8_cache_attends_over_it(benchmark, monkeypatch):
    """Else its row would be the BF16 cache's."""
    from jetrl_verl import kernels

    asked = []
    stock = kernels.attention_fp8
    monkeypatch.setattr(kernels, "attention_fp8", lambda *call, **options: asked.append(1) or stock(*call, **options))
    config = benchmark.shape(1, tiny=True)
    options = benchmark.argparse.Namespace(precisions=["jet_fp8"], lengths=[8], tokens=24, repetitions=1)
    benchmark.training(config, options)
    assert not asked
    options.precisions = ["jet_fp8_kv_fp8"]
    benchmark.training(config, options)
    assert asked
