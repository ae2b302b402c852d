# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The driver of ``make demo``: prepare, start verl, watch it, clean up, report.

verl runs as a separate program, exactly as a user would start it; this process only watches its files. Whatever ends
the run, nothing it started is left.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.tools.demo import DemoError, cache
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.demo.policy import POLICIES
from jetrl_verl.tools.launch import DEVICES, VERL, RunPaths, build_environment, choose_device, precision_word, watch
from jetrl_verl.tools.process_tree import Interrupted, signals_raise
from jetrl_verl.tools.progress import Tracker, last_errors
from jetrl_verl.tools.provenance import provenance, version_of
from jetrl_verl.tools.report import Run, accuracy_keys, load_run, write_report

_PACKAGES = ("jetrl-verl", "verl", "vllm", "torch", "transformers", "ray")


@dataclass(frozen=True)
class DemoOptions:
    """What the command line chooses. Raises ``DemoError`` for a value that does not exist."""

    precision: str
    steps: int
    out: Path
    cache: Path
    device: str = "auto"
    policy: str = "dense"
    """One of ``POLICIES``."""
    overrides: tuple[str, ...] = ()
    """Further Hydra overrides; they win over the demo's own."""

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise DemoError(f"{self.precision!r} is not a precision; choose one of {', '.join(PRECISIONS)}")
        if self.policy not in POLICIES:
            raise DemoError(f"{self.policy!r} is not a policy; choose one of {', '.join(POLICIES)}")
        if self.device not in DEVICES:
            raise DemoError(f"{self.device!r} is not a device; choose one of {', '.join(DEVICES)}")
        if self.steps < 1:
            raise DemoError(f"--steps {self.steps} trains nothing; ask for at least one step")
        if word := precision_word(self.overrides):
            raise DemoError(f"{word} would leave the run named after {self.precision}; choose it with --precision")


def run_demo(
    options: DemoOptions,
    console: Console,
    recipe: cache.Recipe | None = None,
    trainer: Sequence[str] = VERL,
) -> int:
    """Run the demo and return the exit status: 0, 1 after a failure, 128 + signal after an interruption.

    Args:
        options: what to run.
        console: where progress is shown.
        recipe: data, policy and warm-up; the defaults of ``options.policy`` if None.
        trainer: program to which the overrides are appended.
    """
    recipe = recipe or cache.Recipe(policy=POLICIES[options.policy])
    paths = RunPaths((options.out / f"{options.precision}-{time.strftime('%Y%m%d-%H%M%S')}").resolve())
    say = _sayer(console)
    try:
        with signals_raise():
            device = choose_device(options.device)
            prepared = _prepare(options, recipe, paths, device, say)
            say(f"log: {paths.log}")
            return _train(options, paths, prepared, device, trainer, console)
    except Interrupted as interruption:
        say(f"interrupted by {interruption}; everything that was started has ended")
        return 128 + interruption.signal


def _prepare(options: DemoOptions, recipe: cache.Recipe, paths: RunPaths, device: str, say) -> cache.Prepared:
    """Data and policy, and the run's own folder, before the minutes that a warm-up takes."""
    prepared = cache.find(recipe, options.cache)
    try:
        paths.folder.mkdir(parents=True)
    except OSError as error:
        raise DemoError(f"--out {options.out} is no folder to write in ({error.strerror}); name another") from None
    if prepared is None:
        say(f"preparing data and policy in {options.cache} (kept for later runs)")
        return cache.make(recipe, options.cache, device, say)
    say(f"data and policy from {prepared.folder}")
    return prepared


def _train(
    options: DemoOptions,
    paths: RunPaths,
    prepared: cache.Prepared,
    device: str,
    trainer: Sequence[str],
    console: Console,
) -> int:
    say = _sayer(console)
    overrides = build_overrides(options.precision, prepared, paths, device, options.steps)
    if device == "cpu" and options.precision == "jet_fp8" and POLICIES[options.policy].experts:
        # `auto` is stock on a CPU, and stock operations run no mixture.
        overrides.append("jetrl.operations=shared")
    command = [*trainer, *overrides, *options.overrides]
    tracker = Tracker(paths.log, paths.metrics, options.steps)
    status = watch(command, build_environment(paths, device), paths, tracker, console)
    paths.facts.write_text(json.dumps(_facts(options, paths, prepared, device, tracker, command), indent=2))

    if status != 0 or tracker.step < options.steps:
        say(f"verl ended with status {status} after step {tracker.step} of {options.steps}:")
        for line in last_errors(paths.log):
            say(f"  {line}")
        say(f"full log: {paths.log}")
        if paths.ray_logs.exists():
            say(f"Ray's own logs: {paths.ray_logs}")
        return 1
    run = load_run(paths.folder)
    report = write_report([run], paths.report, title=f"Demo, precision={options.precision}")
    for line in accuracy_lines(run):
        say(line)
    say(f"log: {paths.log}")
    say(f"report: {report}")
    return 0


def accuracy_lines(run: Run) -> Iterator[str]:
    """First and last held-out accuracy of ``run``, a line for each validation set, named where there are several."""
    keys = accuracy_keys([run])
    for name, key in keys.items():
        if points := list(zip(*run.series(key))):
            said = [f"{value:.1%} {f'after {step} steps' if step else 'before'}" for step, value in points]
            ends = said if len(said) == 1 else (said[0], said[-1])
            yield f"held-out accuracy{f' of {name}' if len(keys) > 1 else ''}: {', '.join(ends)}"


def _facts(
    options: DemoOptions,
    paths: RunPaths,
    prepared: cache.Prepared,
    device: str,
    tracker: Tracker,
    command: Sequence[str],
) -> dict:
    """Contents of ``run.json``, which become the report's table."""
    return {
        "precision": options.precision,
        **({"operations": paths.operations()} if paths.config.exists() else {}),
        "build": provenance(),
        "device": _device_name(device),
        "steps": tracker.step,
        "seconds": round(tracker.seconds, 1),
        "seconds in phase": {phase: round(seconds, 1) for phase, seconds in tracker.phase_seconds.items()},
        "policy": prepared.facts,
        "versions": {
            "python": sys.version.split()[0],
            **{name: version_of(name) or "not installed" for name in _PACKAGES},
        },
        "command": shlex.join(command),
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, {len(os.sched_getaffinity(0))} cores"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()


def _sayer(console: Console):
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
