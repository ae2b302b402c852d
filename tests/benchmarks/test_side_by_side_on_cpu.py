# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: as many as fit, in their order, none past its time, none hurt by another one's failure.

A program stands in for a run of verl; it notes when it began and ended.
"""

import io
import json
import math
import os
import signal
import sys
import threading
import time

import pytest
from rich.console import Console

from benchmarks import side_by_side
from benchmarks.side_by_side import Planned, SideBySide
from benchmarks.verl_runs import TIME_UP, Results
from jetrl_verl.tools.process_tree import Interrupted, signals_raise

BUILD = {"commit": "c0ffee", "dirty": False, "sources_sha256": "5", "kernel_library_sha256": None, "gpu": None}

PROGRAM = """
import json, os, sys, time
found, notes, then, seconds = sys.argv[1:5]
def note(word):
    with open(notes, "a") as file:
        file.write(json.dumps([found.rsplit("/", 1)[1], word, time.monotonic()]) + "\\n")
note("began")
def leave(**figures):
    with open(found + ".partial", "w") as file:
        json.dump({"status": 0, "steps": 3, "seconds": 1.0, **figures}, file)
    os.rename(found + ".partial", found)
exec(then)
note("ended")
"""
WORKS = "time.sleep(0.6); leave()"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "POLL", 0.05)
    return tmp_path


def planned(place, name: str, then: str = WORKS, gib: float = 1.0, continues: str = "") -> Planned:
    found = place / name
    command = [sys.executable, "-c", PROGRAM, str(found), str(place / "notes"), then]
    after = {"row": continues} if continues else None
    return Planned({"row": name}, command, found, place / f"{name}.log", gib, after)


def take(place, runs, at_once: int = 2, gib: float = math.inf, seconds: float = math.inf, apart: float = 0.0):
    """Exit status, runs by name as the file holds them, output."""
    console = Console(width=160, record=True, file=io.StringIO())
    results = Results(place / "results.json", ("row",), {}, BUILD)
    beside = SideBySide(results, os.environ, at_once, gib, time.monotonic() + seconds, console, apart)
    status = beside.take(runs)
    file = place / "results.json"
    held = json.loads(file.read_text())["runs"] if file.exists() else []
    return status, {run["row"]: run for run in held}, console.export_text()


def times(place) -> dict[str, tuple[float, float]]:
    """Name -> when it began and ended."""
    notes = [json.loads(line) for line in (place / "notes").read_text().splitlines()]
    ends = {name: when for name, word, when in notes if word == "ended"}
    return {name: (when, ends.get(name, math.inf)) for name, word, when in notes if word == "began"}


def most_at_once(place) -> int:
    spans = times(place).values()
    return max(sum(begun <= start < ended for begun, ended in spans) for start, _ in spans)


def test_as_many_as_allowed_run_at_once_and_all_are_taken(place):
    status, runs, said = take(place, [planned(place, f"run{number}") for number in range(4)])
    assert status == 0 and [run["status"] for run in runs.values()] == [0] * 4
    assert most_at_once(place) == 2 and "begins beside 1, plans with 1 GiB" in said


def test_no_more_begin_than_the_memory_holds_and_a_small_one_goes_first(place):
    runs = [planned(place, "a", gib=60), planned(place, "b", gib=60), planned(place, "c", gib=30)]
    status, _, _ = take(place, runs, at_once=3, gib=100)
    found = times(place)
    assert status == 0 and found["c"][0] < found["a"][1] <= found["b"][0]


def test_runs_begin_apart_while_another_is_under_way_and_at_once_behind_its_end(place):
    long, short = "time.sleep(2.0); leave()", "time.sleep(0.1); leave()"
    runs = [planned(place, "a", long), planned(place, "b", short), planned(place, "c", short)]
    status, _, _ = take(place, runs, at_once=3, apart=1.0)
    found = times(place)
    assert status == 0 and found["b"][0] - found["a"][0] > 0.8
    assert found["b"][1] <= found["c"][0] < found["a"][1]


def test_a_run_that_never_fits_stops_before_anything_begins(place):
    with pytest.raises(ValueError, match="100 GiB are too few for b 160"):
        take(place, [planned(place, "a"), planned(place, "b", gib=160)], gib=100)
    assert not (place / "notes").exists()


@pytest.mark.parametrize(
    "then",
    [
        "raise RuntimeError('CUDA out of memory')",
        "os.kill(os.getpid(), 9)",
        "sys.exit(0)",
        "open(found, 'w').write('{')",
    ],
)
def test_one_that_dies_is_a_failure_with_its_last_words_and_the_others_end_well(place, then):
    status, runs, said = take(place, [planned(place, "bad", then), planned(place, "good"), planned(place, "late")])
    assert status == 1 and runs["good"]["status"] == runs["late"]["status"] == 0 and runs["bad"]["status"] != 0
    words = "RuntimeError: CUDA out of memory" if "raise" in then else "the run's program ended with status"
    assert any(words in line for line in runs["bad"]["errors"]) and words in said


def test_a_stage_waits_for_the_one_that_it_continues_also_where_that_failed(place):
    runs = [planned(place, "second", continues="first"), planned(place, "first", "time.sleep(0.6); leave(status=1)")]
    status, found, _ = take(place, runs)
    assert status == 1 and found["second"]["status"] == 0 and times(place)["second"][0] >= times(place)["first"][1]


def test_each_is_told_what_time_is_left_and_none_begins_that_has_too_little(place, monkeypatch):
    monkeypatch.setattr(side_by_side, "CLOSING", 1.0)
    told = "time.sleep(3.0); leave(told=float(seconds))"
    runs = [planned(place, f"run{number}", told) for number in range(4)]
    status, found, said = take(place, runs, at_once=2, seconds=6.5)
    assert status == 1 and set(found) == {"run0", "run1"} and all(3.0 < run["told"] <= 5.5 for run in found.values())
    assert "run2: not begun, since the benchmark's time was up" in said
    # The next call takes what is missing.
    results = Results(place / "results.json", ("row",), {}, BUILD)
    missing = [run for run in runs if not results.done(run.name)]
    status, found, _ = take(place, missing)
    assert status == 0 and set(found) == {"run0", "run1", "run2", "run3"}


def test_a_program_that_does_not_end_itself_is_ended_and_what_it_left_counts(place, monkeypatch):
    monkeypatch.setattr(side_by_side, "CLOSING", 0.5)
    obeys = "import signal; signal.signal(15, lambda *_: (leave(status=124, steps=1), sys.exit(0))); time.sleep(60)"
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    began = time.monotonic()
    status, found, _ = take(place, [planned(place, "obeys", obeys), planned(place, "deaf", deaf)], seconds=2.0)
    assert status == 1 and time.monotonic() - began < 10
    assert (found["obeys"]["status"], found["obeys"]["steps"]) == (TIME_UP, 1)
    assert "ended with status 124" in found["deaf"]["errors"][0]


def test_an_interruption_ends_all_that_runs(place, monkeypatch):
    monkeypatch.setattr(side_by_side, "CLOSING", 1.0)
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with signals_raise(), pytest.raises(Interrupted):
        take(place, [planned(place, "a", "time.sleep(60)"), planned(place, "b", "time.sleep(60)")])
    timer.join()
    held = json.loads((place / "results.json").read_text())["runs"]
    assert {run["row"] for run in held} == {"a", "b"} and all(run["status"] for run in held)
