# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: validated before a resume, exported, rewritten for another number of GPUs."""
