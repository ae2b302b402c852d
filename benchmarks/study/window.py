# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Many runs side by side in a fixed time: ``python -m benchmarks.study.window --gpus 0,1 --slots 7 --minutes 28``.

Runs of this size wait most of their time, so several share a GPU. Each is a process with the command of ``run.py``.
Rows with the most seeds come first in the queue, since there is no verdict without them; when a run ends, the next one
takes its slot. If there is no policy yet, the warm-up comes first. A run that fails, or logs nothing for minutes, is
ended and started again from its last checkpoint.

Training stops early enough to leave time for the scores. One engine scores all runs, or several engines share them
(``--engines``). They score the final weights if all runs of rows with several seeds have finished. Otherwise, by the
rule of docs/study.md, they score the checkpoints at the largest length that all of these have saved. In both cases the
length is shorter if BF16 came near the end of what there is to learn. Run the same command again, on the same machine,
to continue with what is left.

It runs unattended: if a run or an engine fails, the others continue, and each score is stored as soon as it exists. The
first signal (SIGHUP too) ends everything in order.
"""

import argparse
import fcntl
import math
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.study.evaluate import checkpoint_after, runs_in, unscored
from benchmarks.study.run import ROOT, SAVE_EVERY, StudyRun, control, every_run, read_study
from benchmarks.study.warm_up import StudyConfig, StudyError, check_start, read_facts
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.compare.run import is_finished, records_of
from jetrl_verl.tools.launch import DEVICES, choose_device
from jetrl_verl.tools.process_tree import Interrupted, signals_raise, signals_wait
from jetrl_verl.tools.report import REWARD, Run

THREADS = 1500
"""Threads of one run, of Ray, vLLM and the trainer. Measured on 32 cores: 9,270 for eight runs (docs/log/study.md)."""

SHORTEST = 40
"""Rollouts that a run must have saved to count when the common length is chosen."""

HEADROOM = 0.85
"""Largest reward of BF16, mean over its last rollouts and its seeds, at which the task still separates precisions."""
ROLLOUTS_OF_HEADROOM = 10
"""Rollouts of that mean."""
SHORTEST_WITH_HEADROOM = 20
"""Shortest length in rollouts to which a comparison is cut when BF16 learns faster than that."""

_ATTEMPTS = 3
_POLL_SECONDS = 1.0
_SAY_SECONDS = 60.0
_GRACE_SECONDS = 40.0
_KILL_SECONDS = 10.0
_LEAST_SECONDS = 120.0
"""Time in which an engine starts and scores something."""
_PAUSE_SECONDS = 5.0
_SHORTEST_SECONDS = 600.0
"""Time in which runs start and make ``SHORTEST`` rollouts; the warm-up must leave as much."""
_ENGINE_SECONDS = 60.0
"""Time in which an engine starts."""
_SCORE_SECONDS = 33.0
"""Time in which it scores one policy at both temperatures. Measured: 19 and, on another machine, 27 to 33."""

Start = Callable[[Sequence[str], str, Path], subprocess.Popen]
"""Starts a command on a GPU, with a log."""


def queue(out: Path) -> list[StudyRun]:
    """Every run below ``out``, in the order in which they train."""
    return sorted(every_run(out), key=_turn_of)


def _turn_of(run: StudyRun) -> tuple[int, int]:
    """Sort key: rows with the most seeds first, and among these one seed after the other."""
    return -_seeds_of(run), run.seed


def core(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Those of ``runs`` whose row has several seeds: there is no verdict without them."""
    return [run for run in runs if _seeds_of(run) > 1]


def _seeds_of(run: StudyRun) -> int:
    return len(read_study()["runs"][run.label]["seeds"])


def rollouts_of(run: StudyRun) -> int:
    """Number of rollouts that ``run`` has logged."""
    with suppress(OSError):  # the file is being moved aside
        return max((step for step, _ in records_of(run)), default=0)
    return 0


def common_rollouts(runs: Sequence[StudyRun], steps: int) -> int | None:
    """The most rollouts after which every run has a checkpoint; None if none has ``SHORTEST``.

    Runs that have saved fewer than ``SHORTEST`` do not count: they are left out of the comparison.
    """
    lengths = range(SAVE_EVERY, steps + 1, SAVE_EVERY)
    saved = [max((n for n in lengths if checkpoint_after(run, n)), default=0) for run in runs]
    return min((n for n in saved if n >= SHORTEST), default=None)


def rollouts_with_room(trainings: Sequence[StudyRun], longest: int) -> int:
    """The most rollouts, up to ``longest``, after which BF16 still leaves room for a better precision.

    Only training rewards of BF16 decide, so the choice cannot favour a precision. If even the fewest rollouts are too
    many, the result is the fewest, and the verdict says that the task is too easy.

    Args:
        trainings: the runs of BF16. longest: rollouts that all runs have.
    """
    rewards: dict[int, list[float]] = {}  # rollout -> of each training
    for run in trainings:
        for step, reward in zip(*Run(run.name, records_of(run)).series(REWARD)):
            rewards.setdefault(step, []).append(reward)
    fewest, full = min(longest, SHORTEST_WITH_HEADROOM), False
    for n in (longest, *range((longest - 1) // SAVE_EVERY * SAVE_EVERY, fewest, -SAVE_EVERY)):
        if last := [reward for step in range(n - ROLLOUTS_OF_HEADROOM + 1, n + 1) for reward in rewards.get(step, ())]:
            if fmean(last) <= HEADROOM:
                return n
            full = True
    return fewest if full else longest


def length_of(out: Path, runs: Sequence[StudyRun], steps: int) -> int | None:
    """Rollouts whose checkpoints are scored; None for final weights.

    Args:
        out: folder of the study. runs: those that were to be trained. steps: rollouts of a whole training.

    Raises:
        StudyError: a run of a row with several seeds has not finished, and none has saved enough to be compared.
    """
    finished = all(is_finished(run) for run in core(runs))
    longest = steps if finished else common_rollouts(core(runs), steps)
    if longest is None:
        raise StudyError(
            f"No row with several seeds has saved {SHORTEST} rollouts. Run the same command again with more --minutes."
        )
    if longest < SHORTEST:  # a trial, of which only the end matters
        return None
    # All runs of BF16, not only those in ``runs``: a run that is trained later gets the same length.
    rollouts = rollouts_with_room([run for run in runs_in(out) if run.label == control()], longest)
    return None if finished and rollouts == steps else rollouts


def check_threads(at_once: int, running: int | None = None, limits: dict[str, int] | None = None) -> None:
    """Refuse more runs than the machine has threads for: they would crash or hang.

    Args:
        at_once: runs side by side. running: threads of everything else. limits: name -> threads. The machine's if None.

    Raises:
        StudyError: a limit is too low.
    """
    if running is None:
        running = sum(1 for _ in Path("/proc").glob("[0-9]*/task/[0-9]*"))
    if limits is None:
        limits = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0]}
        for name, file in (
            ("kernel.pid_max", "/proc/sys/kernel/pid_max"),
            ("kernel.threads-max", "/proc/sys/kernel/threads-max"),
            ("pids.max of the control group", "/sys/fs/cgroup/pids.max"),
            ("pids.max of the control group", "/sys/fs/cgroup/pids/pids.max"),
        ):
            if Path(file).is_file() and (text := Path(file).read_text().strip()).isdigit():
                limits[name] = int(text)
    needed = at_once * THREADS + running
    for name, limit in limits.items():
        if limit != resource.RLIM_INFINITY and limit < needed:
            raise StudyError(
                f"{at_once} runs side by side need about {needed:,} threads and {name} allows {limit:,}. Raise it "
                "(sysctl -w kernel.pid_max=4194304), or set a smaller --slots."
            )


def kill(process: subprocess.Popen) -> None:
    """Kill a command and all processes below it; verl has another process group, which a signal would not reach."""
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        for member in [*leader.children(recursive=True), leader]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)


def end(processes: Sequence[subprocess.Popen], seconds: float) -> None:
    """Ask all commands to end, and kill those that have not after ``seconds``; signals are held back meanwhile."""
    with signals_wait():
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + seconds
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill(process)


@dataclass
class Running:
    """A run in training: its process, its GPU, when it started and when it was asked to end.

    ``begun`` is a ``time.time``, to compare with dates of files; ``asked`` and all else are ``time.monotonic``.
    """

    process: subprocess.Popen
    gpu: str
    begun: float
    asked: float | None = None


@dataclass
class Window:
    """Trains runs on several GPUs until a deadline.

    Attributes:
        gpus: names for ``CUDA_VISIBLE_DEVICES``. slots: runs side by side on each.
        seconds: after which what trains is stopped.
        start: starts a command. command_of: the command that trains a run. say: shows a line.
        start_seconds, quiet_seconds: a run is ended if it has no log so long after its start, or has not written to it
            for so long.
        pause_seconds: before it is started again. least_seconds: time that must be left for that.
    """

    gpus: Sequence[str]
    slots: int
    seconds: float
    start: Start
    command_of: Callable[[StudyRun], Sequence[str]]
    say: Callable[[str], None]
    start_seconds: float = 420.0
    quiet_seconds: float = 180.0
    pause_seconds: float = 60.0
    least_seconds: float = 400.0
    _running: dict[StudyRun, Running] = field(default_factory=dict, init=False)
    _attempts: dict[StudyRun, int] = field(default_factory=dict, init=False)
    _ready: dict[StudyRun, float] = field(default_factory=dict, init=False)
    """When each waiting run may start, in the order of the queue."""

    def train(self, runs: Sequence[StudyRun], logs: Path) -> list[StudyRun]:
        """Train ``runs`` in their order until the time is over or none is left; returns those that have not finished.

        Every process has ended when this returns or raises.
        """
        begun = said = time.monotonic()
        self._ready = {run: begun for run in runs if not is_finished(run)}
        try:
            while self._ready or self._running:
                now = time.monotonic()
                left = begun + self.seconds - now
                if left < 0:
                    self.say(f"{now - begun:5.0f} s  the time to train is over")
                    break
                self._fill(now, left, logs)
                for run in list(self._running):
                    self._look_after(run, now, f"{now - begun:5.0f} s  {run.name}")
                if now - said > _SAY_SECONDS:
                    said = now
                    self.say(f"{now - begun:5.0f} s  " + ", ".join(f"{a.name} {rollouts_of(a)}" for a in self._running))
                time.sleep(_POLL_SECONDS)
        finally:
            end([running.process for running in self._running.values()], _GRACE_SECONDS)
            self._running.clear()
        return [run for run in runs if not is_finished(run)]

    def _fill(self, now: float, left: float, logs: Path) -> None:
        for run in [run for run, ready in self._ready.items() if ready <= now]:
            if run in self._attempts and left < self.least_seconds:
                del self._ready[run]  # too late to be useful, and it would slow the others down
                continue
            used = [running.gpu for running in self._running.values()]
            gpu = min(self.gpus, key=used.count)
            if used.count(gpu) >= self.slots:
                return
            try:
                with signals_wait():
                    if run.paths.log.is_file():  # keep it, it says why the last attempt ended
                        run.paths.log.replace(run.paths.log.with_name(f"run.{time.time_ns()}.log"))
                    process = self.start(self.command_of(run), gpu, logs / f"{run.name}.log")
                    self._running[run] = Running(process, gpu, time.time())
            except OSError as error:  # no process or file available; try again later
                self.say(f"{run.name} cannot be started: {error}")
                self._ready[run] = now + self.pause_seconds
                continue
            del self._ready[run]
            self._attempts[run] = self._attempts.get(run, 0) + 1

    def _look_after(self, run: StudyRun, now: float, name: str) -> None:
        """Handle the end of ``run``, and end it if it hangs."""
        running = self._running[run]
        if running.process.poll() is not None:
            del self._running[run]
            self.say(f"{name} ended with status {running.process.returncode}, {rollouts_of(run)} rollouts")
            if not is_finished(run) and self._attempts[run] < _ATTEMPTS:
                self._ready[run] = now + self.pause_seconds
        elif running.asked is not None:
            if now - running.asked > _GRACE_SECONDS:
                kill(running.process)
        elif self._hangs(run, running.begun):
            self.say(f"{name} logs nothing and is ended, {rollouts_of(run)} rollouts")
            running.asked = now
            running.process.terminate()

    def _hangs(self, run: StudyRun, begun: float) -> bool:
        logged = 0.0
        with suppress(OSError):
            logged = run.paths.metrics.stat().st_mtime
        return time.time() - max(begun, logged) > (self.quiet_seconds if logged > begun else self.start_seconds)


def start_on(command: Sequence[str], gpu: str, log: Path) -> subprocess.Popen:
    """Start ``command`` with only ``gpu`` visible, in its own session; its output goes to ``log``.

    Raises:
        OSError: no process or file is available.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def score(
    out: Path,
    rollouts: int | None,
    gpus: Sequence[str],
    seconds: float,
    start: Start,
    say: Callable[[str], None],
    program: Sequence[str],
    engines: int = 1,
    quiet_seconds: float = 180.0,
) -> list[str]:
    """Score what is due; another engine retries what one failed at. Returns the names of the runs without a score.

    Args:
        out: folder of the study. rollouts: as for :func:`benchmarks.study.evaluate.evaluate`. gpus: their names.
        seconds: after which engines are ended; their scores up to then are kept.
        start: starts a command. say: shows a line. program: ``benchmarks.study.evaluate``.
        engines: number of engines, which share the runs. quiet_seconds: all engines are ended after so long without a
            new score.
    """
    deadline = time.monotonic() + seconds
    engines = min(engines, len(gpus))
    words = ["--out", str(out), *(["--rollouts", str(rollouts)] if rollouts else [])]

    def due() -> list[str]:
        # If the time ends early, each row with several seeds should have one score before any has two; then the others.
        return [run.name for run in sorted(unscored(out, rollouts), key=_turn_of)]

    names = due()
    for attempt in range(_ATTEMPTS):
        if not names or (attempt and deadline - time.monotonic() < _LEAST_SECONDS):
            break
        running: list[subprocess.Popen] = []
        try:
            for i in range(engines):
                gpu = gpus[(i + attempt) % len(gpus)]  # another GPU than last time, in case it was the cause
                if share := names[i::engines]:
                    try:
                        with signals_wait():
                            command = [*program, *words, *share]
                            running.append(start(command, gpu, out / "window" / f"evaluate-{gpu}.log"))
                    except OSError as error:
                        say(f"no engine on GPU {gpu}: {error}")
            heard, left = time.monotonic(), len(names)
            while any(process.poll() is None for process in running):
                now, still = time.monotonic(), len(due())
                if still < left:
                    heard, left = now, still
                if now > deadline or now - heard > quiet_seconds:
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            end(running, _KILL_SECONDS)
        if names := due():
            say(f"without a score: {', '.join(names)}; the engines' logs are in {out / 'window'}")
            names = names[1:] + names[:1]  # an engine may have failed at the first, so try it last
            time.sleep(max(0.0, min(_PAUSE_SECONDS, deadline - time.monotonic())))
    return names


def scoring_minutes(runs: int, engines: int) -> float:
    """Minutes that ``engines`` engines need for ``runs`` scores and the score of the policy before training."""
    return (_GRACE_SECONDS + _ENGINE_SECONDS + _SCORE_SECONDS * (math.ceil(runs / engines) + 1)) / 60


def make_policy(
    prepared: Path, gpu: str, device: str, seconds: float, log: Path, start: Start, say: Callable[[str], None]
) -> None:
    """Run ``benchmarks.study.warm_up`` if ``prepared`` is incomplete, and check that runs may start from its policy.

    On a CPU, where the warm-up would take days, ``prepared`` must be complete; it may be a small one.

    Args:
        prepared: folder of the warm-up. gpu: its name. device: ``cpu`` or ``cuda``.
        seconds: after which the warm-up is ended. log: gets its output. start: starts a command. say: shows a line.

    Raises:
        StudyError: it failed or took too long, or runs must not start from this policy.
    """
    if device == "cpu":
        read_facts(prepared)
        return
    if not prepared.joinpath("study.json").is_file():
        say(f"warming up the policy, log {log}")
        command = [sys.executable, "-m", "benchmarks.study.warm_up", "--out", str(prepared), "--device", device]
        processes: list[subprocess.Popen] = []
        try:
            with signals_wait():
                processes.append(start(command, gpu, log))
            if status := processes[0].wait(seconds):
                raise StudyError(f"The warm-up ended with status {status}. See {log}.")
        except OSError as error:
            raise StudyError(f"The warm-up cannot be started: {error}. Try again.") from None
        except subprocess.TimeoutExpired:
            raise StudyError(
                f"The warm-up took more than {seconds:.0f} s. See {log}, and set more --minutes."
            ) from None
        finally:
            end(processes, _KILL_SECONDS)
    check_start(prepared, StudyConfig())


@contextmanager
def only_one(out: Path):
    """Refuse a second window in the same folder.

    Raises:
        StudyError: another window is running in ``out``.
    """
    out.joinpath("window").mkdir(parents=True, exist_ok=True)
    with out.joinpath("window", "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyError(f"Another window is running in {out}. Wait for it, or set another --out.") from None
        yield


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="0", help="numbers of the GPUs, with commas")
    parser.add_argument("--slots", type=int, default=4, help="runs side by side on a GPU")
    parser.add_argument("--minutes", type=float, required=True, help="time for everything, scores included")
    parser.add_argument("--scoring", type=float, help="minutes kept for the scores; by default from their number")
    parser.add_argument("--engines", type=int, default=1, help="engines that score, one per GPU")
    parser.add_argument("--prepared", type=Path, default=Path("outputs/study/prepared"))
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--steps", type=int, default=read_study()["steps"])
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("words", nargs="*", help="runs such as bf16-seed1 (default: all), and Hydra overrides for each")
    given = parser.parse_args()
    out, prepared, gpus = given.out.resolve(), given.prepared.resolve(), [gpu.strip() for gpu in given.gpus.split(",")]
    known = {run.name: run for run in queue(out)}
    overrides = [word for word in given.words if "=" in word]
    chosen = [word for word in given.words if "=" not in word] or list(known)
    begun = time.monotonic()

    def command_of(run: StudyRun) -> list[str]:
        words = ["--run", run.label, "--seed", str(run.seed), "--prepared", str(prepared), "--out", str(out), "--share"]
        words += ["--steps", str(given.steps), "--device", device]
        return [sys.executable, "-m", "benchmarks.study.run", *words, *overrides]

    def say(line: str) -> None:
        with suppress(OSError):
            print(line, flush=True)

    try:
        # Choose once: all runs must use the same device, even if one process fails to detect it for a moment.
        device = choose_device(given.device)
        if absent := set(chosen) - set(known):
            raise StudyError(f"{', '.join(sorted(absent))} is not a run. Choose from {', '.join(known)}.")
        if min(given.slots, given.engines) < 1 or not all(gpus):
            raise StudyError("--slots and --engines must be at least 1, and --gpus must be numbers with commas.")
        runs = [run for name, run in known.items() if name in chosen]
        engines = min(given.engines, len(gpus))
        scoring = given.scoring
        if scoring is None:  # runs that were trained there before may be due too
            scoring = scoring_minutes(len({*runs, *runs_in(out)}), engines)
        if given.minutes <= scoring:
            raise StudyError(
                f"--minutes {given.minutes:g} is too short: the scores take {scoring:.1f} minutes. Set more --minutes."
            )
        check_threads(min(len(runs), given.slots * len(gpus)))
        with signals_raise(), only_one(out):
            seconds = 60 * (given.minutes - scoring)
            log = out / "window" / "warm_up.log"
            make_policy(prepared, gpus[0], device, max(0.0, seconds - _SHORTEST_SECONDS), log, start_on, say)
            seconds -= time.monotonic() - begun
            window = Window(gpus, given.slots, seconds, start_on, command_of, say)
            try:
                window.train(runs, out / "window")
            except Interrupted:
                raise
            except Exception:  # a bug in this file must not cost the scores of what has been trained
                traceback.print_exc()
            left = [run for run in runs if not is_finished(run)]
            for run in left:
                say(f"not finished: {run.name}, {rollouts_of(run)} rollouts, log {run.paths.log}")
            rollouts = length_of(out, runs, given.steps)
            say(f"scoring {'final weights' if rollouts is None else f'weights after {rollouts} rollouts'}")
            program = (sys.executable, "-m", "benchmarks.study.evaluate", "--device", device)
            seconds = 60 * given.minutes - (time.monotonic() - begun)
            missing = score(out, rollouts, gpus, seconds, start_on, say, program, engines)
            say(
                f"the page: python3 -m benchmarks.study.plot --out {out}{f' --rollouts {rollouts}' if rollouts else ''}"
            )
    except ToolError as error:
        raise SystemExit(f"error: {error}") from None
    except Interrupted as interruption:
        say(f"interrupted by {interruption}. Run the same command to continue.")
        raise SystemExit(128 + interruption.signal) from None
    raise SystemExit(int(bool(left or missing)))


if __name__ == "__main__":
    main()
