# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""verl's engine and rollout configs with the precision in them.

A precision group points ``_target_`` of verl's own nodes here; verl instantiates them wherever it would have built
its own, in the driver and in every worker, so these two classes are also where our code enters a worker process:

* ``JetFSDPEngineConfig`` imports ``jetrl_verl.train.engine``, which registers the FSDP engine that swaps the linears;
* ``JetRolloutConfig`` adds the arguments that make vLLM use our quantisation method and weight receiver. It adds them
  when it is built, not in YAML, because a key that exists in the composed config collides with a user's
  ``+key=value``.
"""

import importlib
import os
from dataclasses import dataclass
from typing import Any

from verl.workers.config import FSDPEngineConfig, RolloutConfig

from jetrl_verl.algorithms import adaptive_correction
from jetrl_verl.patches import metrics, resume

from .options import JetConfig, UnsupportedConfiguration
from .vllm_arguments import vllm_arguments

_ROLE_FIELD = {"actor": "train", "ref": "ref", "critic": "critic"}


@dataclass
class JetFSDPEngineConfig(FSDPEngineConfig):
    """verl's ``FSDPEngineConfig`` plus the options of this project and the role of the model that it configures."""

    jetrl: Any = None
    """The ``jetrl`` node: a mapping in YAML, a ``JetConfig`` from construction on."""

    jetrl_role: str = "actor"
    """``actor``, ``ref`` or ``critic``: which of the options speaks about this model."""

    jetrl_rollout_tp: int = 1
    """Tensor-parallel size of the rollout, which decides with the shapes which layers can be quantised."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jetrl is None:
            raise UnsupportedConfiguration("JetFSDPEngineConfig needs the field jetrl; choose a precision group.")
        if self.jetrl_role not in _ROLE_FIELD:
            raise UnsupportedConfiguration(
                f"jetrl_role={self.jetrl_role} is not a role; use one of {', '.join(_ROLE_FIELD)}."
            )
        object.__setattr__(self, "jetrl", _resolved(self.jetrl))
        _register_engine()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # verl builds the critic's config in the task runner and pickles it to the workers, where __post_init__ never
        # runs.
        self.__dict__.update(state)
        _register_engine()

    @property
    def fp8_linears(self) -> bool:
        """Whether the linear layers of this model run in FP8."""
        return getattr(self.jetrl, _ROLE_FIELD[self.jetrl_role]) == "fp8"

    @property
    def shared_operations(self) -> bool:
        """Whether this model runs the operations that the rollout runs."""
        return self.jetrl_role == "actor" and self.jetrl.operations == "shared"


@dataclass
class JetRolloutConfig(RolloutConfig):
    """verl's ``RolloutConfig`` whose ``engine_kwargs.vllm`` ask for our FP8 linears; options in ``custom.jetrl``.

    Raises ``UnsupportedConfiguration`` where the user set one of those arguments to something else.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization is not None:
            raise UnsupportedConfiguration(
                f"rollout.quantization={self.quantization} contradicts precision={self.jetrl.precision}; remove it."
            )
        vllm_kwargs = vllm_arguments(self.jetrl, self.engine_kwargs.get("vllm"))
        self.engine_kwargs = {**self.engine_kwargs, "vllm": vllm_kwargs}
        # verl's trainer builds this config before its first step; in every other process these do nothing.
        resume.install_in_trainer()
        if self.jetrl.metrics:
            metrics.install_in_trainer()
        if self.jetrl.correction == "adaptive":
            adaptive_correction.install_in_trainer(self.jetrl.correction_scale)

    @property
    def jetrl(self) -> JetConfig:
        """The options of this run."""
        node = (self.custom or {}).get("jetrl")
        if node is None:
            raise UnsupportedConfiguration(
                "JetRolloutConfig needs rollout.custom.jetrl; choose a precision group and keep that key."
            )
        return _resolved(node)


def _resolved(node: Any) -> JetConfig:
    options = JetConfig.from_node(node)
    if options.operations == "auto":
        # Each process deciding for itself is how both sides would come to different answers.
        raise UnsupportedConfiguration(
            "jetrl.operations=auto is resolved when Hydra composes a config, and this one was made by hand; set "
            "jetrl.operations=shared or jetrl.operations=stock."
        )
    return options


def _register_engine() -> None:
    # Only the processes of a worker group build engines, and verl marks them with RANK. The driver and the task runner
    # read the same config to validate it and need not pay for importing vLLM.
    if "RANK" in os.environ:
        importlib.import_module("jetrl_verl.train.engine")
