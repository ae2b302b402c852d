# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The module whose names a patch's replacement reads, wherever the replacement came from."""

import importlib
import sys
from types import ModuleType

from jetrl_verl.patches.patch import Patch


def current(patch: Patch):
    """What the target module holds under the patched name now."""
    holder = importlib.import_module(patch.module)
    for name in patch.function.split("."):
        holder = getattr(holder, name)
    return holder


def home(patch: Patch) -> ModuleType:
    """Ours if the patch was applied at run time, the target's if it was written into the source."""
    patch.apply()
    return sys.modules[patch.by.__module__ if hasattr(current(patch), "_jetrl_stock") else patch.module]
