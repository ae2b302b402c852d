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
from jetrl_verl.config.engine_config import JetFSDPEngineConfig, resolved
from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.support.scopes import ROLLOUT
from jetrl_verl.config.support.table import refuse
from jetrl_verl.metrics import hooks
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


@dataclass
class JetRolloutConfig(RolloutConfig):
    """verl's ``RolloutConfig`` whose ``engine_kwargs.vllm`` ask for our FP8 linears; options in ``custom.jetrl``.

    Raises ``UnsupportedConfiguration`` where the user set one of those arguments to something else.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization is not None:
            key, precision = f"{ROLLOUT}.quantization", self.jetrl.precision
            refuse("verls_quantization", precision=precision, key=key, value=self.quantization)
        vllm_kwargs = vllm_arguments(self.jetrl, self.engine_kwargs.get("vllm"))
        self.engine_kwargs = {**self.engine_kwargs, "vllm": vllm_kwargs}
        # verl's trainer builds this config before its first step; in every other process these do nothing.
        when_imported("verl.trainer.ppo.v1.trainer_base", "jetrl: tracker", TRACKER.apply)
        if self.jetrl.metrics:
            hooks.install_in_trainer()
        if self.jetrl.correction == "adaptive":
            adaptive_correction.install_in_trainer(self.jetrl.correction_scale)
        if self.jetrl.old_log_probs == "rollout":
            old_log_probs.install_in_trainer()

    @property
    def jetrl(self) -> JetConfig:
        """The options of this run."""
        node = (self.custom or {}).get("jetrl")
        if node is None:
            refuse("class_without_options", what=f"a {type(self).__name__} without custom.jetrl")
        return resolved(node)
