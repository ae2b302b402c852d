# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes of GEMMs that ``benchmarks/advise_rates.py`` fits its rates to."""

from jetrl_verl.tools import ToolError


class BenchError(ToolError):
    """A shape is not known; the message is one sentence for the user."""
