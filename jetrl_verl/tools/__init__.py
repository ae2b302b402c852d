# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of ``jetrl``: doctor, report, diff, memory, compare and demo."""

from jetrl_verl.inputs import UserError


class ToolError(UserError):
    """A command cannot go on for a reason the user can act on; the message is one sentence that says how."""
