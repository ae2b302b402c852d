# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a process of a job refuses is the last line of the driver, through vLLM's and Ray's layers."""

import asyncio

import pytest
from hydra.core.utils import JobReturn, JobStatus
from patch_home import home
from ray.exceptions import ActorDiedError, RayTaskError

from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.patches.worker_errors import FILE, START, WorkerError, reported_to_server, sentence_of
from jetrl_verl.targets.job import JetCallback

SENTENCE = "a norm without a weight is not supported. Set jetrl.operations=stock."


def through_ray(error: Exception, actors: int) -> Exception:
    """As the driver gets it: each actor raises what it got from the one before."""
    for number in range(actors):
        error = RayTaskError(f"call {number}", "Traceback ...", error, "actor", 1, "host").as_instanceof_cause()
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (through_ray(UnsupportedConfiguration(SENTENCE), 3), SENTENCE),
        (through_ray(WorkerError(SENTENCE), 1), SENTENCE),
        (UnsupportedConfiguration(SENTENCE), SENTENCE),
        (through_ray(ValueError(SENTENCE), 2), ""),
        (ValueError(SENTENCE), ""),
    ],
)
def test_the_driver_ends_with_the_sentence_alone(error, sentence):
    assert sentence_of(error) == sentence
    job = JobReturn(status=JobStatus.FAILED)
    job.return_value = error
    if not sentence:  # Hydra prints it
        return JetCallback().on_job_end(None, job)
    with pytest.raises(SystemExit) as ending:
        JetCallback().on_job_end(None, job)
    assert ending.value.code == f"jetrl_verl: {sentence}"


def test_the_driver_ends_with_a_sentence_about_a_killed_actor():
    job, error = JobReturn(status=JobStatus.FAILED), ActorDiedError()
    error.error_msg += "\n\tclass_name: Trainer\n\tactor_id: 1f\n\tpid: 7\n\tip: 10.0.0.1\nThe actor is dead."
    job.return_value = through_ray(error, 2)
    with pytest.raises(SystemExit, match=r"^jetrl_verl: Trainer \(process 7 on 10.0.0.1\) .* resume from the last"):
        JetCallback().on_job_end(None, job)


@pytest.mark.parametrize(("error", "expected"), [(UnsupportedConfiguration, WorkerError), (ValueError, RuntimeError)])
def test_the_server_raises_what_its_worker_refused(error, expected, monkeypatch):
    async def stock(server) -> None:
        with pytest.raises(error), reported_to_server():
            raise error(SENTENCE)
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setenv(FILE, "")  # and back afterwards
    for _ in range(2):  # a sentence is raised once
        with pytest.raises(expected, match="a norm" if expected is WorkerError else "Engine core") as raised:
            asyncio.run(home(START).launch_server(stock, None))
        assert type(raised.value) is expected
