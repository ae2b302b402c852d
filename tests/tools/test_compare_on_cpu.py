# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl compare`` with a fake trainer and a fake evaluation: runs, resuming, statistics, table and page."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.tools import ToolError, launch, process_tree
from jetrl_verl.tools.compare import CompareError, run
from jetrl_verl.tools.compare.evaluate import BEFORE, Request
from jetrl_verl.tools.compare.run import CompareOptions, run_compare
from jetrl_verl.tools.compare.table import Trained, as_markdown, cells, show, summarise, write_comparison
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.report import Run

FAKE = Path(__file__).with_name("fake_compare.py")
LOGGER = "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"
JUDGE = (sys.executable, str(FAKE), "judge")


def options(out: Path, behaviour: str = "succeed", precisions=("bf16", "jet_fp8"), seeds=(1,), words=(), **others):
    """A job given as a command line after ``--``."""
    command = (sys.executable, str(FAKE), "train", behaviour, *words)
    return CompareOptions(precisions, seeds, out, words=command, **others)


def compare(*arguments, judge=JUDGE, **others) -> tuple[int, str]:
    """Exit status and console output."""
    screen = io.StringIO()
    status = run_compare(options(*arguments, **others), Console(file=screen, width=250), evaluator=judge)
    return status, screen.getvalue()


def judge_some(count: int) -> tuple[str, ...]:
    """An evaluation that dies after ``count`` policies."""
    return (sys.executable, str(FAKE), "judge_some", str(count))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (run, launch):
        monkeypatch.setattr(module, "ProcessTree", partial(ProcessTree, grace=1.0))
    monkeypatch.setattr(process_tree, "_POLL_SECONDS", 0.02)


def starts(out: Path, name: str) -> list[int]:
    """The steps from which a run was started, one per attempt."""
    return [int(line) for line in (out / "runs" / name / "checkpoints" / "starts").read_text().split()]


def metrics(out: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (out / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def engines(out: Path) -> list[str]:
    """What each start of an evaluation engine was asked to score."""
    return (out / "evaluation" / "engines").read_text().splitlines()


# --- the driver ------------------------------------------------------------------------------------------------------


def test_every_precision_runs_with_every_seed_and_one_engine_judges_all(tmp_path):
    status, screen = compare(tmp_path, seeds=(1, 2))
    assert status == 0, screen
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert runs == ["bf16-seed1", "bf16-seed2", "jet_fp8-seed1", "jet_fp8-seed2"]
    assert engines(tmp_path) == [f"{runs} True"]
    report = json.loads((tmp_path / "compare.json").read_text())
    assert [row["precision"] for row in report["rows"]] == [BEFORE, "bf16", "jet_fp8"]
    assert [row["seeds"] for row in report["rows"]] == [0, 2, 2]
    for file in ("compare.html", "compare.md", "compare.png"):
        assert (tmp_path / file).is_file()
    assert screen.splitlines()[-1] == f"page: {tmp_path / 'compare.html'}"


def test_runs_differ_in_precision_and_seeds_alone(tmp_path):
    compare(tmp_path, seeds=(1, 2), words=("data.train_batch_size=8",))
    commands = {
        path.parent.name: json.loads(path.read_text())["command"] for path in tmp_path.glob("runs/*/state.json")
    }
    assert len(commands) == 4
    own = ("precision", "data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
    places = ("trainer.experiment_name", "trainer.default_local_dir", "hydra.run.dir", LOGGER)
    rest = {tuple(w for w in words if w.partition("=")[0] not in own + places) for words in commands.values()}
    assert len(rest) == 1 and "data.train_batch_size=8" in rest.pop()
    assert "precision=jet_fp8" in commands["jet_fp8-seed2"] and "data.seed=2" in commands["jet_fp8-seed2"]


def test_only_the_last_step_is_saved_unless_the_command_says_otherwise(tmp_path):
    def saving(words):
        job = run._verl_job(options(tmp_path, words=words))
        command = job.command_of(run.CompareRun("bf16", 1, RunPaths(tmp_path)))
        return [word for word in command if "save_freq" in word]

    assert saving(()) == ["trainer.save_freq=1000000000"]
    assert saving(("trainer.save_freq=20",)) == ["trainer.save_freq=20"]


def test_what_finished_is_neither_trained_nor_judged_again(tmp_path):
    compare(tmp_path)
    status, screen = compare(tmp_path)
    assert status == 0 and "jet_fp8-seed1: finished before" in screen
    assert starts(tmp_path, "jet_fp8-seed1") == [0] and len(engines(tmp_path)) == 1


def test_trainings_of_two_builds_are_refused_before_any_training_unless_asked_for(tmp_path, monkeypatch):
    compare(tmp_path)
    older = provenance()
    monkeypatch.setattr(run, "provenance", lambda: older | {"commit": "f" * 40, "dirty": False})
    with pytest.raises(ToolError, match="2 builds.*this installation.* --across-builds"):
        compare(tmp_path, precisions=("bf16", "fp8_rollout"))
    assert not (tmp_path / "runs" / "fp8_rollout-seed1").exists()
    status, _ = compare(tmp_path, precisions=("bf16", "fp8_rollout"), across_builds=True)
    assert status == 0
    for page in ("compare.md", "compare.html"):
        text = (tmp_path / page).read_text()
        assert "Results of 2 builds side by side" in text and "commit ffffffffff" in text
    builds = {
        entry["precision"]: entry["builds"] for entry in json.loads((tmp_path / "compare.json").read_text())["trained"]
    }
    assert builds[BEFORE] == [] and builds["bf16"] == [older] and builds["fp8_rollout"][0]["commit"] == "f" * 40


def test_a_run_that_two_builds_trained_says_so(tmp_path, monkeypatch):
    compare(tmp_path, "die_once", precisions=("bf16",))
    older = provenance()
    monkeypatch.setattr(run, "provenance", lambda: older | {"kernel_library_sha256": "e" * 64})
    with pytest.raises(ToolError, match="2 builds"):
        compare(tmp_path, "die_once", precisions=("bf16",))
    status, _ = compare(tmp_path, "die_once", precisions=("bf16",), across_builds=True)
    assert status == 0
    facts = json.loads((tmp_path / "runs" / "bf16-seed1" / "run.json").read_text())
    assert facts["earlier_builds"] == [older] and facts["build"]["kernel_library_sha256"] == "e" * 64


def test_a_further_run_joins_without_repeating_the_others(tmp_path):
    compare(tmp_path)
    status, _ = compare(tmp_path, precisions=("bf16", "fp8_rollout", "jet_fp8"))
    assert status == 0
    assert starts(tmp_path, "bf16-seed1") == [0] and starts(tmp_path, "fp8_rollout-seed1") == [0]
    assert engines(tmp_path)[1] == "['fp8_rollout-seed1'] False"
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["precision"] for row in rows] == [BEFORE, "bf16", "fp8_rollout", "jet_fp8"]


def test_other_evaluation_settings_judge_every_run_again_and_train_none(tmp_path):
    compare(tmp_path)
    compare(tmp_path, samples=4)
    assert starts(tmp_path, "bf16-seed1") == [0]
    assert engines(tmp_path)[1] == "['bf16-seed1', 'jet_fp8-seed1'] True"


def test_an_interrupted_run_goes_on_from_its_checkpoint_with_whole_metrics(tmp_path):
    status, screen = compare(tmp_path, "die_once")
    assert status == 1 and "bf16-seed1: ended with status 3 after step 2 of 4, last checkpoint 1" in screen
    status, screen = compare(tmp_path, "die_once")
    assert status == 0, screen
    assert starts(tmp_path, "bf16-seed1") == [0, 1]
    records = metrics(tmp_path, "bf16-seed1")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    # The step it went on from has what it logged when it was trained and when it was resumed.
    assert {"critic/score/mean", "val-core/x/acc/mean@1"} <= records[1]["data"].keys()


def test_a_run_does_not_go_on_with_other_operations_than_it_began_with(tmp_path, monkeypatch):
    """``auto`` may come to be another thing on another machine; the refusal is the same however often it is tried."""
    monkeypatch.setenv("FAKE_OPERATIONS", "shared")
    compare(tmp_path, "die_once", precisions=("jet_fp8",))
    monkeypatch.setenv("FAKE_OPERATIONS", "stock")
    for _ in range(2):
        with pytest.raises(CompareError, match="started with jetrl.operations=shared and would resume with stock"):
            compare(tmp_path, "die_once", precisions=("jet_fp8",))
    monkeypatch.setenv("FAKE_OPERATIONS", "shared")
    status, screen = compare(tmp_path, "die_once", precisions=("jet_fp8",))
    assert status == 0, screen
    assert [record["step"] for record in metrics(tmp_path, "jet_fp8-seed1")] == [0, 1, 2, 3, 4]


def test_a_run_that_was_killed_after_its_last_step_only_ends(tmp_path):
    compare(tmp_path)
    before = metrics(tmp_path, "bf16-seed1")
    state = tmp_path / "runs" / "bf16-seed1" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"finished": False}))
    status, screen = compare(tmp_path)
    assert status == 0, screen
    assert starts(tmp_path, "bf16-seed1") == [0, 4] and metrics(tmp_path, "bf16-seed1") == before


def test_a_run_that_fails_is_named_with_its_error_and_the_others_are_compared(tmp_path):
    status, screen = compare(tmp_path, "fail:fp8_rollout", precisions=("bf16", "fp8_rollout", "jet_fp8"))
    assert status == 1
    assert "ValueError: layer 3 differs" in screen
    assert f"not in the table, because it failed: fp8_rollout-seed1, log {tmp_path}" in screen
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["precision"] for row in rows] == [BEFORE, "bf16", "jet_fp8"]


def test_an_evaluation_that_fails_is_reported_and_repeated(tmp_path):
    screen = io.StringIO()
    broken = (sys.executable, "-c", "raise ValueError('no such GPU')")
    assert run_compare(options(tmp_path), Console(file=screen, width=250), evaluator=broken) == 1
    assert "the evaluation ended with status 1" in screen.getvalue() and "no such GPU" in screen.getvalue()
    assert compare(tmp_path)[0] == 0
    assert starts(tmp_path, "bf16-seed1") == [0]


UNSCORED = "because the evaluation did not score it: "


@pytest.mark.parametrize("asked", [{"samples": 4}, {"temperatures": (0.6,)}])
def test_scores_of_other_settings_do_not_stand_in_for_those_an_evaluation_did_not_reach(asked, tmp_path):
    """Policy before training and BF16 are scored as asked now, the other run as it was asked before."""
    compare(tmp_path)
    status, screen = compare(tmp_path, judge=judge_some(2), **asked)
    assert status == 1 and "the evaluation ended with status 1, without jet_fp8-seed1:" in screen
    lines = screen.splitlines()
    assert lines[-2:] == [f"not in the table, {UNSCORED}jet_fp8-seed1", f"page: {tmp_path / 'compare.html'}"]
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["precision"] for row in rows] == [BEFORE, "bf16"]
    assert rows[0]["accuracies"].keys() == {str(t) for t in asked.get("temperatures", (0.0, 1.0))}
    for page in ("compare.md", "compare.html"):
        below = (tmp_path / page).read_text().partition("before training")[2]
        assert f"Not in the table, {UNSCORED}jet_fp8-seed1." in below and below.count("jet_fp8") == 1, page
    assert compare(tmp_path, **asked)[0] == 0
    assert UNSCORED not in (tmp_path / "compare.md").read_text()


def trained_again(out: Path, name: str) -> None:
    """The run ``name`` finished a moment after everything that was scored."""
    state = out / "runs" / name / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"at": time.time() + 0.01}))
    time.sleep(0.05)


def test_scores_of_an_earlier_training_of_the_run_are_left_out(tmp_path):
    compare(tmp_path)
    trained_again(tmp_path, "jet_fp8-seed1")
    status, screen = compare(tmp_path, judge=judge_some(0))
    assert status == 1 and "the evaluation ended with status 1, without jet_fp8-seed1:" in screen
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["precision"] for row in rows] == [BEFORE, "bf16"]


def test_without_scores_of_the_baseline_there_is_no_difference(tmp_path):
    """Also none to the next run, which would be read as one to the first precision."""
    compare(tmp_path, precisions=("bf16", "fp8_rollout", "jet_fp8"))
    trained_again(tmp_path, "bf16-seed1")
    _, screen = compare(tmp_path, precisions=("bf16", "fp8_rollout", "jet_fp8"), judge=judge_some(0))
    assert f"{UNSCORED}bf16-seed1" in screen and "Δ" not in screen
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["precision"] for row in rows] == [BEFORE, "fp8_rollout", "jet_fp8"]
    assert {found["difference"] for row in rows for found in row["accuracies"].values()} == {None}


@pytest.mark.parametrize(
    ("text", "held", "remedy"),
    [
        ("", ("global_step_1",), "and not a step, as after a full disk; write the step of the newest complete check"),
        ("", (), "and not a step, as after a full disk; there is no checkpoint beside it"),
        ("1", (), "says step 1, whose checkpoint is gone; there is no checkpoint beside it"),
    ],
)
def test_a_run_whose_latest_checkpoint_is_not_told_is_refused_with_the_remedy(text, held, remedy, tmp_path):
    compare(tmp_path, "die_once", precisions=("bf16",))
    checkpoints = tmp_path / "runs" / "bf16-seed1" / "checkpoints"
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(text)
    if not held:
        (checkpoints / "global_step_1").rmdir()
    with pytest.raises(CompareError) as error:
        compare(tmp_path, "die_once", precisions=("bf16",))
    sentence = str(error.value)
    assert remedy in sentence and sentence.endswith(f". Or delete {checkpoints.parent} to start the run again.")
    assert "resume_mode" not in sentence and starts(tmp_path, "bf16-seed1") == [0]


def test_a_folder_of_another_command_is_refused(tmp_path):
    compare(tmp_path)
    with pytest.raises(CompareError, match="bf16-seed1 was made by another command. Choose another --out"):
        compare(tmp_path, words=("actor_rollout_ref.actor.optim.lr=1e-5",))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"command": [], "finished": true}'])
def test_a_damaged_state_is_named_with_what_to_delete(text, tmp_path):
    folder = tmp_path / "runs" / "jet_fp8-seed1"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(text)
    with pytest.raises(
        CompareError, match=f"^{folder}/state.json is damaged. Delete {folder} and run the command again.$"
    ):
        compare(tmp_path)
    assert not (tmp_path / "runs" / "bf16-seed1").exists()


def test_a_runs_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(CompareError, match="out/runs/bf16-seed1 cannot be created: .*. Choose another --out.$"):
        compare(tmp_path / "out")


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("reward_model", "a reward model is not supported with jetrl compare"),
        ("no_config", "did not write its composed config"),
    ],
)
def test_a_job_that_cannot_be_judged_is_ended_early(behaviour, sentence, tmp_path):
    with pytest.raises(CompareError, match=sentence) as error:
        compare(tmp_path, behaviour)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs" / "jet_fp8-seed1").exists()


def test_the_demo_is_the_default_job(tmp_path, monkeypatch):
    entry = cache.Prepared(tmp_path / "entry", {})
    monkeypatch.setattr(cache, "find", lambda recipe, folder: entry)
    chosen = CompareOptions(("jet_fp8",), (3,), tmp_path / "out", words=("trainer.test_freq=2",), steps=4, device="cpu")
    trainer = (sys.executable, str(FAKE), "train", "succeed")
    assert run_compare(chosen, Console(file=io.StringIO()), trainer, JUDGE) == 0
    command = json.loads((tmp_path / "out" / "runs" / "jet_fp8-seed3" / "state.json").read_text())["command"]
    assert f"data.val_files='{entry.test}'" in command and "trainer.total_training_steps=4" in command
    last = {word.partition("=")[0]: word.partition("=")[2] for word in command[4:]}
    expected = {"precision": "jet_fp8", "data.seed": "3", "trainer.resume_mode": "auto", "trainer.test_freq": "2"}
    assert {key: last[key] for key in expected} == expected


DRIVER = """
import sys
from pathlib import Path
from rich.console import Console
from jetrl_verl.tools.compare.run import CompareOptions, run_compare
out = Path(sys.argv[1])
sys.exit(run_compare(CompareOptions(("bf16",), (1,), out, words=tuple(sys.argv[2:])), Console()))
"""


def test_an_interruption_ends_what_was_started_and_the_same_command_goes_on(tmp_path):
    command = (sys.executable, str(FAKE), "train", "hang")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), *command], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in driver.stdout:
            if line.startswith("step 2/"):
                break
        os.kill(driver.pid, signal.SIGTERM)
        rest, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert driver.returncode == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM" in rest and "Run the same command to continue" in rest
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"{tmp_path}" not in listing


CACHE_ALONE = "fp8_rollout+jetrl.kv_cache=fp8"


def test_a_precision_with_settings_is_a_run_of_its_own(tmp_path):
    """An FP8 cache beside the same precision without it: what the cache alone does."""
    status, said = compare(tmp_path, precisions=("fp8_rollout", CACHE_ALONE), seeds=(1, 2))
    assert status == 0, said
    name = "fp8_rollout-jetrl.kv_cache-fp8-seed2"
    assert sorted(folder.name for folder in (tmp_path / "runs").iterdir()) == [
        "fp8_rollout-jetrl.kv_cache-fp8-seed1",
        name,
        "fp8_rollout-seed1",
        "fp8_rollout-seed2",
    ]
    facts = json.loads((tmp_path / "runs" / name / "run.json").read_text())
    words = facts["command"].split()
    assert facts["precision"] == CACHE_ALONE and "precision=fp8_rollout" in words and "jetrl.kv_cache=fp8" in words
    assert f"trainer.experiment_name={name}" in words and (tmp_path / "evaluation" / f"{name}.json").is_file()
    plain = json.loads((tmp_path / "runs/fp8_rollout-seed2/run.json").read_text())["command"]
    assert "kv_cache" not in plain
    rows = {row["precision"]: row for row in json.loads((tmp_path / "compare.json").read_text())["rows"]}
    assert rows[CACHE_ALONE]["seeds"] == 2 and rows["fp8_rollout"]["accuracies"]["0.0"]["difference"] is None
    assert rows[CACHE_ALONE]["accuracies"]["0.0"]["difference"] is not None
    assert f"| {CACHE_ALONE} | 2 |" in (tmp_path / "compare.md").read_text()
    # The same command goes on with what is there; one with another cache does not take it for its own.
    assert "finished before" in compare(tmp_path, precisions=("fp8_rollout", CACHE_ALONE), seeds=(1, 2))[1]


def test_a_setting_of_a_row_wins_over_the_jobs_own_word():
    job = run.Job(["verl", "jetrl.kv_cache=bf16"], {})
    words = job.command_of(run.CompareRun(CACHE_ALONE, 1, RunPaths(Path("out"))))
    assert words.index("jetrl.kv_cache=fp8") > words.index("jetrl.kv_cache=bf16")
    saving = run.CompareRun("jet_fp8+trainer.save_freq=5", 1, RunPaths(Path("out")))
    saves = [word for word in job.command_of(saving) if word.startswith("trainer.save_freq")]
    assert saves == ["trainer.save_freq=5"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--precisions", "bf16,fp4"], "'fp4' is not a precision"),
        (["--precisions", "fp8_rollout+jetrl.kv_cache"], "'fp8_rollout+jetrl.kv_cache' is not a row"),
        (["--precisions", "jet_fp8+data.seed=4"], "data.seed is set by jetrl compare for each run. Remove it from jet"),
        (["--precisions", "bf16+jetrl.kv_cache=fp8"], "precision=bf16 is verl as it is and has no jetrl.kv_cache"),
        (["--precisions", "bf16,bf16"], "--precisions 'bf16,bf16' is wrong: it is empty or repeats a value"),
        (["--seeds", ""], "--seeds '' is wrong"),
        (["--samples", "0"], "--samples and --steps must be at least 1"),
        (["--temperatures", "-1"], "no temperature may be negative"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["precision=bf16"], "precision is set by jetrl compare for each run. Remove precision=bf16."),
        (["--", "python3", "-m", "verl", "+data.seed=4"], "data.seed is set by jetrl compare"),
        (["--", "no-such-program", "run"], "no-such-program is not a program"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, sentence, tmp_path):
    result = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and sentence in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_none_are_refused():
    result = CliRunner().invoke(app, ["compare", "--seeds", "one"])
    assert result.exit_code == 2 and "is not a list of numbers" in result.stderr


def test_the_fakes_are_asked_as_the_real_programs_are():
    """The real evaluator reads the same request; its fields are what the fake was given."""
    request = Request("config.yaml", {"a": "b"}, True, (0.0, 1.0), 2, "out")
    assert vars(Request(**json.loads(json.dumps(vars(request))))) == vars(request) | {"temperatures": [0.0, 1.0]}


# --- statistics, table and page --------------------------------------------------------------------------------------


def trained(precision: str, seed: int | None, right: list[list[float]]) -> Trained:
    records = [(i, {"critic/score/mean": 0.1 * i, "rollout_corr/k3_kl": 1e-4, "timing_s/step": i}) for i in (1, 2, 3)]
    run_ = Run(f"{precision}-seed{seed}", records, {"seed": seed}, precision) if seed is not None else None
    return Trained(precision, seed, {0.0: right}, run_)


def test_accuracy_and_errors_by_hand():
    rows = summarise(
        [
            trained("before", None, [[0], [0], [0], [1]]),
            trained("bf16", 1, [[1], [0], [0], [1]]),
            trained("jet_fp8", 1, [[1], [1], [0], [1]]),
        ]
    )
    before, bf16, jet = (row.accuracies[0.0] for row in rows)
    assert (before.mean, bf16.mean, jet.mean) == (0.25, 0.5, 0.75)
    # Sample standard deviation of (1, 0, 0, 1) is sqrt(1/3), over 4 problems.
    assert bf16.error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert bf16.difference is None and bf16.spread is None
    # Problem by problem (0, 1, 0, 0): standard deviation 1/2.
    assert (jet.difference, jet.difference_error) == (0.25, pytest.approx(0.25))
    assert before.difference == -0.25


def test_pairing_removes_what_both_precisions_share():
    """Equal answers on hard and easy problems: a difference of zero with no error, though each accuracy has one."""
    answers = [[1], [0]] * 8
    rows = summarise([trained("bf16", 1, answers), trained("jet_fp8", 1, answers)])
    jet = rows[1].accuracies[0.0]
    assert jet.error > 0.1 and jet.difference == jet.difference_error == 0


def test_seeds_and_samples_are_averaged_within_a_problem():
    rows = summarise([trained("bf16", 1, [[1, 0], [1, 1]]), trained("bf16", 2, [[0, 0], [1, 1]])])
    (row,) = rows
    assert row.seeds == 2
    found = row.accuracies[0.0]
    assert found.mean == 0.625  # problems: 1/4 and 1
    assert found.error == pytest.approx(0.375)
    assert found.spread == pytest.approx(0.25 / math.sqrt(2))  # seeds: 3/4 and 1/2


def test_precisions_of_other_problems_are_refused():
    with pytest.raises(ValueError, match="jet_fp8 answered 1 problems and bf16 answered 2"):
        summarise([trained("bf16", 1, [[1], [0]]), trained("jet_fp8", 1, [[1]])])
    with pytest.raises(ValueError, match="seeds of bf16 answered different problems"):
        summarise([trained("bf16", 1, [[1], [0]]), trained("bf16", 2, [[1]])])
    with pytest.raises(ValueError, match="at least one trained precision"):
        summarise([trained("before", None, [[1]])])


def test_the_table_shows_noise_beside_every_accuracy_and_leaves_empty_columns_out():
    rows = summarise([trained("bf16", 1, [[1], [0]] * 32), trained("jet_fp8", 1, [[1], [1], [0], [0]] * 16)])
    header, body = cells(rows)
    assert header == ["precision", "seeds", "accuracy, greedy", "Δ, greedy", "last reward", "k3 KL", "s/step"]
    assert body[0] == ["bf16", "1", "50.0% ± 6.3%", "", "0.300", "1.0e-04", "2.0"]
    assert body[1][3] == "+0.0 ± 8.9 points"
    markdown = as_markdown(rows).splitlines()
    assert markdown[0].startswith("| precision | seeds |") and set(markdown[1]) == set("| -")
    assert markdown[2] == f"| {' | '.join(body[0])} |"


def test_the_table_fits_a_terminal_of_eighty_columns():
    screen = io.StringIO()
    precisions = [trained(precision, 1, [[1], [0]] * 32) for precision in ("bf16", "fp8_rollout", "jet_fp8")]
    show(summarise(precisions), Console(file=screen, width=80))
    lines = [line.split() for line in screen.getvalue().splitlines()]
    assert lines[0] == ["precision", "bf16", "fp8_rollout", "jet_fp8"]
    assert ["k3", "KL", *["1.0e-04"] * 3] in lines and "…" not in screen.getvalue()


def test_a_single_problem_has_no_error_and_json_stays_json(tmp_path):
    write_comparison([trained("bf16", 1, [[1]])], tmp_path, {}, "one")
    (row,) = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert row["accuracies"]["0.0"]["mean"] == 1.0 and row["accuracies"]["0.0"]["error"] is None


def test_the_page_has_the_table_and_the_picture(tmp_path):
    entries = [
        trained("before <training>", None, [[0], [1]] * 8),
        *(trained(precision, seed, [[1], [seed - 1]] * 8) for precision in ("bf16", "jet_fp8") for seed in (1, 2)),
    ]
    write_comparison(entries, tmp_path, {"command": "a && b"}, "Two precisions")
    page = (tmp_path / "compare.html").read_text()
    assert page.index("<table>") < page.index("<svg") and "before &lt;training&gt;" in page
