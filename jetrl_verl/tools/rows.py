# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A row of a comparison, ``PRECISION[+KEY=VALUE...]``: a precision and the overrides that are set with it.

fp8_rollout+jetrl.kv_cache=fp8 sets a key of the configuration; jet_fp8++trainer.added=1 adds one, with Hydra's own +.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jetrl_verl.inputs import UserError

_KEY = r"\+{0,2}[A-Za-z_][\w.]*(?:/[\w.]+)?(?:@[\w.]+)?"
_VALUE = r"[\w./:\[\],-]*"  # no space, quote or |, so that a row can name itself in a table
_SETTING = re.compile(rf"\+({_KEY})=({_VALUE})")
_ROW = re.compile(rf"(\w+)((?:\+{_KEY}={_VALUE})*)")


@dataclass(frozen=True)
class Row:
    """The ``name`` of a precision and ``settings``, overrides ``key=value`` in their order."""

    name: str
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.name, *self.settings))

    @property
    def slug(self) -> str:
        """A unique name for files. Where characters had to go, a part of the text's hash follows."""
        words = [self.name, *(word for setting in self.settings for word in setting.split("=", 1))]
        cleaned = "-".join(re.sub(r"[^\w.]+", "_", word) for word in words)
        if cleaned == "-".join(words) and len(cleaned) <= 120:
            return cleaned
        return f"{cleaned[:120]}-{hashlib.sha256(str(self).encode()).hexdigest()[:8]}"


def parse_row(text: str, names: Collection[str], what: str = "a precision") -> Row:
    """The row that ``text`` stands for. ``UserError`` if it has another form or its name is not one of ``names``."""
    match = _ROW.fullmatch(text)
    if match is None:
        form = "Give PRECISION[+KEY=VALUE...]; a value has letters, digits and ./:,[]_- and no other character."
        raise UserError(f"{text!r} is not a row. {form}")
    if match[1] not in names:
        raise UserError(f"{match[1]!r} is not {what}. Choose from {', '.join(names)}.")
    settings = tuple(f"{key}={value}" for key, value in _SETTING.findall(match[2]))
    if len(set(keys_of(settings))) < len(settings):
        raise UserError(f"{text!r} sets a key twice. Set each key once.")
    return Row(match[1], settings)


def split_rows(text: str) -> tuple[str, ...]:
    """The rows of a list with commas between them; those within brackets are part of a value."""
    return tuple(re.split(r",(?![^\[\]]*\])", text))


def keys_of(settings: Iterable[str]) -> list[str]:
    """Keys of overrides, without Hydra's leading ``+`` and ``~``."""
    return [setting.partition("=")[0].lstrip("+~") for setting in settings]
