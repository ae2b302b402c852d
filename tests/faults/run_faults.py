# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Break real runs of the demo and report what a user sees: ``python tests/faults/run_faults.py``.

The runs form a chain on one checkpoint folder. Each resumes where the previous one was broken, trains one step and is
broken in the next: n faults take n + 1 starts of verl, two to four minutes each on two cores. ``--only`` picks faults
and their order; the same ``--out`` continues its chain. On GPUs: ``--device cuda --gpus 2``.

It prints how each run ended. A run that has not ended ``--patience`` seconds after its fault counts as hung, and is
ended. The exit status is 1 if a run hung, left a process, was killed outside its phase, or lost more than one step.
"""

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from jetrl_verl.patches.checkpoint_tracker import TRACKER_FILE
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.overrides import GROUP_SIZE, build_overrides
from jetrl_verl.tools.launch import DEVICES, VERL, RunPaths, build_environment, choose_device, quote
from jetrl_verl.tools.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.tools.progress import last_errors

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
from fault_injector import AT_ITS_END, PHASES, VICTIMS, Fault

CACHE = Path(__file__).parents[2] / "outputs" / "cache"
NAMES = [
    f"{victim}-{phase}"
    for phase in PHASES
    for victim in VICTIMS
    if victim not in ("engine", "server") or phase in ("generation", "update", "sync")
]
OTHERS = ["nan", "truncated", "resumed", "two-runs"]

SENTENCES = {"nan": "has NaN or Inf", "truncated": "is damaged"}
"""Sentence of a run that is not killed and must not go on."""

PROMPTS = 8
# One micro-batch and few samples: no learning is tested.
SMALL = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.resume_mode=auto",
)
# A small share of the GPU, and phases long enough for a kill: 200 tokens of the 232 that the policy's positions leave,
# and an update of many micro-batches.
SMALL_ON_A_GPU = (
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.05",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=1073741824",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.max_model_len=256",
    "data.max_response_length=200",
)
START_SECONDS = 900.0
"""Longest time from the start to the fault."""
LINGER_SECONDS = 90.0
"""How long a process may outlive its run before it counts as left."""


@dataclass
class Outcome:
    """How one run ended.

    Attributes:
        name: of the fault. status: exit status, None if it hung. seconds: from the fault to the end.
        first, last: steps in its metrics, the last one complete. saved: step of the last complete checkpoint.
        errors: from its log. killed: in the phase or at its end, None without a kill.
        left: processes alive ``LINGER_SECONDS`` after its end.
    """

    name: str
    status: int | None
    seconds: float | None
    first: int | None
    last: int | None
    errors: list[str]
    left: list[str] = field(default_factory=list)
    saved: int | None = None
    killed: str | None = None


def job(
    precision: str, prepared: cache.Prepared, paths: RunPaths, device: str, ranks: int, steps: int, checkpoints: Path
) -> list[str]:
    """Overrides of a run of ``ranks`` GPUs, or of as many processes of a CPU, up to global step ``steps``."""
    sequences = PROMPTS * GROUP_SIZE // ranks
    words = [
        *build_overrides(precision, prepared, paths, device, steps),
        *SMALL,
        *(SMALL_ON_A_GPU if device == "cuda" else ()),
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={max(1, sequences // (2 if device == 'cpu' else 16))}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={sequences}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={min(2, ranks)}",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.default_local_dir={quote(checkpoints)}",
    ]
    return words + ([f"ray_kwargs.ray_init.num_gpus={ranks}"] if device == "cpu" else [])


def name_of(process: psutil.Process) -> str:
    """Empty if it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def prepare() -> cache.Prepared:
    """The demo's data and policy."""
    recipe = cache.Recipe()
    return cache.find(recipe, CACHE) or cache.make(recipe, CACHE, "cpu")


class Chain:
    """Runs one after another on one checkpoint folder."""

    def __init__(
        self, out: Path, precision: str, patience: float, device: str, ranks: int, words: Sequence[str] = ()
    ) -> None:
        self.out, self.precision, self.patience = out, precision, patience
        self.device, self.ranks, self.words = device, ranks, tuple(words)
        self.checkpoints = out / "checkpoints"
        self.prepared = prepare()

    @property
    def saved(self) -> int:
        """Step of the last complete checkpoint."""
        tracker = self.checkpoints / TRACKER_FILE
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    @contextlib.contextmanager
    def started(self, name: str, steps: int, environment: dict[str, str]) -> Iterator[tuple[ProcessTree, RunPaths]]:
        """A run up to global step ``steps`` with further environment."""
        paths = RunPaths(self.out / f"{name}-{time.strftime('%H%M%S')}")
        paths.folder.mkdir(parents=True)
        overrides = job(self.precision, self.prepared, paths, self.device, self.ranks, steps, self.checkpoints)
        # Ray kills processes of a host that is short of memory, which would be another fault.
        own = {**build_environment(paths, self.device), "RAY_memory_monitor_refresh_ms": "0"}
        with ProcessTree([*VERL, *overrides, *self.words], {**own, **environment}, paths.log) as tree:
            yield tree, paths

    def run(self, name: str, steps: int, fault: Fault | None = None) -> Outcome:
        """Run until it ends, or until ``patience`` after the fault."""
        began, fired, left = time.time(), None, []
        with self.started(name, steps, fault.environment() if fault else {}) as (tree, paths):
            while (status := tree.poll()) is None:
                time.sleep(0.5)
                fired = fired or (fault.fired() if fault else None)
                if time.time() - (fired or began + START_SECONDS - self.patience) > self.patience:
                    break
            ended = time.time()
            while status is not None and (alive := tree.processes()) and time.time() - ended < LINGER_SECONDS:
                left = [f"{process.pid} {name_of(process)}" for process in alive]
                time.sleep(0.5)
            if not tree.processes():
                left = []
        # A killed driver logs nothing about it.
        errors = last_errors(paths.log) if status != 0 and not (fault and fault.victim == "driver") else []
        killed = fault.killed() if fault else None
        return outcome_of(name, status, ended - (fired or began), paths, errors, left, self.saved, killed)

    def broken(self, name: str, kind: str, victim: str, phase: str) -> Outcome:
        """Resume, train a step, break in the second."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-fault-", dir=self.out))
        step = 2 if kind == "nan" else self.saved + 2
        return self.run(name, self.saved + 4, Fault(kind, victim, phase, step, str(folder)))


def outcome_of(name: str, status: int | None, seconds: float, paths: RunPaths, *further) -> Outcome:
    """With the training steps in the run's metrics file."""
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()] if paths.metrics.exists() else []
    steps = [line["step"] for line in lines if "actor/grad_norm" in line["data"]]
    return Outcome(name, status, round(seconds, 1), min(steps, default=None), max(steps, default=None), *further)


def truncated(chain: Chain) -> list[Outcome]:
    """The newest checkpoint lacks half of the last rank's weights for one run."""
    folder = chain.checkpoints / f"global_step_{chain.saved}" / "actor"
    file = folder / f"model_world_size_{chain.ranks}_rank_{chain.ranks - 1}.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    try:
        return [chain.run("truncated", chain.saved + 2)]
    finally:
        file.write_bytes(whole)


def two_runs(chain: Chain) -> list[Outcome]:
    """Two runs side by side, each with checkpoints of its own."""
    outcomes = []
    words = (chain.precision, chain.patience, chain.device, chain.ranks, chain.words)
    chains = [Chain(chain.out / f"two-runs-{n}", *words) for n in (1, 2)]
    for one in chains:
        one.out.mkdir(parents=True, exist_ok=True)
    with chains[0].started("run", 2, {}) as first, chains[1].started("run", 2, {}) as second:
        began = time.time()
        while any(tree.poll() is None for tree, _ in (first, second)) and time.time() - began < 2 * START_SECONDS:
            time.sleep(1.0)
        for number, (tree, paths) in enumerate((first, second), start=1):
            sockets = sorted(set(re.findall(r"rl-colocate-zmq-\S+", paths.log.read_text(errors="replace"))))
            errors = sockets + ([] if tree.poll() == 0 else last_errors(paths.log))
            outcomes.append(outcome_of(f"two-runs-{number}", tree.poll(), time.time() - began, paths, errors))
    return outcomes


def faults_of(outcomes: Iterable[Outcome]) -> list[str]:
    """A sentence for each failure of a run."""
    wrong = []
    for outcome in outcomes:
        if outcome.status is None:
            wrong.append(f"{outcome.name} hung")
        if outcome.left:
            wrong.append(f"{outcome.name} left {', '.join(outcome.left)}")
        if outcome.killed == AT_ITS_END:
            wrong.append(f"{outcome.name}: the phase ended before the kill")
        if outcome.name in NAMES and outcome.killed is None:
            wrong.append(f"{outcome.name}: nothing was killed")
        if (sentence := SENTENCES.get(outcome.name)) and not any(sentence in line for line in outcome.errors):
            wrong.append(f"{outcome.name} did not say {sentence!r}")
        if not sentence and not outcome.killed and outcome.status != 0:
            wrong.append(f"{outcome.name} ended with status {outcome.status}")
        if (sentence or outcome.killed) and outcome.status == 0:
            wrong.append(f"{outcome.name} ended as if nothing had happened")
    return wrong


def lost(outcomes: Sequence[Outcome]) -> list[str]:
    """Runs of a chain that did not resume after the last checkpoint, or that trained steps they did not save."""
    chain = [outcome for outcome in outcomes if outcome.killed or outcome.name in ("nan", "resumed")]
    wrong = []
    for broken, next_one in zip(chain, chain[1:]):
        if next_one.first != broken.saved + 1:
            wrong.append(f"{next_one.name} began with step {next_one.first} after {broken.name}, saved {broken.saved}")
    return wrong + [
        f"{broken.name} trained {broken.last} steps and saved {broken.saved}"
        for broken in chain
        if (broken.last or 0) > (broken.saved or 0)
    ]


def outcomes_of(name: str, chain: Chain) -> list[Outcome]:
    """Break the chain's next run by the fault ``name``."""
    victim, _, phase = name.partition("-")
    if name == "truncated" and not chain.saved:
        return [*outcomes_of("resumed", chain), *outcomes_of(name, chain)]
    if phase in PHASES:
        return [chain.broken(name, "kill", victim, phase)]
    if name == "nan":
        return [chain.broken(name, "nan", "trainer", "update")]
    if name == "resumed":
        return [chain.run(name, chain.saved + 1)]
    return {"truncated": truncated, "two-runs": two_runs}[name](chain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*NAMES, *OTHERS], default=[*NAMES, *OTHERS], metavar="FAULT")
    parser.add_argument("--precision", default="jet_fp8")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of trainer and rollout; on a CPU processes")
    parser.add_argument("--words", nargs="+", default=[], metavar="WORD", help="further overrides of each job")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds after which a broken run counts as hung")
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.gettempdir()) / "jetrl-faults", help="the chain's folder"
    )
    options = parser.parse_args()
    if options.gpus < 1 or PROMPTS * GROUP_SIZE % options.gpus:
        parser.error(f"--gpus {options.gpus} does not divide {PROMPTS * GROUP_SIZE} sequences; choose 1, 2, 4 or 8")
    out, device = options.out.resolve(), choose_device(options.device)
    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    try:
        with signals_raise():
            chain = Chain(out, options.precision, options.patience, device, options.gpus, options.words)
            for name in options.only:
                outcomes += outcomes_of(name, chain)
                print(*outcomes, sep="\n", flush=True)
    except Interrupted as interruption:
        print(f"interrupted by {interruption}; everything that was started has ended")
        return 128 + interruption.signal
    wrong = [*faults_of(outcomes), *lost(outcomes)]
    print("\n".join(f"wrong: {sentence}" for sentence in wrong) or "No run hung, left a process or lost a step.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
