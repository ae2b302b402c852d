# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The driver of ``make demo``: prepare, train with verl, measure ``fp8_rollout`` on the same policies, report.

verl runs as a separate program, as a user would start it. No process outlives the run, however it ends."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jetrl_verl.config.installed import installed_version
from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.config.support.table import TABLE
from jetrl_verl.inputs import UserError, writing
from jetrl_verl.tools.demo import baseline, cache
from jetrl_verl.tools.demo.overrides import GROUP_SIZE, MAX_RESPONSE_TOKENS, PROMPTS, build_overrides
from jetrl_verl.tools.demo.policy import POLICIES
from jetrl_verl.tools.diff.run import engine_environment
from jetrl_verl.tools.launch import VERL, RunPaths, build_environment, choose_device, precision_word, say, watch
from jetrl_verl.tools.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.tools.progress import Tracker, last_errors
from jetrl_verl.tools.provenance import nvidia_smi, provenance
from jetrl_verl.tools.report import MISMATCH, Run, accuracy_keys, draw, load_run, write_report

_PACKAGES = ("jetrl-verl", "verl", "vllm", "torch", "transformers", "ray")
BASELINE = (sys.executable, "-m", baseline.__name__)
_BASELINE_POLICIES = 6


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command line. Raises ``UserError`` for a value that is not supported."""

    precision: str
    steps: int
    out: Path
    cache: Path
    device: str = "auto"
    policy: str = "dense"
    """One of ``POLICIES``."""
    overrides: tuple[str, ...] = ()
    """Further Hydra overrides; they win over the demo's own."""
    baseline: bool = True
    """Measure the mismatch of ``fp8_rollout`` on the policies of the run."""

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise UserError(f"{self.precision!r} is not a precision. Choose one of {', '.join(PRECISIONS)}.")
        if self.policy not in POLICIES:
            raise UserError(f"{self.policy!r} is not a policy. Choose one of {', '.join(POLICIES)}.")
        if word := precision_word(self.overrides):
            raise UserError(f"{word} would leave the run named after {self.precision}. Set it with --precision.")

    @property
    def last_step(self) -> int:
        """The step that a complete run ends with."""
        words = [word.lstrip("+").lower() for word in self.overrides if "trainer.val_only=" in word]
        return 0 if words[-1:] == ["trainer.val_only=true"] else self.steps


def run_demo(options: DemoOptions, trainer: Sequence[str] = VERL) -> int:
    """Run the demo and return the exit status: 0, 1 after a failure, 128 + signal after an interruption.

    ``trainer``: program to which the overrides are appended.
    """
    recipe = cache.Recipe(policy=POLICIES[options.policy])
    if options.baseline and recipe.policy.delta_heads:
        say(f"fp8_rollout is not measured on the policies of the run: {TABLE['hybrid_of_diff'].reason}")
        options = replace(options, baseline=False)
    paths = RunPaths((options.out / f"{options.precision}-{time.strftime('%Y%m%d-%H%M%S')}").resolve())
    try:
        with signals_raise():
            device = choose_device(options.device)
            prepared = _prepare(options, recipe, paths, device)
            say(f"log: {paths.log}")
            if not _train(options, paths, prepared, device, trainer):
                return 1
            if options.baseline and options.last_step and not _measure_baseline(options, paths, prepared, device):
                return 1
    except Interrupted as interruption:
        say(f"interrupted by {interruption}; everything that was started has ended")
        return 128 + interruption.signal
    run = load_run(paths.folder)
    measured = baseline_run(paths.folder)
    extra = [measured] if measured else []
    digits, parameters = recipe.task.digits, prepared.facts.get("parameters", 0)
    title = (
        f"GRPO on sums of two numbers of {digits} digits, {parameters / 1e6:.1f}M parameters, {_device_name(device)}"
    )
    report = write_report([run], paths.report, title, extra)
    figure, _ = draw([run], extra, ("accuracy", "mismatch"))
    figure.suptitle(title)
    figure.savefig(paths.folder / "demo.png", dpi=150, facecolor="white")
    for line in (*summary_lines(run, measured), f"report: {report}"):
        say(line)
    return 0


def _prepare(options: DemoOptions, recipe: cache.Recipe, paths: RunPaths, device: str) -> cache.Prepared:
    """Data, policy and the folder of the run; the folder first, since the warm-up takes a minute."""
    prepared = cache.find(recipe, options.cache)
    with writing(options.out, "--out"):
        paths.folder.mkdir(parents=True)
    if prepared is None:
        say(f"preparing data and policy in {options.cache} (kept for later runs)")
        return cache.make(recipe, options.cache, device)
    say(f"data and policy from {prepared.folder}")
    return prepared


def _train(
    options: DemoOptions, paths: RunPaths, prepared: cache.Prepared, device: str, trainer: Sequence[str]
) -> bool:
    """Whether verl ran all steps; prints the reason if not."""
    overrides = build_overrides(options.precision, prepared, paths, device, options.steps)
    if device == "cpu" and options.precision == "jet_fp8" and POLICIES[options.policy].experts:
        # `auto` is stock on a CPU, and stock operations do not support a mixture.
        overrides.append("jetrl.operations=shared")
    if options.baseline:
        overrides += ["trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"]
    command = [*trainer, *overrides, *options.overrides]
    tracker = Tracker(paths.log, paths.metrics, options.steps)
    status = watch(command, build_environment(paths, device), paths, tracker)
    paths.facts.write_text(json.dumps(_facts(options, paths, prepared, device, tracker, command), indent=2))
    if status == 0 and tracker.step >= options.last_step:
        return True
    _say_failure(f"verl ended with status {status} after step {tracker.step} of {options.steps}", paths.log)
    if paths.ray_logs.exists():
        say(f"Ray's own logs: {paths.ray_logs}")
    return False


def _say_failure(sentence: str, log: Path) -> None:
    for line in (f"{sentence}:", *(f"  {line}" for line in last_errors(log)), f"full log: {log}"):
        say(line)


def _measure_baseline(options: DemoOptions, paths: RunPaths, prepared: cache.Prepared, device: str) -> bool:
    """Measure ``fp8_rollout`` on some of the policies that sampled in the run. Returns whether that succeeded."""
    checkpoints = paths.folder / "checkpoints"
    last = _BASELINE_POLICIES - 1
    steps = sorted({1 + round(i * (options.steps - 1) / last) for i in range(_BASELINE_POLICIES)})
    # The policy that samples in a step is the one that was saved after the step before.
    folders = {1: prepared.policy} | {
        step: checkpoints / f"global_step_{step - 1}" / "actor" / "huggingface" for step in steps if step > 1
    }
    policies = [(step, str(folder)) for step, folder in folders.items() if folder.is_dir()]
    say(f"measuring fp8_rollout on {len(policies)} policies of the run")
    folder = paths.folder / baseline.PRECISION
    folder.mkdir()
    request = baseline.BaselineRequest(
        policies, str(prepared.test), PROMPTS * GROUP_SIZE, MAX_RESPONSE_TOKENS, str(folder / "metrics.jsonl")
    )
    request.write(folder / "request.json")
    command = [*BASELINE, str(folder / "request.json")]
    environment = build_environment(paths, device) | engine_environment(device == "cuda")
    log = folder / "run.log"
    with ProcessTree(command, environment, log) as tree:
        status = tree.wait()
    if status == 0:
        shutil.rmtree(checkpoints, ignore_errors=True)
        return True
    _say_failure(f"the measurement of fp8_rollout (--no-baseline omits it) ended with status {status}", log)
    return False


def baseline_run(folder: Path) -> Run | None:
    """The mismatch of ``fp8_rollout`` that was measured for the run in ``folder``, or None."""
    measured = folder / baseline.PRECISION
    return (
        load_run(measured, f"{baseline.PRECISION} on the same policies")
        if (measured / "metrics.jsonl").is_file()
        else None
    )


def summary_lines(run: Run, measured: Run | None) -> Iterator[str]:
    """First and last held-out accuracy of each validation set, then the mismatch of ``run`` and of the baseline."""
    for name, key in accuracy_keys([run]).items():
        if points := list(zip(*run.series(key))):
            ends = dict.fromkeys((points[0], points[-1]))
            texts = [f"{value:.1%} {f'after {step} steps' if step else 'before'}" for step, value in ends]
            yield f"held-out accuracy of {name}: {', '.join(texts)}"
    if values := run.series(MISMATCH)[1]:
        mismatch = f"mean {sum(values) / len(values):.1e}" if any(values) else f"exactly 0 in all {len(values)} steps"
        others = measured.series(MISMATCH)[1] if measured else ()
        baseline = f"; {measured.name}: {min(others):.1e} to {max(others):.1e}" if measured else ""
        yield f"k3_kl of rollout and trainer: {mismatch}{baseline}"


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
        **(paths.job() if paths.config.exists() else {"precision": options.precision}),
        "build": provenance(),
        "device": _device_name(device),
        "steps": tracker.step,
        "seconds": round(tracker.seconds, 1),
        "seconds in phase": {phase: round(seconds, 1) for phase, seconds in tracker.phase_seconds.items()},
        "policy": prepared.facts,
        "versions": {
            "python": sys.version.split()[0],
            **{name: installed_version(name) or "not installed" for name in _PACKAGES},
        },
        "command": shlex.join(command),
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, {len(os.sched_getaffinity(0))} cores"
    return "".join(name for name, _ in nvidia_smi()[:1])
