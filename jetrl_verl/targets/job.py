# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Hydra's callback of a non-bf16 precision, in the driver: the checks of this machine right before the job starts, and
the last line of a job that this package stopped, or that a killed process ended."""

import re
import sys
import traceback
from typing import Any

import ray
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from ray.exceptions import ActorDiedError, RayTaskError

from jetrl_verl.algorithms.invariant_scaling import check_resumed
from jetrl_verl.checkpoint.validation import DamagedCheckpointError, check_resume, resume_folder
from jetrl_verl.config import environment, workers
from jetrl_verl.config.composition import reader
from jetrl_verl.config.job import Job
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.patches.worker_errors import causes, sentence_of

REACHES = ("hydra.core.utils:JobReturn._return_value",)
"""The exception of a failed job, whose public property raises it; scripts/reach.py watches it."""


class JetCallback(Callback):
    """Checks this machine, the model folder, the data and the checkpoint, and wraps ``ray.init``, which checks the
    workers."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Hydra turns an exception of a callback into a warning and runs the job; an exit gets through.
        try:
            job = Job.of(config.jetrl)
            workers.install(job)
            environment.check_environment(job, reader(config))
            check_resume(config)
            if (step := resume_folder(config)) is not None:
                check_resumed(step / "actor", job.options.invariant_scaling)
        except (UnsupportedConfiguration, DamagedCheckpointError) as refusal:
            sys.exit(f"jetrl_verl: {refusal}")
        except Exception as error:
            traceback.print_exc()
            sys.exit(
                f"jetrl_verl: the checks before the job failed ({type(error).__name__}: {error}); report "
                "the traceback above, or use precision=bf16."
            )

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """End a job that this package stopped, or one of whose processes died, with a sentence as the last line."""
        if job_return.status != JobStatus.FAILED:
            return
        error = job_return._return_value
        if sentence := sentence_of(error) or sentence_of_death(error):
            # Workers' lines are printed until Ray has ended.
            ray.shutdown()
            sys.exit(f"jetrl_verl: {sentence}")


def sentence_of_death(error: BaseException | None) -> str:
    """What to do about the Ray actor that died and so ended a job; empty if none died."""
    for cause in causes(error):
        if isinstance(cause, ActorDiedError) and not isinstance(cause, RayTaskError) and not cause.actor_init_failed:
            actor = dict(re.findall(r"^\t(class_name|pid|ip): (.+)$", str(cause), re.MULTILINE))
            name, pid, host = (actor.get(key, "unknown") for key in ("class_name", "pid", "ip"))
            return (
                f"{name.rpartition('.')[2]} (process {pid} on {host}) was killed or has crashed, so the job has ended; "
                "see its messages above and that host's memory, and resume from the last checkpoint "
                "(trainer.resume_mode=auto)."
            )
    return ""
