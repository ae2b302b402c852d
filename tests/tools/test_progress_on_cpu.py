# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The line of a step's metrics, and the exceptions and refusals in the log of a failed run."""

import traceback

import pytest
from omegaconf import OmegaConf

from jetrl_verl.checkpoint.validation import DamagedCheckpointError
from jetrl_verl.config import composition
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.models.plan import UnsupportedLayer
from jetrl_verl.sync.statement import ContractViolation
from jetrl_verl.tools.progress import describe, last_errors

NOISE = "WARNING Using None for EOS token id\njetrl_verl.train.engine: 14 linear layers in FP8\n"
ERRORS = [ContractViolation, DamagedCheckpointError, UnsupportedConfiguration, UnsupportedLayer, ValueError]


@pytest.mark.parametrize("kind", ERRORS)
def test_exceptions_and_refusals_are_recognized(tmp_path, kind):
    (line,) = traceback.format_exception_only(kind("layer 3 differs"))
    refusal = "jetrl_verl: precision=fp4 is not a choice."
    log = tmp_path / "run.log"
    log.write_text(f"{NOISE}\x1b[36m(WorkerDict pid=7)\x1b[0m {line}noise after the error\n{refusal}\nnoise\n")
    assert last_errors(log) == [line.rstrip(), refusal]


def test_forwarded_exceptions_and_startup_notes_are_not_errors(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    composition._say.cache_clear()
    node = {"precision": "jet_fp8", "train": "fp8", "rollout": "fp8", "operations": "auto"}
    monkeypatch.setattr(composition, "refusals", lambda *_: ())  # the node alone is no job
    composition.resolve(OmegaConf.create({"jetrl": node}))
    note = capsys.readouterr().err
    passed = "ray.exceptions.RayTaskError: \x1b[36mray::vLLMHttpServer.collective_rpc()\x1b[39m (pid=7, repr=<...>)\n"
    died = "ray.exceptions.RayTaskError(ActorDiedError): ray::TaskRunnerV1.run() (pid=7, repr=<...>)\n"
    log = tmp_path / "run.log"
    log.write_text(f"{note}{passed}{died}Exception: Call to collective_rpc method failed: cancelled\n")
    assert note.startswith("jetrl_verl: ")
    assert last_errors(log) == ["Exception: Call to collective_rpc method failed: cancelled"]


def test_a_log_without_an_exception_shows_its_last_lines(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(NOISE)
    assert last_errors(log, tail=2) == NOISE.splitlines()
    assert last_errors(tmp_path / "none") == []


def test_a_step_shows_the_metrics_it_has():
    accuracies = {"val-core/openai/gsm8k/acc/mean@1": 0.9, "val-core/MATH-500/acc/mean@1": 0.4}
    assert describe(accuracies) == "accuracy of MATH-500 40.0%  accuracy of openai/gsm8k 90.0%"
    assert describe({"rollout_corr/k3_kl": 0.0, "val-core/MATH-500/acc/mean@1": None}) == "k3_kl 0.0e+00"
