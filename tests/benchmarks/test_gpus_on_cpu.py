# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a benchmark knows of the GPUs, here from a program that answers as nvidia-smi does, and which shapes go over
how many of them."""

import os
import time

import pytest

from benchmarks import gpus
from benchmarks.gpus import LEFT_FREE, MemoryPeaks, count_gpus, gpu_gib, peaks_of, too_few, unfit

ANSWERS = """#!/bin/sh
case "$*" in
    *index,memory.used*--loop=1) while :; do printf '0, %d\\n1, 2048\\n' $((used=used+1024)); sleep 0.1; done ;;
    *memory.total*) printf '81559\\n143771\\n' ;;
    *--id=1*index*) echo 1 ;;
    *index*) printf '0\\n1\\n' ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(ANSWERS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_counted_and_the_smallest_is_planned_with(two_gpus, monkeypatch):
    assert count_gpus() == 2 and gpu_gib() == 81559 / 1024 - LEFT_FREE
    assert too_few(2, False) == "" and too_few(4, False).startswith("--gpus 4 is not supported with the 2 GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert count_gpus() == 1


def test_without_gpus_only_a_cpus_job_runs(monkeypatch):
    monkeypatch.setattr(gpus, "QUERY", "no-such-program")
    assert count_gpus() == 0 and gpu_gib() == float("inf")
    assert too_few(2, True) == "" and "the 0 GPUs of this machine. Set --gpus 1." in too_few(1, False)
    with MemoryPeaks() as memory:
        pass
    assert memory.gib is None


def test_the_peak_of_each_gpu_is_that_of_the_time_inside(two_gpus):
    with MemoryPeaks() as memory:
        time.sleep(1.0)
    first, second = memory.gib
    assert second == 2.0 and first >= 3.0
    with MemoryPeaks(watched=False) as unwatched:
        pass
    assert unwatched.gib is None


def test_a_line_that_was_cut_off_is_left_out():
    assert peaks_of(["0, 1024", "1, 512", "0, 2048", "1, 10", "0, "]) == [2.0, 0.5]
    assert peaks_of([]) is None


@pytest.mark.parametrize(
    ("model", "number", "tp", "quantized", "words"),
    [
        ("qwen3_8b", 8, 8, True, ""),
        ("qwen3_1_7b", 2, 2, True, ""),
        ("qwen3_30b_a3b", 4, 4, False, ""),
        ("qwen3_30b_a3b", 2, 2, True, ""),
        ("qwen3_moe_3b", 2, 2, False, ""),
        ("qwen3_moe_3b", 2, 2, True, "[1024, 192]"),
        ("qwen3_moe_3b", 2, 2, True, "Set --model qwen3_30b_a3b --layers 4."),
        ("qwen3_8b", 3, 2, True, "Set a --tp that divides --gpus."),
        ("r1_distill_qwen_1_5b", 8, 8, False, "12 heads"),
        ("qwen3_30b_a3b", 4, 4, True, "[2048, 192]"),
    ],
)
def test_what_does_not_go_over_so_many_gpus_says_why_in_one_sentence(model, number, tp, quantized, words):
    found = unfit(model, number, tp, quantized)
    assert words in found and bool(found) == bool(words)
    assert not found or (" is not supported with " in found and found.count("Set ") == 1)
