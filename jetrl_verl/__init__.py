# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""jetrl_verl: one FP8 precision flow for rollout and training in verl (Jet-RL, arXiv 2601.14243)."""

from pathlib import Path

__version__ = "0.1.0"

if not Path(__file__).with_name("patches").is_dir():
    raise ImportError(
        "jetrl_verl/patches is no folder: this copy of the tree lost its symbolic link to ../patches. Clone it with "
        "git (core.symlinks=true), unpack it with tar or unzip, or install a wheel."
    )
