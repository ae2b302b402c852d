# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What one concern adds to verl's FSDP engine; engine.py lists the features in order."""

import logging
from typing import Any

import torch
import torch.distributed as dist

from jetrl_verl.config.engine_config import JetFSDPEngineConfig

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


class Feature:
    """One feature of one engine.

    Any other method of a feature has the name of a method of verl's engine and wraps it: its first argument ``stock``
    is verl's method, wrapped by the features further down the list; the other arguments are those of the call.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.config: JetFSDPEngineConfig = engine.engine_config
        self.options = self.config.jetrl.options

    @classmethod
    def applies(cls, config: JetFSDPEngineConfig) -> bool:
        """Whether a model with this engine config has the feature."""
        return True

    def install(self, module: torch.nn.Module) -> None:
        """Change the Hugging Face model before FSDP wraps it."""


def from_rank_0(value: Any) -> Any:
    """Rank 0's ``value`` on every rank, since its files may be on no other machine. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
