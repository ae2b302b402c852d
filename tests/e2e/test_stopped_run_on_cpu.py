# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One bit of the rollout's log-probabilities is flipped in a real job: an exact run stops before the update of that
step, saves what it has, and the command that it prints names the token."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import flipped
import pytest
from jobs import train

DIFFERING = "training/old_log_probs_differing_tokens"
SENTENCE = re.compile(
    r"precision=jet_fp8_exact: before the update of step 2, the log-probability of response token \d+ .*?\)\."
)


@pytest.fixture
def job(policy, tmp_path, monkeypatch):
    path = (str(Path(flipped.__file__).parent), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("FLIPPED_STEP", "2")

    def run(precision: str, status: int, *overrides: str):
        words = (f"trainer.default_local_dir={tmp_path / 'checkpoints'}", "trainer.save_freq=1")
        library = f"actor_rollout_ref.model.external_lib={flipped.__name__}"
        return train(policy, precision, tmp_path / "run", 2, library, *words, *overrides, status=status)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("source", ["compute", "rollout"])
def test_a_flipped_bit_stops_an_exact_run_before_the_update(job, source, tmp_path, monkeypatch):
    if source == "rollout":  # the trainer's own comparison is a micro-batch; that of the update's forward stops the run
        monkeypatch.setenv("FLIPPED_UNSEEN", "1")
    run = job("jet_fp8_exact", 1, f"jetrl.old_log_probs={source}")
    assert run.steps(DIFFERING) == [0], "the first step has no fault"
    (sentence,) = set(SENTENCE.findall(run.log))
    assert (
        f"response token {flipped.TOKEN} " in sentence and "its checkpoint of step 1 (trainer.resume_mode" in sentence
    )
    assert run.log.rstrip().splitlines()[-1] == f"jetrl_verl: {sentence}"
    assert (tmp_path / "checkpoints" / "global_step_1" / "actor").is_dir()

    command = shlex.split(sentence.split("`")[1])
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    diff = subprocess.run(
        [sys.executable, "-m", "jetrl_verl.cli", *command[1:]], capture_output=True, text=True, env=environment
    )
    assert diff.returncode == 1, diff.stdout + diff.stderr
    # Both engines agree here, so the fault is not an operation's: it is in what the run's rollout reported.
    assert "first difference: none" in diff.stdout
    assert f"step 2: the log-probability of response token {flipped.TOKEN} " in diff.stdout


@pytest.mark.slow
def test_jet_fp8_warns_once_and_goes_on(job):
    run = job("jet_fp8", 0, "jetrl.operations=shared")
    first, second = run.steps(DIFFERING)
    assert first == 0 < second <= 128
    assert run.log.count("Set precision=jet_fp8_exact to stop at the first") == 1
