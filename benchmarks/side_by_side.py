# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Several runs of verl at once on one GPU, each a program of its own: where a run's start takes longer than its steps
and its seconds are not what is asked for.

A run begins when its share of the GPU's memory is free, when the run that it continues has ended well, when those under
way began long enough ago, and when enough time is left. Runs do not meet: each has a process that adopts and ends what
it started (``ProcessTree``), its own Ray cluster with ports of its own, temporary files, sockets and log. A program
that fails, or leaves nothing, is a failed run and stops no other one. When the time is up the programs end their runs
themselves, and what those logged counts.
"""

import fcntl
import json
import math
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.verl_runs import TIME_UP, Results, not_begun
from jetrl_verl.tools.process_tree import Interrupted, signals_raise
from jetrl_verl.tools.progress import last_errors

CLOSING = 25.0
"""Seconds in which a run ends what it started (``ProcessTree`` asks, waits 8 s, kills) and writes its figures down."""

POLL = 0.5


@dataclass(frozen=True)
class Planned:
    """A run that is to be taken.

    Attributes:
        name: what names it in the results. command: gets the seconds that it may take as its last word; takes the run
        and leaves its figures as JSON in ``found``. log: of the program. gib: of the GPU's memory.
        continues: name of the run whose end it waits for, if that is planned too.
    """

    name: Mapping[str, str | int]
    command: Sequence[str]
    found: Path
    log: Path
    gib: float = 0.0
    continues: Mapping[str, str | int] | None = None

    @property
    def words(self) -> str:
        """The name in a line of text."""
        return " ".join(map(str, self.name.values()))


@dataclass
class _Running:
    planned: Planned
    program: subprocess.Popen
    began: float


class SideBySide:
    """Takes planned runs, at most ``at_once`` and ``gib`` of memory at a time, in their order where they fit.

    Args:
        results: gets each run when it ends. environment: of the programs. at_once: runs. gib: of the GPU's memory
        that the runs may plan with. ends: by ``time.monotonic()``, when all of this has ended. apart: seconds at least
        from one run's begin to the next one's while another is under way.
    """

    def __init__(
        self,
        results: Results,
        environment: Mapping[str, str],
        at_once: int,
        gib: float,
        ends: float,
        console: Console,
        apart: float = 0.0,
    ) -> None:
        self._results, self._environment, self._console = results, dict(environment), console
        self._at_once, self._gib, self._ends, self._apart = at_once, gib, ends, apart
        self._waiting: list[Planned] = []
        self._running: list[_Running] = []
        self._took: list[float] = []
        self._failed = False

    def take(self, runs: Sequence[Planned]) -> int:
        """Take ``runs``; 0 where none of them failed or was left for want of time.

        Raises:
            ValueError: a run that never fits.
        """
        if large := [run for run in runs if run.gib > self._gib]:
            words = ", ".join(f"{run.words} {run.gib:.0f}" for run in large)
            raise ValueError(f"{self._gib:.0f} GiB are too few for {words}. Cut layers, or take them alone.")
        self._waiting = list(runs)
        try:
            while self._waiting or self._running:
                self._collect()
                for run in list(self._waiting):
                    if self._may_begin(run):
                        self._begin(run)
                if self._waiting and not self._time_for_one_more():
                    self._leave_waiting()
                if time.monotonic() > self._ends:  # a program that does not end its run itself
                    break
                time.sleep(POLL)
        finally:
            self._stop()
        return int(self._failed)

    def _collect(self) -> None:
        for running in list(self._running):
            if (status := running.program.poll()) is not None:
                self._running.remove(running)
                self._put(running, status)

    def _put(self, running: _Running, status: int) -> None:
        planned = running.planned
        try:
            found = json.loads(planned.found.read_text())
        except (OSError, ValueError):
            errors = last_errors(planned.log) or ["it said nothing"]
            found = {"status": status or 1, "errors": [f"the run's program ended with status {status}", *errors]}
        if found["status"] == 0:
            self._took.append(time.monotonic() - running.began)
        self._failed |= self._results.put(planned.name, found, self._console)
        for line in found.get("errors", ()):
            self._say(f"  {line}")

    def _may_begin(self, run: Planned) -> bool:
        if len(self._running) >= self._at_once:
            return False
        if any(time.monotonic() - running.began < self._apart for running in self._running):
            return False
        if sum(running.planned.gib for running in self._running) + run.gib > self._gib:
            return False
        others = [*self._waiting, *(running.planned for running in self._running)]
        if run.continues is not None and any(other.name == run.continues for other in others):
            return False
        return self._time_for_one_more()

    def _time_for_one_more(self) -> bool:
        """Whether a run that begins now may get as far as the shorter half of those that have ended."""
        needed = statistics.median(self._took) if self._took else 0.0
        return self._seconds_left() > needed

    def _seconds_left(self) -> float:
        return self._ends - time.monotonic() - CLOSING

    def _begin(self, run: Planned) -> None:
        run.log.parent.mkdir(parents=True, exist_ok=True)
        run.found.unlink(missing_ok=True)
        seconds = self._seconds_left()
        with run.log.open("wb") as output:
            program = subprocess.Popen(
                [*run.command, str(seconds if math.isfinite(seconds) else math.inf)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches this process, which then asks each program to end
            )
        self._waiting.remove(run)
        self._running.append(_Running(run, program, time.monotonic()))
        beside = len(self._running) - 1
        self._say(f"{run.words}: begins beside {beside}, plans with {run.gib:.0f} GiB")

    def _leave_waiting(self) -> None:
        for run in self._waiting:
            self._say(f"{run.words}: {not_begun()['errors'][0]}")
        self._waiting, self._failed = [], True

    def _stop(self) -> None:
        """Ask what still runs to end, wait for it, and write down what it left."""
        for running in self._running:
            with suppress(ProcessLookupError):
                running.program.send_signal(signal.SIGTERM)
        until = time.monotonic() + CLOSING
        while self._running and time.monotonic() < until:
            self._collect()
            time.sleep(POLL)
        for running in self._running:
            running.program.kill()
            running.program.wait()
            self._put(running, TIME_UP)
        self._running = []

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def take_one(file: Path, take: Callable[[], dict]) -> int:
    """The program of one run: ``take`` its figures, and write them whole or not at all.

    Returns:
        0, or 128 + signal behind a SIGTERM or a Ctrl-C.
    """
    with signals_raise():
        try:
            found = take()
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(found))
            partial.rename(file)
        except Interrupted as interrupted:
            return 128 + interrupted.signal
    return 0


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a folder against other runs' programs while it is written; released also where a program is killed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
