# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Changes to verl and vLLM as data, one module per reason. ``patch.py`` defines a patch."""

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
    "dead_servers",
    "equal_lengths",
    "fork_on_cpu",
    "frozen_heap",
    "fsdp_on_cpu",
    "generation",
    "hybrid_on_cpu",
    "log_probs",
    "micro_batches",
    "process_group_on_cpu",
    "reloadable_weights_on_cpu",
    "replay_buffer",
    "restored_weights",
    "separate_rollout",
    "tied_head",
    "token_versions",
    "two_runs",
    "weight_sync",
    "worker_errors",
)


def all_patches() -> "list[Patch]":
    """Every patch for the installed versions in the order of ``MODULES``. Imports torch and parts of verl."""
    modules = [importlib.import_module(f"{__name__}.{name}") for name in MODULES]
    return [patch for module in modules for patch in module.PATCHES if patch.applies]


def installed_states() -> "list[tuple[Patch, str]]":
    """Each patch with the state of its function in the installed package (:data:`patch.STOCK` and so on).

    Reads source and imports neither project. A patch whose project is not installed is left out.
    """
    states = []
    for patch in all_patches():
        spec = importlib.util.find_spec(patch.project)
        if spec is not None:
            file = Path(spec.origin).parent.parent / patch.path
            states.append((patch, patch.state_in(file.read_text() if file.exists() else "")))
    return states
