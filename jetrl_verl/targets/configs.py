# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's engine and rollout configs, as a precision's ``_target_`` names them; verl builds them in every worker.

``JetWorkerEngineConfig`` imports the engine, which registers itself. ``JetRolloutConfig`` adds vLLM's arguments when it
is built, not in YAML, because a key of the composed config collides with a user's ``+key=value``.
"""

import importlib
import os
from dataclasses import dataclass
from typing import Any

from verl.workers.config import RolloutConfig

from jetrl_verl.algorithms import adaptive_correction, old_log_probs
from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.config.job import Job
from jetrl_verl.metrics import hooks
from jetrl_verl.patches import restored_weights
from jetrl_verl.patches.after_import import when_imported
from jetrl_verl.patches.checkpoint_tracker import TRACKER
from jetrl_verl.rollout.arguments import vllm_arguments


class JetWorkerEngineConfig(JetFSDPEngineConfig):
    """``JetFSDPEngineConfig`` that registers our FSDP engine in a process that builds engines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _register_engine()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # verl builds the critic's config in the task runner and pickles it to the workers, where __post_init__ never
        # runs.
        self.__dict__.update(state)
        _register_engine()


def _register_engine() -> None:
    # Only processes of a worker group build engines; verl sets RANK there. Elsewhere importing vLLM would cost seconds.
    if "RANK" in os.environ:
        importlib.import_module("jetrl_verl.train.engine")
        for patch in restored_weights.PATCHES:
            patch.apply()


@dataclass
class JetRolloutConfig(RolloutConfig):
    """verl's ``RolloutConfig`` whose ``engine_kwargs.vllm`` ask for our linear layers; the job is in
    ``custom.jetrl``."""

    # verl 0.9.1 raises it to max_model_len where chunked prefill is off, and fails on its own frozen field.
    _mutable_fields = RolloutConfig._mutable_fields | {"max_num_batched_tokens"}

    def __post_init__(self) -> None:
        super().__post_init__()
        job = self.jetrl
        self.engine_kwargs = {**self.engine_kwargs, "vllm": vllm_arguments(job, self.engine_kwargs.get("vllm"))}
        # verl's trainer builds this config before its first step; in every other process these do nothing.
        when_imported("verl.trainer.ppo.v1.trainer_base", "jetrl: tracker", TRACKER.apply)
        hooks.report_exactness(job.bit_equal, job.shared)
        if job.options.metrics:
            hooks.install_in_trainer()
        if job.options.correction == "adaptive":
            adaptive_correction.install_in_trainer(job.options.correction_scale)
        if job.shared and job.quantizes("actor"):
            old_log_probs.install_in_trainer(job)
        elif job.options.metrics:
            old_log_probs.install_counts_in_trainer()

    @property
    def jetrl(self) -> Job:
        """The job of this run."""
        return Job.of((self.custom or {}).get("jetrl"))
