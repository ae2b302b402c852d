# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A row of a comparison as the command line names it: ``PRECISION[+KEY=VALUE...]``, a precision and what is set
beside it.

    fp8_rollout                       # the precision alone
    fp8_rollout+jetrl.kv_cache=fp8    # with an override of verl's or of this project's
    jet_fp8++trainer.added=1          # a key that verl's configuration lacks, with Hydra's own + in front

The text names the row in tables and records; :attr:`Row.slug` names its files. So keys and values have no space, quote
or ``|``.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jetrl_verl.tools import ToolError

FORM = "PRECISION[+KEY=VALUE...]"

_KEY = r"\+{0,2}[A-Za-z_][\w.]*(?:/[\w.]+)?(?:@[\w.]+)?"
_VALUE = r"[\w./:\[\],-]*"
_SETTING = re.compile(rf"\+({_KEY})=({_VALUE})")
_ROW = re.compile(rf"(\w+)((?:\+{_KEY}={_VALUE})*)")
_LONGEST_SLUG = 120


@dataclass(frozen=True)
class Row:
    """One row: the ``name`` of a precision, and ``settings``, overrides ``key=value`` in their order."""

    name: str
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.name, *self.settings))

    @property
    def slug(self) -> str:
        """A name for files: word characters, points and dashes, another one for every row.

        Where a character of a value had to go, or the name would be too long, a part of the text's hash follows.
        """
        words = [self.name, *(word for setting in self.settings for word in setting.split("=", 1))]
        cleaned = "-".join(re.sub(r"[^\w.]+", "_", word) for word in words)
        if cleaned == "-".join(words) and len(cleaned) <= _LONGEST_SLUG:
            return cleaned
        return f"{cleaned[:_LONGEST_SLUG]}-{hashlib.sha256(str(self).encode()).hexdigest()[:8]}"


def parse_row(text: str, names: Collection[str], what: str = "a precision") -> Row:
    """The row that ``text`` names.

    Args:
        names: of the rows without settings. what: they are, in the error.

    Raises:
        ToolError: it has another form, names none of ``names`` or sets a key twice.
    """
    found = _ROW.fullmatch(text)
    if found is None:
        raise ToolError(
            f"{text!r} is not a row. Give {FORM}; a value has letters, digits and ./:,[]_- and no other character."
        )
    if found[1] not in names:
        raise ToolError(f"{found[1]!r} is not {what}. Choose from {', '.join(names)}.")
    settings = _SETTING.findall(found[2])
    keys = [key.lstrip("+") for key, _ in settings]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ToolError(f"{text!r} sets {', '.join(twice)} twice. Set each key once.")
    return Row(found[1], tuple(f"{key}={value}" for key, value in settings))


def split_rows(text: str) -> tuple[str, ...]:
    """The rows of a list with commas between them; those within brackets are part of a value."""
    return tuple(re.split(r",(?![^\[\]]*\])", text))


def keys_of(settings: Iterable[str]) -> list[str]:
    """Keys of overrides, without Hydra's ``+`` and ``~`` in front."""
    return [setting.partition("=")[0].lstrip("+~") for setting in settings]
