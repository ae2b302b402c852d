# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the driver shows of a step, and of a failed run's log: the exceptions, ours by whatever name, nothing else."""

import traceback

import pytest
from omegaconf import OmegaConf

from jetrl_verl.checkpoint.validation import DamagedCheckpointError
from jetrl_verl.config import operations
from jetrl_verl.config.options import UnsupportedConfiguration
from jetrl_verl.metrics.quantization import NonFiniteWeightError
from jetrl_verl.models.plan import UnsupportedLayer
from jetrl_verl.sync.contract import ContractViolation
from jetrl_verl.tools.progress import describe, last_errors

NOISE = """\
WARNING 11-20 12:00:00 [base.py:300] Using None for EOS token id
jetrl_verl.train.engine: 14 linear layers in FP8
Traceback (most recent call last):
  File "engine.py", line 12, in train_batch
    raise kind(message)
"""


def as_printed(error: Exception) -> str:
    """The last line of the error's traceback."""
    return traceback.format_exception_only(error)[-1]


@pytest.mark.parametrize(
    "kind",
    [
        ContractViolation,
        DamagedCheckpointError,
        NonFiniteWeightError,
        UnsupportedConfiguration,
        UnsupportedLayer,
        ValueError,
    ],
)
def test_an_exception_is_found_by_its_line(tmp_path, kind):
    line = as_printed(kind("layer 3 differs"))
    log = tmp_path / "run.log"
    log.write_text(f"{NOISE}\x1b[36m(WorkerDict pid=7)\x1b[0m {line}noise after the error\n")
    assert last_errors(log) == [line.rstrip()]
    assert line.endswith(f"{kind.__name__}: layer 3 differs\n")


def test_a_refusal_is_found_by_who_speaks(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(f"{NOISE}jetrl_verl: precision=fp4 is not a choice.\nnoise\n")
    assert last_errors(log) == ["jetrl_verl: precision=fp4 is not a choice."]


def test_actors_that_pass_an_exception_on_and_notes_of_the_start_are_no_errors(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    operations._say.cache_clear()
    node = {"precision": "jet_fp8", "train": "fp8", "rollout": "fp8", "operations": "auto"}
    operations.resolve_operations(OmegaConf.create({"jetrl": node}))
    note = capsys.readouterr().err
    passed = "ray.exceptions.RayTaskError: \x1b[36mray::vLLMHttpServer.collective_rpc()\x1b[39m (pid=7, repr=<...>)\n"
    died = "ray.exceptions.RayTaskError(ActorDiedError): ray::TaskRunnerV1.run() (pid=7, repr=<...>)\n"
    log = tmp_path / "run.log"
    log.write_text(f"{note}{passed}{died}Exception: Call to collective_rpc method failed: cancelled\n")
    assert note.startswith("jetrl_verl: ")
    assert last_errors(log) == ["Exception: Call to collective_rpc method failed: cancelled"]


def test_the_end_of_a_log_without_an_exception(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(NOISE)
    assert last_errors(log, tail=2) == NOISE.splitlines()[-2:]
    assert last_errors(tmp_path / "none") == []


def test_a_step_shows_every_validation_set():
    gsm8k, math = {"val-core/openai/gsm8k/acc/mean@1": 0.9}, {"val-core/MATH-500/acc/mean@1": 0.4}
    assert describe(0, gsm8k)["held-out accuracy"] == "90.0%"
    assert describe(0, gsm8k | math)["held-out accuracy"] == "MATH-500 40.0%, openai/gsm8k 90.0%"
    assert describe(1, {"val-core/MATH-500/acc/mean@1": None})["held-out accuracy"] == ""
    assert describe(0, {}).keys() == describe(0, gsm8k | math).keys(), "columns of one table"
