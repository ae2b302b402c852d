# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Measured rates of one GPU: ``rates.json``, each with its unit, how it follows from records, and which; and the builds
that made these records."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jetrl_verl.tools.advise.gpus import BY_BYTES, GPUS, MEASURED, SECONDS_BETWEEN, TIMES_BYTES
from jetrl_verl.tools.provenance import Build, builds_note

FILE = Path(__file__).with_name("rates.json")


class Rates:
    """Values by dotted names, e.g. ``gemm.fp8.fprop``.

    Attributes:
        machine: what was measured.
        builds: record -> the builds that made it (``tools/provenance.py``).
        older: rate -> what was measured, where the code that it stands for has been replaced since.
        gpu: whose they are, of ``GPUS``.
    """

    def __init__(
        self,
        values: Mapping[str, float],
        machine: str = "",
        builds: Mapping[str, Sequence[Build | None]] | None = None,
        older: Mapping[str, str] | None = None,
        gpu: str = MEASURED,
    ) -> None:
        self._values = dict(values)
        self.machine = machine
        self.builds = dict(builds or {})
        self.older = dict(older or {})
        self.gpu = gpu

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def including(self, values: Mapping[str, float]) -> "Rates":
        """These with others in their place."""
        return Rates({**self._values, **values}, self.machine, self.builds, self.older, self.gpu)

    def on(self, gpu: str) -> "Rates":
        """These on a GPU of ``GPUS``, whose memory may be slower; from an H200's."""
        if gpu == self.gpu:
            return self
        times, longer = self._of_memory(gpu)
        values = {name: times * self[name] for name in BY_BYTES}
        values |= {name: longer * self[name] for name in SECONDS_BETWEEN}
        values |= {name: longer * times * self[name] for name in TIMES_BYTES}
        return Rates({**self._values, **values}, self.machine, self.builds, self.older, gpu)

    def notes_on(self, gpu: str) -> tuple[str, ...]:
        """What is assumed of a GPU, in sentences."""
        if gpu == self.gpu:
            return ()
        times, longer = self._of_memory(gpu)
        return (
            f"on an {GPUS[gpu].name} bytes of the GPU's memory take {1 / times:.2f} times an H200's seconds and what "
            f"lies between a trainer's GEMMs {longer:.2f} times, by records of an engine and of layers; all else takes "
            "as long.",
        )

    def _of_memory(self, gpu: str) -> tuple[float, float]:
        """Its bytes a second over an H200's, and the seconds between GEMMs likewise."""
        if self.gpu != MEASURED:
            raise ValueError(f"rates of an {self.gpu} are no other GPU's")
        return self[GPUS[gpu].bandwidth] / self["bandwidth"], self[GPUS[gpu].between]

    def builds_note(self) -> str:
        """One line: which build the rates are of or, where they are of several, that a prediction puts these side by
        side."""
        return builds_note(self.builds, across_builds=True)

    def older_note(self) -> str:
        """One sentence: which rates were measured on code that has been replaced since; empty if none was."""
        names: dict[str, list[str]] = {}
        for name, measured_on in self.older.items():
            names.setdefault(measured_on, []).append(name)
        said = "; ".join(f"{', '.join(of)}: {measured_on}" for measured_on, of in names.items())
        return f"Rates of code that has been replaced since: {said}." if said else ""


def rates_of(found: Mapping[str, Mapping[str, Any]], machine: str = "", builds: Mapping | None = None) -> Rates:
    """The rates of entries as ``rates.json`` has them.

    Args:
        found: rate -> ``value``, and ``older`` where there is something to say.
    """
    older = {name: entry["older"] for name, entry in found.items() if "older" in entry}
    return Rates({name: entry["value"] for name, entry in found.items()}, machine, builds, older)


@cache
def measured() -> Rates:
    """The rates of ``rates.json``."""
    found = json.loads(FILE.read_text())
    return rates_of(found["rates"], found["machine"], found["builds"])
