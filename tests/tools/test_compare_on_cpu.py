# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl compare`` with a fake trainer and a fake evaluation: runs, resuming, failures, numbers of the table."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from jetrl_verl.inputs import UserError
from jetrl_verl.tools import launch, process_tree
from jetrl_verl.tools.compare import run
from jetrl_verl.tools.compare.run import CompareOptions, CompareRun, Job, run_compare
from jetrl_verl.tools.compare.table import BEFORE, cells, summarize
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.report import Run, load_run
from jetrl_verl.tools.rows import parse_row, split_rows

FAKE = (sys.executable, str(Path(__file__).with_name("fake_compare.py")))
KV_CACHE = "fp8_rollout+jetrl.kv_cache=fp8"


def compare(out, behaviour="succeed", precisions=("bf16", "jet_fp8"), seeds=(1,), words=(), count=9, **others):
    """Exit status, console output and ``compare.json`` of a job given as a command line after ``--``."""
    page = out / "compare.json"
    page.unlink(missing_ok=True)
    options = CompareOptions(precisions, seeds, out, (*FAKE, "train", behaviour, *words), **others)
    judge = (*FAKE, "judge", str(count))
    with redirect_stdout(io.StringIO()) as screen:
        status = run_compare(options, evaluator=judge)
    return status, screen.getvalue(), json.loads(page.read_text()) if page.is_file() else None


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (run, launch):
        monkeypatch.setattr(module, "ProcessTree", partial(ProcessTree, grace=1.0))
    monkeypatch.setattr(process_tree, "_POLL_SECONDS", 0.02)


def starts(out: Path, name: str) -> list[str]:  # the first step of each attempt
    return (out / "runs" / name / "checkpoints" / "starts").read_text().split()


def test_every_precision_runs_with_every_seed_and_one_engine_scores_all(tmp_path):
    precisions = ("bf16", KV_CACHE)
    status, screen, page = compare(tmp_path, precisions=precisions, seeds=(1, 2))
    assert status == 0, screen
    names = ["bf16-seed1", "fp8_rollout-jetrl.kv_cache-fp8-seed1", "bf16-seed2", "fp8_rollout-jetrl.kv_cache-fp8-seed2"]
    engines = tmp_path / "engines"
    assert engines.read_text().splitlines() == [str([BEFORE, *names])]
    assert page["not_in_table"] == []
    accuracies = {name: row["accuracy"] for name, row in page["rows"].items()}
    assert accuracies == {BEFORE: 0.5, "bf16": 0.5625, KV_CACHE: 0.6875}
    assert (tmp_path / "compare.html").is_file() and (tmp_path / "compare.png").is_file()
    # With one more precision, no finished run is trained or scored again.
    status, screen, page = compare(tmp_path, precisions=(*precisions, "jet_fp8"), seeds=(1, 2))
    assert status == 0 and list(page["rows"]) == [BEFORE, *precisions, "jet_fp8"]
    assert starts(tmp_path, names[0]) == ["0"] and engines.read_text().splitlines()[1:] == [
        str(["jet_fp8-seed1", "jet_fp8-seed2"])
    ]
    with pytest.raises(UserError, match=f"{tmp_path} was made by another command. Choose another --out"):
        compare(tmp_path, words=("actor_rollout_ref.actor.optim.lr=1e-5",))


def test_runs_differ_only_in_precision_seeds_and_paths(tmp_path):
    job = Job(["verl", "jetrl.kv_cache=bf16"], {})
    own = {"precision", "data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed"}
    paths = {"trainer.experiment_name", "trainer.default_local_dir", "hydra.run.dir"}
    logger = "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"
    commands = [job.command_of(CompareRun(*run, tmp_path)) for run in (("bf16", 1), ("jet_fp8", 2), (KV_CACHE, 3))]
    bf16, jet, kv_cache = ({word.partition("=")[0]: word for word in command} for command in commands)
    assert {key for key in bf16 if bf16[key] != jet[key]} == own | paths | {logger}
    assert kv_cache["precision"] == "precision=fp8_rollout" and commands[2][-1] == "jetrl.kv_cache=fp8"
    assert bf16["trainer.save_freq"] == "trainer.save_freq=1000000000"
    saving = CompareRun("bf16+trainer.save_freq=5", 1, tmp_path)
    assert [word for word in job.command_of(saving) if word.startswith("trainer.save_freq")] == ["trainer.save_freq=5"]


def test_an_interrupted_run_resumes_and_keeps_all_its_metrics(tmp_path):
    status, screen, page = compare(tmp_path, "die_once")
    assert status == 1 and page is None and "bf16-seed1: ended with status 3 after step 2 of 4" in screen
    status, screen, _ = compare(tmp_path, "die_once")
    assert status == 0 and starts(tmp_path, "bf16-seed1") == ["0", "1"], screen
    records = dict(load_run(tmp_path / "runs" / "bf16-seed1").records)
    assert list(records) == [0, 1, 2, 3, 4] and {"critic/score/mean", "val-core/x/acc/mean@1"} <= records[1].keys()


def test_failed_and_unscored_runs_are_named_and_the_others_compared(tmp_path):
    status, screen, page = compare(tmp_path, "fail:fp8_rollout", ("bf16", "fp8_rollout", "jet_fp8"), count=2)
    assert status == 1 and "ValueError: layer 3 differs" in screen and "CUDA out of memory" in screen
    problems = ["fp8_rollout-seed1 did not finish training", "jet_fp8-seed1 was not scored"]
    assert page["not_in_table"] == problems and list(page["rows"]) == [BEFORE, "bf16"]
    assert all(problem in (tmp_path / "compare.html").read_text() and problem in screen for problem in problems)
    # Scores of other settings do not replace missing ones.
    _, _, page = compare(tmp_path, "fail:fp8_rollout", temperature=1.0, samples=2, count=1)
    assert page is None and str([BEFORE, "bf16-seed1", "jet_fp8-seed1"]) in (tmp_path / "engines").read_text()


@pytest.mark.parametrize("behaviour", ["reward_model", "no_config"])
def test_a_job_that_cannot_be_scored_ends_early(behaviour, tmp_path):
    with pytest.raises(UserError, match="a reward model is not supported|did not write its composed config"):
        compare(tmp_path, behaviour)
    assert not (tmp_path / "runs" / "jet_fp8-seed1").exists()


def test_the_demo_is_the_default_job(tmp_path, monkeypatch):
    entry = cache.Prepared(tmp_path / "entry", {})
    monkeypatch.setattr(cache, "find", lambda recipe, folder: entry)
    options = CompareOptions(("jet_fp8",), (3,), tmp_path, ("trainer.test_freq=2",), steps=4, device="cpu")
    status = run_compare(options, (*FAKE, "train", "succeed"), (*FAKE, "judge", "2"))
    command = json.loads((tmp_path / "job.json").read_text())
    assert status == 0 and command[-1] == "trainer.test_freq=2"
    assert f"data.val_files='{entry.test}'" in command and "trainer.total_training_steps=4" in command


def test_an_interruption_ends_every_started_process(tmp_path):
    words = ("--precisions", "bf16", "--out", str(tmp_path), "--", *FAKE, "train", "hang")
    driver = subprocess.Popen([sys.executable, "-m", "jetrl_verl.cli", "compare", *words], stdout=-1, text=True)
    try:
        next(line for line in driver.stdout if line.startswith("step 2/"))
        os.kill(driver.pid, signal.SIGTERM)
        rest, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert driver.returncode == 128 + signal.SIGTERM and "Run the same command to continue" in rest
    assert f"{tmp_path}" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_accuracy_differences_and_errors_by_hand():
    scores = {"before": [[[0], [0], [0], [1]]], "bf16": [[[1], [0], [0], [1]]], "jet_fp8": [[[1], [1], [0], [1]]]}
    before, bf16, jet = summarize(scores, {}, "bf16").values()
    assert (before["accuracy"], bf16["accuracy"], jet["accuracy"]) == (0.25, 0.5, 0.75)
    # The standard deviation of (1, 0, 0, 1) is sqrt(1/3), over 4 problems.
    assert bf16["± accuracy"] == pytest.approx(math.sqrt(1 / 3) / 2) and bf16["Δ"] is bf16["between seeds"] is None
    assert (jet["Δ"], jet["± Δ"], before["Δ"]) == (0.25, pytest.approx(0.25), -0.25)
    # Pairing removes what both precisions share; without scores of the baseline there is no difference.
    answers = [[[1], [0]] * 8]
    same = summarize({"bf16": answers, "jet_fp8": answers}, {}, "bf16")["jet_fp8"]
    assert same["± accuracy"] > 0.1 and same["Δ"] == same["± Δ"] == 0
    assert summarize({"jet_fp8": answers}, {}, "bf16")["jet_fp8"]["Δ"] is None


def test_seeds_and_samples_are_averaged_within_a_problem():
    logged = [(i, {"critic/score/mean": 0.1 * i, "rollout_corr/k3_kl": 1e-4, "timing_s/step": i}) for i in (1, 2, 3)]
    rows = summarize({"bf16": [[[1, 0], [1, 1]], [[0, 0], [1, 1]]]}, {"bf16": [Run("a", logged)]}, "bf16")
    assert rows["bf16"]["accuracy"] == 0.625 and rows["bf16"]["± accuracy"] == pytest.approx(0.375)  # 1/4 and 1
    assert rows["bf16"]["between seeds"] == pytest.approx(0.25 / math.sqrt(2))  # seeds: 3/4 and 1/2
    assert cells(rows)[1] == ["bf16", "62.5%", "37.5%", "", "", "17.7%", "0.300", "1.0e-04", "2.0"]
    lags = [{"rollout_corr/lag_0/tokens": 6, "rollout_corr/lag_0/k3_kl": 0.0, "rollout_corr/lag_1/tokens": 2}, {}]
    runs = [Run("a", [(i, step | lag) for (i, step), lag in zip(logged, lags)])]
    header, *rows = cells(summarize({name: [[[1]]] for name in ("a", "b")}, {"a": runs}, "a"))
    assert header[-3:-1] == ["k3 KL, current", "stale tokens"]
    assert [row[-3:-1] for row in rows] == [["0.0e+00", "25.0%"], ["", ""]]
    with pytest.raises(UserError, match="different numbers of problems"):
        summarize({"bf16": [[[1], [0]]], "jet_fp8": [[[1]]]}, {}, "bf16")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("jet_fp8", ()),
        ("jet_fp8+jetrl.kv_cache=fp8+data.seed=4", ("jetrl.kv_cache=fp8", "data.seed=4")),
        ("jet_fp8+++a.b=1e-6++c=/x/y_z.parquet", ("++a.b=1e-6", "+c=/x/y_z.parquet")),
        ("jet_fp8+trainer.logger=[console,file]+clip=x", ("trainer.logger=[console,file]", "clip=x")),
    ],
)
def test_a_row_is_a_precision_and_overrides_of_hydra(text, settings):
    row = parse_row(text, ["jet_fp8"])
    assert (str(row), row.name, row.settings) == (text, "jet_fp8", settings)
    OverridesParser.create().parse_overrides(list(row.settings))


@pytest.mark.parametrize("text", ["jet_fp9", "", "jet_fp8+", "jet_fp8+a", "jet_fp8+a=x|y", "jet_fp8+a=1++a=2"])
def test_an_invalid_row_is_refused(text):
    with pytest.raises(UserError):
        parse_row(text, ["jet_fp8"])


def test_a_list_is_split_where_a_row_ends():
    assert split_rows("bf16,jet_fp8+a=[1,2]+b=3,fp8_rollout") == ("bf16", "jet_fp8+a=[1,2]+b=3", "fp8_rollout")


def test_every_row_has_its_own_valid_file_name():
    texts = ["a", "a+b=c", "a+b.c=d", "a+b=c.d", "a+b=c-d", "a+b=c_d", "a+b=c/d", "a+b=c:d", "a++b=c", "a+b=[1,2]"]
    texts += ["a+b=" + "x" * 200, "a+b=" + "x" * 199 + "y", "a+b=c+d=e", "a+b=c-d-e"]
    slugs = [parse_row(text, ["a"]).slug for text in texts]
    assert len(set(slugs)) == len(texts) and slugs[2] == "a-b.c-d"
    assert all(slug.replace("-", "").replace(".", "").replace("_", "").isalnum() for slug in slugs)
    assert max(map(len, slugs)) < 140
