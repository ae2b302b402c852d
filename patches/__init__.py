# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What has to be different in verl or vLLM, one module per reason: target, hash, symptom, when it can go, replacement.

``patch.py`` says what a patch is, ``reach.py`` lists everything else of other projects that we override or reach into.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetrl_verl.patches.patch import Patch

MODULES = (
    "attention_name",
    "batch_hooks",
    "checkpoint_tracker",
    "fork_on_cpu",
    "fsdp_on_cpu",
    "generation",
    "log_probs",
    "process_group_on_cpu",
    "reloadable_weights_on_cpu",
    "replay_buffer",
    "two_runs",
    "weight_sync",
)


def all_patches() -> "list[Patch]":
    """Every patch, in the order of the modules above; imports them, and with them torch and parts of verl."""
    found = (importlib.import_module(f"{__name__}.{module}").PATCHES for module in MODULES)
    return [patch for patches in found for patch in patches]


def installed_states() -> "list[tuple[Patch, str]]":
    """Each patch with what its function is in the installed packages (:data:`patch.STOCK` and so on); imports neither.

    A patch whose project is not installed is left out.
    """
    found = []
    for patch in all_patches():
        spec = importlib.util.find_spec(patch.project)
        if spec is not None:
            file = Path(spec.origin).parent.parent / patch.path
            found.append((patch, patch.state_in(file.read_text() if file.exists() else "")))
    return found
