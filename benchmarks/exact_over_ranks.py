# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether trainer and rollout agree in every bit over several GPUs, in real jobs of verl: each arrangement of the ranks
under each precision that promises it.

    python3 -m benchmarks.exact_over_ranks OUT --gpus 2 --seconds 560     # every cell below; and again: what is left
    python3 -m benchmarks.exact_over_ranks OUT --gpus 2 --plan            # the memory that each plans with; takes none
    python3 -m benchmarks.exact_over_ranks OUT --gpus 4 --tp 4            # cells whose shape goes over four ranks
    python3 -m benchmarks.exact_over_ranks OUT --gpus 2 hsdp mixture:jet_fp8_exact          # these
    python3 -m benchmarks.exact_over_ranks OUT --tiny --gpus 2 fsdp2:jet_fp8                # on a CPU, to try it out

Three steps with updates, packed, responses of exactly 2048 tokens, a rollout over ``--tp`` GPUs (2), random weights of
a published shape (verl_step.py has the job). An update's micro-batches are others than those of the old
log-probabilities. Cells:

- ``fsdp2``, ``fsdp1``, ``hsdp`` (two replicas of the trainer), ``ulysses`` (FSDP2, sequences over all ranks): 1.7B
- ``8b``: FSDP2; below four GPUs with 8-bit moments, parameters and optimizer on the host while the rollout works
- ``mixture``: FSDP2, four layers of 30B-A3B's, whose experts go over two ranks

A cell is exact if ``k3_kl``, ``ppo_kl``, ``log_prob_diff`` and ``prob_diff`` (verl_runs.py) are logged in each step and
are exactly 0, and each step had a gradient. Exit status 1 if a cell of the call is not, or has not ended well.

Three jobs run at once where the GPUs' memory allows (side_by_side.py), so seconds mean nothing. Ranks of a rollout wait
for each other inside a kernel, and of two rollouts on the same GPUs neither has all of its ranks there at once, so that
five of them get nowhere: a job begins ``--apart`` seconds behind the one before it, and one generates while others
start. OUT gets
``exact_over_ranks.json`` after each, with its build. A later call with the same OUT takes what has not ended well with
the same code (``--again``: all that it names), ``--add FILE`` takes over cells of another machine of the same kind, and
``--seconds`` is how long a call may take.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import verl_step
from benchmarks.gpus import gpu_gib, too_few, unfit
from benchmarks.published_shapes import SHARED_ON_A_CPU, write_model_apart
from benchmarks.recipe_memory import Plan, plan, table_of_plans
from benchmarks.recipes import BESIDE_OTHERS, OFFLOAD
from benchmarks.side_by_side import Planned, SideBySide, one_at_a_time, take_one
from benchmarks.verl_runs import (
    MISMATCH,
    Results,
    add_files,
    compile_bytecode,
    environment_of,
    fresh_folder,
    python_path,
    run_verl,
)
from jetrl_verl.tools.demo.overrides import words_of_one_machine
from jetrl_verl.tools.launch import VERL, RunPaths
from jetrl_verl.tools.process_tree import Interrupted, signals_raise
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.rows import Row

STEPS = 3
PRECISIONS = ("jet_fp8", "jet_fp8_exact")
SIZES = {False: 2048, True: 24}
"""Whether it is the tiny benchmark -> tokens of a response."""

UPDATE_TOKENS, LOG_PROB_TOKENS = 4096, 8192
"""Of a micro-batch, on each GPU: one sequence at a time and three."""

AT_ONCE, APART = 3, 90.0
"""Jobs at once, and seconds from one's begin to the next one's: a start takes 150 to 200, three steps some 75."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

console = Console(width=170)


@dataclass(frozen=True)
class Cell:
    """An arrangement of the ranks.

    Attributes:
        model: of ``PUBLISHED``. settings: overrides of verl's; ``{gpus}`` are the GPUs, ``{half}`` half of them.
        layers: all if None. copies: replicas of the trainer.
    """

    model: str
    settings: tuple[str, ...] = ()
    layers: int | None = None
    copies: int = 1


CELLS: dict[str, Cell] = {
    "fsdp2": Cell("qwen3_1_7b"),
    "ulysses": Cell("qwen3_1_7b", (f"{ACTOR}.ulysses_sequence_parallel_size={{gpus}}",)),
    "hsdp": Cell("qwen3_1_7b", (f"{ACTOR}.fsdp_config.fsdp_size={{half}}",), copies=2),
    "fsdp1": Cell("qwen3_1_7b", (f"{ACTOR}.strategy=fsdp",)),
    "mixture": Cell("qwen3_30b_a3b", layers=4),
    "8b": Cell("qwen3_8b"),
}
"""What was asked for first stands first: a call whose time is up has taken that."""

COLUMNS = ("status", "exact", "steps", "moved", *MISMATCH, "grad_norm", "response_length", "peak_gib", "seconds")


@dataclass(frozen=True)
class Job:
    """What all cells share: where they write, their GPUs, whether they are ``tiny`` ones on a CPU, how many there are
    at once, when all has ended, and how many seconds apart they begin."""

    out: Path
    gpus: int
    tp: int
    tiny: bool = False
    at_once: int = AT_ONCE
    ends: float = math.inf
    apart: float = 0.0

    @property
    def sequences(self) -> int:
        """Of a step: a group of samples for each GPU and as many at least as keep a rollout busy."""
        return verl_step.SAMPLES * max(self.gpus, 2 if self.tiny else 4)

    def offloads(self, cell: Cell) -> bool:
        """Whether weights and moments are on the host while the rollout works, as verl_step decides."""
        return cell.model == "qwen3_8b" and self.gpus < verl_step.WHOLE_GPUS

    def plan(self, cell: Cell) -> Plan:
        """Memory that a cell takes of each GPU."""
        small = self.offloads(cell)
        shards = self.gpus // cell.copies
        return plan(cell.model, cell.layers, LOG_PROB_TOKENS, small, shards=shards, ranks=self.tp, offloads=small)

    def row(self, name: str, precision: str) -> Row:
        """The row of verl_step that a cell is."""
        settings = [word.format(gpus=self.gpus, half=max(1, self.gpus // 2)) for word in CELLS[name].settings]
        if self.tiny:
            # What `auto` becomes on Hopper. An entropy bonus, so that each step has a gradient whatever the coins say.
            shared = [SHARED_ON_A_CPU] if precision == "jet_fp8" else []
            return Row(precision, (*settings, *shared, f"{ACTOR}.entropy_coeff=0.1"))
        tokens = (f"{ACTOR}.ppo_max_token_len_per_gpu={UPDATE_TOKENS}",)
        tokens += (f"{ROLLOUT}.log_prob_max_token_len_per_gpu={LOG_PROB_TOKENS}",)
        # Those that a run has whose state stays on the GPU, and Ray's claims of cores, one run's on one GPU.
        beside = BESIDE_OTHERS[len(OFFLOAD) :] if self.offloads(CELLS[name]) else BESIDE_OTHERS
        beside = (*words_of_one_machine(), *beside)
        return Row(precision, (*settings, *tokens, *beside, f"ray_kwargs.ray_init.num_cpus={16 * self.gpus}"))

    def paths(self, name: str, precision: str) -> RunPaths:
        """Files of a run."""
        return RunPaths(self.out / "runs" / f"{name}-{precision}-{self.gpus}x{self.tp}")

    def model(self, cell: Cell) -> Path:
        """Folder of a cell's model, written where it is not there yet."""
        layers = None if self.tiny else cell.layers
        parts = [cell.model, f"{layers}_layers" if layers else "", f"{self.gpus}_ranks" if self.tiny else ""]
        folder = self.out / "models" / "-".join(filter(None, parts))
        with one_at_a_time(folder):
            write_model_apart(cell.model, folder, self.tiny, layers, ranks=self.gpus)
        return folder

    def words(self, name: str, precision: str, model: Path) -> list[str]:
        """Overrides of verl of a run."""
        options = argparse.Namespace(
            model=CELLS[name].model,
            response=SIZES[self.tiny],
            sequences=self.sequences,
            steps=STEPS,
            memory=0.3,
            tiny=self.tiny,
            gpus=self.gpus,
            tp=self.tp,
            set=[],
        )
        row, paths = self.row(name, precision), self.paths(name, precision)
        words = verl_step.words_of(row, options, model, verl_step.data_of(self.out), paths)
        return [*words, f"trainer.experiment_name={name}-{precision}"]

    def take_steps(self, name: str, precision: str) -> dict:
        """One run's figures, exit status and verdict."""
        paths, model = self.paths(name, precision), self.model(CELLS[name])
        fresh_folder(paths)
        words = self.words(name, precision, model)
        environment = environment_of(paths, self.tiny, self.at_once * self.gpus)
        found = run_verl([*VERL, *words], environment, paths, STEPS, self.ends)
        return {"words": words, **judged(found, SIZES[self.tiny])}

    def planned(self, name: str, precision: str) -> Planned:
        """A run as a program of its own."""
        run, words = self.paths(name, precision).folder.name, ["--gpus", str(self.gpus), "--tp", str(self.tp)]
        words += ["--at-once", str(self.at_once), *(["--tiny"] if self.tiny else [])]
        program = [sys.executable, "-m", "benchmarks.exact_over_ranks", str(self.out)]
        return Planned(
            self.name(name, precision),
            [*program, *words, "--one", f"{name}:{precision}", "--seconds"],
            self.found(name, precision),
            self.out / "programs" / f"{run}.log",
            0.0 if self.tiny else self.plan(CELLS[name]).peak,
        )

    def found(self, name: str, precision: str) -> Path:
        """What a run's program leaves."""
        return self.out / "programs" / f"{self.paths(name, precision).folder.name}.json"

    def name(self, name: str, precision: str) -> dict[str, str | int]:
        """What names a run in the results."""
        return {"cell": name, "precision": precision, "gpus": self.gpus, "tp": self.tp}


def judged(found: Mapping, response: int) -> dict:
    """A run's figures with ``exact`` (``yes`` or ``no``) and, where it is not, what differs, as ``errors``."""
    # Not `!= 0.0` alone: a figure that is missing or no number is no zero either.
    logged = {name: found.get(name) for name in MISMATCH} if found["steps"] else {}
    differ = [f"{name} is {'missing' if value is None else value}" for name, value in logged.items() if value != 0]
    if found["steps"] != STEPS:
        differ.append(f"{found['steps']} of {STEPS} steps were taken")
    elif found["moved"] != STEPS:
        differ.append(f"{STEPS - found['moved']} of {STEPS} steps had no gradient")
    differ += verl_step.other_length(dict(found), response)
    verdict = {**found, "exact": "no" if differ or found["status"] else "yes"}
    return verdict | {"errors": [*found.get("errors", ()), *differ]} if differ else verdict


def chosen(words: Sequence[str]) -> list[tuple[str, str]]:
    """Runs that the command line asks for: ``CELL`` or ``CELL:PRECISION``; all where it names none.

    Raises:
        ValueError: a name that is no cell, or no precision that promises equal bits.
    """
    runs = []
    for word in words or CELLS:
        name, _, precision = word.partition(":")
        if name not in CELLS:
            raise ValueError(f"{name} is not a cell. Choose from {', '.join(CELLS)}.")
        if precision and precision not in PRECISIONS:
            raise ValueError(f"{precision} is not a precision here. Choose from {', '.join(PRECISIONS)}.")
        runs += [(name, one) for one in ([precision] if precision else PRECISIONS)]
    return runs


def that_fit(job: Job, runs: Sequence[tuple[str, str]], named: bool) -> list[tuple[str, str]]:
    """Those of ``runs`` whose shape goes over the job's ranks; a line on the others.

    Raises:
        ValueError: one that was ``named`` does not.
    """
    fitting = []
    for run in runs:
        if not (reason := unfit(CELLS[run[0]].model, job.gpus, job.tp, quantized=True)):
            fitting.append(run)
        elif named or job.gpus % job.tp:
            raise ValueError(reason)
        else:
            say(f"{':'.join(run)} is left out: {reason}")
    return fitting


def say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_plans(job: Job, runs: Sequence[tuple[str, str]]) -> None:
    """What each run plans with, and what it is started with."""
    for run in runs:
        say(f"{':'.join(run)}: {' '.join(job.words(*run, Path('MODEL')))}")
    rows = {}
    for name in dict.fromkeys(name for name, _ in runs):
        cell = CELLS[name]
        moments = "8 bits" if job.offloads(cell) else "FP32"
        rows[name] = (cell.model, str(cell.layers or "all"), moments, str(LOG_PROB_TOKENS)), job.plan(cell)
    if not job.tiny:
        console.print(table_of_plans(rows))


def take_side_by_side(job: Job, results: Results, runs: Sequence[tuple[str, str]]) -> int:
    """Take ``runs``; 128 + signal behind a SIGTERM or a Ctrl-C, else 0: what came of them is in ``results``."""
    compiled = compile_bytecode(console)
    verl_step.prepare_data(job.out, job.sequences * STEPS)
    compiled()
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with signals_raise():
        try:
            gib = math.inf if job.tiny else gpu_gib()
            beside = SideBySide(results, environment, job.at_once, gib, job.ends, console, job.apart)
            beside.take([job.planned(*run) for run in runs])
        except Interrupted as interrupted:
            return 128 + interrupted.signal
    return 0


def all_exact(results: Results, names: Sequence[Mapping]) -> bool:
    """Whether each of these runs has ended well with this code and was exact."""
    exact = [run for run in results.runs if run.get("exact") == "yes"]
    return all(results.done(name) and any(name.items() <= run.items() for run in exact) for name in names)


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("runs", nargs="*", metavar="CELL[:PRECISION]", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--gpus", type=int, default=2, help="of one host")
    parser.add_argument("--tp", type=int, default=2, help="GPUs of one replica of the rollout")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that this call may take, no limit if not set")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="jobs that share the GPUs where they fit")
    parser.add_argument("--apart", type=float, default=APART, help="seconds from one job's begin to the next one's")
    parser.add_argument("--again", action="store_true", help="also what has ended well already")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="records of other machines")
    parser.add_argument("--plan", action="store_true", help="show what each run plans with, and take none")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(words)
    ends = began + options.seconds
    job = Job(options.out.resolve(), options.gpus, options.tp, options.tiny, options.at_once, ends, options.apart)
    try:
        runs = that_fit(job, chosen([options.one] if options.one else options.runs), bool(options.runs))
    except ValueError as error:
        parser.error(str(error))
    if options.one:
        return take_one(job.found(*runs[0]), lambda: job.take_steps(*runs[0]))
    if options.plan:
        show_plans(job, runs)
        return 0
    if not runs:
        parser.error(f"no cell goes over --gpus {job.gpus} --tp {job.tp}. Set a smaller --tp.")
    job.out.mkdir(parents=True, exist_ok=True)
    settings = {"response": SIZES[job.tiny], "steps": STEPS, "tiny": job.tiny}
    results = Results(job.out / "exact_over_ranks.json", ("cell", "precision", "gpus", "tp"), settings, provenance())
    add_files(results, options.add, parser.error)
    left = [run for run in runs if options.again or not results.done(job.name(*run))]
    if left and (reason := too_few(job.gpus, job.tiny)):
        parser.error(reason)
    status = 0
    try:
        status = take_side_by_side(job, results, left) if left else 0
    except ValueError as error:
        parser.error(str(error))
    finally:
        results.show(COLUMNS, console)
    return status or int(not all_exact(results, [job.name(*run) for run in runs]))


if __name__ == "__main__":
    sys.exit(main())
