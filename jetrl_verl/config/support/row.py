# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A row of the table of support: a setting, with what it is not supported, why, and what to set instead.

Every message that comes of a row has one shape: ``X is not supported with Y: why. Set Z.`` Texts of a row may hold
placeholders (``{{`` and ``}}`` are braces): ``{key}`` and ``{value}`` of the setting, a dotted key of the composed
configuration, whose value it is, or a word that the caller hands over.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class UnsupportedConfiguration(ValueError):
    """What a precision does not support: ``X is not supported with Y: why. Set Z.``"""


Get = Callable[[str], Any]
"""Value at a dotted path of a composed configuration; None where it is absent."""

COMPOSITION = "composition"
"""The composed configuration shows it: at the command line, also under ``--cfg job``."""

DRIVER = "driver"
"""The machine, the model folder or the data show it: in the driver, before Ray starts."""

WORKER = "worker"
"""The objects of verl, transformers or vLLM show it: in the worker that builds the trainer's model or the engine."""


@dataclass(frozen=True)
class Scope:
    """With what a setting is not supported.

    Attributes:
        said: the Y of the message, a template.
        doc: the same for the documentation.
        applies: whether a job is in it.
        example: overrides that put a job into it, and that are supported.
        stock: whether ``jetrl.operations=auto`` becomes ``stock`` where a row of it is met.
        refused: whether a row of it refuses the job.
    """

    said: str
    doc: str
    applies: Callable[[Get], bool]
    example: tuple[str, ...] = ()
    stock: bool = False
    refused: bool = True


@dataclass(frozen=True)
class Wrong:
    """The values of a setting that are not supported.

    Attributes:
        doc: the values in words.
        test: ``(value, get)``, whether a value is one of them.
    """

    doc: str
    test: Callable[[Any, Get], bool]


@dataclass(frozen=True)
class Row:
    """One feature.

    Attributes:
        name: by which code looks the row up; unique.
        feature: what it is, in the words of the documentation.
        scope: with what it is not supported.
        reason: why, in a few words; a template, empty where there is nothing to say.
        remedy: what to set; a template, a sentence without its full stop.
        keys: settings that ask for the feature, as the user types them.
        wrong: values of the settings that are refused; None where no setting shows the feature, and code that sees
            the machine, the model, the trainer or the engine looks the row up.
        what: the X of the message; a template.
        example: a value of the settings that is refused. The tests set it.
        beside: other settings that the example needs.
        found: when it can be known: ``COMPOSITION``, ``DRIVER`` or ``WORKER``.
        listed: whether README names it; a row about our own keys is only in docs/support.md.
    """

    name: str
    feature: str
    scope: Scope
    reason: str
    remedy: str
    keys: tuple[str, ...] = ()
    wrong: Wrong | None = None
    what: str = "{key}={value}"
    example: Any = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    found: str = COMPOSITION
    listed: bool = True

    def met(self, get: Get) -> Iterator[dict[str, Any]]:
        """The words ``key`` and ``value`` of each of its settings that a job in its scope has wrong."""
        if self.wrong is not None and self.scope.applies(get):
            for key in self.keys:
                value = get(key)
                if self.wrong.test(value, get):
                    yield {"key": key, "value": shown(value)}

    def clause(self, get: Get | None = None, **words: Any) -> str:
        """``X is not supported with Y: why``; of a row that refuses nothing the reason alone."""
        reason = _filled(self.reason, get, words)
        if not self.scope.refused:
            return reason
        clause = f"{_filled(self.what, get, words)} is not supported with {_filled(self.scope.said, get, words)}"
        return f"{clause}: {reason}" if reason else clause

    def message(self, get: Get | None = None, **words: Any) -> str:
        """``X is not supported with Y: why. Set Z.``"""
        remedy = _filled(self.remedy, get, words)
        return f"{self.clause(get, **words)}. {remedy}."


def shown(value: Any) -> str:
    """A value as the user types it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _filled(template: str, get: Get | None, words: Mapping[str, Any]) -> str:
    def fill(match: re.Match) -> str:
        literal, name = match.groups()
        if name is None:
            return f"{{{literal}}}"
        if name in words:
            return str(words[name])
        if get is None:
            raise KeyError(f"{name} is not known, for {template!r}")
        return shown(get(name))

    return re.sub(r"\{\{([^}]*)\}\}|\{([\w.]+)\}", fill, template)


def other_than(*fine: Any, absent: bool = True) -> Wrong:
    """Values but ``fine`` ones; an absent one is fine unless ``absent`` is False."""
    listed = ", ".join(f"`{shown(value)}`" for value in fine) or "the default"
    return Wrong(f"other than {listed}", lambda value, get: (value is not None or not absent) and value not in fine)


IS_SET = Wrong("set", lambda value, get: value is not None)
IS_TRUE = Wrong("`true`", lambda value, get: bool(value))
IS_FALSE = Wrong("`false`", lambda value, get: value is not None and not value)
IS_ABSENT = Wrong("absent or `null`", lambda value, get: value is None)


def above(most: int) -> Wrong:
    """Numbers above ``most``."""
    return Wrong(f"above {most}", lambda value, get: (value or 0) > most)
