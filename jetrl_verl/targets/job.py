# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Hydra's callback of a non-bf16 precision: the checks of this machine, in the driver, right before the job starts."""

import sys
import traceback
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from jetrl_verl.checkpoint.validation import DamagedCheckpointError, check_resume
from jetrl_verl.config import environment, workers
from jetrl_verl.config.composition import reader
from jetrl_verl.config.job import Job
from jetrl_verl.config.support.row import UnsupportedConfiguration


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
        except (UnsupportedConfiguration, DamagedCheckpointError) as refusal:
            sys.exit(f"jetrl_verl: {refusal}")
        except Exception as error:
            traceback.print_exc()
            sys.exit(
                f"jetrl_verl: the checks before the job failed ({type(error).__name__}: {error}); report "
                "the traceback above, or use precision=bf16."
            )
