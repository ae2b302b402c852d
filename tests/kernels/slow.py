# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of a parametrized test that only ``make test-all`` runs."""

import itertools
from collections.abc import Iterable

import pytest

from jetrl_verl.reference import SCALE_RULES


def slow(*values):
    """One case, of one or several parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)


def one_rule_fast(cases: Iterable) -> list:
    """Every case with both scale rules; the fast rule alternates."""
    pairs = [(case, rules) for case, rules in zip(cases, itertools.cycle([SCALE_RULES, SCALE_RULES[::-1]]))]
    return [pair for case, (first, second) in pairs for pair in ((case, first), slow(case, second))]


def mostly_slow(cases: Iterable, fast: Iterable) -> list:
    """``cases``, all slow but those in ``fast``."""
    fast = list(fast)
    assert set(fast) <= set(cases := list(cases)), set(fast) - set(cases)
    return [case if case in fast else slow(*(case if isinstance(case, tuple) else (case,))) for case in cases]
