# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Check that trainer and rollout agree in every bit over several GPUs, in real jobs of verl.

    python3 -m benchmarks.exact_over_ranks OUT --gpus 2 --seconds 560              # every cell; again: what is left
    python3 -m benchmarks.exact_over_ranks OUT --gpus 4 --tp 4                     # cells that fit four ranks
    python3 -m benchmarks.exact_over_ranks OUT --gpus 2 hsdp mixture:jet_fp8_exact # these cells
    python3 -m benchmarks.exact_over_ranks OUT --tiny --gpus 2 fsdp2:jet_fp8       # on a CPU, to try this out

Three steps with updates, packed, responses of exactly 2048 tokens, a rollout over ``--tp`` GPUs, random weights of a
published shape (verl_step.py has the job). Update and old log-probabilities have micro-batches of different sizes.
Cells:

- ``fsdp2``, ``fsdp1``, ``hsdp`` (two replicas of the trainer), ``ulysses`` (FSDP2, sequences over all ranks): 1.7B
- ``8b``: FSDP2; below four GPUs with 8-bit moments, and offloaded while the rollout works
- ``mixture``: FSDP2, four layers of 30B-A3B

A cell is exact if ``k3_kl``, ``ppo_kl``, ``log_prob_diff`` and ``prob_diff`` (verl_runs.py) are logged in each step and
are exactly 0, and each step had a gradient. Exit status 1 if a cell of the call is not exact. OUT gets
``exact_over_ranks.json`` after each. A later call with the same OUT takes what has not ended well with the same code
(``--again``: all that it names).
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks import verl_step
from benchmarks.gpus import too_few, unfit
from benchmarks.published_shapes import SHARED_ON_A_CPU, write_model_apart
from benchmarks.verl_runs import (
    MISMATCH,
    Results,
    compile_bytecode,
    environment_of,
    fresh_folder,
    run_verl,
    take_all,
)
from jetrl_verl.tools.demo.overrides import words_of_one_machine
from jetrl_verl.tools.launch import VERL, RunPaths
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.rows import Row

STEPS = 3
PRECISIONS = ("jet_fp8", "jet_fp8_exact")
RESPONSE = {False: 2048, True: 24}
"""Whether it is the tiny benchmark -> tokens of a response."""
UPDATE_TOKENS, LOG_PROB_TOKENS = 4096, 8192
"""Of a micro-batch, on each GPU: one sequence and three."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NAMES = ("cell", "precision", "gpus", "tp")
COLUMNS = ("status", "exact", "steps", "moved", *MISMATCH, "grad_norm", "response_length", "peak_gib", "seconds")

console = Console(width=170)


@dataclass(frozen=True)
class Cell:
    """An arrangement of the ranks.

    Attributes:
        model: of ``PUBLISHED``. settings: overrides of verl's; ``{gpus}`` are the GPUs, ``{half}`` half of them.
        layers: all if None.
    """

    model: str
    settings: tuple[str, ...] = ()
    layers: int | None = None


CELLS: dict[str, Cell] = {
    "fsdp2": Cell("qwen3_1_7b"),
    "ulysses": Cell("qwen3_1_7b", (f"{ACTOR}.ulysses_sequence_parallel_size={{gpus}}",)),
    "hsdp": Cell("qwen3_1_7b", (f"{ACTOR}.fsdp_config.fsdp_size={{half}}",)),
    "fsdp1": Cell("qwen3_1_7b", (f"{ACTOR}.strategy=fsdp",)),
    "mixture": Cell("qwen3_30b_a3b", layers=4),
    "8b": Cell("qwen3_8b"),
}
"""In the order in which a call takes them."""


@dataclass(frozen=True)
class Job:
    """What all cells of a call share; ``ends`` is when all has ended, by ``time.monotonic()``."""

    out: Path
    gpus: int
    tp: int
    tiny: bool = False
    ends: float = math.inf

    @property
    def sequences(self) -> int:
        """Of a step: a group of samples for each GPU, and at least as many as keep a rollout busy."""
        return verl_step.SAMPLES * max(self.gpus, 2 if self.tiny else 4)

    def row(self, name: str, precision: str) -> Row:
        """The row of verl_step that a cell is."""
        settings = [word.format(gpus=self.gpus, half=max(1, self.gpus // 2)) for word in CELLS[name].settings]
        if self.tiny:
            # An entropy bonus gives each step a gradient whatever the coins say.
            shared = [SHARED_ON_A_CPU] if precision == "jet_fp8" else []
            return Row(precision, (*settings, *shared, f"{ACTOR}.entropy_coeff=0.1"))
        tokens = (f"{ACTOR}.ppo_max_token_len_per_gpu={UPDATE_TOKENS}",)
        tokens += (f"{ROLLOUT}.log_prob_max_token_len_per_gpu={LOG_PROB_TOKENS}",)
        return Row(precision, (*settings, *tokens, *words_of_one_machine()))

    def words(self, name: str, precision: str, model: Path, paths: RunPaths) -> list[str]:
        """Overrides of verl of a run."""
        options = argparse.Namespace(
            model=CELLS[name].model,
            response=RESPONSE[self.tiny],
            sequences=self.sequences,
            steps=STEPS,
            memory=0.3,
            tiny=self.tiny,
            gpus=self.gpus,
            tp=self.tp,
            set=[],
        )
        words = verl_step.words_of(self.row(name, precision), options, model, verl_step.data_of(self.out), paths)
        return [*words, f"trainer.experiment_name={name}-{precision}"]

    def take_steps(self, name: str, precision: str) -> dict:
        """One run's figures, exit status and verdict."""
        cell, paths = CELLS[name], RunPaths(self.out / "runs" / f"{name}-{precision}-{self.gpus}x{self.tp}")
        layers = None if self.tiny else cell.layers
        parts = [cell.model, f"{layers}_layers" if layers else "", f"{self.gpus}_ranks" if self.tiny else ""]
        model = self.out / "models" / "-".join(filter(None, parts))
        write_model_apart(cell.model, model, self.tiny, layers, ranks=self.gpus)
        verl_step.prepare_data(self.out, self.sequences * STEPS)
        fresh_folder(paths)
        words = self.words(name, precision, model, paths)
        figures = run_verl([*VERL, *words], environment_of(paths, self.tiny), paths, STEPS, self.ends)
        return {"words": words, **judged(figures, RESPONSE[self.tiny])}


def judged(figures: Mapping, response: int) -> dict:
    """A run's figures with ``exact`` (``yes`` or ``no``) and, where it is not, what differs, as ``errors``."""
    # A figure that is missing or no number is no zero either.
    logged = {name: figures.get(name) for name in MISMATCH} if figures["steps"] else {}
    differ = [f"{name} is {'missing' if value is None else value}" for name, value in logged.items() if value != 0]
    if figures["steps"] != STEPS:
        differ.append(f"{figures['steps']} of {STEPS} steps were taken")
    elif figures["moved"] != STEPS:
        differ.append(f"{STEPS - figures['moved']} of {STEPS} steps had no gradient")
    differ += verl_step.other_length(dict(figures), response)
    exact = not differ and figures["status"] == 0
    result = {**figures, "exact": "yes" if exact else "no", "status": figures["status"] or int(not exact)}
    return result | {"errors": [*figures.get("errors", ()), *differ]} if differ else result


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


def fitting(job: Job, runs: Sequence[tuple[str, str]], named: bool) -> list[tuple[str, str]]:
    """Those of ``runs`` whose shape goes over the job's ranks; a line on each that is left out.

    Raises:
        ValueError: one that was ``named`` does not, or none does.
    """
    kept = []
    for run in runs:
        reason = unfit(CELLS[run[0]].model, job.gpus, job.tp, quantized=True)
        if reason and (named or job.gpus % job.tp):
            raise ValueError(reason)
        if reason:
            console.print(f"{':'.join(run)} is left out: {reason}", markup=False, highlight=False, soft_wrap=True)
        else:
            kept.append(run)
    if not kept:
        raise ValueError(f"no cell goes over --gpus {job.gpus} --tp {job.tp}. Set a smaller --tp.")
    return kept


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("runs", nargs="*", metavar="CELL[:PRECISION]", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--gpus", type=int, default=2, help="of one host")
    parser.add_argument("--tp", type=int, default=2, help="GPUs of one replica of the rollout")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that this call may take, no limit if not set")
    parser.add_argument("--again", action="store_true", help="also what has ended well already")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    options = parser.parse_intermixed_args(words)
    job = Job(options.out.resolve(), options.gpus, options.tp, options.tiny, began + options.seconds)
    try:
        runs = fitting(job, chosen(options.runs), bool(options.runs))
    except ValueError as error:
        parser.error(str(error))
    if reason := too_few(job.gpus, job.tiny):
        parser.error(reason)
    job.out.mkdir(parents=True, exist_ok=True)
    settings = {"response": RESPONSE[job.tiny], "steps": STEPS, "tiny": job.tiny}
    results = Results(job.out / "exact_over_ranks.json", NAMES, settings, provenance())
    named = [(dict(zip(NAMES, (*run, job.gpus, job.tp), strict=True)), run) for run in runs]
    named = [(name, run) for name, run in named if options.again or not results.done(name)]
    if named:
        compile_bytecode(console)()
    left = [(name, partial(job.take_steps, *run)) for name, run in named]
    return take_all(results, left, COLUMNS, job.ends, console)


if __name__ == "__main__":
    sys.exit(main())
