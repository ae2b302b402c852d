# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine config with the options of this project and the role of its model."""

from dataclasses import dataclass
from typing import Any

from verl.workers.config import FSDPEngineConfig

from jetrl_verl.formats.catalog import UNQUANTIZED

from .options import JetConfig, UnsupportedConfiguration
from .support.table import refuse

_ROLE_FIELD = {"actor": "train", "ref": "ref", "critic": "critic"}


@dataclass
class JetFSDPEngineConfig(FSDPEngineConfig):
    """verl's ``FSDPEngineConfig`` plus the options of this project and the role of the model that it configures."""

    jetrl: Any = None
    """The ``jetrl`` node: a mapping in YAML, a ``JetConfig`` from construction on."""

    jetrl_role: str = "actor"
    """``actor``, ``ref`` or ``critic``: which option is about this model."""

    jetrl_rollout_tp: int = 1
    """Tensor-parallel size of the rollout; with the shapes it decides which layers can be quantized."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jetrl is None:
            refuse("class_without_options", what=f"a {type(self).__name__} without jetrl")
        if self.jetrl_role not in _ROLE_FIELD:
            raise UnsupportedConfiguration(
                f"jetrl_role={self.jetrl_role} is not a role. Set one of {', '.join(_ROLE_FIELD)}."
            )
        object.__setattr__(self, "jetrl", resolved(self.jetrl))

    @property
    def quantized_linears(self) -> bool:
        """Whether the linear layers of this model run in the format of the flow."""
        return getattr(self.jetrl, _ROLE_FIELD[self.jetrl_role]) != UNQUANTIZED

    @property
    def shared_operations(self) -> bool:
        """Whether this model runs the operations that the rollout runs."""
        return self.jetrl_role == "actor" and self.jetrl.operations == "shared"


def resolved(node: Any) -> JetConfig:
    """Options of a ``jetrl`` node in which ``jetrl.operations`` is ``stock`` or ``shared``."""
    options = JetConfig.from_node(node)
    if options.operations == "auto":
        # If each process decided, the two sides could differ.
        refuse("auto_uncomposed")
    return options
