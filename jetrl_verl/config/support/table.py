# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The whole table of what is not supported with what, and the functions that ask it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from .algorithms import ALGORITHM_ROWS
from .machine import MACHINE_ROWS, MODEL_ROWS
from .operations import EXACT_ROWS, NOTE_ROWS, SHARED_ROWS
from .options import OPTION_ROWS
from .rollout import ROLLOUT_ROWS
from .row import Get, Row, UnsupportedConfiguration
from .scopes import EXACT
from .training import TRAINING_ROWS
from .workers import COMMAND_ROWS, WORKER_ROWS

if TYPE_CHECKING:
    from jetrl_verl.models import Unsupported

COMPOSITION_ROWS: dict[str, Row] = {**TRAINING_ROWS, **ROLLOUT_ROWS, **SHARED_ROWS, **EXACT_ROWS, **ALGORITHM_ROWS}
"""Rows that the composed configuration shows, in the order of the check."""

TABLE: dict[str, Row] = {
    **OPTION_ROWS,
    **COMPOSITION_ROWS,
    **NOTE_ROWS,
    **MACHINE_ROWS,
    **MODEL_ROWS,
    **WORKER_ROWS,
    **COMMAND_ROWS,
}
"""All rows by name."""


def refusal(name: str, *, precision: str = "", **words: Any) -> str:
    """Message of a row, ``X is not supported with Y: why. Set Z.``

    Args:
        name: the row's.
        precision: of the run, which the Y of many rows states.
        words: of the message; see :meth:`Row.clause`.
    """
    return TABLE[name].message({"jetrl.precision": precision}.get, **words)


def refuse(name: str, **words: Any) -> NoReturn:
    """Raise ``UnsupportedConfiguration`` with the message of a row; arguments of :func:`refusal`."""
    raise UnsupportedConfiguration(refusal(name, **words))


def refusals(get: Get, rows: Mapping[str, Row] = COMPOSITION_ROWS) -> Iterator[str]:
    """Messages of the rows that refuse a composed configuration, in the order of the table."""
    for row in rows.values():
        for words in row.met(get):
            yield row.message(get, **words)


def as_exact(get: Get) -> Get:
    """Reads a configuration as if it had asked for ``jet_fp8_exact``, to find what that would refuse."""

    def read(key: str) -> Any:
        if key == "jetrl.precision":
            return "jet_fp8_exact"
        value = get(key)
        return "shared" if key == "jetrl.operations" and value == "auto" else value

    return read


def stock_because(get: Get) -> Iterator[str]:
    """Why a composed configuration makes ``jetrl.operations=auto`` ``stock``; see :meth:`Row.loss`."""
    yield from losses(lambda key: "shared" if key == "jetrl.operations" else get(key), SHARED_ROWS)


def inexact_because(get: Get) -> Iterator[str]:
    """What else makes a composed configuration differ in the last bits; see :meth:`Row.loss`."""
    rows = {**OPTION_ROWS, **EXACT_ROWS}
    yield from losses(as_exact(get), {name: row for name, row in rows.items() if row.scope is EXACT})


def losses(get: Get, rows: Mapping[str, Row]) -> Iterator[str]:
    """What a composed configuration loses by the rows that it meets; see :meth:`Row.loss`."""
    for row in rows.values():
        for words in row.met(get):
            yield row.loss(**words)


def model_refusal(error: "Unsupported", path: str, precision: str) -> str:
    """Message of the row that an error of ``models/`` or ``nn/`` about the model at ``path`` names."""
    return refusal(error.row, precision=precision, what=f"the model {path}", why=str(error))


@contextmanager
def explained(path: str, precision: str) -> Iterator[None]:
    """Turn what ``models/`` and ``nn/`` raise about the model at ``path`` into ``UnsupportedConfiguration``."""
    from jetrl_verl.models import Unsupported

    try:
        yield
    except Unsupported as error:
        raise UnsupportedConfiguration(model_refusal(error, path, precision)) from None
