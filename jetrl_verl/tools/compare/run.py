# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The driver of ``jetrl compare``: train every precision with every seed, score all runs, write the table and the page.

Commands of runs differ only in precision, its overrides, seeds and output paths. The same command continues its work.
"""

import html
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.inputs import UserError, load_json, reading, writing
from jetrl_verl.tools.compare.evaluate import Request, load_config
from jetrl_verl.tools.compare.table import BEFORE, CAPTION, Scores, cells, summarize
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.launch import VERL, RunPaths, build_environment, choose_device, quote, say, watch
from jetrl_verl.tools.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.tools.progress import Tracker, last_errors
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.report import html_table, load_run, read_metrics, write_report
from jetrl_verl.tools.rows import keys_of, parse_row

EVALUATE = (sys.executable, "-m", "jetrl_verl.tools.compare.evaluate")
# verl's seeds: order of the data, sampling, mini-batches.
SEED_KEYS = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")

_TOTAL_STEPS = re.compile(r"Total training steps: (\d+)")
_OWN_KEYS = (
    "precision", *SEED_KEYS, "trainer.default_local_dir", "trainer.resume_mode", "trainer.logger", "hydra.run.dir",
)  # fmt: skip


@dataclass(frozen=True)
class CompareOptions:
    """The options of the command line. Raises ``UserError`` for a wrong value.

    ``precisions`` are rows (tools/rows.py); differences are to the first. ``words`` are overrides of the demo or a verl
    command line. ``temperature`` and ``samples`` are those of the evaluation, ``steps`` to ``device`` of the demo.
    """

    precisions: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    words: tuple[str, ...] = ()
    temperature: float = 0.0
    samples: int = 1
    steps: int = 20
    cache: Path = Path("outputs/cache")
    device: str = "auto"

    def __post_init__(self) -> None:
        rows = [parse_row(precision, PRECISIONS) for precision in self.precisions]
        for key in keys_of([*self.words, *(setting for row in rows for setting in row.settings)]):
            if key in _OWN_KEYS:
                raise UserError(f"{key} is set by jetrl compare for each run. Remove it from the command.")
        for name in ("precisions", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"--{name} is empty or repeats a value. Set each value once, with commas.")
        if self.temperature == 0 and self.samples > 1:
            raise UserError(f"{self.samples} --samples of a greedy evaluation are equal. Set --temperature above 0.")


@dataclass(frozen=True)
class CompareRun:
    """One row, ``precision``, with one seed, below the folder ``out`` of the comparison."""

    precision: str
    seed: int
    out: Path

    row = property(lambda self: parse_row(self.precision, PRECISIONS))
    name = property(lambda self: f"{self.row.slug}-seed{self.seed}")
    paths = property(lambda self: RunPaths(self.out / "runs" / self.name))
    finished = property(lambda self: self.paths.facts.exists())
    checkpoints = property(lambda self: self.paths.folder / "checkpoints")


@dataclass(frozen=True)
class Job:
    """What every run trains: the command without the words of a run, its environment, and its steps if known."""

    command: Sequence[str]
    environment: Mapping[str, str]
    steps: int = 0

    def command_of(self, run: CompareRun) -> list[str]:
        """The whole command line of one run; its words come last and win over the job's own."""
        words = {
            "precision": run.row.name,
            **dict.fromkeys(SEED_KEYS, run.seed),
            "trainer.experiment_name": run.name,
            "trainer.logger": "[console,file]",
            "trainer.default_local_dir": quote(run.checkpoints),
            "trainer.resume_mode": "auto",
            "hydra.run.dir": quote(run.paths.folder / "hydra"),
            # Workers of a cluster that is already running do not inherit the environment of this process.
            "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH": quote(run.paths.metrics),
        }
        if "trainer.save_freq" not in keys_of([*self.command, *run.row.settings]):
            words["trainer.save_freq"] = 10**9  # verl also saves after the last step
        return [*self.command, *(f"{key}={value}" for key, value in words.items()), *run.row.settings]


def run_compare(options: CompareOptions, trainer: Sequence[str] = VERL, evaluator: Sequence[str] = EVALUATE) -> int:
    """Run the comparison and return the exit status: 0, 1 after a failure, 128 + signal after an interruption.

    ``trainer`` trains the demo and is followed by overrides, ``evaluator`` scores and is followed by a request's file.
    ``UserError`` if the comparison cannot go on; every process that was started has ended.
    """
    out = options.out.resolve()
    runs = [CompareRun(precision, seed, out) for seed in options.seeds for precision in options.precisions]
    try:
        with signals_raise():
            job = _job(options, trainer)
            made_by = out / "job.json"
            if made_by.exists():
                with reading(made_by, "record of a comparison", "Choose another --out"):
                    if load_json(made_by, list) != job.command:
                        raise UserError(f"{out} was made by another command. Choose another --out, or delete that one.")
            _write(made_by, job.command)
            for run in runs:
                train(run, job)
            problems = [f"{run.name} did not finish training" for run in runs if not run.finished]
            if finished := [run for run in runs if run.finished]:
                scores = score(finished, options, job, evaluator)
                problems += [f"{name} was not scored" for name, table in scores.items() if table is None]
                if scored := [run for run in finished if scores[run.name]]:
                    _write_tables(scored, options.precisions[0], scores, problems)
            for problem in problems:
                say(f"not in the table: {problem}")
            return int(bool(problems))
    except Interrupted as interruption:
        say(f"interrupted by {interruption}; all processes have ended. Run the same command to continue.")
        return 128 + interruption.signal


def _job(options: CompareOptions, trainer: Sequence[str]) -> Job:
    """The command line of the user, or the demo. ``UserError`` if there is no such program, GPU or folder."""
    is_demo = not options.words or "=" in options.words[0]
    if is_demo:
        device, prepared = choose_device(options.device), cache.find(cache.Recipe(), options.cache)
    elif shutil.which(options.words[0]) is None:
        raise UserError(f"{options.words[0]} is not a program. Give overrides, or a verl command line after --.")
    with writing(options.out, "--out"):
        options.out.mkdir(parents=True, exist_ok=True)  # before the warm-up, which takes minutes
    if not is_demo:
        return Job(list(options.words), os.environ)
    prepared = prepared or cache.make(cache.Recipe(), options.cache, device)
    paths = RunPaths(options.out.resolve())  # replaced, like the precision, by the last words of each run
    overrides = build_overrides("bf16", prepared, paths, device, options.steps)
    return Job([*trainer, *overrides, *options.words], build_environment(paths, device), options.steps)


def train(run: CompareRun, job: Job) -> None:
    """Train ``run`` from its last checkpoint, if it has one, and write its facts once it has finished.

    ``UserError`` if the job could not be scored later, or its metrics are damaged.
    """
    if run.finished:
        say(f"{run.name}: finished before")
        return
    paths, command = run.paths, job.command_of(run)
    paths.folder.mkdir(parents=True, exist_ok=True)
    if paths.metrics.is_file():  # of an interrupted attempt; verl's tracker would overwrite it
        attempts = len(list(paths.folder.glob("metrics-*.jsonl")))
        paths.metrics.rename(paths.folder / f"metrics-{attempts:03}.jsonl")

    def read_line(line: str) -> None:
        if match := _TOTAL_STEPS.search(line):
            tracker.steps = int(match[1])
            load_config(paths.config)  # fail now if the job cannot be scored later

    tracker = Tracker(paths.log, paths.metrics, job.steps, read_line)
    say(f"{run.name}: training, log {paths.log}")
    own = {"VERL_FILE_LOGGER_PATH": str(paths.metrics), "PRECISION": run.row.name}  # scripts of recipes read PRECISION
    status = watch(command, {**job.environment, **own}, paths, tracker)
    step = max(read_metrics(paths.folder), default=0)
    if status != 0 or step < max(tracker.steps, 1):
        what = f"{run.name}: ended with status {status} after step {step} of {tracker.steps or '?'}:"
        say("\n  ".join([what, *last_errors(paths.log)]))
        return
    facts = {**paths.job(), "precision": run.precision, "seed": run.seed, "steps": step}
    facts |= {"seconds in phase": {phase: round(seconds, 1) for phase, seconds in tracker.phase_seconds.items()}}
    _write(paths.facts, facts | {"build": provenance(), "command": shlex.join(command)})


def score(
    runs: Sequence[CompareRun], options: CompareOptions, job: Job, evaluator: Sequence[str]
) -> dict[str, Scores | None]:
    """Name -> scores of the policy before training and of every run, None where the evaluation failed.

    One engine scores those that have no file for this temperature and number of samples.
    """
    out, name = runs[0].out, f"scores-{options.temperature:g}-{options.samples}.json"
    files = {BEFORE: out / name, **{run.name: run.paths.folder / name for run in runs}}
    checkpoints = {run.name: str(run.checkpoints) for run in runs}
    missing = {name: (checkpoints.get(name), str(file)) for name, file in files.items() if not file.exists()}
    if missing:
        log, spec = out / "evaluation.log", out / "evaluation.json"
        _write(spec, vars(Request(str(runs[0].paths.config), missing, options.temperature, options.samples)))
        say(f"scoring {len(missing)} policies in one BF16 engine, log {log}")
        with ProcessTree([*evaluator, str(spec)], job.environment, log) as tree:
            status = tree.wait()
        if status != 0:
            say("\n  ".join([f"the evaluation ended with status {status}:", *last_errors(log)]))
    return {name: _scores(file) if file.exists() else None for name, file in files.items()}


def _scores(file: Path) -> Scores:
    with reading(file, "file of scores", "Delete it, and run the same command again"):
        return load_json(file)["scores"]


def _write_tables(
    runs: Sequence[CompareRun], baseline: str, scores: Mapping[str, Scores | None], problems: Sequence[str]
) -> None:
    """Write ``compare.html``, its PNG and ``compare.json`` of ``runs`` and show the table."""
    seeds = {run.precision: [] for run in runs}
    tables = ({BEFORE: [scores[BEFORE]]} if scores[BEFORE] else {}) | {name: [] for name in seeds}
    for run in runs:
        seeds[run.precision].append(replace(load_run(run.paths.folder, run.name), group=run.precision))
        tables[run.precision].append(scores[run.name])
    page = runs[0].out / "compare.html"
    rows = summarize(tables, seeds, baseline)
    lines = cells(rows)
    widths = [max(map(len, line)) for line in lines]
    notes = [*(f"Not in the table: {problem}." for problem in problems), CAPTION]
    summary = html_table(lines) + "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    write_report(sum(seeds.values(), []), page, ", ".join(seeds), summary=summary)
    _write(page.with_suffix(".json"), {"rows": rows, "not_in_table": problems})
    for figures in zip(*lines):  # a column per precision: there are few, and many figures
        say("  ".join(f"{figure:<{width}}" for figure, width in zip(figures, widths)))
    say(f"page: {page}")


def _write(path: Path, content: object) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1))
    unfinished.rename(path)
