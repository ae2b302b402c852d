# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a rollout's engine reaches with one, two and four GPUs to a replica, under each precision; no trainer, no Ray.

    python3 -m benchmarks.engine_over_ranks OUT --gpus 4 --seconds 560       # and again: what is left
    python3 -m benchmarks.engine_over_ranks OUT --gpus 2 --tp 1 2 --rows bf16,jet_fp8 --sequences 16
    python3 -m benchmarks.engine_over_ranks OUT --gpus 4 --tp 4 --in-turn    # one start for all rows
    python3 -m benchmarks.engine_over_ranks OUT --gpus 4 --tp 4 --kernels    # and what a decode step runs, rank by rank
    python3 -m benchmarks.engine_over_ranks OUT --gpus 2 --tp 2 --tiny       # on a CPU, to try it out

The engine is that of a job of verl_step.py (engine_alone.py): verl's own arguments for vLLM, dummy weights of the
published shape, ``--sequences`` responses of exactly ``--response`` tokens, four to a prompt. Of two batches the first
one warms up. Tokens/s are those of one replica, and of each of its GPUs.

Replicas of one size run side by side, each on GPUs of its own, as many as there are GPUs for; a larger size begins when
all of a smaller one have ended. ``--alone`` takes one at a time. OUT gets ``engine_over_ranks.json`` after each.

``--in-turn``: a start takes four to ten times as long as the batches, so all engines of a size start together, several
on the same GPUs, and once all have started one generates at a time, on whichever GPUs; what waits holds memory and no
more. Each has the cache that the batch needs, since vLLM cannot measure what is free while others start.

``--kernels``: behind it the decode steps from 1000 tokens on are recorded on each rank (kernels_of_ranks.py): a step's
microseconds, those in which the GPU is busy, and each kernel's. The record has all of it, the output what takes most.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import verl_step
from benchmarks.behind_last_layer import print_shares
from benchmarks.engine_alone import timed_steps
from benchmarks.gpus import gpu_gib, too_few, unfit
from benchmarks.kernels_of_ranks import CALLS
from benchmarks.published_shapes import PUBLISHED, write_model_apart
from benchmarks.recipe_memory import GIB, sizes_of, words_of_cache
from benchmarks.side_by_side import Planned, SideBySide, one_at_a_time, take_one
from benchmarks.verl_runs import Results, add_files, compile_bytecode, environment_of, fresh_folder, python_path
from jetrl_verl.formats.catalog import FLOW, UNQUANTIZED
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.bench.timeline import Share
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.process_tree import Interrupted, signals_raise
from jetrl_verl.tools.progress import last_errors
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.rows import Row, parse_row, split_rows

STEPS = 2
ROWS = "bf16,fp8_rollout,jet_fp8"
SIZES = {False: (2048, 64), True: (24, 8)}
"""Whether it is the tiny benchmark -> tokens of a response, and responses."""

HELD = 2.0
"""GiB of an engine beside weights and cache: CUDA's context, NCCL, CUDA graphs. One of 8B took 33.6, of which those two
are 32.4."""

MOST = 24
"""Kernels of a step in the output."""

NAMES = ("model", "tp", "row")
COLUMNS = ("status", "tokens_per_s", "tokens_per_s_and_gpu", "seconds")

console = Console(width=150)


@dataclass(frozen=True)
class Job:
    """What all engines share: where they write, the model's shape, tokens of a response, responses, vLLM's share of the
    memory, whether they are ``tiny`` ones on a CPU, when all has ended, whether a step's kernels are recorded, and
    whether one engine generates at a time, which then share GPUs."""

    out: Path
    model: str
    response: int
    sequences: int
    memory: float
    tiny: bool = False
    ends: float = math.inf
    kernels: bool = False
    in_turn: bool = False

    def name(self, row: Row, tp: int) -> dict[str, str | int]:
        """What names an engine in the results."""
        return {"model": self.model, "tp": tp, "row": str(row)}

    def paths(self, row: Row, tp: int) -> RunPaths:
        """Files of an engine."""
        return RunPaths(self.out / "runs" / f"{self.model}-{row.slug}-{tp}")

    def folder(self, tp: int) -> Path:
        """Of the model, written where it is not there yet."""
        folder = self.out / "models" / (f"{self.model}-{tp}_ranks" if self.tiny else self.model)
        with one_at_a_time(folder):
            write_model_apart(self.model, folder, self.tiny, ranks=tp)
        return folder

    def words(self, row: Row, tp: int, model: Path) -> list[str]:
        """Overrides of verl of the job whose engine it is: a replica, and nothing else."""
        fields = {name: getattr(self, name) for name in ("model", "response", "sequences", "memory", "tiny")}
        beside_others = list(words_of_cache(self.cache_bytes(tp))) if self.in_turn else []
        options = argparse.Namespace(**fields, steps=STEPS, gpus=tp, tp=tp, set=beside_others)
        return verl_step.words_of(row, options, model, verl_step.data_of(self.out), self.paths(row, tp))

    def cache_bytes(self, tp: int) -> int:
        """Of the keys and values of the batch, on each GPU, and a twentieth more."""
        tokens = self.sequences * (verl_step.PROMPT + self.response)
        return int(1.05 * tokens * sizes_of(self.model, None).kv_bytes()) // tp

    def gib(self, row: Row, tp: int) -> float:
        """Of each of its GPUs that an engine takes beside others."""
        from jetrl_verl.tools.advise.memory import rollout_weights  # torch

        kind = UNQUANTIZED if row.name in verl_step.BF16_LINEARS else FLOW
        return (rollout_weights(sizes_of(self.model, None), kind) / tp + self.cache_bytes(tp)) / GIB + HELD

    def compose(self, row: Row, tp: int) -> Path:
        """The job's configuration, composed as a run composes it, in a file."""
        import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
        from hydra import compose, initialize_config_module
        from omegaconf import OmegaConf

        paths, words = self.paths(row, tp), self.words(row, tp, self.folder(tp))
        fresh_folder(paths)
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=words)
        paths.config.parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, paths.config)
        return paths.config

    def take(self, row: Row, tp: int) -> dict:
        """An engine's tokens/s and status."""
        began, paths = time.monotonic(), self.paths(row, tp)
        config, log = self.compose(row, tp), paths.folder / "engine.log"
        turn = self.out / "turn.lock" if self.in_turn else None
        environment = environment_of(paths, self.tiny)
        status, found = timed_steps(config, log, environment, STEPS, self.ends, self.kernels, turn)
        rates = [each["tokens_per_s"] for each in found if "tokens_per_s" in each]
        taken = {"status": status or int(not rates), "seconds": round(time.monotonic() - began, 1)}
        taken |= {"in_turn": True, "cache_bytes": self.cache_bytes(tp)} if self.in_turn else {}
        if taken["status"]:
            taken["errors"] = last_errors(log)
        if rates:  # of an engine whose recording failed, too
            taken |= {"steps": len(rates), "tokens_per_s": rates[-1], "tokens_per_s_and_gpu": rates[-1] / tp}
        return taken | next((each for each in found if "ranks" in each), {})

    def planned(self, row: Row, tp: int, place: int, gpus: Sequence[str]) -> Planned:
        """An engine as a program of its own, on the ``place``-th ``tp`` of ``gpus``, which engines in turn share."""
        place %= max(1, len(gpus) // tp)
        visible = [] if self.tiny else [f"CUDA_VISIBLE_DEVICES={','.join(gpus[place * tp : (place + 1) * tp])}"]
        words = ["--model", self.model, "--response", str(self.response), "--sequences", str(self.sequences)]
        words += ["--memory", str(self.memory), *(["--tiny"] if self.tiny else [])]
        words += [*(["--kernels"] if self.kernels else []), *(["--in-turn"] if self.in_turn else [])]
        program = ["env", *visible, sys.executable, "-m", "benchmarks.engine_over_ranks", str(self.out), *words]
        run = self.paths(row, tp).folder.name
        return Planned(
            self.name(row, tp),
            [*program, "--tp", str(tp), "--one", str(row), "--seconds"],
            self.found(row, tp),
            self.out / "programs" / f"{run}.log",
        )

    def found(self, row: Row, tp: int) -> Path:
        """What an engine's program leaves."""
        return self.out / "programs" / f"{self.paths(row, tp).folder.name}.json"


def batches(left: Sequence[tuple[Row, int]], gpus: int, alone: bool, in_turn: bool) -> list[list[tuple[Row, int]]]:
    """Engines that run side by side, batch by batch: of one size, as many as ``gpus`` hold, all where they generate
    ``in_turn``; small ones first."""
    found = []
    for tp in sorted({tp for _, tp in left}):
        of_size = [each for each in left if each[1] == tp]
        most = 1 if alone else len(of_size) if in_turn else max(1, gpus // tp)
        found += [of_size[first : first + most] for first in range(0, len(of_size), most)]
    return found


def crowded(job: Job, left: Sequence[tuple[Row, int]], gpus: int, gib: float) -> str:
    """Why the engines that start together do not fit on a GPU of ``gib``; empty if they do."""
    for batch in batches(left, gpus, alone=False, in_turn=True):
        for place in range(gpus // batch[0][1]):
            together = batch[place :: gpus // batch[0][1]]
            if (needed := sum(job.gib(*each) for each in together)) > gib:
                rows = ", ".join(str(row) for row, _ in together)
                return (
                    f"--in-turn needs {needed:.0f} GiB of a GPU for {rows} with --tp {batch[0][1]}, and there are "
                    f"{gib:.0f}. Set fewer --rows, or leave --in-turn out."
                )
    return ""


def take_all(job: Job, results: Results, left: Sequence[tuple[Row, int]], gpus: int, alone: bool) -> int:
    """Take all engines, and the table last, also behind a SIGTERM or a Ctrl-C."""
    compiled = compile_bytecode(console)
    verl_step.prepare_data(job.out, job.sequences * STEPS)
    compiled()
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")
    environment, status = {**os.environ, "PYTHONPATH": python_path()}, 0
    with signals_raise():
        try:
            for batch in batches(left, gpus, alone, job.in_turn):
                beside = SideBySide(results, environment, len(batch), math.inf, job.ends, console)
                status |= beside.take([job.planned(*each, place, visible) for place, each in enumerate(batch)])
        except Interrupted as interrupted:
            return 128 + interrupted.signal
        finally:
            results.show(COLUMNS, console)
            for run in results.runs:
                show_kernels(run)
    return status


def show_kernels(run: dict) -> None:
    """A step of each rank, and the kernels that take most of the first one's."""
    ranks = [found for found in run.get("ranks", ()) if "shares" in found]  # none on a CPU
    name = f"{run['model']}, TP {run['tp']}, {run['row']}"
    for rank, found in enumerate(ranks):
        said = f"a step {found['step_us']:.0f} us, the GPU busy {found['busy_us']:.0f} us"
        if waits := found.get("waits"):  # records before 708c7cd have neither these nor the host's parts
            kernel, us = next(iter(waits.items()))
            said += f", most of the rest, {us:.0f} us, in front of all runs of {kernel[:60]}"
        console.print(f"{name}, rank {rank}: {said}", highlight=False, soft_wrap=True)
        if host := ", ".join(f"{part} {us:.0f}" for part, us in found.get("host_parts_us", {}).items()):
            if ran := found.get("on_core_us"):  # records before this figure have none
                host += f"; its thread ran {sum(ran[call] for call in CALLS):.0f} of the two calls"
            console.print(f"  a step of its worker's host, not recorded, us: {host}", highlight=False, soft_wrap=True)
    for found in ranks[:1]:
        most = sorted((Share(**share) for share in found["shares"]), key=lambda share: -share.us)[:MOST]
        print_shares(f"kernels of rank 0 of {name} that take most", most, sum(share.us for share in most))


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", choices=PUBLISHED, default="qwen3_8b")
    parser.add_argument("--gpus", type=int, default=2, help="of one host")
    parser.add_argument(
        "--tp", type=int, nargs="+", help="GPUs of a replica; 1, 2, 4 and so on up to --gpus if not set"
    )
    parser.add_argument("--rows", default=ROWS, help=f"of {', '.join(verl_step.ROWS)}, separated by commas")
    parser.add_argument("--response", type=int, help=f"tokens of a response, {SIZES[False][0]} if not set")
    parser.add_argument("--sequences", type=int, help=f"responses, {SIZES[False][1]} if not set")
    parser.add_argument("--memory", type=float, default=0.6, help="vLLM's share of the GPU's memory")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that this call may take, no limit if not set")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--alone", action="store_true", help="one engine at a time")
    how.add_argument("--in-turn", action="store_true", help="all engines of a size start together and generate in turn")
    parser.add_argument("--again", action="store_true", help="also what has ended well already")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="records of other machines")
    parser.add_argument("--kernels", action="store_true", help="also what a decode step runs on each rank")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    response, sequences = SIZES[options.tiny]
    job = Job(
        options.out.resolve(),
        options.model,
        options.response or response,
        options.sequences or sequences,
        options.memory,
        options.tiny,
        began + options.seconds,
        options.kernels,
        options.in_turn,
    )
    sizes = options.tp or [tp for tp in (1, 2, 4, 8) if tp <= options.gpus]
    try:
        rows = [parse_row(text, verl_step.ROWS, "a row") for text in split_rows(options.one or options.rows)]
    except ToolError as error:
        parser.error(str(error))
    if options.one:
        return take_one(job.found(rows[0], sizes[0]), lambda: job.take(rows[0], sizes[0]))
    if max(sizes) > options.gpus:
        parser.error(f"--tp {max(sizes)} is not supported with --gpus {options.gpus}. Set more --gpus.")
    for tp in sizes:
        quantized = any(row.name not in verl_step.BF16_LINEARS for row in rows)
        if reason := unfit(job.model, tp, tp, quantized) or too_few(options.gpus, job.tiny):
            parser.error(reason)
    if job.sequences % verl_step.SAMPLES:
        parser.error(f"--sequences {job.sequences} is not supported. Set a multiple of {verl_step.SAMPLES}.")
    job.out.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(job, name) for name in ("response", "sequences", "memory", "tiny")}
    results = Results(job.out / "engine_over_ranks.json", NAMES, settings, provenance())
    add_files(results, options.add, parser.error)

    def done(row: Row, tp: int) -> bool:
        name = job.name(row, tp)
        recorded = any("ranks" in run for run in results.runs if name.items() <= run.items())
        return results.done(name) and (recorded or not job.kernels)

    left = [(row, tp) for tp in sizes for row in rows if options.again or not done(row, tp)]
    if job.in_turn and (reason := crowded(job, left, options.gpus, gpu_gib())):
        parser.error(reason)
    return take_all(job, results, left, options.gpus, options.alone)


if __name__ == "__main__":
    sys.exit(main())
