# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The flag ``precision=`` and its options: the Hydra group, the options' dataclass, and the checks.

Names are imported on first use: ``--cfg job`` need not import verl's worker configs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .options import PRECISIONS, JetConfig, UnsupportedConfiguration

if TYPE_CHECKING:
    from .check import check_config
    from .engine_config import JetFSDPEngineConfig
    from .environment import check_environment

_LAZY = {
    "JetFSDPEngineConfig": "engine_config",
    "check_config": "check",
    "check_environment": "environment",
}

__all__ = [
    "PRECISIONS",
    "JetConfig",
    "JetFSDPEngineConfig",
    "UnsupportedConfiguration",
    "check_config",
    "check_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
