# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How a benchmark takes its runs of verl: one after another, each written down at once, none of them past its time."""

import functools
import io
import json
import math
import os
import signal
import sys
import time

import pytest
from rich.console import Console

from benchmarks.verl_runs import TIME_UP, Results, run_verl, take_all
from jetrl_verl.tools.launch import RunPaths

SETTINGS = {"build": {"commit": "c0ffee"}, "tiny": True}
COLUMNS = ("status", "steps", "step_s")
TWO_STEPS = """
import json, sys, time
with open(sys.argv[1], "w") as metrics:
    for step in (1, 2):
        data = {"actor/grad_norm": 0.5, "timing_s/step": 10.0 * step, "rollout_corr/k3_kl": 0.25 / step}
        data["actor/ppo_kl"] = (-0.5) ** step
        metrics.write(json.dumps({"step": step, "data": data}) + "\\n")
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "results.json"


def take(file, runs: dict, ends: float = math.inf, settings=SETTINGS) -> tuple[int, str]:
    """Exit status and output of a benchmark whose runs are functions by name."""
    console = Console(width=120, record=True, file=io.StringIO())
    results = Results(file, ("row",), settings)
    status = take_all(results, [({"row": name}, run) for name, run in runs.items()], COLUMNS, ends, console)
    return status, console.export_text()


def ok(steps: int = 3) -> dict:
    return {"status": 0, "steps": steps, "step_s": 1.5}


def test_a_run_that_raises_has_failed_and_the_next_one_follows(file):
    def broken():
        raise OSError("no space left")

    status, said = take(file, {"first": broken, "second": ok})
    assert status == 1
    assert [(run["row"], run["status"]) for run in json.loads(file.read_text())["runs"]] == [
        ("first", 1),
        ("second", 0),
    ]
    assert said.rstrip().endswith("first: OSError: no space left")


def test_a_row_that_cannot_run_here_is_no_failure(file):
    status, said = take(file, {"first": lambda: {"status": None, "errors": ["not run, since it needs a GPU"]}})
    assert status == 0 and "first: not run, since it needs a GPU" in said


def test_the_file_is_whole_after_each_run(file):
    seen = []

    def look():
        seen.append([run["row"] for run in json.loads(file.read_text())["runs"]] if file.exists() else [])
        return ok()

    take(file, {"first": look, "second": look, "third": look})
    assert seen == [[], ["first"], ["first", "second"]]


def test_a_later_call_adds_to_the_file_and_replaces_what_it_takes_again(file):
    take(file, {"first": ok, "second": lambda: {"status": 1, "errors": ["died"]}})
    status, said = take(file, {"second": functools.partial(ok, 2), "third": ok})
    runs = {run["row"]: run["steps"] for run in json.loads(file.read_text())["runs"]}
    assert status == 0 and runs == {"first": 3, "second": 2, "third": 3}
    assert "died" not in said and "first" in said


def test_a_file_of_another_build_is_kept_and_not_added_to(file):
    take(file, {"first": ok})
    for number, commit in enumerate(("decade", "facade")):
        before = file.read_text()
        take(file, {"second": ok}, settings=SETTINGS | {"build": {"commit": commit}})
        assert file.with_name(f"results.before_{number}.json").read_text() == before
        assert [run["row"] for run in json.loads(file.read_text())["runs"]] == ["second"]


def test_no_run_begins_behind_the_end(file):
    status, said = take(file, {"first": ok}, ends=time.monotonic() - 1)
    assert status == 1 and "first: not begun, since the benchmark's time was up" in said


def test_an_interrupted_benchmark_still_shows_what_it_has(file):
    status, said = take(file, {"first": ok, "second": lambda: os.kill(os.getpid(), signal.SIGTERM), "third": ok})
    assert status == 128 + signal.SIGTERM
    assert "first" in said and [run["row"] for run in json.loads(file.read_text())["runs"]] == ["first"]


def run(tmp_path, then: str, steps: int = 2, ends: float = math.inf) -> dict:
    paths = RunPaths(tmp_path)
    return run_verl([sys.executable, "-c", TWO_STEPS + then, str(paths.metrics)], {**os.environ}, paths, steps, ends)


def test_figures_are_those_behind_the_first_step(tmp_path):
    found = run(tmp_path, "")
    assert (found["status"], found["steps"], found["step_s"], found["k3_kl"]) == (0, 2, 20.0, 0.25)
    assert found["ppo_kl"] == -0.5 and "errors" not in found


def test_a_run_whose_time_is_up_is_ended_and_its_steps_count(tmp_path):
    found = run(tmp_path, "time.sleep(600)", steps=3, ends=time.monotonic() + 2)
    assert (found["status"], found["steps"]) == (TIME_UP, 2)
    assert found["seconds"] < 30 and "time was up" in found["errors"][0]


def test_too_few_steps_are_a_failure_and_so_is_a_status(tmp_path):
    assert run(tmp_path, "", steps=3)["status"] == 1
    found = run(tmp_path, "raise RuntimeError('out of memory')")
    assert found["status"] == 1 and found["errors"] == ["RuntimeError: out of memory"]
