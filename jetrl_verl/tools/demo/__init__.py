# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``make demo``: real verl and vLLM learn arithmetic under one precision, on a CPU or a GPU, and end with a report."""

from jetrl_verl.tools import ToolError


class DemoError(ToolError):
    """The demo cannot go on for a reason the user can act on; the message is one sentence that says how."""
