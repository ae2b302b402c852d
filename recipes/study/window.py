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
"""Many arms side by side while a machine is ours: ``python -m recipes.study.window --gpus 0,1 --slots 7 --minutes 28``.

Arms of this size wait most of their time, so several share a GPU. Each is the command of ``run.py`` in a process of its
own. The queue begins with the arms that have most seeds, since without them there is no verdict; as one ends, the next
takes its place. Where there is no policy yet, the warm-up comes first. An arm that fails, or logs nothing for minutes,
is ended and started again, and goes on from its last checkpoint. Training is stopped in time for the scores, which are
part of the minutes. Then one engine scores them all (or several, ``--engines``, each some): final weights if all arms
with several seeds have finished, else, by the rule of docs/study.md, the checkpoints after as many rollouts as all of
these have saved; in both cases fewer if BF16 came near the end of what there is to learn before that. The same command
goes on with what is left, on the same machine.

Nobody needs to watch it, so it is written to lose nothing: whatever one arm or engine does, the others go on, and a
score is in its place as soon as there is one. Signals: the first ends everything in order, SIGHUP as well.
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

from jetrl_verl.compare import CompareError
from jetrl_verl.compare.run import is_finished, records_of
from jetrl_verl.demo import DemoError
from jetrl_verl.demo.process_tree import Interrupted, signals_raise, signals_wait
from jetrl_verl.demo.run import DEVICES, choose_device
from jetrl_verl.observe.report import REWARD, Run
from recipes.study.evaluate import arms_in, checkpoint_after, unscored
from recipes.study.run import ROOT, SAVE_EVERY, StudyArm, control, every_arm, read_arms
from recipes.study.warm_up import StudyConfig, StudyError, check_start, read_facts

THREADS = 1500
"""Threads of an arm, Ray's, vLLM's and the trainer's together. Seen on 32 cores: 9,270 for eight arms (docs/LOG.md)."""

SHORTEST = 40
"""Rollouts that an arm with several seeds must have saved, or it does not keep the others from a longer comparison."""

ROOM = 0.85
"""Reward of BF16, mean over its last rollouts and its seeds, up to which the task still tells arms apart."""
ROLLOUTS_OF_ROOM = 10
"""Rollouts of that mean."""
SHORTEST_WITH_ROOM = 20
"""Rollouts to which a comparison may be cut where BF16 learns faster than that."""

_ATTEMPTS = 3
_POLL_SECONDS = 1.0
_SAY_SECONDS = 60.0
_GRACE_SECONDS = 40.0
_KILL_SECONDS = 10.0
_LEAST_SECONDS = 120.0
"""In which an engine starts and scores something."""
_PAUSE_SECONDS = 5.0
_SHORTEST_SECONDS = 600.0
"""In which arms start and make ``SHORTEST`` rollouts; what the warm-up must leave."""
_ENGINE_SECONDS = 60.0
"""In which an engine starts."""
_SCORE_SECONDS = 33.0
"""In which it scores one policy, both temperatures. Seen: 19 and, on another machine, 27 to 33."""

Start = Callable[[Sequence[str], str, Path], subprocess.Popen]
"""Starts a command on a GPU, with a log."""


def queue(out: Path) -> list[StudyArm]:
    """Every arm below ``out``, in the order in which they train."""
    return sorted(every_arm(out), key=_turn_of)


def _turn_of(arm: StudyArm) -> tuple[int, int]:
    """Sorts arms: those with most seeds first, of these one seed after the other."""
    return -_seeds_of(arm), arm.seed


def core(arms: Sequence[StudyArm]) -> list[StudyArm]:
    """Those of ``arms`` that have several seeds: no verdict without them."""
    return [arm for arm in arms if _seeds_of(arm) > 1]


def _seeds_of(arm: StudyArm) -> int:
    return len(read_arms()["arms"][arm.label]["seeds"])


def rollouts_of(arm: StudyArm) -> int:
    """How far the training of ``arm`` has come."""
    with suppress(OSError):  # moved aside at this moment
        return max((step for step, _ in records_of(arm)), default=0)
    return 0


def common_rollouts(arms: Sequence[StudyArm], steps: int) -> int | None:
    """The most rollouts after which every arm has a checkpoint; None if none has ``SHORTEST``.

    Arms that have saved fewer than ``SHORTEST`` do not count: they are left out of the comparison.
    """
    lengths = range(SAVE_EVERY, steps + 1, SAVE_EVERY)
    saved = [max((n for n in lengths if checkpoint_after(arm, n)), default=0) for arm in arms]
    return min((n for n in saved if n >= SHORTEST), default=None)


def rollouts_with_room(trainings: Sequence[StudyArm], longest: int) -> int:
    """The most rollouts, up to ``longest``, before which BF16 was not yet too good to be told from a better one.

    It is decided by BF16's training rewards alone, so it cannot favour an arm. Where even the fewest are too many, the
    fewest: the verdict will say that the task is too easy.

    Args:
        trainings: BF16's. longest: rollouts that all arms have.
    """
    rewards: dict[int, list[float]] = {}  # rollout -> of each training
    for arm in trainings:
        for step, reward in zip(*Run(arm.name, records_of(arm)).series(REWARD)):
            rewards.setdefault(step, []).append(reward)
    fewest, full = min(longest, SHORTEST_WITH_ROOM), False
    for n in (longest, *range((longest - 1) // SAVE_EVERY * SAVE_EVERY, fewest, -SAVE_EVERY)):
        if last := [reward for step in range(n - ROLLOUTS_OF_ROOM + 1, n + 1) for reward in rewards.get(step, ())]:
            if fmean(last) <= ROOM:
                return n
            full = True
    return fewest if full else longest


def length_of(out: Path, arms: Sequence[StudyArm], steps: int) -> int | None:
    """What is scored: None for final weights, else checkpoints after so many rollouts.

    Args:
        out: folder of the study. arms: those that were to be trained. steps: rollouts of a whole training.

    Raises:
        StudyError: an arm with several seeds has not finished, and none has saved enough to be compared.
    """
    finished = all(is_finished(arm) for arm in core(arms))
    longest = steps if finished else common_rollouts(core(arms), steps)
    if longest is None:
        raise StudyError(
            f"no arm with several seeds has saved {SHORTEST} rollouts; give more --minutes, the same command goes on."
        )
    if longest < SHORTEST:  # a trial, of which nothing but the end is of interest
        return None
    # Not of ``arms``: one that is trained later is cut as the others were.
    rollouts = rollouts_with_room([arm for arm in arms_in(out) if arm.label == control()], longest)
    return None if finished and rollouts == steps else rollouts


def check_threads(at_once: int, running: int | None = None, limits: dict[str, int] | None = None) -> None:
    """Refuse more arms than the machine has threads for: they would end at any moment, or hang.

    Args:
        at_once: arms side by side. running: threads of everything else. limits: name -> threads. The machine's if None.

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
                f"{at_once} arms side by side need about {needed:,} threads and {name} allows {limit:,}; raise it "
                "(sysctl -w kernel.pid_max=4194304), or give a smaller --slots."
            )


def kill(process: subprocess.Popen) -> None:
    """End a command and everything below it at once; a signal to its group would not reach verl, which has its own."""
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        for member in [*leader.children(recursive=True), leader]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)


def end(processes: Sequence[subprocess.Popen], seconds: float) -> None:
    """Ask commands to end, all at once, and kill what has not after ``seconds``; signals wait meanwhile."""
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
    """An arm that trains: its process, its GPU, when it started and when it was asked to end.

    ``begun`` is of ``time.time``, which files are dated by; ``asked`` of ``time.monotonic``, as all else.
    """

    process: subprocess.Popen
    gpu: str
    begun: float
    asked: float | None = None


@dataclass
class Window:
    """Trains arms on several GPUs until a deadline.

    Attributes:
        gpus: names for ``CUDA_VISIBLE_DEVICES``. slots: arms side by side on each.
        seconds: after which what trains is stopped.
        start: starts a command. command_of: the command that trains an arm. say: shows a line.
        start_seconds, quiet_seconds: an arm that has not opened its log so long after its start, or not written to it
            for so long since, is ended.
        pause_seconds: before it is started again. least_seconds: what must be left for that.
    """

    gpus: Sequence[str]
    slots: int
    seconds: float
    start: Start
    command_of: Callable[[StudyArm], Sequence[str]]
    say: Callable[[str], None]
    start_seconds: float = 420.0
    quiet_seconds: float = 180.0
    pause_seconds: float = 60.0
    least_seconds: float = 400.0
    _running: dict[StudyArm, Running] = field(default_factory=dict, init=False)
    _attempts: dict[StudyArm, int] = field(default_factory=dict, init=False)
    _ready: dict[StudyArm, float] = field(default_factory=dict, init=False)
    """When an arm may start, in the order in which they wait."""

    def train(self, arms: Sequence[StudyArm], logs: Path) -> list[StudyArm]:
        """Train ``arms`` in their order; those that have not finished when the time is over or nothing runs any more.

        Whatever was started has ended when this returns or raises.
        """
        begun = said = time.monotonic()
        self._ready = {arm: begun for arm in arms if not is_finished(arm)}
        try:
            while self._ready or self._running:
                now = time.monotonic()
                left = begun + self.seconds - now
                if left < 0:
                    self.say(f"{now - begun:5.0f} s  the time to train is over")
                    break
                self._fill(now, left, logs)
                for arm in list(self._running):
                    self._look_after(arm, now, f"{now - begun:5.0f} s  {arm.name}")
                if now - said > _SAY_SECONDS:
                    said = now
                    self.say(f"{now - begun:5.0f} s  " + ", ".join(f"{a.name} {rollouts_of(a)}" for a in self._running))
                time.sleep(_POLL_SECONDS)
        finally:
            end([running.process for running in self._running.values()], _GRACE_SECONDS)
            self._running.clear()
        return [arm for arm in arms if not is_finished(arm)]

    def _fill(self, now: float, left: float, logs: Path) -> None:
        for arm in [arm for arm, ready in self._ready.items() if ready <= now]:
            if arm in self._attempts and left < self.least_seconds:
                del self._ready[arm]  # it would only take time from the others
                continue
            used = [running.gpu for running in self._running.values()]
            gpu = min(self.gpus, key=used.count)
            if used.count(gpu) >= self.slots:
                return
            try:
                with signals_wait():
                    if arm.paths.log.is_file():  # it says why the last attempt ended
                        arm.paths.log.replace(arm.paths.log.with_name(f"run.{time.time_ns()}.log"))
                    process = self.start(self.command_of(arm), gpu, logs / f"{arm.name}.log")
                    self._running[arm] = Running(process, gpu, time.time())
            except OSError as error:  # no process or file to be had: for a while
                self.say(f"{arm.name} cannot be started: {error}")
                self._ready[arm] = now + self.pause_seconds
                continue
            del self._ready[arm]
            self._attempts[arm] = self._attempts.get(arm, 0) + 1

    def _look_after(self, arm: StudyArm, now: float, name: str) -> None:
        """See whether ``arm`` has ended, and end it if it hangs."""
        running = self._running[arm]
        if running.process.poll() is not None:
            del self._running[arm]
            self.say(f"{name} ended with status {running.process.returncode}, {rollouts_of(arm)} rollouts")
            if not is_finished(arm) and self._attempts[arm] < _ATTEMPTS:
                self._ready[arm] = now + self.pause_seconds
        elif running.asked is not None:
            if now - running.asked > _GRACE_SECONDS:
                kill(running.process)
        elif self._hangs(arm, running.begun):
            self.say(f"{name} logs nothing and is ended, {rollouts_of(arm)} rollouts")
            running.asked = now
            running.process.terminate()

    def _hangs(self, arm: StudyArm, begun: float) -> bool:
        logged = 0.0
        with suppress(OSError):
            logged = arm.paths.metrics.stat().st_mtime
        return time.time() - max(begun, logged) > (self.quiet_seconds if logged > begun else self.start_seconds)


def start_on(command: Sequence[str], gpu: str, log: Path) -> subprocess.Popen:
    """Start ``command`` where it sees ``gpu`` alone, out of a terminal's reach; ``log`` gets its words.

    Raises:
        OSError: there is no process or file to be had.
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
    """Score what is due, and by another engine what one failed at; names of the arms that have no score then.

    Args:
        out: folder of the study. rollouts: as for :func:`recipes.study.evaluate.evaluate`. gpus: their names.
        seconds: after which engines are ended; what they have scored by then counts.
        start: starts a command. say: shows a line. program: ``recipes.study.evaluate``.
        engines: side by side, each with a share. quiet_seconds: without a new score after which all are ended.
    """
    deadline = time.monotonic() + seconds
    engines = min(engines, len(gpus))
    words = ["--out", str(out), *(["--rollouts", str(rollouts)] if rollouts else [])]

    def due() -> list[str]:
        # If the time ends: of arms with several seeds each has one score before any has two, then come the others.
        return [arm.name for arm in sorted(unscored(out, rollouts), key=_turn_of)]

    names = due()
    for attempt in range(_ATTEMPTS):
        if not names or (attempt and deadline - time.monotonic() < _LEAST_SECONDS):
            break
        running: list[subprocess.Popen] = []
        try:
            for i in range(engines):
                gpu = gpus[(i + attempt) % len(gpus)]  # the last one may be what an engine failed at
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
            say(f"without a score: {', '.join(names)}; {out / 'window'} has the engines' words")
            names = names[1:] + names[:1]  # the first is what an engine was at
            time.sleep(max(0.0, min(_PAUSE_SECONDS, deadline - time.monotonic())))
    return names


def scoring_minutes(arms: int, engines: int) -> float:
    """Minutes that the scores of ``arms`` take with so many engines, the policy's before training included."""
    return (_GRACE_SECONDS + _ENGINE_SECONDS + _SCORE_SECONDS * (math.ceil(arms / engines) + 1)) / 60


def make_policy(
    prepared: Path, gpu: str, device: str, seconds: float, log: Path, start: Start, say: Callable[[str], None]
) -> None:
    """Run ``recipes.study.warm_up`` where ``prepared`` is not complete, and see that arms may begin with its policy.

    On a CPU, where the warm-up would take days, ``prepared`` must be complete and may be a small one.

    Args:
        prepared: folder of the warm-up. gpu: its name. device: ``cpu`` or ``cuda``.
        seconds: after which the warm-up is ended. log: gets its words. start: starts a command. say: shows a line.

    Raises:
        StudyError: it failed or took too long; or ``prepared`` is not one to begin with.
    """
    if device == "cpu":
        read_facts(prepared)
        return
    if not prepared.joinpath("study.json").is_file():
        say(f"warming up the policy, log {log}")
        command = [sys.executable, "-m", "recipes.study.warm_up", "--out", str(prepared), "--device", device]
        processes: list[subprocess.Popen] = []
        try:
            with signals_wait():
                processes.append(start(command, gpu, log))
            if status := processes[0].wait(seconds):
                raise StudyError(f"the warm-up ended with status {status}; see {log}.")
        except OSError as error:
            raise StudyError(f"the warm-up cannot be started ({error}); try again.") from None
        except subprocess.TimeoutExpired:
            raise StudyError(
                f"the warm-up took more than {seconds:.0f} s; see {log} and give more --minutes."
            ) from None
        finally:
            end(processes, _KILL_SECONDS)
    check_start(prepared, StudyConfig())


@contextmanager
def only_one(out: Path):
    """Keep another window from training the same arms.

    Raises:
        StudyError: one is at work below ``out``.
    """
    out.joinpath("window").mkdir(parents=True, exist_ok=True)
    with out.joinpath("window", "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyError(f"another window is at work below {out}; wait for it, or give another --out.") from None
        yield


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="0", help="their numbers, with commas")
    parser.add_argument("--slots", type=int, default=4, help="arms side by side on a GPU")
    parser.add_argument("--minutes", type=float, required=True, help="in which everything is done, scores included")
    parser.add_argument("--scoring", type=float, help="minutes kept for the scores; by default by their number")
    parser.add_argument("--engines", type=int, default=1, help="that score, each on a GPU of its own")
    parser.add_argument("--prepared", type=Path, default=Path("outputs/study/prepared"))
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--steps", type=int, default=read_arms()["steps"])
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("words", nargs="*", help="arms such as bf16-seed1, else all; and Hydra overrides for each")
    given = parser.parse_args()
    out, prepared, gpus = given.out.resolve(), given.prepared.resolve(), [gpu.strip() for gpu in given.gpus.split(",")]
    known = {arm.name: arm for arm in queue(out)}
    overrides = [word for word in given.words if "=" in word]
    chosen = [word for word in given.words if "=" not in word] or list(known)
    begun = time.monotonic()

    def command_of(arm: StudyArm) -> list[str]:
        words = ["--arm", arm.label, "--seed", str(arm.seed), "--prepared", str(prepared), "--out", str(out), "--share"]
        words += ["--steps", str(given.steps), "--device", device]
        return [sys.executable, "-m", "recipes.study.run", *words, *overrides]

    def say(line: str) -> None:
        with suppress(OSError):
            print(line, flush=True)

    try:
        # Once for all: what one process could not tell for a moment must not make one arm another.
        device = choose_device(given.device)
        if absent := set(chosen) - set(known):
            raise StudyError(f"{', '.join(sorted(absent))} is not an arm; choose from {', '.join(known)}.")
        if min(given.slots, given.engines) < 1 or not all(gpus):
            raise StudyError("--slots and --engines must be at least 1, and --gpus numbers with commas; correct them.")
        arms = [arm for name, arm in known.items() if name in chosen]
        engines = min(given.engines, len(gpus))
        scoring = given.scoring
        if scoring is None:  # others that were trained there before may be due as well
            scoring = scoring_minutes(len({*arms, *arms_in(out)}), engines)
        if given.minutes <= scoring:
            raise StudyError(f"the scores alone take {scoring:.1f} minutes; give more --minutes.")
        check_threads(min(len(arms), given.slots * len(gpus)))
        with signals_raise(), only_one(out):
            seconds = 60 * (given.minutes - scoring)
            log = out / "window" / "warm_up.log"
            make_policy(prepared, gpus[0], device, max(0.0, seconds - _SHORTEST_SECONDS), log, start_on, say)
            seconds -= time.monotonic() - begun
            window = Window(gpus, given.slots, seconds, start_on, command_of, say)
            try:
                window.train(arms, out / "window")
            except Interrupted:
                raise
            except Exception:  # of this file's own making; what has been trained is scored all the same
                traceback.print_exc()
            left = [arm for arm in arms if not is_finished(arm)]
            for arm in left:
                say(f"not finished: {arm.name}, {rollouts_of(arm)} rollouts, log {arm.paths.log}")
            rollouts = length_of(out, arms, given.steps)
            say(f"scoring {'final weights' if rollouts is None else f'weights after {rollouts} rollouts'}")
            program = (sys.executable, "-m", "recipes.study.evaluate", "--device", device)
            seconds = 60 * given.minutes - (time.monotonic() - begun)
            missing = score(out, rollouts, gpus, seconds, start_on, say, program, engines)
            say(f"the page: python3 -m recipes.study.plot --out {out}{f' --rollouts {rollouts}' if rollouts else ''}")
    except (StudyError, CompareError, DemoError) as error:
        raise SystemExit(f"error: {error}") from None
    except Interrupted as interruption:
        say(f"interrupted by {interruption}; the same command goes on")
        raise SystemExit(128 + interruption.signal) from None
    raise SystemExit(int(bool(left or missing)))


if __name__ == "__main__":
    main()
