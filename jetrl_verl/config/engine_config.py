# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine config with the job and the role of its model."""

from dataclasses import dataclass
from typing import Any

from verl.workers.config import FSDPEngineConfig

from .job import Job


@dataclass
class JetFSDPEngineConfig(FSDPEngineConfig):
    """verl's ``FSDPEngineConfig`` plus the job and the role of the model that it configures."""

    jetrl: Any = None
    """The ``jetrl`` node: a mapping in YAML, a ``Job`` from construction on."""

    jetrl_role: str = "actor"
    """``actor``, ``ref`` or ``critic``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "jetrl", Job.of(self.jetrl))

    @property
    def quantized_linears(self) -> bool:
        """Whether the linear layers of this model run in the format of the flow."""
        return self.jetrl.quantizes(self.jetrl_role)

    @property
    def shared_operations(self) -> bool:
        """Whether this model runs the operations that the rollout runs."""
        return self.jetrl_role == "actor" and self.jetrl.shared
