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
"""Many arms side by side while a machine is ours: ``python -m recipes.study.window --gpus 0,1 --slots 7 --minutes 17``.

Arms of this size wait most of their time, so several share a GPU. Each is the command of ``run.py`` in a process of its
own. The queue begins with the arms that have most seeds, since without them there is no verdict; as one ends, the next
takes its place. An arm that failed is started once more and goes on from its last checkpoint. When the minutes are
over, what still trains is stopped. Then one engine a GPU scores: final weights if all arms with several seeds have
finished, else, by the rule of docs/study.md, the checkpoints after as many rollouts as all of these have saved. The
same command goes on with what is left, on the same machine.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jetrl_verl.demo.process_tree import Interrupted, signals_raise
from recipes.study.evaluate import checkpoint_after, unscored
from recipes.study.run import ROOT, SAVE_EVERY, StudyArm, arm_of, read_arms
from recipes.study.warm_up import StudyError, read_facts

THREADS = 2500
"""Threads of an arm, Ray's, vLLM's and the trainer's together. Seen: at fourteen arms 32,768 did not suffice."""

SHORTEST = 40
"""Rollouts below which an arm is not compared."""

_ATTEMPTS = 2
_POLL_SECONDS = 1.0
_SAY_SECONDS = 60.0
_GRACE_SECONDS = 40.0

Start = Callable[[Sequence[str], str, Path], subprocess.Popen]
"""Starts a command on a GPU, with a log."""


def queue(out: Path) -> list[StudyArm]:
    """Every arm below ``out``: those with most seeds first, of these one seed after the other."""
    arms = read_arms()["arms"]
    pairs = [(label, seed) for label, arm in arms.items() for seed in arm["seeds"]]
    pairs.sort(key=lambda pair: (-len(arms[pair[0]]["seeds"]), pair[1]))
    return [arm_of(label, seed, out) for label, seed in pairs]


def core(arms: Sequence[StudyArm]) -> list[StudyArm]:
    """Those of ``arms`` that have several seeds: no verdict without them."""
    seeds = {label: len(arm["seeds"]) for label, arm in read_arms()["arms"].items()}
    return [arm for arm in arms if seeds[arm.label] > 1]


def is_finished(arm: StudyArm) -> bool:
    """Whether ``arm`` has trained to its end."""
    return arm.state.is_file() and json.loads(arm.state.read_text())["finished"]


def rollouts_of(arm: StudyArm) -> int:
    """How far the training of ``arm`` has come."""
    try:
        return max((json.loads(line)["step"] for line in arm.paths.metrics.open()), default=0)
    except (OSError, ValueError):  # not there yet, or a line that is being written
        return 0


def common_rollouts(arms: Sequence[StudyArm], steps: int) -> int | None:
    """The most rollouts after which every arm has a checkpoint; None if none has ``SHORTEST``.

    Arms that have saved fewer than ``SHORTEST`` do not count: they are left out of the comparison.
    """
    lengths = range(SAVE_EVERY, steps + 1, SAVE_EVERY)
    saved = [max((n for n in lengths if checkpoint_after(arm, n)), default=0) for arm in arms]
    return min((n for n in saved if n >= SHORTEST), default=None)


def check_threads(at_once: int, limits: dict[str, int] | None = None) -> None:
    """Refuse more arms than the machine has threads for: they would end at any moment, or hang.

    Args:
        at_once: arms side by side. limits: name -> threads; the machine's if None.

    Raises:
        StudyError: a limit is too low.
    """
    if limits is None:
        limits = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0]}
        for name, file in (
            ("kernel.pid_max", "/proc/sys/kernel/pid_max"),
            ("kernel.threads-max", "/proc/sys/kernel/threads-max"),
            ("pids.max of the control group", "/sys/fs/cgroup/pids.max"),
        ):
            if Path(file).is_file() and (text := Path(file).read_text().strip()).isdigit():
                limits[name] = int(text)
    needed = at_once * THREADS
    for name, limit in limits.items():
        if limit != resource.RLIM_INFINITY and limit < needed:
            raise StudyError(
                f"{at_once} arms side by side need about {needed:,} threads and {name} allows {limit:,}; raise it, or "
                "give a smaller --slots."
            )


@dataclass
class Window:
    """Trains arms on several GPUs until a deadline.

    Attributes:
        gpus: names for ``CUDA_VISIBLE_DEVICES``. slots: arms side by side on each.
        seconds: after which what trains is stopped.
        start: starts a command. command_of: the command that trains an arm. say: shows a line.
    """

    gpus: Sequence[str]
    slots: int
    seconds: float
    start: Start
    command_of: Callable[[StudyArm], Sequence[str]]
    say: Callable[[str], None]
    _running: dict[StudyArm, tuple[subprocess.Popen, str]] = field(default_factory=dict)

    def train(self, arms: Sequence[StudyArm], logs: Path) -> list[StudyArm]:
        """Train ``arms`` in their order; those that have not finished when the time is over or nothing runs any more.

        Whatever was started has ended when this returns or raises.
        """
        waiting = [arm for arm in arms if not is_finished(arm)]
        attempts = dict.fromkeys(waiting, 0)
        begun, said = time.monotonic(), 0.0
        try:
            while waiting or self._running:
                passed = time.monotonic() - begun
                if passed > self.seconds:
                    self.say("the time is over")
                    break
                self._fill(waiting, attempts, logs)
                for arm in [arm for arm, (process, _) in self._running.items() if process.poll() is not None]:
                    process, _ = self._running.pop(arm)
                    self.say(f"{passed:5.0f} s  {arm.name} ended with status {process.returncode}")
                    if not is_finished(arm) and attempts[arm] < _ATTEMPTS:
                        waiting.append(arm)
                if passed - said > _SAY_SECONDS:
                    said = passed
                    self.say(f"{passed:5.0f} s  " + ", ".join(f"{a.name} {rollouts_of(a)}" for a in self._running))
                time.sleep(_POLL_SECONDS)
        finally:
            self._stop()
        return [arm for arm in arms if not is_finished(arm)]

    def _fill(self, waiting: list[StudyArm], attempts: dict[StudyArm, int], logs: Path) -> None:
        used = [gpu for _, gpu in self._running.values()]
        while waiting:
            gpu = min(self.gpus, key=used.count)
            if used.count(gpu) >= self.slots:
                return
            arm = waiting.pop(0)
            attempts[arm] += 1
            used.append(gpu)
            self._running[arm] = (self.start(self.command_of(arm), gpu, logs / f"{arm.name}.log"), gpu)

    def _stop(self) -> None:
        processes = [process for process, _ in self._running.values()]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._running.clear()


def start_on(command: Sequence[str], gpu: str, log: Path) -> subprocess.Popen:
    """Start ``command`` where it sees ``gpu`` alone, in a process group of its own; ``log`` gets its words."""
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
    start: Start,
    program: Sequence[str] = (sys.executable, "-m", "recipes.study.evaluate"),
) -> bool:
    """Score what is due by one engine a GPU; whether all of it was.

    Args:
        out: folder of the study. rollouts: as for :func:`recipes.study.evaluate.evaluate`.
        gpus: their names. start: starts a command. program: ``recipes.study.evaluate``.
    """
    names = [arm.name for arm in unscored(out, rollouts)]
    words = ["--out", str(out), *(["--rollouts", str(rollouts)] if rollouts else [])]
    shares = [(gpu, names[i :: len(gpus)]) for i, gpu in enumerate(gpus)]
    engines = [
        start([*program, *words, *share], gpu, out / "window" / f"evaluate-{gpu}.log") for gpu, share in shares if share
    ]
    try:
        return all([engine.wait() == 0 for engine in engines])
    finally:
        for engine in engines:
            if engine.poll() is None:
                os.killpg(engine.pid, signal.SIGKILL)


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="0", help="their numbers, with commas")
    parser.add_argument("--slots", type=int, default=4, help="arms side by side on a GPU")
    parser.add_argument("--minutes", type=float, required=True, help="after which training is stopped and scored")
    parser.add_argument("--prepared", type=Path, default=Path("outputs/study/prepared"))
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--steps", type=int, default=read_arms()["steps"])
    parser.add_argument("words", nargs="*", help="arms such as bf16-seed1, else all; and Hydra overrides for each")
    given = parser.parse_args()
    out, prepared, gpus = given.out.resolve(), given.prepared.resolve(), given.gpus.split(",")
    known = {arm.name: arm for arm in queue(out)}
    overrides = [word for word in given.words if "=" in word]
    chosen = [word for word in given.words if "=" not in word] or list(known)

    def command_of(arm: StudyArm) -> list[str]:
        words = ["--arm", arm.label, "--seed", str(arm.seed), "--prepared", str(prepared), "--out", str(out), "--share"]
        return [sys.executable, "-m", "recipes.study.run", *words, "--steps", str(given.steps), *overrides]

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        if absent := set(chosen) - set(known):
            raise StudyError(f"{', '.join(sorted(absent))} is not an arm; choose from {', '.join(known)}.")
        read_facts(prepared)
        arms = [arm for name, arm in known.items() if name in chosen]
        check_threads(min(len(arms), given.slots * len(gpus)))
        with signals_raise():
            window = Window(gpus, given.slots, 60 * given.minutes, start_on, command_of, say)
            left = window.train(arms, out / "window")
            rollouts = None
            if core(left):
                rollouts = common_rollouts(core(arms), given.steps)
                if rollouts is None:
                    raise StudyError(
                        f"no arm with several seeds has saved {SHORTEST} rollouts; give more --minutes, the same "
                        "command goes on."
                    )
            say(f"scoring {'final weights' if rollouts is None else f'after {rollouts} rollouts'}")
            scored = score(out, rollouts, gpus, start_on)
    except StudyError as error:
        raise SystemExit(f"error: {error}") from None
    except Interrupted as interruption:
        say(f"interrupted by {interruption}; the same command goes on")
        raise SystemExit(128 + interruption.signal) from None
    for arm in left:
        say(f"not finished: {arm.name}, {rollouts_of(arm)} rollouts, log {arm.paths.log}")
    if not scored:
        say(f"not everything was scored; {out / 'window'} has the engines' words")
    raise SystemExit(int(bool(left) or not scored))


if __name__ == "__main__":
    main()
