# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Measured rates of one GPU: ``rates.json``, each with its unit, how it follows from records, and which."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("rates.json")


class Rates:
    """Values by dotted names, e.g. ``gemm.fp8.fprop``.

    Attributes:
        machine: what was measured.
    """

    def __init__(self, values: Mapping[str, float], machine: str = "") -> None:
        self._values = dict(values)
        self.machine = machine

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def including(self, values: Mapping[str, float]) -> "Rates":
        """These with others in their place."""
        return Rates({**self._values, **values}, self.machine)


@cache
def measured() -> Rates:
    """The rates of ``rates.json``."""
    found = json.loads(FILE.read_text())
    return Rates({name: entry["value"] for name, entry in found["rates"].items()}, found["machine"])
