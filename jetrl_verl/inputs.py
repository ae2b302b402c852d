# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Files and folders that a user hands over: what is wrong with one becomes a sentence. Imports no framework."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UserError(Exception):
    """A request or a file that cannot be used; the message is one sentence: what is wrong, consequence, remedy."""


@contextmanager
def reading(path: str | Path, what: str, remedy: str, error: type[Exception] = UserError) -> Iterator[None]:
    """Turn everything that parsing one file raises into ``error``, which names the file, the reason and the remedy.

    The body reads that file and picks its fields, nothing else: parsers of damaged files raise any exception.
    """
    try:
        yield
    except error:
        raise
    except Exception as reason:
        raise error(f"{path} is not a readable {what} ({reason_of(reason)}). {remedy}.") from None


@contextmanager
def writing(path: str | Path, option: str) -> Iterator[None]:
    """Turn an ``OSError`` of writing below ``path``, which ``option`` of the command names, into a sentence."""
    try:
        yield
    except OSError as reason:
        at = f" at {reason.filename}" if reason.filename else ""
        message = f"{option} {path} cannot be written ({reason_of(reason)}{at}). Fix that, or set another folder."
        raise UserError(message) from None


def check_new_folder(path: Path, option: str) -> None:
    """Raise unless the output folder ``path`` does not exist yet or is empty."""
    with writing(path, option):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{option} {path} exists and is not an empty folder. Name another one, or remove it.")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``path``, absent or empty, at the end of the body, or goes if that raises."""
    building = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        building.mkdir(parents=True)
        yield building
        if path.exists():
            path.rmdir()
        building.rename(path)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def load_json(path: str | Path, kind: type = dict) -> Any:
    """The content of a JSON file. ``TypeError`` if its top level is no ``kind``; for the body of :func:`reading`."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, kind):
        raise TypeError(f"it holds a {type(content).__name__}, not a {kind.__name__}")
    return content


def reason_of(error: Exception) -> str:
    """Kind and first line of an exception, as a clause."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = text.partition("\n")[0].rstrip(".!")
    return f"{type(error).__name__}: {line[:160]}" if line else type(error).__name__
