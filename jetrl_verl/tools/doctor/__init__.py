# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What this machine can run, and for each thing wrong one line that fixes it: ``jetrl doctor``."""

LINEARS, MIXTURES = "linears", "mixtures of experts"
"""Subjects of findings."""
