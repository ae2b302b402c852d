# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Break real runs of the demo on purpose and write down what a user then sees: ``python tests/faults/run_faults.py``.

The runs form a chain on one checkpoint folder. Each resumes where the one before was broken, trains one step, which
proves the resume, and is broken in its second. So a chain of n faults takes n + 1 starts of verl, each two to four
minutes on two cores. ``--only`` picks faults and their order; a second call with the same ``--out`` goes on with that
chain. On GPUs: ``--device cuda --gpus 2`` (trainer and rollout have two ranks each; of these the last is killed).

A line per fault says how the broken run ended (exit status, seconds from the fault, the sentence it left, processes
that it left, when all had ended and when the GPUs had their memory back), what was saved, and where the next run
resumed. A run that has not ended ``--patience`` seconds after its fault counts as hung, and is ended. The exit status
is 1 if a run hung, left something behind, was killed behind the phase that it was to be killed in, or lost more than
the step under way. docs/troubleshooting.md lists the outcomes.

``--chains 4`` deals the faults among so many chains that run at once, each behind a checkpoint of its own and with a
run at its end that resumes: on GPUs the demo's policy leaves room, and a start takes longer than its steps.

``resized`` resumes on another number of GPUs, which is refused, then rewrites the checkpoint (``jetrl reshard``) and
resumes. ``full-disk`` mounts a tmpfs that holds one checkpoint and not two (root, or a user namespace:
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import psutil

from jetrl_verl.patches.checkpoint_tracker import TRACKER_FILE
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.overrides import GROUP_SIZE, build_overrides
from jetrl_verl.tools.launch import DEVICES, VERL, RunPaths, build_environment, choose_device, quote
from jetrl_verl.tools.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.tools.progress import last_errors
from jetrl_verl.tools.provenance import builds_note, provenance

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
from fault_injector import AT_ITS_END, PHASES, VICTIMS, Fault

from benchmarks.gpus import query

CACHE = Path(__file__).parents[2] / "outputs" / "cache"
NAMES = [f"{victim}-{phase}" for phase in PHASES for victim in VICTIMS]
OTHERS = ["nan", "truncated", "resumed", "resized", "full-disk", "two-runs"]

SENTENCES = {
    "nan": "has NaN or Inf",
    "truncated": "is damaged",
    "resized-refused": "jetrl reshard",
    "full-disk": "could not be written",
}
"""What a run has to say that is not killed and must not go on."""

PROMPTS = 8
# One micro-batch and few samples: what is tested is not learning.
SMALL = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.resume_mode=auto",
)
# A small share of a GPU that others may use, too, and phases that last long enough to be met there: 200 tokens of the
# 232 that the policy's positions leave, and an update of many micro-batches.
SMALL_ON_A_GPU = (
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.05",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=1073741824",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.max_model_len=256",
    "data.max_response_length=200",
)
START_SECONDS = 900.0
"""Longest time from the start to the fault."""
APART = 10.0
"""Seconds from one chain's begin to the next one's."""
RECORD = "outcomes.jsonl"
LINGER_SECONDS = 90.0
"""How long what a run started, or GPU memory, may outlive it before it counts as left behind."""


@dataclass
class Outcome:
    """How one run ended.

    Attributes:
        name: of the fault. status: exit status, None if it hung. seconds: from the fault to the end.
        first, last: steps in its metrics, the last one complete. saved: step of the last complete checkpoint.
        errors: what it said. killed: in the phase or at its end, None without a kill.
        left: processes that were still there ``LINGER_SECONDS`` after its end. gone: seconds from the fault until all
        had ended, None if they had not. most: MiB of all GPUs that they held at once at most, None on a CPU. freed:
        seconds from the fault until they held none, None if they still did; held: MiB that they held then.
    """

    name: str
    status: int | None
    seconds: float | None
    first: int | None
    last: int | None
    errors: list[str]
    left: list[str] = field(default_factory=list)
    gone: float | None = None
    most: int | None = None
    freed: float | None = None
    held: int | None = None
    saved: int | None = None
    killed: str | None = None


def gpu_memory(device: str, seen: Mapping[int, psutil.Process]) -> int | None:
    """MiB that processes hold of the GPUs which CUDA_VISIBLE_DEVICES leaves to them, None on a CPU. Others may work
    there, too. nvidia-smi is asked, since torch would keep a context there; it lists a process until its memory is
    free, also one that has ended.

    Args:
        seen: by id, the processes; an id that another one has by now does not count.

    Raises:
        SystemExit: nvidia-smi does not say what a process holds, as with MIG.
    """
    if device == "cpu":
        return None
    answer = subprocess.run(query("pid,used_memory", "compute-apps"), capture_output=True, text=True, check=True)
    held = 0
    for line in answer.stdout.splitlines():
        pid, used = line.split(", ")
        if not used.isdigit():
            raise SystemExit(f"nvidia-smi says {used!r} of what a process holds here. Use GPUs without MIG or vGPU.")
        process = seen.get(int(pid))
        if process is not None and (process.is_running() or not psutil.pid_exists(process.pid)):
            held += int(used)
    return held


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
    return cache.find(recipe, CACHE) or cache.make(recipe, CACHE, "cpu", print)


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
        began = time.time()
        fired = gone = freed = held = None
        most = gpu_memory(self.device, {})
        left, seen = [], {}
        with self.started(name, steps, fault.environment() if fault else {}) as (tree, paths):
            while (status := tree.poll()) is None:
                time.sleep(0.5)
                seen |= {process.pid: process for process in tree.processes()}
                if most is not None:
                    most = max(most, gpu_memory(self.device, seen))
                fired = fired or (fault.fired() if fault else None)
                if time.time() - (fired or began + START_SECONDS - self.patience) > self.patience:
                    break
            ended = time.time()
            since = fired or began
            while status is not None:
                alive = tree.processes()
                seen |= {process.pid: process for process in alive}
                left = [f"{process.pid} {name_of(process)}" for process in alive]
                gone = gone or (None if left else round(time.time() - since, 1))
                held = gpu_memory(self.device, seen)
                freed = freed or (round(time.time() - since, 1) if held == 0 else None)
                if not (left or held) or time.time() - ended > LINGER_SECONDS:
                    break
                time.sleep(0.5)
        steps_done = steps_of(paths.metrics)
        return Outcome(
            name,
            status,
            round(ended - since, 1),
            min(steps_done, default=None),
            max(steps_done, default=None),
            # A driver that was killed has said nothing about it.
            last_errors(paths.log) if status != 0 and not (fault and fault.victim == "driver") else [],
            left,
            gone,
            most,
            freed,
            held,
            self.saved,
            fault.killed() if fault else None,
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


NEED_A_CHECKPOINT = ("truncated", "resized", "full-disk")


def truncated(chain: Chain) -> list[Outcome]:
    """The newest checkpoint loses half of its weights, on the last rank, and gets it back."""
    folder = chain.checkpoints / f"global_step_{chain.saved}" / "actor"
    file = folder / f"model_world_size_{chain.ranks}_rank_{chain.ranks - 1}.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    try:
        return [chain.run("truncated", chain.saved + 2)]
    finally:
        file.write_bytes(whole)


def resized(chain: Chain) -> list[Outcome]:
    """The newest checkpoint on half as many ranks (on two where the chain has one): as it is, then rewritten."""
    ranks, plenty, saved = chain.ranks, chain.checkpoints, chain.saved
    chain.ranks = ranks // 2 if ranks > 1 else 2
    refused = chain.run("resized-refused", saved + 1)
    chain.checkpoints = chain.out / f"of-{chain.ranks}-ranks-{saved}"
    command = [sys.executable, "-m", "jetrl_verl.cli", "reshard", str(plenty / f"global_step_{saved}")]
    subprocess.run([*command, "--gpus", str(chain.ranks), "--out", str(chain.checkpoints)], check=True)
    resumed = chain.run("resized-resumed", saved + 1)
    chain.ranks, chain.checkpoints = ranks, plenty
    return [refused, resumed]


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
    lines = [
        "| fault | ended after | exit | steps | saved | processes gone, GPU memory free after | what it said |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        ended = "**hung**" if outcome.status is None else f"{outcome.seconds:.0f} s"
        ended += f" ({outcome.killed})" if outcome.killed else ""
        after = f"**{len(outcome.left)} processes left**" if outcome.left else seconds(outcome.gone)
        if outcome.held is not None:
            memory = seconds(outcome.freed) if outcome.freed else f"**{outcome.held} MiB are not**"
            after += f", {memory} ({outcome.most / 1024:.1f} GiB)"
        said = "<br>".join(line[:300].replace("|", "\\|") for line in outcome.errors)
        steps = f"{outcome.first}..{outcome.last}"
        lines.append(f"| {outcome.name} | {ended} | {outcome.status} | {steps} | {outcome.saved} | {after} | {said} |")
    return "\n".join(lines)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


def faults_of(outcomes: Iterable[Outcome]) -> list[str]:
    """What no run may do, a sentence each."""
    found = []
    for outcome in outcomes:
        if outcome.status is None:
            found.append(f"{outcome.name} hung")
        if outcome.left:
            found.append(f"{outcome.name} left {', '.join(outcome.left)}")
        if outcome.held:
            found.append(f"{outcome.name} left {outcome.held} MiB of a GPU")
        if outcome.most == 0 and (outcome.killed or outcome.status == 0):
            found.append(f"{outcome.name}: nvidia-smi never saw that it held memory of a GPU")
        if outcome.killed == AT_ITS_END:
            found.append(f"{outcome.name}: the phase ended before the kill")
        if outcome.name in NAMES and outcome.killed is None:
            found.append(f"{outcome.name}: nothing was killed")
        if (sentence := SENTENCES.get(outcome.name)) and not any(sentence in line for line in outcome.errors):
            found.append(f"{outcome.name} did not say {sentence!r}")
        if not sentence and not outcome.killed and outcome.status != 0:
            found.append(f"{outcome.name} ended with status {outcome.status}")
        if (sentence or outcome.killed) and outcome.status == 0:
            found.append(f"{outcome.name} ended as if nothing had happened")
    return found


def lost(outcomes: Sequence[Outcome]) -> list[str]:
    """Broken runs of a chain behind which the next one did not go on with the step after the last checkpoint, or whose
    last checkpoint is older than the step before the broken one."""
    chain = [outcome for outcome in outcomes if outcome.killed or outcome.name in ("nan", "resumed")]
    found = []
    for broken, next_one in zip(chain, chain[1:]):
        if next_one.first != broken.saved + 1:
            found.append(f"{next_one.name} began with step {next_one.first} behind {broken.name}, saved {broken.saved}")
    return found + [
        f"{broken.name} trained {broken.last} steps and saved {broken.saved}"
        for broken in chain
        if (broken.last or 0) > (broken.saved or 0)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*NAMES, *OTHERS], default=[*NAMES, *OTHERS], metavar="FAULT")
    parser.add_argument("--precision", default="jet_fp8")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of trainer and rollout; on a CPU processes")
    parser.add_argument("--chains", type=int, default=1, help="side by side, the faults dealt among them")
    parser.add_argument("--words", nargs="+", default=[], metavar="WORD", help="further overrides of each job")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds after which a broken run counts as hung")
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.gettempdir()) / "jetrl-faults", help="the chain's folder"
    )
    options = parser.parse_args()
    if options.gpus < 1 or PROMPTS * GROUP_SIZE % options.gpus:
        parser.error(f"--gpus {options.gpus} does not divide {PROMPTS * GROUP_SIZE} sequences; choose 1, 2, 4 or 8")
    options.out.mkdir(parents=True, exist_ok=True)
    options.out, options.device = options.out.resolve(), choose_device(options.device)
    try:
        with signals_raise():
            if options.chains > 1:
                return side_by_side(options)
            one_chain(options)
            return said([options.out / RECORD])
    except Interrupted as interruption:
        print(f"interrupted by {interruption}; everything that was started has ended")
        return 128 + interruption.signal


def one_chain(options: argparse.Namespace) -> None:
    """Take the faults one after another, and write their outcomes down."""
    words = tuple(options.words)
    chain = Chain(options.out, options.precision, options.patience, options.device, options.gpus, words)
    record = options.out / RECORD
    facts = {
        "device": options.device,
        "gpus": options.gpus,
        "precision": options.precision,
        "words": words,
        "build": provenance(),
    }
    for name in options.only:
        outcomes = outcomes_of(name, chain)
        with record.open("a") as file:
            file.writelines(json.dumps({**asdict(outcome), **facts}) + "\n" for outcome in outcomes)
        print(table(outcomes), flush=True)


def dealt(faults: Sequence[str], chains: int) -> list[list[str]]:
    """The faults of each chain: kills first, and behind the last one a run that resumes, without which nobody would
    know what it lost."""
    found = []
    for one in (faults[i::chains] for i in range(min(chains, len(faults)))):
        kills = [name for name in one if name in NAMES]
        others = [name for name in one if name not in NAMES and name != "resumed"]
        found.append([*kills, *others, "resumed"])
    return found


def side_by_side(options: argparse.Namespace) -> int:
    """Chains at once, each a program of its own in a folder of its own; the exit status."""
    prepare()  # once, not by each of them
    common = ["--precision", options.precision, "--device", options.device, "--gpus", str(options.gpus)]
    common += ["--patience", str(options.patience), *(["--words", *options.words] if options.words else [])]
    programs, asked = [], {}
    try:
        for number, faults in enumerate(dealt(options.only, options.chains), start=1):
            time.sleep(APART if programs else 0.0)
            folder = options.out / f"chain-{number}"
            folder.mkdir(exist_ok=True)
            asked[folder / RECORD] = faults, len(lines_of(folder / RECORD))
            words = [sys.executable, __file__, "--only", *faults, *common, "--out", str(folder)]
            with (folder / "chain.log").open("w") as log:
                programs.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        for program in programs:
            program.wait()
    finally:
        for program in programs:
            program.terminate()  # it ends what it has started
        for program in programs:
            program.wait()
    return said(asked, [sentence for record in asked for sentence in not_taken(record, *asked[record])])


def not_taken(record: Path, faults: Sequence[str], before: int) -> Iterator[str]:
    """A sentence for each of a chain's ``faults`` without an outcome after the first ``before``: its program died.
    A fault's outcomes have its name, or begin with it."""
    taken = [line["name"] for line in lines_of(record)[before:]]
    for fault in faults:
        if not any(name == fault or name.startswith(f"{fault}-") for name in taken):
            yield f"{record.parent.name} left no outcome of {fault}; {record.parent / 'chain.log'} says why"


def lines_of(record: Path) -> list[dict]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def outcomes_of(name: str, chain: Chain) -> list[Outcome]:
    """Break the chain's next run as ``name`` says."""
    victim, _, phase = name.partition("-")
    if name in NEED_A_CHECKPOINT and not chain.saved:
        return [*outcomes_of("resumed", chain), *outcomes_of(name, chain)]
    if phase in PHASES:
        return [chain.broken(name, "kill", victim, phase)]
    if name == "nan":
        return [chain.broken(name, "nan", "trainer", "update")]
    if name == "resumed":
        return [chain.run(name, chain.saved + 1)]
    return {"full-disk": full_disk, "truncated": truncated, "two-runs": two_runs, "resized": resized}[name](chain)


def said(records: Iterable[Path], further: Iterable[str] = ()) -> int:
    """Print the table of all outcomes, which builds made them, and what no run may do; the exit status.

    Args:
        records: of each chain one. further: what else is wrong.
    """
    known = {item.name for item in fields(Outcome)}
    outcomes, builds, jobs, wrong = [], {}, set(), list(further)
    for record in records:
        lines = lines_of(record)
        chain = [Outcome(**{key: value for key, value in line.items() if key in known}) for line in lines]
        wrong += [*faults_of(chain), *lost(chain)]
        outcomes += chain
        for line in lines:
            builds.setdefault(line["name"], []).append(line["build"])
            jobs.add(f"{line['precision']}, {line['gpus']} ranks, {line['device']}")
    print(f"\n{table(outcomes)}\n\n{builds_note(builds, True)}")
    print(f"{'; '.join(sorted(jobs))}.")
    print("\n".join(f"wrong: {sentence}" for sentence in wrong) or "Nothing hung, was left behind or was lost.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
