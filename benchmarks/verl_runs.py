# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of real verl for the benchmarks: environment, time limit, phases of the start, figures of the steps, and a file
of results that is whole after each run and adds up over calls."""

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

from benchmarks.gpus import MemoryPeaks
from benchmarks.published_shapes import ROOT
from jetrl_verl.tools.bytecode import folders_without, start_compiling
from jetrl_verl.tools.launch import RunPaths, build_environment
from jetrl_verl.tools.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.tools.progress import GrowingFile, last_errors
from jetrl_verl.tools.provenance import builds_note
from jetrl_verl.tools.report import Run, load_run

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights", "step")
"""Of verl's ``timing_s/*``, the whole step last."""

CODE = ("sources_sha256", "kernel_library_sha256", "torch", "triton", "verl", "vllm")
"""Of ``provenance``: what computes a run. The rest names it, and the machine."""

MISMATCH = {
    "k3_kl": "rollout_corr/k3_kl",
    "ppo_kl": "actor/ppo_kl",
    "log_prob_diff": "training/rollout_log_probs_diff_max",
    "prob_diff": "training/rollout_probs_diff_max",
}
"""Figure -> metric of what makes rollout and trainer differ. The first two are means of terms that FP32 may round to 0,
k3 up to differences of 3e-4 (verl computes ``exp(x) - x - 1``). The last two are the largest difference of a token's
log-probability, from jetrl_verl/metrics (so ``precision=bf16`` has none), and of its probability, verl's own."""

NOT_FINITE = "not finite"
"""Figure of ``MISMATCH`` where a step has no number: verl writes a NaN or an infinity as null."""

TIME_UP = 124
"""Status of a run that the benchmark ended or did not begin, since its own time was up; as of ``timeout``."""


START = (
    ("driver", "Started a local Ray instance"),
    ("task_runner", "create worker group"),
    ("load", "Before FSDP, memory allocated"),
    ("wrap", "actor and ref model engine initialized"),
    ("vllm_load", "Capturing CUDA graphs"),
    ("vllm_capture", "all initialize finished, ready to fit"),
    ("first_sync", "Training Progress:"),
)
"""Phases of a start and the line of verl's or vLLM's log that ends each: the driver's imports and Ray; the imports of
the process that trains, and data; a worker's imports and the model, read and cast to FP32 on the host; FSDP; three
processes' imports, vLLM's model and what it compiles; CUDA graphs; the first weight sync. Then step 1. A line
that is missing (no CUDA graphs on a CPU) adds its phase to the next one."""


def compile_bytecode(console: Console) -> Callable[[], None]:
    """Begin to compile what a run's processes import, where that is missing; the function waits for its end.

    A fresh machine has none. Six processes that start one after another then compile the same files for 20 to 50 s
    each; all cores do it once in a quarter of a minute.
    """
    missing, began = folders_without(), time.monotonic()
    compiling = start_compiling(missing)

    def wait() -> None:
        if compiling is not None:
            compiling.wait()
            words = f"bytecode of {', '.join(map(str, missing))}: {time.monotonic() - began:.0f} s"
            console.print(words, markup=False, highlight=False, soft_wrap=True)

    return wait


def environment_of(paths: RunPaths, cpu: bool) -> dict[str, str]:
    """Environment of a run whose metrics go to ``paths.metrics``."""
    environment = build_environment(paths, "cpu" if cpu else "cuda")
    # vLLM calls ninja by name.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return environment


def python_path() -> str:
    """``PYTHONPATH`` by which a process finds this folder's modules wherever it starts."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class Start:
    """When a run got to the ends of ``START``, by its growing log; ``seconds`` of each phase that ended."""

    def __init__(self, log: Path) -> None:
        self._lines, self._began, self._left = GrowingFile(log), time.monotonic(), list(START)
        self.seconds: dict[str, float] = {}

    def update(self) -> None:
        """Read what the log has got since the last call."""
        for line in self._lines.lines():
            for place, (name, text) in enumerate(self._left):
                if text in line:
                    self._end(name, place + 1)
                    break

    def first_step_is_there(self) -> None:
        """The run has logged a step; a second call does nothing."""
        if "first_step" not in self.seconds:
            self._end("first_step", len(self._left))

    def _end(self, name: str, phases: int) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._began, 1)
        self._began, self._left = now, self._left[phases:]


def run_verl(
    command: Sequence[str],
    environment: Mapping[str, str],
    paths: RunPaths,
    steps: int,
    ends: float = math.inf,
    gpus: int = 1,
) -> dict:
    """Run ``command`` to its end, and leave nothing of it but its files in ``paths``.

    Args:
        ends: when to end it, by ``time.monotonic()``; what it logged until then counts.
        gpus: of the run; where there are several, the memory of each is looked at.

    Returns:
        ``status`` (1 too where it took fewer than ``steps`` steps or where a figure of ``MISMATCH`` is ``NOT_FINITE``,
        ``TIME_UP`` where its time was), ``seconds``, ``start_s`` (seconds of the phases of its start, see ``START``),
        ``gpu_peak_gib`` (a list, :class:`benchmarks.gpus.MemoryPeaks`), and :func:`figures` of what it logged;
        ``errors`` of a run that failed.
    """
    started = time.monotonic()
    with MemoryPeaks(gpus > 1) as memory, ProcessTree(command, environment, paths.log) as tree:
        start = Start(paths.log)
        for _ in tree.follow():
            start.update()
            if _has_metrics(paths):
                start.first_step_is_there()
            if time.monotonic() > ends:
                break
        status = tree.poll()
    result = {"status": TIME_UP if status is None else status, "seconds": round(time.monotonic() - started, 1)}
    result["start_s"] = start.seconds
    if memory.gib:
        result["gpu_peak_gib"] = memory.gib
    result |= figures(load_run(paths.folder)) if _has_metrics(paths) else {"steps": 0}
    without = [name for name in MISMATCH if result.get(name) == NOT_FINITE]
    if status == 0 and (result["steps"] != steps or without):
        result["status"] = 1
    if status is None:
        result["errors"] = [f"ended after {result['seconds']} s, since the benchmark's time was up"]
    elif result["status"]:
        result["errors"] = last_errors(paths.log)
    if without:
        result.setdefault("errors", []).append(f"{', '.join(without)} {NOT_FINITE} in a step")
    return result


def _has_metrics(paths: RunPaths) -> bool:
    return paths.metrics.exists() and paths.metrics.stat().st_size > 0


class Results:
    """A benchmark's file of results, and the runs that fill it.

    A file that is there already is added to, so a benchmark may be split over several calls, and over machines with
    the same GPU: each run says what built it (``build``), and a run replaces an earlier one of the same name.

    Args:
        file: JSON. names: keys that name a run. settings: what is the same for all runs. build: that of this call.

    Raises:
        SystemExit: the file is of another GPU or other settings.
    """

    def __init__(self, file: Path, names: Sequence[str], settings: Mapping, build: Mapping) -> None:
        self.file, self._names, self._build = file, names, dict(build)
        self._settings = json.loads(json.dumps({**settings, "gpu": build.get("gpu")}))
        self.runs: list[dict] = []
        if file.exists():
            kept = json.loads(file.read_text())
            self.runs = kept.pop("runs")
            differ = [key for key in {**kept, **self._settings} if kept.get(key) != self._settings.get(key)]
            if differ:
                words = ", ".join(f"{key} {kept.get(key)!r} and not {self._settings.get(key)!r}" for key in differ)
                raise SystemExit(f"The runs of {file} have {words}. Choose another folder.")

    def done(self, name: Mapping) -> bool:
        """Whether a run has ended well and was made by this call's code."""
        return any(self._is(run, name) and run["status"] == 0 and self._same_code(run["build"]) for run in self.runs)

    def _same_code(self, build: Mapping) -> bool:
        """Whether a build computes what this call's does. Its commit may differ in a page or a test: the table says."""
        return all(build.get(key) == self._build.get(key) for key in CODE)

    def put(self, name: Mapping, result: Mapping, console: Console) -> bool:
        """Write a run down and say so; whether it failed.

        One whose time was up leaves an earlier one of the same code that got as far where it is. Words on files of this
        tree are written as from its root, those on the benchmark's own files as from ``OUT``.
        """
        run = {**name, **result, "build": self._build}
        if "words" in result:
            own = f"{self.file.parent}/"
            run["words"] = [word.replace(f"{ROOT}/", "").replace(own, "OUT/") for word in result["words"]]
        if not (result["status"] == TIME_UP and self._got_as_far(run)):
            self.runs = [here for here in self.runs if not self._is(here, name)] + [run]
            self._write()
        words = " ".join(map(str, name.values()))
        said = f"{words}: status {result['status']}, {result.get('steps', 0)} steps, {result.get('seconds', 0)} s"
        if result.get("start_s"):
            said += f" ({', '.join(f'{phase} {seconds:.0f}' for phase, seconds in result['start_s'].items())})"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        return bool(result["status"])

    def _write(self) -> None:
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({**self._settings, "runs": self.runs}, indent=1) + "\n")
        partial.rename(self.file)

    def take(self, runs: Iterable[tuple[Mapping, Callable[[], dict]]], ends: float, console: Console) -> int:
        """Take each run and write it down; one that raises has failed, and the next one follows.

        Args:
            runs: name of a run, and the function that returns its figures and ``status`` (None if it cannot run here).
            ends: no run begins after it.

        Returns:
            The benchmark's exit status: 0 where no run of this call failed.
        """
        failed = False
        for name, take_steps in runs:
            if time.monotonic() > ends:
                result = not_begun()
            else:
                try:
                    result = take_steps()
                except Interrupted:
                    raise
                except Exception as error:
                    traceback.print_exc()
                    result = {"status": 1, "errors": [f"{type(error).__name__}: {error}"]}
            failed |= self.put(name, result, console)
        return int(failed)

    def _got_as_far(self, run: Mapping) -> bool:
        steps = [here.get("steps", 0) for here in self.runs if self._is(here, run) and self._same_code(here["build"])]
        return max(steps, default=-1) >= run.get("steps", 0)

    def show(self, columns: Sequence[str], console: Console) -> None:
        """The table of all runs that the file holds, and why some have no figures."""
        if not self.runs:
            return
        console.print(table(self.runs, self._names, columns))
        for run in self.runs:
            for line in (*run.get("errors", ()), *run.get("engine_errors", ())):
                words = self._words(run)
                console.print(f"{words}: {line}", markup=False, highlight=False, soft_wrap=True)
        note = builds_note({self._words(run): [run["build"]] for run in self.runs})
        console.print(note, markup=False, highlight=False, soft_wrap=True)

    def _words(self, run: Mapping) -> str:
        return " ".join(str(run[name]) for name in self._names)

    def _is(self, run: Mapping, name: Mapping) -> bool:
        return all(run[key] == name[key] for key in self._names)


def not_begun() -> dict:
    """Result of a run for which no time was left."""
    return {"status": TIME_UP, "errors": ["not begun, since the benchmark's time was up"]}


def take_all(
    results: Results,
    runs: Iterable[tuple[Mapping, Callable[[], dict]]],
    columns: Sequence[str],
    ends: float,
    console: Console,
) -> int:
    """:meth:`Results.take`, and the table last, also after a SIGTERM or a Ctrl-C; the exit status."""
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
    """Steps with a finite gradient, those of them whose gradient is not 0 (``moved``), extremes over all steps, and
    after the first one seconds: the median of each phase, and of what no phase has (``rest_s``), and all of the whole
    step (``each_step_s``), since a median hides a slow one.

    The first step compiles, so it is left out where there is another. Medians of phases need not add up to the step's.
    A figure of ``MISMATCH`` is the step's value that is furthest from zero, with its sign: FP32 may round k3, which is
    never negative, below zero. It is ``NOT_FINITE`` where a step has no number, and None where a step does not have it
    at all.
    """
    steps = [data for _, data in run.records if "actor/grad_norm" in data]
    if not steps:
        return {"steps": 0}

    def largest(key: str) -> float | None:
        values = [data[key] for data in steps if data.get(key) is not None]
        return max(values) if values else None

    def furthest_from_zero(key: str) -> float | str | None:
        if not all(key in data for data in steps):
            return None
        values = [data[key] for data in steps]
        finite = all(value is not None and math.isfinite(value) for value in values)
        return max(values, key=abs) if finite else NOT_FINITE

    counted = steps[1:] or steps

    def typical(key: str) -> float | None:
        values = [data[key] for data in counted if key in data]
        return statistics.median(values) if values else None

    *phases, whole = (f"timing_s/{phase}" for phase in PHASES)
    timed = [data for data in counted if whole in data]
    rest = [data[whole] - sum(data.get(phase, 0.0) for phase in phases) for data in timed]
    # verl writes a NaN as null.
    finite = [data for data in steps if data["actor/grad_norm"] is not None and math.isfinite(data["actor/grad_norm"])]
    return {
        "steps": len(finite),
        **{name: furthest_from_zero(key) for name, key in MISMATCH.items()},
        "grad_norm": largest("actor/grad_norm"),
        "moved": sum(data["actor/grad_norm"] > 0 for data in finite),
        "prompt_length": typical("prompt_length/mean"),
        "response_length": typical("response_length/mean"),
        "peak_gib": largest("actor/perf/max_memory_allocated_gb"),
        **{f"{phase}_s": typical(f"timing_s/{phase}") for phase in PHASES},
        "rest_s": statistics.median(rest) if rest else None,
        "each_step_s": [data[whole] for data in timed],
    }


def table(runs: Sequence[Mapping], names: Sequence[str], columns: Sequence[str]) -> Table:
    """One row per run: its ``names``, then figures, right-aligned; a dash where there is none."""
    shown = Table(box=SIMPLE_HEAD)
    for name in names:
        shown.add_column(name, no_wrap=True)
    for column in columns:
        shown.add_column(column.replace("tokens_per_s", "tok/s").replace("_", " "), justify="right")
    for result in runs:
        values = (result.get(column) for column in columns)
        shown.add_row(*(str(result[name]) for name in names), *map(_cell, values))
    return shown


def _cell(value: float | str | None) -> str:
    if isinstance(value, list):  # one figure for each GPU
        return max(map(_cell, value), key=float, default="-")
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


FIGURES = (
    *("status", "steps", *MISMATCH, "grad_norm", "response_length", "peak_gib"),
    *(f"{phase}_s" for phase in PHASES),
)
"""Columns of :func:`table` that every run has."""
