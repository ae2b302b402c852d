# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The whole table of what is supported with what, and who asks it what."""

from collections.abc import Iterator
from typing import Any

from .algorithms import ALGORITHM_ROWS
from .general import GENERAL_ROWS
from .machine import MACHINE_ROWS, WORKER_ROWS
from .operations import EXACT_ROWS, SHARED_ROWS
from .options import OPTION_ROWS
from .row import Get, Row

COMPOSITION_ROWS: tuple[Row, ...] = (*GENERAL_ROWS, *SHARED_ROWS, *EXACT_ROWS, *ALGORITHM_ROWS)
"""What ``config/check.py`` reads, in the order of the check."""

TABLE: tuple[Row, ...] = (*OPTION_ROWS, *COMPOSITION_ROWS, *MACHINE_ROWS, *WORKER_ROWS)

_BY_NAME = {row.name: row for row in TABLE}


def row(name: str) -> Row:
    """The row of a name."""
    return _BY_NAME[name]


def refusal(name: str, get: Get | None = None, **words: Any) -> str:
    """Message of a row, ``X is not supported with Y: why. Set Z.``, for one who sees what no setting shows.

    Args:
        name: the row's.
        get: reads the composed configuration, where the row's texts need it.
        words: what else the row's texts name.
    """
    return row(name).message(get, **words)


def refusals(get: Get, rows: tuple[Row, ...] = COMPOSITION_ROWS) -> Iterator[str]:
    """Messages of the rows that refuse a composed configuration, first things first."""
    for each in rows:
        if each.scope.refused:
            for words in each.met(get):
                yield each.message(get, **words)


def stock_because(get: Get) -> Iterator[str]:
    """Why a composed configuration makes ``jetrl.operations=auto`` ``stock``: ``X is not supported with Y: why``."""

    def as_shared(key: str) -> Any:
        return "shared" if key == "jetrl.operations" else get(key)

    for each in SHARED_ROWS:
        for words in each.met(as_shared):
            yield each.clause(as_shared, **words)


def row_of(error: Exception) -> Row | None:
    """The row that an error of a module below is about, by its words; None if it is about none."""
    return next((each for each in MACHINE_ROWS if each.sign and each.sign in str(error)), None)
