# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl doctor``: what this machine can run, and how to fix what is wrong."""

LINEARS, MIXTURES = "linears", "mixtures of experts"
"""Subjects of findings."""
