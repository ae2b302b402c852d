# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The flag ``precision=`` and its options: the Hydra group, the job that the driver resolves, and the checks.

Names are imported on first use: ``--cfg job`` need not import verl's worker configs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .job import Job
from .options import PRECISIONS, JetConfig
from .support.row import UnsupportedConfiguration

if TYPE_CHECKING:
    from .composition import resolve
    from .engine_config import JetFSDPEngineConfig
    from .environment import check_environment

_LAZY = {"JetFSDPEngineConfig": "engine_config", "check_environment": "environment", "resolve": "composition"}

__all__ = [
    "PRECISIONS",
    "JetConfig",
    "JetFSDPEngineConfig",
    "Job",
    "UnsupportedConfiguration",
    "check_environment",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
