# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The module whose names a patch's replacement reads, wherever the replacement came from."""

import importlib
import importlib.util
import sys
from importlib import metadata
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


def released(patch: Patch):
    """The function of the installed release, patched or not."""
    path = metadata.distribution(patch.project).locate_file(patch.path)
    spec = importlib.util.spec_from_file_location(patch.module, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, patch.function)
