# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scores the final weights of every run on the test split in one BF16 engine: ``python -m benchmarks.study.evaluate``.

Engine, order of the prompts, seed and reward are those of ``jetrl compare`` (tools/compare/evaluate.py); this file
chooses the checkpoints. Score each run on the machine that trained it: checkpoints are large, scores are small. Each
evaluation also scores the policy before training, with equal weights, prompts and seed. So it shows what another start
of the engine changes, and plot.py counts that as noise.

If the time ended before all runs finished, ``--rollouts N`` scores the checkpoint after rollout N of every run that has
one. These scores have a folder of their own: all runs of a table have the same length.
"""

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.run import StudyRun, control, read_study, run_of
from benchmarks.study.warm_up import StudyError
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.compare.evaluate import BEFORE, Request, file_of, write_request
from jetrl_verl.tools.compare.run import EVALUATE, finished_at, folder_of_runs
from jetrl_verl.tools.launch import DEVICES, RunPaths, build_environment, choose_device
from jetrl_verl.tools.process_tree import Interrupted, signals_raise

CACHE_BYTES = 9 * 10**9
"""KV cache of the engine: at 8 KB per token, twice what 1,024 sequences of the longest kind need."""

_POLL_SECONDS = 0.5

TEMPERATURES = (0.0, 1.0)
"""Greedy, and as in training; the second decides, since greedy decoding shows only the mode of the policy."""


def runs_in(out: Path) -> list[StudyRun]:
    """Every run that has a folder below ``out``, in the order of ``runs.yaml`` and of seeds."""
    found = []
    for label in read_study()["runs"]:
        folders = folder_of_runs(out).glob(f"{label}-seed*")
        seeds = sorted(int(folder.name.removeprefix(f"{label}-seed")) for folder in folders)
        found += [run_of(label, seed, out) for seed in seeds]
    return found


def folder_of(out: Path, rollouts: int | None = None) -> Path:
    """Where the scores are: of final weights, or of those after ``rollouts``."""
    return (out / (f"evaluation-{rollouts}" if rollouts else "evaluation")).resolve()


def checkpoint_after(run: StudyRun, rollouts: int) -> Path | None:
    """The checkpoint of ``run`` after ``rollouts`` rollouts, or None."""
    checkpoint = run.checkpoints / f"global_step_{rollouts}"
    # verl writes data.pt after the actor; an interrupted save has none.
    return checkpoint if (checkpoint / "data.pt").is_file() else None


def unscored(out: Path, rollouts: int | None = None) -> dict[StudyRun, Path]:
    """Runs to score -> what is scored: those that finished, or that have a checkpoint after ``rollouts``."""
    due = {}
    for run in runs_in(out):
        file = file_of(folder_of(out, rollouts), run.name)
        if rollouts:
            checkpoint = checkpoint_after(run, rollouts)
            since = (checkpoint / "data.pt").stat().st_mtime if checkpoint else None
        else:
            checkpoint, since = run.checkpoints, finished_at(run)
        if since is not None and not (file.is_file() and file.stat().st_mtime >= since):
            due[run] = checkpoint
    return due


def write_config(run: StudyRun, path: Path, device: str) -> None:
    """Write the configuration of ``run`` with the test split in place of the validation split."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(run.config)
    test = Path(config.actor_rollout_ref.model.path).with_name("test.parquet")
    changes = {"data.val_files": str(test), "data.val_max_samples": -1}
    if device == "cuda":
        # The cache is fixed, since engines may start side by side: vLLM measures the free memory at its start, and
        # fails if another process frees some meanwhile.
        changes["actor_rollout_ref.rollout.gpu_memory_utilization"] = 0.1
        changes["actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"] = CACHE_BYTES
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.save(config, path)


def before_files(folder: Path) -> list[Path]:
    """Scores of the policy before training, one file per evaluation."""
    file = file_of(folder, BEFORE)
    return sorted(folder.glob(f"{file.stem}.*{file.suffix}"))


def evaluate(
    out: Path,
    samples: int,
    device: str,
    evaluator: Sequence[str] = EVALUATE,
    rollouts: int | None = None,
    names: Sequence[str] = (),
) -> list[str]:
    """Score what is due; returns the names of the runs that were scored.

    Args:
        out: folder of the study. samples: responses to a problem at temperature 1. device: ``cpu`` or ``cuda``.
        evaluator: program that scores, to which the request's file is appended.
        rollouts: score the checkpoints after that many, not the final weights. names: score only these runs, in
            this order; all if empty.

    Each score is moved into its folder as soon as the engine has written it.

    Raises:
        StudyError: the engine failed (its scores are kept), or ``out`` has no runs, or not all of ``names``.
    """
    runs = {run.name for run in runs_in(out)}
    if not runs:
        raise StudyError(
            f"{folder_of_runs(out)} has no runs. Train one with `python3 -m benchmarks.study.run --out {out} --run "
            f"{control()} --seed 1`."
        )
    due, folder = unscored(out, rollouts), folder_of(out, rollouts)
    if names:
        absent = set(names) - runs
        if absent:
            raise StudyError(
                f"{', '.join(sorted(absent))} is not a run below {out}. Choose from {', '.join(sorted(runs))}."
            )
        by_name = {run.name: run for run in due}
        due = {by_name[name]: due[by_name[name]] for name in names if name in by_name}
    if not due:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    # Another engine may score other runs at the same time, so each has its own folder.
    new = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
    write_config(next(iter(due)), new / "config.yaml", device)
    checkpoints = {run.name: str(checkpoint) for run, checkpoint in due.items()}
    write_request(
        Request(str(new / "config.yaml"), checkpoints, True, TEMPERATURES, samples, str(new)), new / "request.json"
    )
    environment = build_environment(RunPaths(folder), device)
    scored = []

    def take() -> None:
        before = file_of(new, BEFORE)
        if before.is_file():
            # The time in the name lets results of several engines and machines lie in one folder.
            before.replace(folder / f"{before.stem}.{time.time_ns()}{before.suffix}")
        for name in checkpoints:
            if file_of(new, name).is_file():
                file_of(new, name).replace(file_of(folder, name))
                scored.append(name)

    engine = subprocess.Popen([*evaluator, str(new / "request.json")], env=environment)
    try:
        while engine.poll() is None:
            take()
            time.sleep(_POLL_SECONDS)
    finally:
        if engine.poll() is None:
            engine.kill()
        engine.wait()
        take()
        shutil.rmtree(new, ignore_errors=True)
    if engine.returncode:
        missing = ", ".join(name for name in checkpoints if name not in scored)
        raise StudyError(
            f"The engine ended with status {engine.returncode} before it scored {missing}. Its last lines say why."
        )
    return scored


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--samples", type=int, default=1, help="responses to a problem at temperature 1")
    parser.add_argument("--rollouts", type=int, help="score the checkpoints after that many, not the final weights")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("runs", nargs="*", help="names such as bf16-seed1; by default all that are due")
    given = parser.parse_args()
    try:
        device = choose_device(given.device)
        with signals_raise():  # otherwise a signal would leave the engine running
            scored = evaluate(given.out, given.samples, device, rollouts=given.rollouts, names=given.runs)
    except ToolError as error:
        raise SystemExit(f"error: {error}") from None
    except Interrupted as interruption:
        raise SystemExit(128 + interruption.signal) from None
    print(f"scored {', '.join(scored) or 'nothing: all runs that are due have a score'}")


if __name__ == "__main__":
    main()
