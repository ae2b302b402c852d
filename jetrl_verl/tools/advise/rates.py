# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Measured rates of one GPU: ``rates.json``, each with its unit, how it follows from records, and which; and the builds
that made these records."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jetrl_verl.tools.provenance import Build, builds_note

FILE = Path(__file__).with_name("rates.json")


class Rates:
    """Values by dotted names, e.g. ``gemm.fp8.fprop``.

    Attributes:
        machine: what was measured.
        builds: record -> the builds that made it (``tools/provenance.py``).
    """

    def __init__(
        self, values: Mapping[str, float], machine: str = "", builds: Mapping[str, Sequence[Build | None]] | None = None
    ) -> None:
        self._values = dict(values)
        self.machine = machine
        self.builds = dict(builds or {})

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def including(self, values: Mapping[str, float]) -> "Rates":
        """These with others in their place."""
        return Rates({**self._values, **values}, self.machine, self.builds)

    def builds_note(self) -> str:
        """One line: which build the rates are of or, where they are of several, that a prediction puts these side by
        side."""
        return builds_note(self.builds, across_builds=True)


@cache
def measured() -> Rates:
    """The rates of ``rates.json``."""
    found = json.loads(FILE.read_text())
    return Rates({name: entry["value"] for name, entry in found["rates"].items()}, found["machine"], found["builds"])
