# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of real verl as the benchmarks start them, one after another: the environment, the time that they may take,
figures of the steps, and a file of results that is whole after each run.
"""

import json
import math
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl.tools.launch import RunPaths, build_environment
from jetrl_verl.tools.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.tools.progress import last_errors
from jetrl_verl.tools.report import Run, load_run

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights", "step")
"""Of verl's ``timing_s/*``."""

TIME_UP = 124
"""Status of a run that the benchmark ended or did not begin, since its own time was up; as of ``timeout``."""


def environment_of(paths: RunPaths, cpu: bool) -> dict[str, str]:
    """Environment of a run whose metrics go to ``paths.metrics``."""
    environment = build_environment(paths, "cpu" if cpu else "cuda")
    # vLLM calls ninja by name.
    return environment | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"}


def run_verl(
    command: Sequence[str], environment: Mapping[str, str], paths: RunPaths, steps: int, ends: float = math.inf
) -> dict:
    """Run ``command`` to its end, and leave nothing of it behind but its files in ``paths``.

    Args:
        ends: when to end it, by ``time.monotonic()``; what it logged until then counts.

    Returns:
        ``status`` (1 too where it took fewer than ``steps`` steps, ``TIME_UP`` where its time was), ``seconds``, and
        :func:`figures` of what it logged; ``errors`` of a run that failed.
    """
    started = time.monotonic()
    with ProcessTree(command, environment, paths.log) as tree:
        for _ in tree.follow():
            if time.monotonic() > ends:
                break
        status = tree.poll()
    found = {"status": TIME_UP if status is None else status, "seconds": round(time.monotonic() - started, 1)}
    found |= figures(load_run(paths.folder)) if _has_metrics(paths) else {"steps": 0}
    if status == 0 and found["steps"] != steps:
        found["status"] = 1
    if status is None:
        found["errors"] = [f"ended after {found['seconds']} s, since the benchmark's time was up"]
    elif found["status"]:
        found["errors"] = last_errors(paths.log)
    return found


def _has_metrics(paths: RunPaths) -> bool:
    return paths.metrics.exists() and paths.metrics.stat().st_size > 0


class Results:
    """A benchmark's file of results, and the runs that fill it.

    A file that is there already is added to, so a benchmark may be split over several calls: a run of the same name
    takes the place of the old one. A file of another build or other settings is kept under another name.

    Args:
        file: JSON. names: keys that name a run. settings: what is the same for all runs, ``build`` among it.
    """

    def __init__(self, file: Path, names: Sequence[str], settings: Mapping) -> None:
        self.file, self._names = file, names
        self._settings = json.loads(json.dumps(settings))
        self.runs: list[dict] = []
        if file.exists():
            held = json.loads(file.read_text())
            runs = held.pop("runs")
            if held == self._settings:
                self.runs = runs
            else:
                count = len(list(file.parent.glob(f"{file.stem}.before_*{file.suffix}")))
                file.rename(file.with_name(f"{file.stem}.before_{count}{file.suffix}"))

    def take(self, runs: Iterable[tuple[Mapping, Callable[[], dict]]], ends: float, console: Console) -> int:
        """Take each run and write it down; one that raises has failed, and the next one follows.

        Args:
            runs: name of a run, and what takes it and returns its ``status`` (None where it cannot run here) and
                figures. ends: no run begins behind it.

        Returns:
            The benchmark's exit status: 0 where no run of this call failed.
        """
        failed = False
        for name, take_steps in runs:
            if time.monotonic() > ends:
                found = {"status": TIME_UP, "errors": ["not begun, since the benchmark's time was up"]}
            else:
                try:
                    found = take_steps()
                except Interrupted:
                    raise
                except Exception as error:
                    traceback.print_exc()
                    found = {"status": 1, "errors": [f"{type(error).__name__}: {error}"]}
            self.runs = [run for run in self.runs if not self._is(run, name)] + [{**name, **found}]
            self.file.write_text(json.dumps({**self._settings, "runs": self.runs}, indent=1) + "\n")
            failed |= bool(found["status"])
            words = " ".join(map(str, name.values()))
            said = f"{words}: status {found['status']}, {found.get('steps', 0)} steps, {found.get('seconds', 0)} s"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        return int(failed)

    def show(self, columns: Sequence[str], console: Console) -> None:
        """The table of all runs that the file holds, and why some have no figures."""
        if not self.runs:
            return
        console.print(table(self.runs, self._names, columns))
        for run in self.runs:
            for line in run.get("errors", ()):
                words = " ".join(str(run[name]) for name in self._names)
                console.print(f"{words}: {line}", markup=False, highlight=False, soft_wrap=True)

    def _is(self, run: Mapping, name: Mapping) -> bool:
        return all(run[key] == name[key] for key in self._names)


def take_all(
    results: Results,
    runs: Iterable[tuple[Mapping, Callable[[], dict]]],
    columns: Sequence[str],
    ends: float,
    console: Console,
) -> int:
    """:meth:`Results.take`, and the table last, also behind a SIGTERM or a Ctrl-C; the exit status."""
    with signals_raise():
        try:
            return results.take(runs, ends, console)
        except Interrupted as interrupted:
            return 128 + interrupted.signal
        finally:
            results.show(columns, console)


def fresh_folder(paths: RunPaths) -> None:
    """Make the folder of a run; what a failed one left there goes."""
    shutil.rmtree(paths.folder, ignore_errors=True)
    paths.folder.mkdir(parents=True)


def figures(run: Run) -> dict:
    """Steps with a finite gradient, extremes over all steps, and the median seconds of each phase behind the first.

    The first step compiles, so it is left out where there is another.
    """
    steps = [data for _, data in run.records if "actor/grad_norm" in data]
    if not steps:
        return {"steps": 0}

    def largest(key: str) -> float | None:
        values = [data[key] for data in steps if data.get(key) is not None]
        return max(values) if values else None

    def furthest_from_zero(key: str) -> float | None:
        return max((data[key] for data in steps if data.get(key) is not None), key=abs, default=None)

    def typical(key: str) -> float | None:
        values = [data[key] for data in steps[1:] or steps if key in data]
        return statistics.median(values) if values else None

    # verl writes a NaN as null.
    finite = [data for data in steps if data["actor/grad_norm"] is not None and math.isfinite(data["actor/grad_norm"])]
    return {
        "steps": len(finite),
        "k3_kl": largest("rollout_corr/k3_kl"),
        "ppo_kl": furthest_from_zero("actor/ppo_kl"),
        "grad_norm": largest("actor/grad_norm"),
        "prompt_length": typical("prompt_length/mean"),
        "response_length": typical("response_length/mean"),
        "peak_gib": largest("actor/perf/max_memory_allocated_gb"),
        **{f"{phase}_s": typical(f"timing_s/{phase}") for phase in PHASES},
    }


def table(runs: Sequence[Mapping], names: Sequence[str], columns: Sequence[str]) -> Table:
    """One row per run: its ``names``, then figures, right-aligned; a dash where there is none."""
    shown = Table(box=SIMPLE_HEAD)
    for name in names:
        shown.add_column(name, no_wrap=True)
    for column in columns:
        shown.add_column(column.replace("tokens_per_s", "tok/s").replace("_", " "), justify="right")
    for found in runs:
        values = (found.get(column) for column in columns)
        shown.add_row(*(str(found[name]) for name in names), *map(_cell, values))
    return shown


def _cell(value: float | str | None) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


FIGURES = (
    *("status", "steps", "k3_kl", "ppo_kl", "grad_norm", "response_length", "peak_gib"),
    *(f"{phase}_s" for phase in PHASES),
)
"""Columns of :func:`table` that every run has."""
