# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The driver of ``jetrl compare``: train every arm, have all of them judged, write the table and the page.

An arm is one precision with one seed. Arms run one after another, each as the program a user would start, with the same
words but for ``precision=``, the seeds and where it writes. A folder per arm holds everything it leaves; an arm that
finished is not trained again, one that was interrupted goes on from its last checkpoint, and a folder that was made by
another command is refused, so what stands beside each other in the table was always asked for by one command.
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

from jetrl_verl.compare import CompareError
from jetrl_verl.compare.evaluate import BEFORE, Request, file_of, load_config, write_request
from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.demo import cache
from jetrl_verl.demo.overrides import RunPaths, build_environment, build_overrides, quote
from jetrl_verl.demo.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.demo.progress import GrowingFile, Tracker, last_errors
from jetrl_verl.demo.run import DEVICES, VERL, choose_device, watch
from jetrl_verl.patches.resume import DamagedCheckpointError, check_tracker

EVALUATE = (sys.executable, "-m", "jetrl_verl.compare.evaluate")
SEED_KEYS = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
"""Everything of a run that is drawn from a seed of verl's: order of the data, sampling, mini-batches."""

_ONLY_LAST = 10**9
_TOTAL_STEPS = re.compile(r"Total training steps: (\d+)")
_OURS = ("precision", *SEED_KEYS, "trainer.default_local_dir", "trainer.resume_mode", "trainer.logger", "hydra.run.dir")


@dataclass(frozen=True)
class CompareOptions:
    """What the command line chooses. Raises ``CompareError`` for a value that makes no sense.

    Attributes:
        precisions, seeds: the arms are their product; differences are to the first precision.
        out: folder of the comparison; the same folder goes on with an interrupted one.
        temperatures, samples: of the evaluation; 0 is greedy, which takes one sample.
        words: of the demo, further overrides; otherwise a verl command line that trains the job.
        steps, cache, device: of the demo.
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

    def __post_init__(self) -> None:
        for precision in self.precisions:
            if precision not in PRECISIONS:
                raise CompareError(f"{precision!r} is not a precision; choose from {', '.join(PRECISIONS)}.")
        for name in ("precisions", "seeds", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                listed = ",".join(map(str, values))
                raise CompareError(f"--{name} {listed} names none or one twice; give each value once, with commas.")
        if self.samples < 1 or self.steps < 1 or min(self.temperatures) < 0:
            raise CompareError("--samples and --steps must be at least 1 and no temperature negative; correct them.")
        if self.device not in DEVICES:
            raise CompareError(f"{self.device!r} is not a device; choose one of {', '.join(DEVICES)}.")
        for word in self.words:
            key = word.partition("=")[0].lstrip("+~")
            if "=" in word and key in _OURS:
                raise CompareError(f"{key} is what the arms differ in or are told apart by; remove {word}.")

    @property
    def is_demo(self) -> bool:
        """Whether the job is the demo: no further words, or overrides alone."""
        return not self.words or "=" in self.words[0]


@dataclass(frozen=True)
class Arm:
    """One training."""

    precision: str
    seed: int
    paths: RunPaths

    name = property(lambda self: f"{self.precision}-seed{self.seed}")
    state = property(lambda self: self.paths.folder / "arm.json")
    checkpoints = property(lambda self: self.paths.folder / "checkpoints")
    config = property(lambda self: self.paths.config)


@dataclass(frozen=True)
class Job:
    """What every arm trains: a command to which an arm's own words are added, its environment, its steps if known."""

    command: Sequence[str]
    environment: Mapping[str, str]
    steps: int = 0
    saves: bool = False
    """Whether the command says itself when to save checkpoints."""

    def command_of(self, arm: Arm) -> list[str]:
        """The whole command line of one arm."""
        words = {
            "precision": arm.precision,
            **dict.fromkeys(SEED_KEYS, arm.seed),
            "trainer.experiment_name": arm.name,
            "trainer.logger": "[console,file]",
            "trainer.default_local_dir": quote(arm.checkpoints),
            "trainer.resume_mode": "auto",
            "hydra.run.dir": quote(arm.paths.folder / "hydra"),
            # Workers of a cluster that runs already do not inherit this process's environment.
            "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH": quote(arm.paths.metrics),
        }
        if not self.saves:
            words["trainer.save_freq"] = _ONLY_LAST  # verl also saves after the last step
        return [*self.command, *(f"{key}={value}" for key, value in words.items())]

    def environment_of(self, arm: Arm) -> dict[str, str]:
        """Environment of one arm; scripts that take the precision from ``PRECISION`` are told the same."""
        return {**self.environment, "VERL_FILE_LOGGER_PATH": str(arm.paths.metrics), "PRECISION": arm.precision}


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
        CompareError, DemoError: one sentence; what was started has ended.
    """
    say = _sayer(console)
    out = options.out.resolve()
    arms = [
        Arm(precision, seed, RunPaths(out / "arms" / f"{precision}-seed{seed}"))
        for seed in options.seeds
        for precision in options.precisions
    ]
    try:
        with signals_raise():
            job = _demo(options, trainer, recipe, say) if options.is_demo else _verl_job(options)
            for arm in arms:
                check_state(arm, job)
            failed = [arm for arm in arms if not train(arm, job, console)]
            finished = [arm for arm in arms if arm not in failed]
            if not finished:
                return 1
            request = Request(
                str(finished[0].config), {}, False, options.temperatures, options.samples, str(out / "evaluation")
            )
            judged = _judge(finished, request, job, evaluator, say)
            _report(finished, request, options, job, out, console)
            for arm in failed:
                say(f"not in the table, because it failed: {arm.name}, log {arm.paths.log}")
            return int(bool(failed) or not judged)
    except Interrupted as interruption:
        say(f"interrupted by {interruption}; everything that was started has ended, the same command goes on")
        return 128 + interruption.signal


def _demo(options: CompareOptions, trainer: Sequence[str], recipe: cache.Recipe | None, say) -> Job:
    device = choose_device(options.device)
    recipe = recipe or cache.Recipe()
    prepared = cache.find(recipe, options.cache)
    _make(options.out / "arms")  # before the minutes that a warm-up takes
    prepared = prepared or cache.make(recipe, options.cache, device, say)
    # Precision and paths are those of the arms; the words of an arm come last and win.
    nowhere = RunPaths(options.out.resolve())
    overrides = build_overrides("bf16", prepared, nowhere, device, options.steps)
    environment = build_environment(nowhere, device)
    return Job([*trainer, *overrides, *options.words], environment, options.steps, _saves(options.words))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompareError(f"{folder} cannot be made ({error.strerror}); choose another --out.") from None


def _verl_job(options: CompareOptions) -> Job:
    if shutil.which(options.words[0]) is None:
        raise CompareError(
            f"{options.words[0]} is no program that can be run; give a verl command line after --, for example "
            "`-- python3 -m verl.trainer.main_ppo ...`."
        )
    return Job(options.words, os.environ, saves=_saves(options.words))


def _saves(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0].lstrip("+") == "trainer.save_freq" for word in words)


# --- training --------------------------------------------------------------------------------------------------------


def _state_of(arm: Arm) -> dict:
    """What was noted of an arm's training; empty before the first. Raises ``CompareError`` if it is damaged."""
    if not arm.state.is_file():
        return {}
    try:
        state = json.loads(arm.state.read_text())
        if isinstance(state, dict) and "finished" in state and ("at" in state or not state["finished"]):
            return state
    except (OSError, ValueError):
        pass
    raise CompareError(f"{arm.state} is damaged; delete {arm.paths.folder} and run the command again.")


def check_state(arm: Arm, job: Job) -> None:
    """Refuse an arm whose folder another command made, or whose state is damaged, with ``CompareError``."""
    state = _state_of(arm)
    if state and state.get("command") != job.command_of(arm):
        raise CompareError(
            f"{arm.paths.folder} was made by another command; choose another --out, or delete that folder."
        )


def finished_at(arm: Arm) -> float | None:
    """When ``arm`` had trained to its end, of ``time.time``; None if it has not."""
    state = _state_of(arm)
    return state["at"] if state and state["finished"] else None


def is_finished(arm: Arm) -> bool:
    """Whether ``arm`` has trained to its end."""
    return finished_at(arm) is not None


def train(arm: Arm, job: Job, console: Console) -> bool:
    """Train one arm unless it has finished; whether it has now.

    Raises:
        CompareError: the job cannot be judged, or would go on with other operations than it began with, or the arm's
            folder cannot be made or is damaged.
    """
    say = _sayer(console)
    if is_finished(arm):
        say(f"{arm.name}: finished before")
        return True
    paths = arm.paths
    _make(paths.folder)
    command = job.command_of(arm)
    state = {"command": command, "finished": False}
    # What jetrl.operations=auto came to be depends on the machine; an arm must not go on as another one.
    began = _state_of(arm).get("operations") if _latest_step(arm) else None
    _write(arm.state, state | ({"operations": began} if began else {}))
    earlier = _set_aside(paths.metrics)
    say(f"{arm.name}: training, log {paths.log}")

    def learn(line: str) -> None:
        if stated := _TOTAL_STEPS.search(line):
            tracker.steps = int(stated.group(1))
            load_config(arm.config)  # what cannot be judged is not worth training
            if began not in (None, operations := paths.operations()):
                raise CompareError(
                    f"{arm.name} began with jetrl.operations={began} and would go on with {operations}; go on where it "
                    f"began, with the same GPUs and packages, or delete {paths.folder}."
                )
            _write(arm.state, state | {"operations": operations})

    tracker = Tracker(paths.log, paths.metrics, job.steps, learn)
    try:
        status = watch(command, job.environment_of(arm), paths, tracker, console)
    finally:
        _join(earlier, paths.metrics)
    reached = _latest_step(arm)
    # verl saves its last step; what it logs since a resume says less.
    if status != 0 or reached < max(tracker.steps, 1):
        what = f"ended with status {status} after step {tracker.step} of {tracker.steps or '?'}"
        say(f"{arm.name}: {what}, last checkpoint {reached or 'none'}:")
        for line in last_errors(paths.log):
            say(f"  {line}")
        return False
    seconds = {phase: round(value, 1) for phase, value in tracker.phase_seconds.items()}
    facts = {"precision": arm.precision, "seed": arm.seed, "steps": reached, "seconds in phase": seconds}
    facts["operations"] = paths.operations()
    _write(paths.facts, facts | {"command": shlex.join(command)})
    _write(arm.state, {"command": command, "finished": True, "at": time.time()})
    return True


def records_of(arm: Arm) -> list[tuple[int, dict]]:
    """Step and metrics of all that the attempts of ``arm`` have logged, one that was killed or still runs included."""
    metrics = arm.paths.metrics
    return list(_joined(_lines_of(_aside(metrics)), _lines_of(metrics)).items())


def _aside(metrics: Path) -> Path:
    return metrics.with_name("metrics.earlier.jsonl")


def _lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def _set_aside(metrics: Path) -> list[str]:
    """Lines of an interrupted training, which verl's logger would overwrite; they wait in a file of their own."""
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
    """Step -> what was logged, of lines of two files of metrics.

    A resumed training begins with a validation of the step that it resumes from, which joins what that step logged.
    """
    first = min(map(step_of, later), default=math.inf)
    records = [json.loads(line) for line in earlier if step_of(line) < math.inf]
    steps = {record["step"]: record["data"] for record in records if record["step"] <= first}
    for record in (json.loads(line) for line in later if step_of(line) < math.inf):
        steps[record["step"]] = {**steps.get(record["step"], {}), **record["data"]}
    return steps


def step_of(line: str) -> float:
    """Step of a line of metrics; infinite for one that is no record."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # cut off when the run was killed


def _latest_step(arm: Arm) -> int:
    """Step of the newest checkpoint of ``arm``, 0 without any. Raises ``CompareError`` if that is not to be told."""
    latest = arm.checkpoints / "latest_checkpointed_iteration.txt"
    if not latest.is_file():
        return 0
    try:
        check_tracker(latest)
    except DamagedCheckpointError as error:
        # How an arm resumes is not the user's to say here.
        fault = str(error).removesuffix("; start again with trainer.resume_mode=disable")
        raise CompareError(f"{fault}; deleting {arm.paths.folder} starts the arm again.") from None
    return int(latest.read_text())


# --- judging ---------------------------------------------------------------------------------------------------------


def _scores(arms: Sequence[Arm], request: Request) -> dict[str, dict[float, list[list[float]]] | None]:
    """Name -> temperature -> problem -> sample, of the policy before training and of every arm.

    None for what was not scored as ``request`` asks since it was trained: files of an earlier evaluation stay until the
    engine has written theirs.
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

    return {BEFORE: read(BEFORE, since=0.0)} | {arm.name: read(arm.name, since=finished_at(arm)) for arm in arms}


def _judge(arms: Sequence[Arm], request: Request, job: Job, evaluator: Sequence[str], say) -> bool:
    """Have every arm scored that was not, all of them by one engine; whether all are scored now."""
    scores = _scores(arms, request)
    missing = {arm.name: str(arm.checkpoints) for arm in arms if scores[arm.name] is None}
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
    unscored = [name for name, found in _scores(arms, request).items() if found is None]
    if status == 0 and not unscored:
        return True
    say(f"the evaluation ended with status {status}, without {', '.join(unscored) or 'nothing'}:")
    for line in last_errors(log):
        say(f"  {line}")
    return False


def _report(
    arms: Sequence[Arm], request: Request, options: CompareOptions, job: Job, out: Path, console: Console
) -> None:
    from jetrl_verl.observe.compare import Trained, show, write_comparison
    from jetrl_verl.observe.report import load_run

    scores = _scores(arms, request)
    unscored = [name for name, found in scores.items() if found is None]
    trained = []
    if (found := scores[BEFORE]) is not None:
        trained.append(Trained(BEFORE, None, found))
    for precision in options.precisions:
        for arm in arms:
            if arm.precision == precision and (found := scores[arm.name]) is not None:
                run = load_run(arm.paths.folder, arm.name)
                trained.append(Trained(precision, arm.seed, found, replace(run, arm=precision)))
    if not any(entry.run for entry in trained):
        return
    facts = {"command": shlex.join(job.command), "seeds": list(options.seeds), "samples": options.samples}
    title = f"{', '.join(options.precisions)} on one job"
    rows = write_comparison(trained, out, facts, title, options.precisions[0], unscored)
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
