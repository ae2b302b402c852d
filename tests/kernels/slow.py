# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of a parametrized test that only ``make test-all`` runs."""

from collections.abc import Iterable

import pytest


def slow(*values):
    """One case, of one or several parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(cases: Iterable, fast: Iterable) -> list:
    """``cases``, all slow but those in ``fast``."""
    fast = list(fast)
    assert set(fast) <= set(cases := list(cases)), set(fast) - set(cases)
    return [case if case in fast else slow(*(case if isinstance(case, tuple) else (case,))) for case in cases]
