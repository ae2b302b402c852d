# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fake of verl (``train BEHAVIOUR OVERRIDES...``) and of the evaluation (``judge COUNT REQUEST``), without a model.

Behaviours ``fail:PRECISION`` and ``die_once`` (the first attempt) die in step 2, with a checkpoint of step 1."""

import json
import os
import sys
import time
from pathlib import Path

from jetrl_verl.tools.compare.evaluate import Request
from jetrl_verl.tools.compare.table import BEFORE

STEPS = 4


def train(behaviour: str, words: list[str]) -> None:
    values = {key.lstrip("+"): value.strip("'") for key, _, value in (word.partition("=") for word in words)}
    precision, seed = values["precision"], int(values["data.seed"])
    assert os.environ["PRECISION"] == precision
    config = Path(values["hydra.run.dir"]) / ".hydra" / "config.yaml"
    if behaviour != "no_config":
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(f"reward: {{reward_model: {{enable: {behaviour == 'reward_model'}}}}}\n")
    checkpoints = Path(values["trainer.default_local_dir"])
    checkpoints.mkdir(exist_ok=True)
    latest = checkpoints / "latest_checkpointed_iteration.txt"
    first = int(latest.read_text()) if latest.is_file() else 0
    with (checkpoints / "starts").open("a") as starts:
        starts.write(f"{first}\n")
    print(f"(TaskRunnerV1 pid=1) INFO:Total training steps: {STEPS}", flush=True)
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0) as log:  # truncated, as verl's tracker does
        for step in range(first, STEPS + 1):  # of the step that it resumes from, a validation
            data = {"val-core/x/acc/mean@1": 0.4 + 0.1 * step} if step in (first, STEPS) else {}
            if step > first:
                data |= {"critic/score/mean": 0.1 * step, "rollout_corr/k3_kl": 2e-5, "timing_s/step": 3.0 + seed}
            log.write(json.dumps({"step": step, "data": data}).encode() + b"\n")
            if step == 1:
                latest.write_text("1")
            if step == 2 and (behaviour == f"fail:{precision}" or (behaviour == "die_once" and not first)):
                print("ValueError: layer 3 differs", flush=True)
                os._exit(3)
            if step == 2 and behaviour in ("hang", "reward_model"):
                time.sleep(600)
    latest.write_text(str(STEPS))


def judge(request: Request, count: int) -> None:
    """4 of 8 problems are correct, one more under ``jet`` and one more with seed 2; dies after ``count`` policies."""
    with Path(request.config).parents[4].joinpath("engines").open("a") as engines:
        engines.write(f"{list(request.policies)}\n")
    for i, (name, (checkpoint, file)) in enumerate(request.policies.items()):
        if i == count:
            raise RuntimeError("CUDA out of memory")
        assert (checkpoint is None) == (name == BEFORE)
        right = 4 + ("jet" in name) + ("seed2" in name)
        Path(file).write_text(json.dumps({"scores": [[float(problem < right)] for problem in range(8)]}))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3:])
    else:
        judge(Request(**json.loads(Path(sys.argv[3]).read_text())), int(sys.argv[2]))
