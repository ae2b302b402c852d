# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The whole table of what is supported with what, and who asks it what."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from .algorithms import ALGORITHM_ROWS
from .commands import COMMAND_ROWS
from .general import GENERAL_ROWS
from .machine import MACHINE_ROWS
from .operations import EXACT_ROWS, SHARED_ROWS
from .options import OPTION_ROWS
from .row import Get, Row, UnsupportedConfiguration
from .scopes import EXACT
from .workers import WORKER_ROWS

if TYPE_CHECKING:
    from jetrl_verl.models import Unsupported

COMPOSITION_ROWS: tuple[Row, ...] = (*GENERAL_ROWS, *SHARED_ROWS, *EXACT_ROWS, *ALGORITHM_ROWS)
"""What ``config/check.py`` reads, in the order of the check."""

TABLE: tuple[Row, ...] = (*OPTION_ROWS, *COMPOSITION_ROWS, *MACHINE_ROWS, *WORKER_ROWS, *COMMAND_ROWS)

INEXACT_ROWS: tuple[Row, ...] = tuple(each for each in TABLE if each.scope.stock or each.scope.doc == EXACT.doc)
"""What costs equality in every bit: it makes the operations stock, or ``jet_fp8_exact`` alone refuses it."""

_BY_NAME = {row.name: row for row in TABLE}


def row(name: str) -> Row:
    """The row of a name."""
    return _BY_NAME[name]


def refusal(name: str, get: Get | None = None, /, **words: Any) -> str:
    """Message of a row, ``X is not supported with Y: why. Set Z.``, for one who sees what no setting shows.

    Args:
        name: the row's.
        get: reads the composed configuration, where the row's texts need it.
        words: what else the row's texts name.
    """
    return row(name).message(get, **words)


def refuse(name: str, get: Get | None = None, /, **words: Any) -> NoReturn:
    """Raise ``UnsupportedConfiguration`` with the message of a row; arguments of :func:`refusal`."""
    raise UnsupportedConfiguration(refusal(name, get, **words))


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


def model_refusal(error: "Unsupported", path: str, precision: str) -> str:
    """What a run is told of a model that ``models/`` cannot run: the message of the row that the error names."""
    return row(error.row).message(**_words(error, path, precision))


def model_clause(error: "Unsupported", path: str, precision: str) -> str:
    """The same without the remedy and the full stop."""
    return row(error.row).clause(**_words(error, path, precision))


def _words(error: "Unsupported", path: str, precision: str) -> dict[str, Any]:
    return {"path": path, "error": error, "jetrl.precision": precision, **error.words}


@contextmanager
def explained(path: str, precision: str) -> Iterator[None]:
    """Inside, what ``models/`` and ``nn/`` raise of a model becomes ``UnsupportedConfiguration``, its row's message.

    Args:
        path: of the model. precision: of the run.
    """
    from jetrl_verl.models import Unsupported

    try:
        yield
    except Unsupported as error:
        raise UnsupportedConfiguration(model_refusal(error, path, precision)) from None
