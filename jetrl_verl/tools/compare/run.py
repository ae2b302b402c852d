# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The driver of ``jetrl compare``: train every run, score all of them, write the table and the page.

A run is one precision, or one with overrides beside it (tools/rows.py), with one seed. Runs train one after another.
Each is the command that a user would start; commands differ only in ``precision=``, these overrides, the seeds and the
output paths. Each run has its own folder. A finished run is
not trained again, an interrupted run resumes from its last checkpoint, and a folder made by another command is refused.
So all rows of a table come from one command.
"""

import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.patches.checkpoint_tracker import TRACKER_FILE, DamagedCheckpointError, check_tracker
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.compare import CompareError
from jetrl_verl.tools.compare.evaluate import BEFORE, Request, file_of, load_config, write_request
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.launch import DEVICES, VERL, RunPaths, build_environment, choose_device, quote, watch
from jetrl_verl.tools.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.tools.progress import GrowingFile, Tracker, last_errors
from jetrl_verl.tools.provenance import builds_note, provenance, same_build
from jetrl_verl.tools.rows import keys_of, parse_row

EVALUATE = (sys.executable, "-m", "jetrl_verl.tools.compare.evaluate")
SEED_KEYS = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
"""The seeds of verl: order of the data, sampling, mini-batches."""

_ONLY_LAST = 10**9
_TOTAL_STEPS = re.compile(r"Total training steps: (\d+)")
_OURS = ("precision", *SEED_KEYS, "trainer.default_local_dir", "trainer.resume_mode", "trainer.logger", "hydra.run.dir")


@dataclass(frozen=True)
class CompareOptions:
    """The options of the command line. Raises ``CompareError`` for a wrong value.

    Attributes:
        precisions, seeds: every precision runs with every seed; differences are to the first precision. A precision is
        a row (tools/rows.py), ``fp8_rollout+jetrl.kv_cache=fp8``.
        out: folder of the comparison; give the same folder to continue an interrupted one.
        temperatures, samples: of the evaluation; 0 is greedy, with one sample.
        words: more overrides of the demo, or a verl command line that trains the job.
        steps, cache, device: of the demo.
        across_builds: compare trainings of several builds of this package, and say so in the table.
    """

    precisions: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    temperatures: tuple[float, ...] = (0.0, 1.0)
    samples: int = 1
    words: tuple[str, ...] = ()
    steps: int = 20
    cache: Path = Path("outputs/cache")
    device: str = "auto"
    across_builds: bool = False

    def __post_init__(self) -> None:
        for precision in self.precisions:
            try:
                row = parse_row(precision, PRECISIONS)
            except ToolError as error:
                raise CompareError(str(error)) from None
            for key in keys_of(row.settings):
                if key in _OURS:
                    raise CompareError(f"{key} is set by jetrl compare for each run. Remove it from {precision}.")
                if row.name == "bf16" and key.startswith("jetrl."):
                    raise CompareError(f"{precision}: precision=bf16 is verl as it is and has no {key}. Remove it.")
        for name in ("precisions", "seeds", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                listed = ",".join(map(str, values))
                raise CompareError(
                    f"--{name} {listed!r} is wrong: it is empty or repeats a value. Set each value once, with commas."
                )
        if self.samples < 1 or self.steps < 1 or min(self.temperatures) < 0:
            raise CompareError("--samples and --steps must be at least 1, and no temperature may be negative.")
        if self.device not in DEVICES:
            raise CompareError(f"{self.device!r} is not a device. Choose one of {', '.join(DEVICES)}.")
        for word in self.words:
            (key,) = keys_of([word])
            if "=" in word and key in _OURS:
                raise CompareError(f"{key} is set by jetrl compare for each run. Remove {word}.")

    @property
    def is_demo(self) -> bool:
        """Whether the job is the demo: no words, or only overrides."""
        return not self.words or "=" in self.words[0]


def folder_of_runs(out: Path) -> Path:
    """Folder below ``out`` that holds the folders of the runs."""
    return out / "runs"


def name_of(precision: str, seed: int) -> str:
    """What names the files and the experiment of a run."""
    return f"{parse_row(precision, PRECISIONS).slug}-seed{seed}"


@dataclass(frozen=True)
class CompareRun:
    """One precision, with overrides beside it or without, and one seed; ``precision`` is the row's text."""

    precision: str
    seed: int
    paths: RunPaths

    row = property(lambda self: parse_row(self.precision, PRECISIONS))
    name = property(lambda self: name_of(self.precision, self.seed))
    state = property(lambda self: self.paths.folder / "state.json")
    checkpoints = property(lambda self: self.paths.folder / "checkpoints")
    config = property(lambda self: self.paths.config)


@dataclass(frozen=True)
class Job:
    """What every run trains: the command without the words of a run, its environment, and its steps if known."""

    command: Sequence[str]
    environment: Mapping[str, str]
    steps: int = 0
    saves: bool = False
    """Whether the command sets when to save checkpoints."""

    def command_of(self, run: CompareRun) -> list[str]:
        """The whole command line of one run."""
        row = run.row
        words = {
            "precision": row.name,
            **dict.fromkeys(SEED_KEYS, run.seed),
            "trainer.experiment_name": run.name,
            "trainer.logger": "[console,file]",
            "trainer.default_local_dir": quote(run.checkpoints),
            "trainer.resume_mode": "auto",
            "hydra.run.dir": quote(run.paths.folder / "hydra"),
            # Workers of a cluster that is already running do not inherit the environment of this process.
            "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH": quote(run.paths.metrics),
        }
        if not self.saves and not _saves(row.settings):
            words["trainer.save_freq"] = _ONLY_LAST  # verl also saves after the last step
        # Behind the precision, which is a choice of a group, their place does not matter; the job's own word loses.
        return [*self.command, *(f"{key}={value}" for key, value in words.items()), *row.settings]

    def environment_of(self, run: CompareRun) -> dict[str, str]:
        """Environment of one run, with ``PRECISION`` for scripts that read it."""
        return {**self.environment, "VERL_FILE_LOGGER_PATH": str(run.paths.metrics), "PRECISION": run.row.name}


def run_compare(
    options: CompareOptions,
    console: Console,
    trainer: Sequence[str] = VERL,
    evaluator: Sequence[str] = EVALUATE,
    recipe: cache.Recipe | None = None,
) -> int:
    """Run the comparison and return the exit status: 0, 1 after a failure, 128 + signal after an interruption.

    Args:
        options: what to compare.
        console: where progress and the table are shown.
        trainer: program that trains the demo, to which overrides are appended.
        evaluator: program that scores, to which the request's file is appended.
        recipe: data and policy of the demo; the defaults if None.

    Raises:
        CompareError, DemoError: every process that was started has ended.
    """
    say = _sayer(console)
    out = options.out.resolve()
    runs = [
        CompareRun(precision, seed, RunPaths(folder_of_runs(out) / name_of(precision, seed)))
        for seed in options.seeds
        for precision in options.precisions
    ]
    try:
        with signals_raise():
            job = _demo(options, trainer, recipe, say) if options.is_demo else _verl_job(options)
            for run in runs:
                check_state(run, job)
            _check_builds(runs, options.across_builds)
            failed = [run for run in runs if not train(run, job, console)]
            finished = [run for run in runs if run not in failed]
            if not finished:
                return 1
            request = Request(
                str(finished[0].config), {}, False, options.temperatures, options.samples, str(out / "evaluation")
            )
            judged = _judge(finished, request, job, evaluator, say)
            _report(finished, request, options, job, out, console)
            for run in failed:
                say(f"not in the table, because it failed: {run.name}, log {run.paths.log}")
            return int(bool(failed) or not judged)
    except Interrupted as interruption:
        say(f"interrupted by {interruption}; all processes have ended. Run the same command to continue.")
        return 128 + interruption.signal


def _demo(options: CompareOptions, trainer: Sequence[str], recipe: cache.Recipe | None, say) -> Job:
    device = choose_device(options.device)
    recipe = recipe or cache.Recipe()
    prepared = cache.find(recipe, options.cache)
    _make(folder_of_runs(options.out))  # fails before the warm-up, which takes minutes
    prepared = prepared or cache.make(recipe, options.cache, device, say)
    # These are placeholders: each run appends its own precision and paths, and the last word wins.
    nowhere = RunPaths(options.out.resolve())
    overrides = build_overrides("bf16", prepared, nowhere, device, options.steps)
    environment = build_environment(nowhere, device)
    return Job([*trainer, *overrides, *options.words], environment, options.steps, _saves(options.words))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompareError(f"{folder} cannot be created: {error.strerror}. Choose another --out.") from None


def _verl_job(options: CompareOptions) -> Job:
    if shutil.which(options.words[0]) is None:
        raise CompareError(
            f"{options.words[0]} is not a program. Give a verl command line after --, for example "
            "`-- python3 -m verl.trainer.main_ppo ...`."
        )
    return Job(options.words, os.environ, saves=_saves(options.words))


def _saves(words: Sequence[str]) -> bool:
    return "trainer.save_freq" in keys_of(words)


# --- training --------------------------------------------------------------------------------------------------------


def _state_of(run: CompareRun) -> dict:
    """Contents of the state file of ``run``; empty if there is none. Raises ``CompareError`` if it is damaged."""
    if not run.state.is_file():
        return {}
    try:
        state = json.loads(run.state.read_text())
        if isinstance(state, dict) and "finished" in state and ("at" in state or not state["finished"]):
            return state
    except (OSError, ValueError):
        pass
    raise CompareError(f"{run.state} is damaged. Delete {run.paths.folder} and run the command again.")


def check_state(run: CompareRun, job: Job) -> None:
    """Raise ``CompareError`` if another command made the folder of ``run``, or if its state is damaged."""
    state = _state_of(run)
    if state and state.get("command") != job.command_of(run):
        raise CompareError(
            f"{run.paths.folder} was made by another command. Choose another --out, or delete that folder."
        )


def builds_of(run: CompareRun) -> list[Mapping | None]:
    """Builds of this package that trained ``run`` so far, oldest first; None for one that was not recorded."""
    state = _state_of(run)
    return state.get("builds", [None]) if state and (state["finished"] or _latest_step(run)) else []


def _check_builds(runs: Sequence[CompareRun], across_builds: bool) -> None:
    """Raise ``ToolError`` for runs of several builds now; the table would refuse them after hours of training."""
    builds = {run.name: builds_of(run) for run in runs}
    if not all(map(is_finished, runs)):
        builds["this installation"] = [provenance()]
    builds_note(builds, across_builds)


def finished_at(run: CompareRun) -> float | None:
    """Time (``time.time``) at which ``run`` finished training; None if it has not."""
    state = _state_of(run)
    return state["at"] if state and state["finished"] else None


def is_finished(run: CompareRun) -> bool:
    """Whether ``run`` has finished training."""
    return finished_at(run) is not None


def train(run: CompareRun, job: Job, console: Console) -> bool:
    """Train ``run`` unless it has finished; returns whether it has finished now.

    Raises:
        CompareError: the job cannot be scored, or it would resume with other operations than it started with, or the
            folder of the run cannot be created or is damaged.
    """
    say = _sayer(console)
    if is_finished(run):
        say(f"{run.name}: finished before")
        return True
    paths = run.paths
    _make(paths.folder)
    command = job.command_of(run)
    state = {"command": command, "finished": False}
    # jetrl.operations=auto resolves per machine. A run must resume with the operations it started with.
    began = _state_of(run).get("operations") if _latest_step(run) else None
    builds = builds_of(run)
    if not builds or not same_build(builds[-1], provenance()):
        builds.append(provenance())
    state["builds"] = builds
    _write(run.state, state | ({"operations": began} if began else {}))
    earlier = _set_aside(paths.metrics)
    say(f"{run.name}: training, log {paths.log}")

    def learn(line: str) -> None:
        if stated := _TOTAL_STEPS.search(line):
            tracker.steps = int(stated.group(1))
            load_config(run.config)  # fail now if the job cannot be scored later
            if began not in (None, operations := paths.operations()):
                raise CompareError(
                    f"{run.name} started with jetrl.operations={began} and would resume with {operations}. Resume it "
                    f"with the same GPUs and packages, or delete {paths.folder}."
                )
            _write(run.state, state | {"operations": operations})

    tracker = Tracker(paths.log, paths.metrics, job.steps, learn)
    try:
        status = watch(command, job.environment_of(run), paths, tracker, console)
    finally:
        _join(earlier, paths.metrics)
    reached = _latest_step(run)
    # verl saves its last step. Its log since a resume may say less.
    if status != 0 or reached < max(tracker.steps, 1):
        what = f"ended with status {status} after step {tracker.step} of {tracker.steps or '?'}"
        say(f"{run.name}: {what}, last checkpoint {reached or 'none'}:")
        for line in last_errors(paths.log):
            say(f"  {line}")
        return False
    seconds = {phase: round(value, 1) for phase, value in tracker.phase_seconds.items()}
    facts = {"precision": run.precision, "seed": run.seed, "steps": reached, "seconds in phase": seconds}
    facts |= {"operations": paths.operations(), "build": builds[-1]}
    facts |= {"earlier_builds": builds[:-1]} if builds[:-1] else {}
    _write(paths.facts, facts | {"command": shlex.join(command)})
    _write(run.state, {"command": command, "finished": True, "at": time.time(), "builds": builds})
    return True


def records_of(run: CompareRun) -> list[tuple[int, dict]]:
    """Step and metrics of all attempts of ``run``, also of one that was killed or is still training."""
    metrics = run.paths.metrics
    return list(_joined(_lines_of(_aside(metrics)), _lines_of(metrics)).items())


def _aside(metrics: Path) -> Path:
    return metrics.with_name("metrics.earlier.jsonl")


def _lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def _set_aside(metrics: Path) -> list[str]:
    """Move the metrics of an interrupted training aside, or verl's logger overwrites them; returns their lines."""
    aside = _aside(metrics)
    if metrics.is_file():
        _join(_lines_of(aside), metrics)
        metrics.rename(aside)
    return _lines_of(aside)


def _join(earlier: Sequence[str], metrics: Path) -> None:
    """Put the steps before the first of ``metrics`` in front of it."""
    steps = _joined(earlier, _lines_of(metrics))
    metrics.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps.items()))


def _joined(earlier: Sequence[str], later: Sequence[str]) -> dict[int, dict]:
    """Step -> metrics, merged from the lines of two files.

    A resumed training starts with a validation of the step it resumes from; it is added to the metrics of that step.
    """
    first = min(map(step_of, later), default=math.inf)
    records = [json.loads(line) for line in earlier if step_of(line) < math.inf]
    steps = {record["step"]: record["data"] for record in records if record["step"] <= first}
    for record in (json.loads(line) for line in later if step_of(line) < math.inf):
        steps[record["step"]] = {**steps.get(record["step"], {}), **record["data"]}
    return steps


def step_of(line: str) -> float:
    """Step of a line of metrics; infinite for a line that is not a record."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # cut off when the run was killed


def _latest_step(run: CompareRun) -> int:
    """Step of the newest checkpoint of ``run``, 0 without any. Raises ``CompareError`` if it is not known."""
    latest = run.checkpoints / TRACKER_FILE
    if not latest.is_file():
        return 0
    try:
        return check_tracker(latest)
    except DamagedCheckpointError as error:
        # This command sets trainer.resume_mode itself, so that remedy does not apply here.
        fault = str(error).removesuffix("; start again with trainer.resume_mode=disable")
        raise CompareError(f"{fault}. Or delete {run.paths.folder} to start the run again.") from None


# --- scoring ---------------------------------------------------------------------------------------------------------


def _scores(runs: Sequence[CompareRun], request: Request) -> dict[str, dict[float, list[list[float]]] | None]:
    """Name -> temperature -> problem -> sample, of the policy before training and of every run.

    None if there is no score with the settings of ``request`` since the training: files of an earlier evaluation stay
    until the engine overwrites them.
    """
    settings = request.settings(load_config(request.config))

    def read(name: str, since: float) -> dict[float, list[list[float]]] | None:
        file = file_of(request.out, name)
        if not file.is_file() or file.stat().st_mtime < since:
            return None
        found = json.loads(file.read_text())
        if found["settings"] != settings:
            return None
        return {float(temperature): table for temperature, table in found["scores"].items()}

    return {BEFORE: read(BEFORE, since=0.0)} | {run.name: read(run.name, since=finished_at(run)) for run in runs}


def _scored_by(request: Request, name: str) -> Mapping | None:
    """Build that scored the policy ``name``; None if it is not recorded."""
    return json.loads(file_of(request.out, name).read_text()).get("build")


def _judge(runs: Sequence[CompareRun], request: Request, job: Job, evaluator: Sequence[str], say) -> bool:
    """Score every run that has no score yet, all in one engine; returns whether all have one now."""
    scores = _scores(runs, request)
    missing = {run.name: str(run.checkpoints) for run in runs if scores[run.name] is None}
    before = scores[BEFORE] is None
    if not missing and not before:
        return True
    folder = Path(request.out)
    folder.mkdir(parents=True, exist_ok=True)
    log, spec = folder / "evaluation.log", folder / "request.json"
    write_request(replace(request, checkpoints=missing, before=before), spec)
    say(f"scoring {len(missing) + before} policies in one BF16 engine, log {log}")
    lines = GrowingFile(log)
    with ProcessTree([*evaluator, str(spec)], job.environment, log) as tree:
        for _ in tree.follow():
            for line in lines.lines():
                if line.startswith("evaluated "):
                    say(line)
        status = tree.poll()
    unscored = [name for name, found in _scores(runs, request).items() if found is None]
    if status == 0 and not unscored:
        return True
    say(f"the evaluation ended with status {status}, without {', '.join(unscored) or 'nothing'}:")
    for line in last_errors(log):
        say(f"  {line}")
    return False


def _report(
    runs: Sequence[CompareRun], request: Request, options: CompareOptions, job: Job, out: Path, console: Console
) -> None:
    from jetrl_verl.tools.compare.table import Trained, show, write_comparison
    from jetrl_verl.tools.report import load_run

    scores = _scores(runs, request)
    unscored = [name for name, found in scores.items() if found is None]
    trained = []
    if (found := scores[BEFORE]) is not None:
        trained.append(Trained(BEFORE, None, found, scored_by=_scored_by(request, BEFORE)))
    for precision in options.precisions:
        for run in runs:
            if run.precision == precision and (found := scores[run.name]) is not None:
                logged = load_run(run.paths.folder, run.name)
                scored_by = _scored_by(request, run.name)
                trained.append(Trained(precision, run.seed, found, replace(logged, group=precision), scored_by))
    if not any(entry.run for entry in trained):
        return
    facts = {"command": shlex.join(job.command), "seeds": list(options.seeds), "samples": options.samples}
    title = f"{', '.join(options.precisions)} on one job"
    rows = write_comparison(trained, out, facts, title, options.precisions[0], unscored, options.across_builds)
    show(rows, console)
    say = _sayer(console)
    if unscored:
        say(f"not in the table, because the evaluation did not score it: {', '.join(unscored)}")
    say(f"page: {out / 'compare.html'}")


def _write(path: Path, content: Mapping) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1))
    unfinished.rename(path)


def _sayer(console: Console):
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
