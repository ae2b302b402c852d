# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Where a verl run is, read from the two files it writes, and shown live in a terminal or line by line elsewhere.

Before the first step verl reports nothing but log lines, so the phase is taken from lines that verl 0.9.1 prints at its
milestones. A milestone that a later version words differently costs a phase's name, nothing else: the steps come from
the metrics file.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jetrl_verl.tools.report import MISMATCH, REWARD, STEP_SECONDS, Run, accuracy_keys

# Text of the log line that ends a phase, and the phase that begins with it.
MILESTONES = (
    ("Started a local Ray instance", "starting verl's trainer"),
    ("Total training steps:", "loading the actor"),
    ("actor and ref model engine initialized", "starting vLLM"),
    ("all initialize finished, ready to fit", "measuring held-out accuracy"),
)
FIRST_PHASE = "starting Ray"
TRAINING = "training"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^(\([^()]* pid=\d+[^()]*\) ?)+")
# By the usual endings of a name, or, of ours, by where the class is defined: a traceback gives its module.
_ERROR_LINE = re.compile(
    r"^(([A-Za-z_][\w.]*)?(Error|Exception)(\([\w.]+\))?: (?!ray::)"
    r"|jetrl_verl(\.\w+)*\.[A-Z]\w*: |jetrl_verl: (?!warning: |jetrl\.operations=auto is ))\S"
)
"""An exception's line, or a refusal's; not that an actor passed an exception on, nor what a run says at its start."""


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
    """State of a run: its phase, how long each phase took, and the metrics so far.

    Args:
        log: combined output of the trainer.
        metrics: file of verl's ``file`` logger.
        steps: number of steps the run was asked for.
        on_line: called with every line of the log.
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
        self._log_lines, self._metric_lines = GrowingFile(self.log), GrowingFile(self.metrics)

    def update(self) -> None:
        """Read what was written since the last call."""
        for line in self._log_lines.lines():
            self.on_line(line)
            for i, (text, phase) in enumerate(MILESTONES):
                if text in line and self.phase in (FIRST_PHASE, *(earlier for _, earlier in MILESTONES[:i])):
                    self._enter(phase)
        for line in self._metric_lines.lines():
            record = json.loads(line)
            self.run.records.append((record["step"], record["data"]))
            if self.phase != TRAINING:
                self._enter(TRAINING)

    def finish(self) -> None:
        """Close the books on the last phase."""
        self._enter("ended")

    @property
    def step(self) -> int:
        """Last completed training step, 0 before the first."""
        return max((step for step, _ in self.run.records), default=0)

    @property
    def seconds(self) -> float:
        """Since the trainer was started."""
        return time.monotonic() - self.started

    def _enter(self, phase: str) -> None:
        now = time.monotonic()
        self.phase_seconds[self.phase] = self.phase_seconds.get(self.phase, 0.0) + now - self._phase_started
        self.phase, self._phase_started = phase, now


def describe(step: int, data: dict) -> dict[str, str]:
    """The columns shown for one metrics record, formatted; a metric it lacks is an empty string."""

    def text(key: str, form: str) -> str:
        value = data.get(key)
        return "" if value is None else format(value, form)

    keys = accuracy_keys([Run("", [(step, data)])])
    accuracies = {name: value for name, key in keys.items() if (value := text(key, ".1%"))}
    return {
        "step": str(step),
        "reward": text(REWARD, ".3f"),
        "k3_kl": text(MISMATCH, ".1e"),
        "entropy": text("actor/entropy", ".3f"),
        "clipped": text("actor/pg_clipfrac", ".1%"),
        "seconds": text(STEP_SECONDS, ".1f"),
        "held-out accuracy": ", ".join(f"{name} {v}" if len(keys) > 1 else v for name, v in accuracies.items()),
    }


class PlainView:
    """One line per phase and per step, for pipes and CI logs."""

    def __init__(self, console: Console):
        self._console, self._phase, self._shown = console, None, 0

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *exception) -> None:
        pass

    def show(self, tracker: Tracker) -> None:
        """Print what is new."""
        if tracker.phase != self._phase:
            self._phase = tracker.phase
            self._print(f"[{tracker.seconds:6.1f} s] {tracker.phase}")
        for step, data in tracker.run.records[self._shown :]:
            columns = describe(step, data)
            columns["step"] = f"{step}/{tracker.steps}"
            self._print("  ".join(f"{name} {value}" for name, value in columns.items() if value))
        self._shown = len(tracker.run.records)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A bar, the phase and the last steps, redrawn in place."""

    ROWS = 8

    def __init__(self, console: Console):
        self._live = Live(console=console, refresh_per_second=4)

    def __enter__(self) -> "LiveView":
        self._live.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._live.__exit__(*exception)

    def show(self, tracker: Tracker) -> None:
        """Redraw."""
        phase = tracker.phase if tracker.step == 0 else f"step {tracker.step} of {tracker.steps}"
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(phase, style="bold"),
            ProgressBar(total=tracker.steps, completed=tracker.step, width=40),
            Text(f"{tracker.seconds:.0f} s", style="dim"),
        )
        parts = [head]
        if tracker.run.records:
            table = Table(box=None, padding=(0, 2), header_style="dim")
            for name in describe(0, {}):
                table.add_column(name, justify="right")
            for step, data in tracker.run.records[-self.ROWS :]:
                table.add_row(*describe(step, data).values())
            parts.append(table)
        self._live.update(Group(*parts))


def view_for(console: Console) -> PlainView | LiveView:
    """``LiveView`` in a terminal, ``PlainView`` elsewhere."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def last_errors(log: Path, most: int = 3, tail: int = 12) -> list[str]:
    """What a failed run says about its failure.

    The last ``most`` distinct exception messages, or, where none is recognised, the last ``tail`` lines. Ray repeats an
    exception for every actor it passes through and colours its prefixes; both are removed.
    """
    if not log.exists():
        return []
    text = _ANSI.sub("", log.read_text(errors="replace"))
    lines = [_RAY_PREFIX.sub("", line).rstrip() for line in text.replace("\r", "\n").splitlines()]
    errors = list(dict.fromkeys(line for line in reversed(lines) if _ERROR_LINE.match(line)))[:most]
    return errors[::-1] or [line for line in lines if line][-tail:]
