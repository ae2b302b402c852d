# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Follow a verl run by its log and its metrics file: phase, seconds, metrics of each step, errors of a failed run.

The phases before the first step come from log lines of verl 0.9.1; a version that words them otherwise costs a name.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jetrl_verl.tools.report import MISMATCH, REWARD, STEP_SECONDS, Run, accuracy_keys

# Text of the log line that ends a phase, and the phase that begins with it.
MILESTONES = (
    ("Started a local Ray instance", "starting verl's trainer"),
    ("Total training steps:", "loading the actor"),
    ("actor and ref model engine initialized", "starting vLLM"),
    ("all initialize finished, ready to fit", "measuring held-out accuracy"),
)
FIRST_PHASE = "starting Ray"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^(\([^()]* pid=\d+[^()]*\) ?)+")
# The line of an exception, by the usual endings of its name or by this package's name, or of a refusal. Lines about an
# exception that an actor passed on, and notes of a run's start, do not match.
_ERROR_LINE = re.compile(
    r"^(([A-Za-z_][\w.]*)?(Error|Exception)(\([\w.]+\))?: (?!ray::)"
    r"|jetrl_verl(\.\w+)*\.[A-Z]\w*: |jetrl_verl: (?!warning: |note: |exact))\S"
)


class GrowingFile:
    """Complete lines of a file that another process appends to; the file may not exist yet."""

    def __init__(self, path: Path):
        self._path, self._offset = path, 0

    def lines(self) -> Iterator[str]:
        """Lines completed since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line.decode(errors="replace").rstrip("\n")


@dataclass
class Tracker:
    """State of a run: its phase, the seconds of each phase, and the metrics so far.

    ``log`` is the trainer's output, whose lines go to ``on_line``; ``metrics`` the file of verl's ``file`` tracker;
    ``steps`` the number of steps the run was asked for.
    """

    log: Path
    metrics: Path
    steps: int
    on_line: Callable[[str], None] = lambda line: None
    phase: str = FIRST_PHASE
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        self.started = self._phase_started = time.monotonic()
        self.run = Run("", [])
        self._log, self._metrics = GrowingFile(self.log), GrowingFile(self.metrics)

    def update(self) -> list[str]:
        """Read what was written since the last call; returns a line per new phase and step for the screen."""
        lines = []
        for line in self._log.lines():
            self.on_line(line)
            for i, (text, phase) in enumerate(MILESTONES):
                if text in line and self.phase in (FIRST_PHASE, *(earlier for _, earlier in MILESTONES[:i])):
                    lines.append(self._enter(phase))
        for line in self._metrics.lines():
            record = json.loads(line)
            self.run.records.append((record["step"], record["data"]))
            if self.phase != "training":
                lines.append(self._enter("training"))
            lines.append(f"step {record['step']}/{self.steps}  {describe(record['data'])}")
        return lines

    def finish(self) -> None:
        """Count the seconds of the last phase."""
        self._enter("ended")

    @property
    def step(self) -> int:
        """Last completed training step, 0 before the first."""
        return max((step for step, _ in self.run.records), default=0)

    @property
    def seconds(self) -> float:
        """Since the trainer was started."""
        return time.monotonic() - self.started

    def _enter(self, phase: str) -> str:
        now = time.monotonic()
        self.phase_seconds[self.phase] = self.phase_seconds.get(self.phase, 0.0) + now - self._phase_started
        self.phase, self._phase_started = phase, now
        return f"[{self.seconds:6.1f} s] {phase}"


def describe(data: dict) -> str:
    """The main metrics of one step in a line, without those that it lacks."""
    accuracies = accuracy_keys([Run("", [(0, data)])])
    columns = {
        "reward": (REWARD, ".3f"),
        "k3_kl": (MISMATCH, ".1e"),
        "entropy": ("actor/entropy", ".3f"),
        "clipped": ("actor/pg_clipfrac", ".1%"),
        "seconds": (STEP_SECONDS, ".1f"),
        **{f"accuracy of {name}": (key, ".1%") for name, key in accuracies.items()},
    }
    return "  ".join(f"{name} {data[key]:{form}}" for name, (key, form) in columns.items() if data.get(key) is not None)


def last_errors(log: Path, most: int = 3, tail: int = 12) -> list[str]:
    """The last ``most`` distinct exception messages of a failed run or, without any, the last ``tail`` lines.

    Ray repeats an exception for every actor it passes through and colours its prefixes; both are removed.
    """
    if not log.exists():
        return []
    text = _ANSI.sub("", log.read_text(errors="replace"))
    lines = [_RAY_PREFIX.sub("", line).rstrip() for line in text.replace("\r", "\n").splitlines()]
    errors = list(dict.fromkeys(line for line in reversed(lines) if _ERROR_LINE.match(line)))[:most]
    return errors[::-1] or [line for line in lines if line][-tail:]
