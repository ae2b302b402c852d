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
"""Scores every arm's final weights on the test split in one BF16 engine: ``python -m recipes.study.evaluate``.

The engine, the prompts' order, the seed and the reward are those of ``jetrl compare`` (compare/evaluate.py); here is
only which checkpoints it gets. Arms that were trained on a machine without the others are scored there, since
checkpoints are large and scores are small. Each evaluation scores the policy before training as well, so what another
start of the engine changes is known: equal weights, equal prompts, equal seed. plot.py counts it as noise.

Where the time ended before all arms did, ``--rollouts N`` scores the checkpoint after rollout N of every arm that has
one, and keeps these scores apart: a table holds arms of one length.
"""

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jetrl_verl.compare import CompareError
from jetrl_verl.compare.evaluate import BEFORE, Request, file_of, write_request
from jetrl_verl.compare.run import EVALUATE, finished_at
from jetrl_verl.demo import DemoError
from jetrl_verl.demo.overrides import RunPaths, build_environment
from jetrl_verl.demo.process_tree import Interrupted, signals_raise
from jetrl_verl.demo.run import DEVICES, choose_device
from recipes.study.run import StudyArm, arm_of, control, read_arms
from recipes.study.warm_up import StudyError

CACHE_BYTES = 9 * 10**9
"""KV cache of the engine: at 8 KB a token, 1,024 sequences of the longest kind twice over."""

_POLL_SECONDS = 0.5

TEMPERATURES = (0.0, 1.0)
"""Greedy, and as trained; the second decides, since it is the policy and not its mode."""


def arms_in(out: Path) -> list[StudyArm]:
    """Every arm that has a folder below ``out``, in the order of ``arms.yaml`` and of seeds."""
    found = []
    for label in read_arms()["arms"]:
        folders = (out / "arms").glob(f"{label}-seed*")
        seeds = sorted(int(folder.name.removeprefix(f"{label}-seed")) for folder in folders)
        found += [arm_of(label, seed, out) for seed in seeds]
    return found


def folder_of(out: Path, rollouts: int | None = None) -> Path:
    """Where the scores are: of final weights, or of those after ``rollouts``."""
    return (out / (f"evaluation-{rollouts}" if rollouts else "evaluation")).resolve()


def checkpoint_after(arm: StudyArm, rollouts: int) -> Path | None:
    """The checkpoint of ``arm`` after that many rollouts, if it has one."""
    checkpoint = arm.checkpoints / f"global_step_{rollouts}"
    # verl writes it when the actor is complete; a run that was stopped before leaves a part of that.
    return checkpoint if (checkpoint / "data.pt").is_file() else None


def unscored(out: Path, rollouts: int | None = None) -> dict[StudyArm, Path]:
    """Arms to score -> what is scored: those that finished, or that have a checkpoint after ``rollouts``."""
    due = {}
    for arm in arms_in(out):
        file = file_of(folder_of(out, rollouts), arm.name)
        if rollouts:
            checkpoint = checkpoint_after(arm, rollouts)
            since = (checkpoint / "data.pt").stat().st_mtime if checkpoint else None
        else:
            checkpoint, since = arm.checkpoints, finished_at(arm)
        if since is not None and not (file.is_file() and file.stat().st_mtime >= since):
            due[arm] = checkpoint
    return due


def write_config(arm: StudyArm, path: Path, device: str) -> None:
    """The configuration that ``arm`` ran, on the test split instead of the one that draws its curves."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(arm.config)
    test = Path(config.actor_rollout_ref.model.path).with_name("test.parquet")
    changes = {"data.val_files": str(test), "data.val_max_samples": -1}
    if device == "cuda":
        # An arm that shared its GPU took little of it. A fixed cache, since engines may start side by side: vLLM
        # measures what is free, and ends if a neighbour gives memory back meanwhile.
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
    """Score what is due; names of the arms that were scored.

    Args:
        out: folder of the study. samples: responses to a problem at temperature 1. device: ``cpu`` or ``cuda``.
        evaluator: program that scores, to which the request's file is appended.
        rollouts: score the checkpoints after that many instead of final weights. names: of these arms alone, in
            this order, if any.

    A score is in its place as soon as the engine has it.

    Raises:
        StudyError: the engine failed; what it had scored is kept. Or ``out`` holds no arm, or not all of ``names``.
    """
    arms = {arm.name for arm in arms_in(out)}
    if not arms:
        raise StudyError(
            f"{out / 'arms'} holds no arm; train one first, with `python3 -m recipes.study.run --out {out} --arm "
            f"{control()} --seed 1`."
        )
    due, folder = unscored(out, rollouts), folder_of(out, rollouts)
    if names:
        absent = set(names) - arms
        if absent:
            raise StudyError(f"{', '.join(sorted(absent))} is no arm below {out}; name folders of {out / 'arms'}.")
        by_name = {arm.name: arm for arm in due}
        due = {by_name[name]: due[by_name[name]] for name in names if name in by_name}
    if not due:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    # A folder of its own, since another engine may score other arms meanwhile.
    new = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
    write_config(next(iter(due)), new / "config.yaml", device)
    checkpoints = {arm.name: str(checkpoint) for arm, checkpoint in due.items()}
    write_request(
        Request(str(new / "config.yaml"), checkpoints, True, TEMPERATURES, samples, str(new)), new / "request.json"
    )
    environment = build_environment(RunPaths(folder), device)
    scored = []

    def take() -> None:
        before = file_of(new, BEFORE)
        if before.is_file():
            # Named after the moment, so that results of several engines and machines can be laid into one folder.
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
            f"the engine ended with status {engine.returncode}, without {missing}; its last lines say why."
        )
    return scored


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--samples", type=int, default=1, help="responses to a problem at temperature 1")
    parser.add_argument("--rollouts", type=int, help="score the checkpoints after that many, not final weights")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("arms", nargs="*", help="names such as bf16-seed1; all that are due if none is given")
    given = parser.parse_args()
    try:
        device = choose_device(given.device)
        with signals_raise():  # else a signal would leave the engine with its GPU
            scored = evaluate(given.out, given.samples, device, rollouts=given.rollouts, names=given.arms)
    except (StudyError, CompareError, DemoError) as error:
        raise SystemExit(f"error: {error}") from None
    except Interrupted as interruption:
        raise SystemExit(128 + interruption.signal) from None
    print(f"scored {', '.join(scored) or 'nothing: every arm that is due has its score'}")


if __name__ == "__main__":
    main()
