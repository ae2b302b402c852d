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
"""The flag and its options: the Hydra group ``precision``, the config classes that it selects, and the refusals.

``options`` holds the ``jetrl`` node as a dataclass, ``verl_configs`` verl's engine and rollout configs that carry it,
``hydra_plugin`` adds the group to verl's primary configs, ``check`` refuses what cannot work, ``operations`` says what
``jetrl.operations=auto`` is. Names are resolved on
first use: Hydra reads ``precision/*.yaml`` through this package, and ``--cfg job`` need not import verl's worker
configs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .options import PRECISIONS, JetConfig, UnsupportedConfiguration

if TYPE_CHECKING:
    from .check import check_config
    from .environment import check_environment
    from .verl_configs import JetFSDPEngineConfig, JetRolloutConfig

_LAZY = {
    "JetFSDPEngineConfig": "verl_configs",
    "JetRolloutConfig": "verl_configs",
    "check_config": "check",
    "check_environment": "environment",
}

__all__ = [
    "PRECISIONS",
    "JetConfig",
    "JetFSDPEngineConfig",
    "JetRolloutConfig",
    "UnsupportedConfiguration",
    "check_config",
    "check_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
