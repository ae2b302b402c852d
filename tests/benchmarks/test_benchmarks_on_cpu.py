# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every script prints its help; kernels.py checks the results that it times."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


RUN_ELSEWHERE = {"kernels", "weight_sync", "layer_host_time"}
"""Scripts that another test runs, here or in test_host_work_on_cpu.py."""


def scripts() -> list[str]:
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    names = {file.stem for file in files if '__name__ == "__main__"' in file.read_text()}
    return sorted(names - RUN_ELSEWHERE)


@pytest.mark.parametrize("name", scripts())
def test_the_help_of_every_script_is_printed(name):
    words = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_kernels_measures_and_checks_every_operation(monkeypatch, tmp_path):
    """On a CPU with small shapes and without a clock."""
    from benchmarks import kernels as benchmark

    monkeypatch.setattr(benchmark, "microseconds", lambda calls, rounds: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(benchmark, "MODELS", {"qwen3-30b-a3b": {"qkv": (384, 256)}})
    monkeypatch.setattr(benchmark, "EXPERTS", {"qwen3-30b-a3b": {"down": (256, 128)}})
    monkeypatch.setattr(benchmark, "NUMBER_OF_EXPERTS", 8)
    options = argparse.Namespace(
        models=["qwen3-30b-a3b"], what=benchmark.WHAT, tokens=[256], batches=[1], rounds=1, out=tmp_path / "out.json"
    )
    assert benchmark.run(options, torch.device("cpu")) == 0
    records = json.loads(options.out.read_text())["records"]
    assert {record["what"] for record in records} >= {"fprop", "dgrad", "wgrad", "decode", "grouped", "relayout_128x1"}
    assert all("jetrl" in record["us"] and not record["wrong"] for record in records)

    wrong = benchmark.kernels.gemm_nt
    monkeypatch.setattr(benchmark.kernels, "gemm_nt", lambda *call, **options: wrong(*call, **options) * 1.01)
    assert benchmark.run(options, torch.device("cpu")) == 1, "a wrong result fails the benchmark"
