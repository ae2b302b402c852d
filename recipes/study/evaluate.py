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
"""

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from jetrl_verl.compare.evaluate import BEFORE, Request, file_of, write_request
from jetrl_verl.compare.run import EVALUATE
from jetrl_verl.demo.overrides import RunPaths, build_environment
from jetrl_verl.demo.run import DEVICES, detect_device
from recipes.study.run import StudyArm, arm_of, read_arms
from recipes.study.warm_up import StudyError

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


def unscored(out: Path) -> list[StudyArm]:
    """Arms that finished and have no score since."""

    def is_due(arm: StudyArm) -> bool:
        if not arm.state.is_file():
            return False
        state, file = json.loads(arm.state.read_text()), file_of(out / "evaluation", arm.name)
        return state["finished"] and not (file.is_file() and file.stat().st_mtime >= state["at"])

    return [arm for arm in arms_in(out) if is_due(arm)]


def write_config(arm: StudyArm, path: Path) -> None:
    """The configuration that ``arm`` ran, on the test split instead of the one that draws its curves."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(arm.config)
    test = Path(config.actor_rollout_ref.model.path).with_name("test.parquet")
    # An arm that shared its GPU left most of it to others.
    changes = {
        "data.val_files": str(test),
        "data.val_max_samples": -1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
    }
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.save(config, path)


def before_files(folder: Path) -> list[Path]:
    """Scores of the policy before training, one file per evaluation."""
    file = file_of(folder, BEFORE)
    return sorted(folder.glob(f"{file.stem}.*{file.suffix}"))


def evaluate(out: Path, samples: int, device: str, evaluator: Sequence[str] = EVALUATE) -> list[str]:
    """Score what is due; names of the arms that were scored.

    Args:
        out: folder of the study. samples: responses to a problem at temperature 1. device: ``cpu`` or ``cuda``.
        evaluator: program that scores, to which the request's file is appended.

    Raises:
        StudyError: the engine failed.
    """
    due, folder = unscored(out), (out / "evaluation").resolve()
    if not due:
        return []
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    write_config(due[0], new / "config.yaml")
    checkpoints = {arm.name: str(arm.checkpoints) for arm in due}
    write_request(
        Request(str(new / "config.yaml"), checkpoints, True, TEMPERATURES, samples, str(new)), new / "request.json"
    )
    environment = build_environment(RunPaths(folder), device)
    if subprocess.run([*evaluator, str(new / "request.json")], env=environment).returncode:
        raise StudyError(f"scoring {', '.join(checkpoints)} failed; its last lines say why.")
    before = file_of(new, BEFORE)
    # Named after the second, so that results of several machines can be laid into one folder.
    before.replace(folder / f"{before.stem}.{int(time.time())}{before.suffix}")
    for name in checkpoints:
        file_of(new, name).replace(file_of(folder, name))
    return list(checkpoints)


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--samples", type=int, default=1, help="responses to a problem at temperature 1")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    given = parser.parse_args()
    device = detect_device() if given.device == "auto" else given.device
    try:
        scored = evaluate(given.out, given.samples, device)
    except StudyError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"scored {', '.join(scored) or 'nothing: every arm that finished has its score'}")


if __name__ == "__main__":
    main()
