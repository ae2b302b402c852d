# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The whole table of what is supported with what, and the functions that ask it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from .algorithms import ALGORITHM_ROWS
from .general import GENERAL_ROWS
from .machine import MACHINE_ROWS
from .operations import EXACT_ROWS, SHARED_ROWS
from .options import OPTION_ROWS
from .row import Get, Row, UnsupportedConfiguration
from .scopes import EXACT, SMALLER, TENSOR_PARALLEL
from .workers import COMMAND_ROWS, WORKER_ROWS

if TYPE_CHECKING:
    from jetrl_verl.models import Unsupported

COMPOSITION_ROWS: tuple[Row, ...] = (*GENERAL_ROWS, *SHARED_ROWS, *EXACT_ROWS, *ALGORITHM_ROWS)
"""What ``config/check.py`` reads, in the order of the check."""

TABLE: tuple[Row, ...] = (*OPTION_ROWS, *COMPOSITION_ROWS, *MACHINE_ROWS, *WORKER_ROWS, *COMMAND_ROWS)

INEXACT_ROWS: tuple[Row, ...] = tuple(row for row in TABLE if row.scope.stock or row.scope is EXACT)
"""What costs equality in every bit: it makes the operations stock, or ``jet_fp8_exact`` alone refuses it."""

_BY_NAME = {row.name: row for row in TABLE}


def row(name: str) -> Row:
    """The row of a name."""
    return _BY_NAME[name]


def refusal(name: str, get: Get | None = None, *, precision: str = "", **words: Any) -> str:
    """Message of a row, ``X is not supported with Y: why. Set Z.``

    Args:
        name: the row's.
        get: reads the composed configuration, where the row's scope names a value of it.
        precision: of the run, where the scope names that alone.
        words: of the message; see :meth:`Row.clause`.
    """
    return row(name).message({"jetrl.precision": precision}.get if precision else get, **words)


def refuse(name: str, get: Get | None = None, **words: Any) -> NoReturn:
    """Raise ``UnsupportedConfiguration`` with the message of a row; arguments of :func:`refusal`."""
    raise UnsupportedConfiguration(refusal(name, get, **words))


def refusals(get: Get, rows: tuple[Row, ...] = COMPOSITION_ROWS) -> Iterator[str]:
    """Messages of the rows that refuse a composed configuration, in the order of the table."""
    for row in rows:
        if row.scope.refused:
            for words in row.met(get):
                yield row.message(get, **words)


def stock_because(get: Get) -> Iterator[str]:
    """Why a composed configuration makes ``jetrl.operations=auto`` ``stock``: ``X is not supported with Y: why``."""

    def as_shared(key: str) -> Any:
        return "shared" if key == "jetrl.operations" else get(key)

    for row in SHARED_ROWS:
        for words in row.met(as_shared):
            yield row.clause(as_shared, **words)


def model_refusal(error: "Unsupported", path: str, precision: str) -> str:
    """Message of the row that an error of ``models/`` names."""
    unsupported = row(error.row)
    get = {"jetrl.precision": precision}.get
    fitting = f"{TENSOR_PARALLEL}={error.words.get('largest')}, the largest that fits"
    remedy = unsupported.remedy.replace(SMALLER, fitting)
    return unsupported.message(get, what=f"{unsupported.what} {path}", why=str(error), remedy=remedy)


def model_clause(error: "Unsupported", path: str, precision: str) -> str:
    """The same without the remedy and the full stop."""
    unsupported = row(error.row)
    get = {"jetrl.precision": precision}.get
    return unsupported.clause(get, what=f"{unsupported.what} {path}", why=str(error))


@contextmanager
def explained(path: str, precision: str) -> Iterator[None]:
    """Turn what ``models/`` and ``nn/`` raise about the model at ``path`` into ``UnsupportedConfiguration``."""
    from jetrl_verl.models import Unsupported

    try:
        yield
    except Unsupported as error:
        raise UnsupportedConfiguration(model_refusal(error, path, precision)) from None
