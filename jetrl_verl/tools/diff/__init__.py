# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff``: where rollout and trainer differ, which operation differs first, and what each kind contributes.

``rollout`` runs vLLM in a process of its own and records it, ``trainer`` builds the Hugging Face model as the engine
does, ``attribution`` compares and corrects, ``report`` says it, ``run`` is the command.
"""

from jetrl_verl.tools import ToolError


class DiffError(ToolError):
    """The comparison cannot be made; the message is one sentence: what is wrong, what to do."""
