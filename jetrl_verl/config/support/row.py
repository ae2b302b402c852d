# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A row of the table of support: what is not supported, with what, why, and what to set instead."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jetrl_verl.inputs import UserError


class UnsupportedConfiguration(UserError, ValueError):
    """What a precision does not support: ``X is not supported with Y: why. Set Z.``"""


Get = Callable[[str], Any]
"""Value at a dotted path of a composed configuration; None where it is absent."""


@dataclass(frozen=True)
class Scope:
    """With what something is not supported.

    Attributes:
        text: the Y of a message; empty if nothing is refused, and the reason alone is said.
        applies: whether a job is in it; by default none is, and code alone refers to its rows.
        leave: the setting that takes a job out of it, for remedies; empty if there is none.
        key: a key whose value messages state instead of ``text``.
    """

    text: str
    applies: Callable[[Get], bool] = lambda get: False
    leave: str = ""
    key: str = ""

    def stated(self, get: Get | None) -> str:
        """The Y of a message about a job."""
        if not self.key:
            return self.text
        name = "precision" if self.key == "jetrl.precision" else self.key
        return f"{name}={shown(get(self.key))}"


NO_REMEDY = "No setting changes that"

EVERY = Scope("every precision but bf16", lambda get: True, "precision=bf16", key="jetrl.precision")


@dataclass(frozen=True)
class Values:
    """The values of a setting that are not supported: in words, as a test, and the value to set instead."""

    text: str
    test: Callable[[Any], bool]
    use: str


@dataclass(frozen=True)
class Row:
    """One thing that is not supported; its name is its key in the table.

    Attributes:
        feature: what it is; the X of the message where there is no setting.
        reason: in a few words; empty if only the caller knows it.
        settings: key -> values that ask for the feature; empty if code finds it.
        scope: with what it is not supported; the Y of the message.
        instead: the remedy; empty for the setting's value and the scope's.
        fix: the setting that takes the feature away, where ``settings`` does not say it.
        loses: what a run that is not refused loses.
    """

    feature: str
    reason: str = ""
    settings: Mapping[str, Values] = field(default_factory=dict)
    scope: Scope = EVERY
    instead: str = ""
    fix: str = ""
    loses: str = "k3_kl will be above 0"

    def met(self, get: Get) -> Iterator[dict[str, Any]]:
        """``key`` and ``value`` of each of its settings that is not supported in a job."""
        if self.scope.applies(get):
            for key, values in self.settings.items():
                value = get(key)
                if values.test(value):
                    yield {"key": key, "value": shown(value)}

    def clause(
        self, get: Get | None = None, *, key: str = "", value: Any = "", what: str = "", scope: str = "", why: str = ""
    ) -> str:
        """``X is not supported with Y: why``, or why alone if the row refuses nothing.

        Args:
            get: reads the configuration, for a scope with a key.
            key, value: the setting. what, scope, why: X, Y and the reason, where the caller knows better.
        """
        why = why or self.reason
        if not self.scope.text:
            return why
        what = what or (f"{key}={value}" if key else self.feature)
        return f"{what} is not supported with {scope or self.scope.stated(get)}{f': {why}' if why else ''}"

    def remedy(self, key: str = "") -> str:
        """``Set Z``, for a setting of the row or without one."""
        return self.instead or f"Set {', or '.join(filter(None, (self._setting(key), self.scope.leave)))}"

    def _setting(self, key: str) -> str:
        return f"{key}={self.settings[key].use}" if key in self.settings else self.fix

    def message(self, get: Get | None = None, *, key: str = "", remedy: str = "", **words: Any) -> str:
        """``X is not supported with Y: why. Set Z.``; further arguments of :meth:`clause`."""
        return f"{self.clause(get, key=key, **words)}. {remedy or self.remedy(key)}."

    def loss(self, *, key: str = "", value: Any = "", what: str = "", why: str = "") -> str:
        """``X (why); what the run loses. Set Z.`` of a run that is not refused; arguments of :meth:`clause`."""
        what = what or (f"{key}={value}" if key else self.feature)
        setting, kept = self._setting(key), "" if self.scope.text else self.instead
        remedy = kept or (f"Set {setting}" if setting else NO_REMEDY)
        return f"{what} ({why or self.reason}); {self.loses}. {remedy}."


def shown(value: Any) -> str:
    """A value as the user types it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def other_than(*allowed: Any, required: bool = False) -> Values:
    """Values other than the ``allowed`` ones, of which the first is the one to set. An absent value is allowed unless
    the setting is ``required``.
    """
    listed = ", ".join(f"`{shown(value)}`" for value in allowed)
    return Values(
        f"other than {listed}",
        lambda value: value not in allowed and (value is not None or required),
        shown(allowed[0]),
    )


def one_of(*values: Any, use: str) -> Values:
    """The ``values``."""
    return Values(" or ".join(f"`{shown(value)}`" for value in values), lambda value: value in values, use)


def above(most: int) -> Values:
    """Numbers above ``most``."""
    return Values(f"above {most}", lambda value: (value or 0) > most, str(most))


SET = Values("set", lambda value: value is not None, "null")
TRUE = Values("`true`", bool, "false")
FALSE = Values("`false`", lambda value: value is not None and not value, "true")
NOT_TRUE = Values("`false`", lambda value: not value, "true")
NOT_FALSE = other_than(False)
NOT_EMPTY = Values("other than `{}`", lambda value: value not in (None, {}), "null")
