# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""jetrl_verl: one FP8 precision flow for rollout and training in verl (Jet-RL, arXiv 2601.14243)."""

__version__ = "0.1.0"
