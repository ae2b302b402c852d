# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/generation_host_time.py measures what it says, and does not measure two things that differ."""

from argparse import Namespace

import pytest

from benchmarks import generation_host_time as benchmark

SMALL = Namespace(requests=[32], response=64, repetitions=1)


def test_every_part_has_a_time_and_a_token_costs_less_behind_the_patch(cpu_platform):
    rows = benchmark.measure(SMALL)["32"]
    assert list(rows) == list(benchmark.ROWS)
    for parts in rows.values():
        assert parts["core"] > 0 and parts["decode"] > 0
        assert parts["server"] == pytest.approx(parts["decode"] + parts["rest"]) == pytest.approx(parts["runs"][0])
    assert 0 < rows["patched"]["rest"] < rows["stock"]["rest"]


def test_two_rows_that_say_different_things_are_not_compared(cpu_platform, monkeypatch):
    """Here every run of the scripted core says other log-probabilities."""
    runs = iter(range(1, 100))
    core, said = benchmark.ScriptedCore, benchmark.log_probs_of

    class Changing(core):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            shift = next(runs)
            monkeypatch.setattr(benchmark, "log_probs_of", lambda place: said(place + shift))

    monkeypatch.setattr(benchmark, "ScriptedCore", Changing)
    with pytest.raises(SystemExit, match="differ between stock and patched"):
        benchmark.measure(SMALL)
