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
import torch
from rich.console import Console

from benchmarks.published_shapes import ROOT
from benchmarks.verl_runs import (
    MISMATCH,
    NOT_FINITE,
    START,
    TIME_UP,
    Results,
    Start,
    figures,
    not_begun,
    run_verl,
    take_all,
)
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.report import Run

SETTINGS = {"tiny": True}
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


def build(commit: str = "c0ffee", gpu: str = "NVIDIA H200", driver: str = "580", sources: str = "5") -> dict:
    """A build as ``provenance`` has it; two drivers are two machines of one kind."""
    sums = {"dirty": False, "sources_sha256": sources * 64, "kernel_library_sha256": "7" * 64}
    return {"commit": commit, **sums, "gpu": gpu, "driver": driver}


def take(file, runs: dict, ends: float = math.inf, settings=SETTINGS, made_by=None, add=()) -> tuple[int, str]:
    """Exit status and output of a benchmark whose runs are functions by name."""
    console = Console(width=120, record=True, file=io.StringIO())
    results = Results(file, ("row",), settings, made_by or build())
    for other in add:
        results.add(other)
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
    assert "\nfirst: OSError: no space left\nBuild: commit" in said


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


def test_no_record_names_the_folder_that_this_tree_or_its_own_files_lie_in(file):
    words = [f"reward.path='{ROOT}/benchmarks/coin_reward.py'", f"data.train_files={file.parent}/a.parquet"]
    take(file, {"bf16": lambda: ok() | {"words": words}})
    (run,) = json.loads(file.read_text())["runs"]
    assert run["words"] == ["reward.path='benchmarks/coin_reward.py'", "data.train_files=OUT/a.parquet"]


def test_a_later_call_adds_to_the_file_and_replaces_what_it_takes_again(file):
    take(file, {"first": ok, "second": lambda: {"status": 1, "errors": ["died"]}})
    status, said = take(file, {"second": functools.partial(ok, 2), "third": ok})
    runs = {run["row"]: run["steps"] for run in json.loads(file.read_text())["runs"]}
    assert status == 0 and runs == {"first": 3, "second": 2, "third": 3}
    assert "died" not in said and "first" in said


@pytest.mark.parametrize("other", [{"settings": {"tiny": False}}, {"made_by": build(gpu="NVIDIA H100")}])
def test_a_file_of_another_gpu_or_other_settings_is_kept_and_not_added_to(file, other):
    take(file, {"first": ok})
    for number in range(2):
        before = file.read_text()
        take(file, {"second": ok}, **(other if number == 0 else {}))
        assert file.with_name(f"results.before_{number}.json").read_text() == before
        assert [run["row"] for run in json.loads(file.read_text())["runs"]] == ["second"]


def test_calls_on_several_machines_make_one_record_that_says_which_build_made_what(file):
    """As two sessions with one GPU each do: the second begins with the first one's file."""
    first = file.with_name("first.json")
    take(first, {"bf16": ok, "jet_fp8": ok})
    status, said = take(file, {"best": ok}, made_by=build(driver="590"), add=[first])
    record = json.loads(file.read_text())
    assert {run["row"]: run["build"]["driver"] for run in record["runs"]} == {
        "bf16": "580",
        "jet_fp8": "580",
        "best": "590",
    }
    assert status == 0 and record["gpu"] == "NVIDIA H200" and "Build: commit c0ffee" in said
    _, said = take(file, {"bf16": ok}, made_by=build("decade"))
    assert "Results of 2 builds side by side" in said and "commit decade, kernel library 77777777: bf16" in said


def test_a_file_from_before_a_setting_and_a_name_were_written_down_is_read_and_added_to(file):
    """What it lacks is what was so then; a run of the same name takes the place of the old one."""
    take(file, {"bf16": ok, "jet_fp8": ok})
    before = {"exact_length": False, "gpus": 1}
    for other in (file, file.with_name("other.json")):
        results = Results(other, ("gpus", "row"), {**SETTINGS, "exact_length": False}, build(), before)
        results.add(file) if other != file else None
        assert [(run["gpus"], run["row"]) for run in results.runs] == [(1, "bf16"), (1, "jet_fp8")]
        assert results.done({"gpus": 1, "row": "bf16"}) and not results.done({"gpus": 2, "row": "bf16"})
    with pytest.raises(ValueError, match="exact_length False and not True"):
        Results(file.with_name("third.json"), ("gpus", "row"), {**SETTINGS, "exact_length": True}, build(), before).add(
            file
        )


def test_runs_that_are_here_are_not_replaced_by_those_of_a_file(file):
    first = file.with_name("first.json")
    take(first, {"bf16": functools.partial(ok, 1)})
    take(file, {"bf16": functools.partial(ok, 3)})
    take(file, {}, add=[first])
    assert [run["steps"] for run in json.loads(file.read_text())["runs"]] == [3]


@pytest.mark.parametrize("other", [{"settings": {"tiny": False}}, {"made_by": build(gpu="NVIDIA H100")}])
def test_a_file_of_another_gpu_or_other_settings_does_not_belong_to_the_record(file, other):
    first = file.with_name("first.json")
    take(first, {"bf16": ok}, **other)
    with pytest.raises(ValueError, match="tiny False and not True|H100' and not 'NVIDIA H200"):
        take(file, {"best": ok}, add=[first])


def test_what_has_ended_well_with_this_code_is_done(file):
    take(file, {"good": ok, "failed": lambda: {"status": 1, "errors": ["died"]}, "late": not_begun})
    builds = ((build(), True), (build(driver="590"), True), (build("decade"), True), (build(sources="6"), False))
    for made_by, done in builds:
        results = Results(file, ("row",), SETTINGS, made_by)
        assert results.done({"row": "good"}) == done
        assert not any(results.done({"row": row}) for row in ("failed", "late", "other"))


def test_a_run_without_time_does_not_replace_one_that_got_as_far(file):
    def late(steps: int) -> dict:
        return {"status": TIME_UP, "steps": steps, "errors": ["time was up"]}

    for steps, kept in ((2, 2), (0, 2), (1, 2), (3, 3)):
        status, _ = take(file, {"row": functools.partial(late, steps)})
        assert status == 1 and [run["steps"] for run in json.loads(file.read_text())["runs"]] == [kept]


def test_the_phases_of_a_start_are_those_that_the_log_shows(tmp_path, monkeypatch):
    from benchmarks import verl_runs

    now = iter([100.0, 108.0, 120.0, 150.0, 155.0, 170.0])
    monkeypatch.setattr(verl_runs.time, "monotonic", lambda: next(now))
    log = tmp_path / "run.log"
    start = Start(log)
    log.write_text(f"noise\n\x1b[36m(pid=1)\x1b[0m 10:00 {START[0][1]}. View\n")
    start.update()
    with log.open("a") as file:
        file.write(f"INFO: {START[1][1]} dict_keys\n{START[1][1]} again\n")
    start.update()
    with log.open("a") as file:  # no CUDA graphs: the phase belongs to the next one
        file.write(f"INFO:{START[3][1]}\nINFO:{START[5][1]}\n")
    start.update()
    start.first_step_is_there()
    start.first_step_is_there()
    assert start.seconds == {"driver": 8.0, "task_runner": 12.0, "wrap": 30.0, "vllm_capture": 5.0, "first_step": 15.0}


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


def test_seconds_are_medians_behind_the_first_step_and_each_whole_step_is_kept():
    """What no phase has is a step's own: medians of phases, of different steps, need not add up to the step's."""
    seconds = [(90.0, 5.0, 99.0), (13.0, 1.0, 14.25), (8.0, 6.0, 14.5), (7.0, 2.0, 9.75)]
    steps = [
        {"actor/grad_norm": 1.0, "timing_s/gen": gen, "timing_s/ref": ref, "timing_s/step": step}
        for gen, ref, step in seconds
    ]
    found = figures(Run("run", list(enumerate(steps, start=1))))
    assert (found["gen_s"], found["ref_s"], found["step_s"], found["rest_s"]) == (8.0, 2.0, 14.25, 0.5)
    assert found["each_step_s"] == [14.25, 14.5, 9.75] and found["old_log_prob_s"] is None
    untimed = figures(Run("run", [(1, {"actor/grad_norm": 1.0})]))
    assert untimed["rest_s"] is None and untimed["each_step_s"] == []


@pytest.mark.parametrize(
    ("logged", "found"),
    [
        ((0.0, 0.0), 0.0),
        ((0.25, -1e-9), 0.25),
        ((0.0, -1e-9), -1e-9),  # k3 is never negative, but FP32 rounds
        ((0.0, None), NOT_FINITE),  # as verl's logger writes a NaN
        ((0.0, math.nan), NOT_FINITE),
        ((math.inf, 0.0), NOT_FINITE),
        ((0.0, "absent"), None),
        (("absent", "absent"), None),
    ],
)
@pytest.mark.parametrize("name", MISMATCH)
def test_no_difference_of_a_step_is_hidden_by_another_steps(name, logged, found):
    steps = [{"actor/grad_norm": 1.0, **({} if value == "absent" else {MISMATCH[name]: value})} for value in logged]
    assert figures(Run("run", list(enumerate(steps))))[name] == found


def test_a_run_with_a_mismatch_that_is_no_number_has_failed(tmp_path):
    """Though its gradients are finite, so that all its steps count."""
    program = TWO_STEPS.replace('data["actor/ppo_kl"] = (-0.5) ** step', 'data["actor/ppo_kl"] = None')
    paths = RunPaths(tmp_path)
    found = run_verl([sys.executable, "-c", program, str(paths.metrics)], {**os.environ}, paths, 2)
    assert (found["status"], found["steps"], found["ppo_kl"]) == (1, 2, NOT_FINITE)
    assert found["errors"][-1] == "ppo_kl not finite in a step" and found["log_prob_diff"] is None


def test_the_metrics_of_the_mismatch_are_those_that_verl_and_this_project_log():
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    from jetrl_verl.metrics import hooks

    ours, theirs, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.5]]), torch.ones(1, 2)
    batch = {"old_log_probs": ours, "rollout_log_probs": theirs, "response_mask": mask, "responses": mask}
    data = DataProto.from_dict(batch)
    logged = {f"rollout_corr/{name}" for name in compute_offpolicy_metrics(ours, theirs, mask)}
    logged |= calculate_debug_metrics(data).keys() | hooks._tail(data).keys()
    assert {*MISMATCH.values()} - {"actor/ppo_kl"} <= logged
    assert hooks._tail(data)[MISMATCH["log_prob_diff"]] == 0.5
    batch["rollout_log_probs"] = torch.tensor([[-1.0, math.nan]])
    assert math.isnan(hooks._tail(DataProto.from_dict(batch))[MISMATCH["log_prob_diff"]])


def test_a_run_whose_time_is_up_is_ended_and_its_steps_count(tmp_path):
    found = run(tmp_path, "time.sleep(600)", steps=3, ends=time.monotonic() + 2)
    assert (found["status"], found["steps"]) == (TIME_UP, 2)
    assert found["seconds"] < 30 and "time was up" in found["errors"][0]


def test_too_few_steps_are_a_failure_and_so_is_a_status(tmp_path):
    assert run(tmp_path, "", steps=3)["status"] == 1
    found = run(tmp_path, "raise RuntimeError('out of memory')")
    assert found["status"] == 1 and found["errors"] == ["RuntimeError: out of memory"]
