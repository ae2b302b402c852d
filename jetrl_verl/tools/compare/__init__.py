# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl compare``: one job under several precisions, all runs scored by one BF16 engine."""

from jetrl_verl.tools import ToolError


class CompareError(ToolError):
    """The comparison cannot continue, and the user can fix the reason; the message says how."""
