# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A row of the table of support: what is not supported, with what, why, and what to set instead.

A row's message is one sentence and a remedy: ``X is not supported with Y: why. Set Z.``
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class UnsupportedConfiguration(ValueError):
    """What a precision does not support: ``X is not supported with Y: why. Set Z.``"""


Get = Callable[[str], Any]
"""Value at a dotted path of a composed configuration; None where it is absent."""

COMPOSITION = "composition"
"""Known from the composed configuration: at the command line, also under ``--cfg job``."""

DRIVER = "driver"
"""Known from the machine, the model folder or the data: in the driver, before Ray starts."""

WORKER = "worker"
"""Known from the objects of verl, transformers or vLLM, in the worker that builds the trainer's model or the engine."""


@dataclass(frozen=True)
class Scope:
    """With what a setting is not supported.

    Attributes:
        said: the Y of the message; a function of the configuration where it names a value of it.
        doc: the same for the documentation.
        applies: whether a job is in it.
        example: overrides that put a job into it, and that are supported.
        stock: whether ``jetrl.operations=auto`` becomes ``stock`` where a row of it is met.
        refused: whether a row of it refuses the job.
    """

    said: str | Callable[[Get], str]
    doc: str
    applies: Callable[[Get], bool]
    example: tuple[str, ...] = ()
    stock: bool = False
    refused: bool = True


@dataclass(frozen=True)
class Wrong:
    """The values of a setting that are not supported.

    Attributes:
        doc: in words.
        test: whether a value is one of them, ``(value, get)``.
        use: the value to set instead; None where the row's remedy says it.
        example: one of them, which the tests set.
    """

    doc: str
    test: Callable[[Any, Get], bool]
    use: str | None = None
    example: Any = None


@dataclass(frozen=True)
class Row:
    """One feature that is not supported.

    Attributes:
        name: by which code looks the row up; unique.
        feature: what it is, in the words of the documentation.
        reason: why, in a few words; empty where only the caller knows, or there is nothing to say.
        settings: keys that ask for the feature, and which of their values are refused; code looks up a row without.
        remedy: a sentence without its full stop; after ``Set KEY=VALUE`` of a setting the rest of it.
        what: the X of the message where no setting is; of a row about models, the noun before the model's path.
        needs: further settings under which ``settings`` are refused, for the tests.
        known: when it can be known: ``COMPOSITION``, ``DRIVER`` or ``WORKER``.
    """

    name: str
    feature: str
    scope: Scope
    reason: str = ""
    settings: Mapping[str, Wrong] = field(default_factory=dict)
    remedy: str = ""
    what: str = ""
    needs: Mapping[str, Any] = field(default_factory=dict)
    known: str = COMPOSITION

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the settings."""
        return tuple(self.settings)

    def met(self, get: Get) -> Iterator[dict[str, Any]]:
        """``key`` and ``value`` of each of its settings that is refused in a job of its scope."""
        if self.scope.applies(get):
            for key, wrong in self.settings.items():
                value = get(key)
                if wrong.test(value, get):
                    yield {"key": key, "value": shown(value)}

    def clause(
        self, get: Get | None = None, *, key: str = "", value: Any = "", what: str = "", scope: str = "", why: str = ""
    ) -> str:
        """``X is not supported with Y: why``; of a row that refuses nothing the reason alone.

        Args:
            get: reads the configuration, where the scope names a value of it.
            key, value: the setting. what, scope, why: X, Y and the reason, where the caller knows better.
        """
        reason = why or self.reason
        if not self.scope.refused:
            return reason
        what = what or (f"{_typed(key)}={value}" if key else self.what)
        said = self.scope.said
        clause = f"{what} is not supported with {scope or (said if isinstance(said, str) else said(get))}"
        return f"{clause}: {reason}" if reason else clause

    def message(self, get: Get | None = None, *, key: str = "", remedy: str = "", **words: Any) -> str:
        """``X is not supported with Y: why. Set Z.``; further arguments of :meth:`clause`."""
        return f"{self.clause(get, key=key, **words)}. {remedy or self.advice(key)}."

    def advice(self, key: str) -> str:
        """The remedy for a setting, or that of the row."""
        wrong = self.settings.get(key)
        return self.remedy if wrong is None or wrong.use is None else f"Set {_typed(key)}={wrong.use}{self.remedy}"


def _typed(key: str) -> str:
    """A key as the user types it: the precision is a group."""
    return "precision" if key == "jetrl.precision" else key


def shown(value: Any) -> str:
    """A value as the user types it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def other_than(*allowed: Any, example: Any, use: str | None = None, required: bool = False) -> Wrong:
    """Values other than the ``allowed`` ones, of which the first is the one to set unless ``use`` says another. An
    absent value is allowed unless the setting is ``required``.
    """
    listed = ", ".join(f"`{shown(value)}`" for value in allowed)
    return Wrong(
        f"other than {listed}",
        lambda value, get: value not in allowed and (value is not None or required),
        shown(allowed[0]) if use is None else use,
        example,
    )


def equal(*values: Any, use: str | None = None) -> Wrong:
    """One of ``values``."""
    listed = " or ".join(f"`{shown(value)}`" for value in values)
    return Wrong(listed, lambda value, get: value in values, use, values[0])


def above(most: int) -> Wrong:
    """Numbers above ``most``."""
    return Wrong(f"above {most}", lambda value, get: (value or 0) > most, str(most), most + 1)


IS_SET = Wrong("set", lambda value, get: value is not None, "null", "something")
IS_TRUE = Wrong("`true`", lambda value, get: bool(value), "false", True)
IS_FALSE = Wrong("`false`", lambda value, get: value is not None and not value, "true", False)
IS_NOT_TRUE = Wrong("`false`", lambda value, get: not value, "true", False)
NOT_FALSE = other_than(False, example=True)
