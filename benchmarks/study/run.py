# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One run of the study: ``python -m benchmarks.study.run --run jet_fp8 --seed 1 --out DIR``.

A run is a row of ``runs.yaml`` with one seed. It trains in ``DIR/runs/<row>-seed<seed>`` with the driver of
``jetrl compare``: a finished run is not trained again, an interrupted one resumes from its last checkpoint, the metrics
of all attempts are merged, and a folder made with other overrides is refused.

The overrides of a run are, in this order, those of the demo for this device, of the study, of the row, and of the
command line; the last of two equal keys wins. ``--share`` is for several runs on one GPU. vLLM then takes a fixed 2 GB
of KV cache, enough for 256 responses of this size, instead of a share of the free memory. It also keeps the cache while
the trainer works: going to sleep fails ("Memory usage increased after sleeping") if another run takes memory meanwhile.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from rich.console import Console

from benchmarks.study import task
from benchmarks.study.warm_up import StudyError, read_facts
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.compare import run as compare
from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.launch import DEVICES, VERL, RunPaths, build_environment, choose_device, quote
from jetrl_verl.tools.process_tree import Interrupted, signals_raise

ROOT = Path(__file__).parents[2]

SAVE_EVERY = 10
"""Rollouts between two checkpoints."""

SHARED_GPU = (
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "++actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=2000000000",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "++actor_rollout_ref.rollout.enable_sleep_mode=False",
)


@dataclass(frozen=True)
class StudyRun(compare.CompareRun):
    """One row of ``runs.yaml`` with one seed. Several rows may have the same precision, so the row gives the name."""

    label: str = ""

    name = property(lambda self: f"{self.label}-seed{self.seed}")


@cache
def read_study() -> dict:
    """Contents of ``runs.yaml``, cached; do not change them."""
    return yaml.safe_load(Path(__file__).with_name("runs.yaml").read_text())


def control() -> str:
    """The first row of ``runs.yaml``, which the others are compared with."""
    return next(iter(read_study()["runs"]))


def run_of(label: str, seed: int, out: Path) -> StudyRun:
    """The row ``label`` of ``runs.yaml`` with ``seed`` and its folder below ``out``.

    Raises:
        StudyError: there is no such row.
    """
    rows = read_study()["runs"]
    if label not in rows:
        raise StudyError(f"{label} is not a row of runs.yaml. Choose one of {', '.join(rows)}.")
    paths = RunPaths(compare.folder_of_runs(out.resolve()) / f"{label}-seed{seed}")
    return StudyRun(rows[label]["precision"], seed, paths, label)


def every_run(out: Path) -> list[StudyRun]:
    """Each row of ``runs.yaml`` with each of its seeds, in that order, with its folder below ``out``."""
    return [run_of(label, seed, out) for label, row in read_study()["runs"].items() for seed in row["seeds"]]


def words_of(label: str, facts: Mapping, prepared: Path) -> list[str]:
    """Overrides of a row beyond those of the demo: the sizes of the study, then its own.

    Args:
        label: row of ``runs.yaml``. facts: contents of the prepared folder's ``study.json``. prepared: that folder.
    """
    study = read_study()
    row, prompts, samples = study["runs"][label], study["prompts"], study["samples"]
    learning_rate = study["learning_rate"] * row.get("learning_rate_factor", 1)
    prompt_tokens, response_tokens = task.token_limits(tuple(facts["config"]["levels"]))
    words = {
        "data.val_files": quote(prepared.resolve() / "validation.parquet"),
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt_tokens,
        "data.max_response_length": response_tokens,
        "actor_rollout_ref.actor.optim.lr": f"{learning_rate:g}",
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts // study["updates"],
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": prompts * samples // study["updates"],
        # Without it, mini-batches follow the order of the rollout, and data_loader_seed has no effect.
        "actor_rollout_ref.actor.shuffle": True,
        "actor_rollout_ref.rollout.n": samples,
        "actor_rollout_ref.rollout.max_model_len": prompt_tokens + response_tokens,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": prompts * samples // study["updates"],
        "trainer.project_name": "jetrl-study",
        "trainer.test_freq": 20,
        # All checkpoints are kept: if the time ends early, runs are compared at a length that all of them reached.
        "trainer.save_freq": SAVE_EVERY,
    }
    return [*(f"{key}={value}" for key, value in words.items()), *row.get("words", ())]


def job_of(
    run: StudyRun, prepared: Path, device: str, steps: int, words: Sequence[str], trainer: Sequence[str] = VERL
) -> compare.Job:
    """The job of ``run``.

    Args:
        run: the run. prepared: folder of ``benchmarks.study.warm_up``. device: ``cpu`` or ``cuda``. steps: rollouts.
        words: more overrides, which win. trainer: program to which the overrides are appended.

    Raises:
        StudyError: the prepared folder is incomplete.
    """
    facts = read_facts(prepared)
    nowhere = RunPaths(run.paths.folder)  # the driver adds the paths of the run
    demo = build_overrides("bf16", Prepared(prepared.resolve(), facts), nowhere, device, steps)
    environment = build_environment(nowhere, device)
    # Workers import the recipes' classes by name.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    return compare.Job([*trainer, *demo, *words_of(run.label, facts, prepared), *words], environment, steps, saves=True)


def train_run(run: StudyRun, job: compare.Job, console: Console) -> int:
    """Train ``run``; returns 0, 1 after a failure, 128 + signal after an interruption.

    Raises:
        CompareError: another command made the folder of the run.
    """
    try:
        with signals_raise():
            compare.check_state(run, job)
            return int(not compare.train(run, job, console))
    except Interrupted as interruption:
        console.print(f"interrupted by {interruption}. Run the same command to continue.", markup=False)
        return 128 + interruption.signal


def main() -> None:
    """Entry of the program."""
    study = read_study()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, choices=study["runs"], help="row of runs.yaml")
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--prepared", type=Path, default=Path("outputs/study/prepared"))
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--steps", type=int, default=study["steps"])
    parser.add_argument(
        "--share", action="store_true", help="take a fixed part of the GPU, to share it with other runs"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("words", nargs="*", help="more Hydra overrides")
    given = parser.parse_args()
    try:
        device = choose_device(given.device)
        run = run_of(given.run, given.seed, given.out)
        words = [*(SHARED_GPU if given.share else ()), *given.words]
        job = job_of(run, given.prepared, device, given.steps, words)
        raise SystemExit(train_run(run, job, Console()))
    except ToolError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
