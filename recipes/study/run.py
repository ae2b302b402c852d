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
"""One arm of the study: ``python -m recipes.study.run --arm jet_fp8 --seed 1 --out DIR``.

An arm is a row of ``arms.yaml`` with one seed. It trains in ``DIR/arms/<arm>-seed<seed>`` exactly as an arm of
``jetrl compare`` does (the driver is the same): one that finished is not trained again, one that was interrupted goes
on from its last checkpoint, the metrics of all attempts are joined, and a folder made by other words is refused.

The words of an arm are the demo's for this device, then the study's sizes, then the arm's, then those given here; the
last of two equal keys wins. ``--share`` is for several arms on one GPU: vLLM takes a fixed 2 GB of KV cache, all that
256 responses of this size need, instead of a share of what happens to be free, and keeps it while the trainer works,
since vLLM ends a run ("Memory usage increased after sleeping") in which a neighbour took memory while it went to sleep.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from rich.console import Console

from jetrl_verl.compare import CompareError
from jetrl_verl.compare import run as compare
from jetrl_verl.demo import DemoError
from jetrl_verl.demo.cache import Prepared
from jetrl_verl.demo.overrides import RunPaths, build_environment, build_overrides, quote
from jetrl_verl.demo.process_tree import Interrupted, signals_raise
from jetrl_verl.demo.run import DEVICES, VERL, choose_device
from recipes.study import task
from recipes.study.warm_up import StudyError, read_facts

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
class StudyArm(compare.Arm):
    """One training; several arms may have one precision, so the name is the study's own."""

    label: str = ""

    name = property(lambda self: f"{self.label}-seed{self.seed}")


@cache
def read_arms() -> dict:
    """Contents of ``arms.yaml``; not to be changed."""
    return yaml.safe_load(Path(__file__).with_name("arms.yaml").read_text())


def control() -> str:
    """The row of ``arms.yaml`` that the others are compared with, the first."""
    return next(iter(read_arms()["arms"]))


def arm_of(label: str, seed: int, out: Path) -> StudyArm:
    """The arm ``label`` of ``arms.yaml`` with its folder below ``out``.

    Raises:
        StudyError: there is no such arm.
    """
    arms = read_arms()["arms"]
    if label not in arms:
        raise StudyError(f"{label} is not an arm; choose one of {', '.join(arms)}.")
    paths = RunPaths(out.resolve() / "arms" / f"{label}-seed{seed}")
    return StudyArm(arms[label]["precision"], seed, paths, label)


def every_arm(out: Path) -> list[StudyArm]:
    """Each row of ``arms.yaml`` with each of its seeds, in that order, with its folder below ``out``."""
    return [arm_of(label, seed, out) for label, arm in read_arms()["arms"].items() for seed in arm["seeds"]]


def words_of(label: str, facts: Mapping, prepared: Path) -> list[str]:
    """Overrides of an arm beyond the demo's: sizes of the study, then what the arm says itself.

    Args:
        label: row of ``arms.yaml``. facts: contents of the prepared folder's ``study.json``. prepared: that folder.
    """
    study = read_arms()
    arm, prompts, samples = study["arms"][label], study["prompts"], study["samples"]
    learning_rate = study["learning_rate"] * arm.get("learning_rate_factor", 1)
    prompt_tokens, response_tokens = task.token_limits(tuple(facts["config"]["levels"]))
    words = {
        "data.val_files": quote(prepared.resolve() / "validation.parquet"),
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt_tokens,
        "data.max_response_length": response_tokens,
        "actor_rollout_ref.actor.optim.lr": f"{learning_rate:g}",
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts // study["updates"],
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": prompts * samples // study["updates"],
        # Without it verl's mini-batches follow the order of the rollout, and data_loader_seed decides nothing.
        "actor_rollout_ref.actor.shuffle": True,
        "actor_rollout_ref.rollout.n": samples,
        "actor_rollout_ref.rollout.max_model_len": prompt_tokens + response_tokens,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": prompts * samples // study["updates"],
        "trainer.project_name": "jetrl-study",
        "trainer.test_freq": 20,
        # All of them are kept: where the time ends early, arms are compared at a length that all of them reached.
        "trainer.save_freq": SAVE_EVERY,
    }
    return [*(f"{key}={value}" for key, value in words.items()), *arm.get("words", ())]


def job_of(
    arm: StudyArm, prepared: Path, device: str, steps: int, words: Sequence[str], trainer: Sequence[str] = VERL
) -> compare.Job:
    """What ``arm`` runs.

    Args:
        arm: the arm. prepared: folder of ``recipes.study.warm_up``. device: ``cpu`` or ``cuda``. steps: rollouts.
        words: further overrides, which win. trainer: program to which the overrides are appended.

    Raises:
        StudyError: the prepared folder is not complete.
    """
    facts = read_facts(prepared)
    nowhere = RunPaths(arm.paths.folder)  # the driver adds an arm's own paths
    demo = build_overrides("bf16", Prepared(prepared.resolve(), facts), nowhere, device, steps)
    environment = build_environment(nowhere, device)
    # Workers import the recipes' classes by name.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    return compare.Job([*trainer, *demo, *words_of(arm.label, facts, prepared), *words], environment, steps, saves=True)


def run_arm(arm: StudyArm, job: compare.Job, console: Console) -> int:
    """Train ``arm``; 0, 1 after a failure, 128 + signal after an interruption.

    Raises:
        CompareError: the arm's folder was made by another command.
    """
    try:
        with signals_raise():
            compare.check_state(arm, job)
            return int(not compare.train(arm, job, console))
    except Interrupted as interruption:
        console.print(f"interrupted by {interruption}; the same command goes on", markup=False)
        return 128 + interruption.signal


def main() -> None:
    """Entry of the program."""
    study = read_arms()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", required=True, choices=study["arms"])
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--prepared", type=Path, default=Path("outputs/study/prepared"))
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--steps", type=int, default=study["steps"])
    parser.add_argument("--share", action="store_true", help="leave room for other arms on the same GPU")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("words", nargs="*", help="further Hydra overrides")
    given = parser.parse_args()
    try:
        device = choose_device(given.device)
        arm = arm_of(given.arm, given.seed, given.out)
        words = [*(SHARED_GPU if given.share else ()), *given.words]
        job = job_of(arm, given.prepared, device, given.steps, words)
        raise SystemExit(run_arm(arm, job, Console()))
    except (StudyError, CompareError, DemoError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
