# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl doctor``: what this machine can run, and how to fix what is wrong."""

from typing import NamedTuple

OK, NOTE, WRONG = "ok", "note", "wrong"


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        subject: what was checked. state: ``ok``, ``note`` (works, worth knowing) or ``wrong``.
        detail: the result. fix: what to do; empty unless ``wrong``.
    """

    subject: str
    state: str
    detail: str
    fix: str = ""


LINEARS, MIXTURES = "linears", "mixtures of experts"
"""Subjects of findings."""
