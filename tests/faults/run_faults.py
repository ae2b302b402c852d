# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Break real runs of the demo on purpose and write down what a user then sees: ``python tests/faults/run_faults.py``.

The runs form a chain on one checkpoint folder. Each resumes where the one before was broken, trains one step, which
proves the resume, and is broken in its second. So a chain of n faults takes n + 1 starts of verl, each two to four
minutes on two cores. ``--only`` picks faults; a second call with the same ``--out`` goes on with that chain.

A line per fault says how the broken run ended (exit status, seconds from the fault, the sentence it left, processes
that it left) and where the next run resumed (steps lost). A run that has not ended ``--patience`` seconds after its
fault counts as hung, and is ended. Outcomes of the last full chain stand in docs/faults.md.

``full-disk`` mounts a tmpfs that holds one checkpoint and not two (root, or a user namespace:
``unshare --map-root-user --mount python tests/faults/run_faults.py ...``). ``two-runs`` starts two runs at once.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.launch import VERL, RunPaths, build_environment
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.progress import last_errors

sys.path.insert(0, str(Path(__file__).parent))
from fault_injector import PHASES, VICTIMS, Fault

CACHE = Path(__file__).parents[2] / "outputs" / "cache"
NAMES = [f"{victim}-{phase}" for phase in PHASES for victim in VICTIMS]
OTHERS = ["nan", "truncated", "resumed", "full-disk", "two-runs"]

# One micro-batch and few samples: what is tested is not learning.
SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.resume_mode=auto",
)
START_SECONDS = 900.0
"""Longest time from the start to the fault."""
LINGER_SECONDS = 90.0
"""How long what a run started may outlive it before it counts as left behind."""


@dataclass
class Outcome:
    """How one run ended.

    Attributes:
        name: of the fault. status: exit status, None if it hung. seconds: from the fault to the end.
        first, last: steps in its metrics, the last one complete. errors: what it said.
        left: processes that were still there ``LINGER_SECONDS`` after its end. gone: seconds until all had ended.
    """

    name: str
    status: int | None
    seconds: float | None
    first: int | None
    last: int | None
    errors: list[str]
    left: list[str] = field(default_factory=list)
    gone: float | None = None


class Chain:
    """Runs one after another on one checkpoint folder."""

    def __init__(self, out: Path, precision: str, patience: float) -> None:
        self.out, self.precision, self.patience = out, precision, patience
        self.checkpoints = out / "checkpoints"
        recipe = cache.Recipe()
        self.prepared = cache.find(recipe, CACHE) or cache.make(recipe, CACHE, "cpu", print)

    @property
    def saved(self) -> int:
        """Step of the last complete checkpoint."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    @contextlib.contextmanager
    def started(self, name: str, steps: int, environment: dict[str, str]) -> Iterator[tuple[ProcessTree, RunPaths]]:
        """A run up to global step ``steps`` with further environment."""
        paths = RunPaths(self.out / f"{name}-{time.strftime('%H%M%S')}")
        paths.folder.mkdir(parents=True)
        overrides = build_overrides(self.precision, self.prepared, paths, "cpu", steps)
        overrides += [*SMALL, f"trainer.default_local_dir='{self.checkpoints}'"]
        command = [*VERL, *overrides]
        with ProcessTree(command, {**build_environment(paths, "cpu"), **environment}, paths.log) as tree:
            yield tree, paths

    def run(self, name: str, steps: int, fault: Fault | None = None) -> Outcome:
        """Run until it ends, or until ``patience`` after the fault."""
        began = time.time()
        fired = None
        with self.started(name, steps, fault.environment() if fault else {}) as (tree, paths):
            while (status := tree.poll()) is None:
                time.sleep(0.5)
                fired = fired or (fault.fired() if fault else None)
                if time.time() - (fired or began + START_SECONDS - self.patience) > self.patience:
                    break
            ended = time.time()
            while (left := tree.processes()) and status is not None and time.time() - ended < LINGER_SECONDS:
                time.sleep(0.5)
            gone = round(time.time() - ended, 1)
            left = [f"{process.pid} {process.name()}" for process in left] if status is not None else []
        steps_done = steps_of(paths.metrics)
        return Outcome(
            name,
            status,
            round(ended - (fired or began), 1),
            min(steps_done, default=None),
            max(steps_done, default=None),
            last_errors(paths.log),
            left,
            None if left or status is None else gone,
        )

    def broken(self, name: str, kind: str, victim: str, phase: str) -> Outcome:
        """Resume, train a step, break in the second."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-fault-", dir=self.out))
        step = 2 if kind == "nan" else self.saved + 2
        return self.run(name, self.saved + 4, Fault(kind, victim, phase, step, str(folder)))


def steps_of(metrics: Path) -> list[int]:
    """Training steps in a metrics file."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [line["step"] for line in lines if "actor/grad_norm" in line["data"]]


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A tmpfs of that size at ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def full_disk(chain: Chain) -> list[Outcome]:
    """A disk with room for one checkpoint and a half; then the same folder on a disk with room."""
    plenty = chain.checkpoints
    size = sum(file.stat().st_size for file in (plenty / f"global_step_{chain.saved}").rglob("*"))
    chain.checkpoints = chain.out / "small-disk"
    with small_disk(chain.checkpoints, int(1.5 * size / 2**20) + 1):
        outcome = chain.run("full-disk", 4)
        kept = Path(shutil.copytree(chain.checkpoints, chain.out / "after-full-disk", dirs_exist_ok=True))
    chain.checkpoints = kept
    resumed = chain.run("full-disk-resumed", chain.saved + 2)
    chain.checkpoints = plenty
    return [outcome, resumed]


def truncated(chain: Chain) -> list[Outcome]:
    """The newest checkpoint loses half of its weights' file, and gets it back."""
    folder = chain.checkpoints / f"global_step_{chain.saved}"
    (file,) = (folder / "actor").glob("model_world_size_*")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    outcome = chain.run("truncated", chain.saved + 2)
    file.write_bytes(whole)
    return [outcome]


def two_runs(chain: Chain) -> list[Outcome]:
    """Two runs side by side, each with checkpoints of its own."""
    outcomes = []
    chains = [Chain(chain.out / f"two-runs-{n}", chain.precision, chain.patience) for n in (1, 2)]
    for one in chains:
        one.out.mkdir(parents=True, exist_ok=True)
    with chains[0].started("run", 2, {}) as first, chains[1].started("run", 2, {}) as second:
        began = time.time()
        while any(tree.poll() is None for tree, _ in (first, second)) and time.time() - began < 2 * START_SECONDS:
            time.sleep(1.0)
        for number, (tree, paths) in enumerate((first, second), start=1):
            steps = steps_of(paths.metrics)
            sockets = sorted(set(re.findall(r"rl-colocate-zmq-\S+", paths.log.read_text(errors="replace"))))
            outcomes.append(
                Outcome(
                    f"two-runs-{number}",
                    tree.poll(),
                    round(time.time() - began, 1),
                    min(steps, default=None),
                    max(steps, default=None),
                    sockets + ([] if tree.poll() == 0 else last_errors(paths.log)),
                )
            )
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    lines = ["| fault | ended after | exit | steps | left behind | what it said |", "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        ended = "**hung**" if outcome.status is None else f"{outcome.seconds:.0f} s"
        left = f"{len(outcome.left)} processes" if outcome.left else "nothing"
        left += f" (all gone after {outcome.gone:.0f} s)" if outcome.gone is not None else ""
        said = "<br>".join(line[:300].replace("|", "\\|") for line in outcome.errors)
        lines.append(
            f"| {outcome.name} | {ended} | {outcome.status} | {outcome.first}..{outcome.last} | {left} | {said} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*NAMES, *OTHERS], default=[*NAMES, *OTHERS], metavar="FAULT")
    parser.add_argument("--precision", default="jet_fp8")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds after which a broken run counts as hung")
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.gettempdir()) / "jetrl-faults", help="the chain's folder"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chain = Chain(options.out.resolve(), options.precision, options.patience)
    record = options.out / "outcomes.jsonl"
    for name in options.only:
        victim, _, phase = name.partition("-")
        if phase in PHASES:
            outcomes = [chain.broken(name, "kill", victim, phase)]
        elif name == "nan":
            outcomes = [chain.broken(name, "nan", "trainer", "update")]
        elif name == "resumed":
            outcomes = [chain.run(name, chain.saved + 1)]
        else:
            outcomes = {"full-disk": full_disk, "truncated": truncated, "two-runs": two_runs}[name](chain)
        with record.open("a") as file:
            file.writelines(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
    print(table([Outcome(**json.loads(line)) for line in record.read_text().splitlines()]))


if __name__ == "__main__":
    main()
