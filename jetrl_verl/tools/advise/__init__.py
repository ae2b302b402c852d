# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl advise``: seconds of each phase, memory and gain of each precision, predicted from measured rates.

A roofline with measured efficiencies (docs/advise.md): ``shapes`` what a model is, ``rates`` what one GPU was measured
to do, ``trainer`` and ``rollout`` the seconds of a phase, ``memory`` the bytes, ``job`` what is asked of them,
``settings`` which settings cost exactness, ``run`` and ``report`` the command. No GPU, no network.
"""

from jetrl_verl.tools import ToolError


class AdviseError(ToolError):
    """Nothing can be predicted; the message says what to give instead."""
