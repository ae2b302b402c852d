# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stands in for verl and for the evaluation in tests of ``jetrl compare``: same files, no model.

``train BEHAVIOUR OVERRIDES...`` writes metrics, a composed configuration and checkpoints as verl does; BEHAVIOUR is
``succeed``, ``fail:PRECISION`` (that run dies in step 2), ``die_once`` (every run dies in step 2 of its first attempt,
with a checkpoint of step 1), ``hang``, ``reward_model`` (a job that cannot be judged; hangs) or ``no_config``.
``judge REQUEST`` answers what jetrl_verl/tools/compare/evaluate.py is asked; ``judge_some COUNT REQUEST`` dies after so
many.
"""

import json
import os
import sys
import time
from pathlib import Path

from jetrl_verl.tools.compare.evaluate import BEFORE, Request, file_of, load_config

STEPS = 4
PROBLEMS = 8


def train(behaviour: str, words: list[str]) -> None:
    values = {key.lstrip("+"): value.strip("'") for key, _, value in (word.partition("=") for word in words)}
    precision, seed = values["precision"], int(values["data.seed"])
    assert os.environ["PRECISION"] == precision
    config = Path(values["hydra.run.dir"]) / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        "data: {val_files: test.parquet, max_response_length: 48}\n"
        "actor_rollout_ref: {model: {path: policy}}\n"
        f"reward: {{reward_model: {{enable: {behaviour == 'reward_model'}}}}}\n"
        f"jetrl: {{operations: {os.environ.get('FAKE_OPERATIONS', 'stock')}}}\n"
    )
    if behaviour == "no_config":
        config.unlink()
    checkpoints = Path(values["trainer.default_local_dir"])
    checkpoints.mkdir(exist_ok=True)
    latest = checkpoints / "latest_checkpointed_iteration.txt"
    resumed = int(latest.read_text()) if latest.is_file() else 0
    with (checkpoints / "starts").open("a") as starts:
        starts.write(f"{resumed}\n")
    print(f"(TaskRunnerV1 pid=1) INFO:Total training steps: {STEPS}", flush=True)
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0) as log:  # truncated, as verl's logger does
        for step in range(resumed, STEPS + 1):  # of the step that it resumes from, a validation
            data = {"val-core/x/acc/mean@1": 0.4 + 0.1 * step} if step in (resumed, STEPS) else {}
            if step > resumed:
                data |= {
                    "critic/score/mean": 0.4 + 0.05 * step + 0.01 * seed,
                    "rollout_corr/k3_kl": 1e-4 if precision == "fp8_rollout" else 2e-5,
                    "actor/entropy": 0.3 - 0.01 * step,
                    "actor/pg_clipfrac": 0.001 * seed,
                    "timing_s/gen": 1.0,
                    "timing_s/step": 3.0 + seed,
                }
            log.write(json.dumps({"step": step, "data": data}).encode() + b"\n")
            if step == 1 and behaviour == "die_once":
                (checkpoints / "global_step_1").mkdir(exist_ok=True)
                latest.write_text("1")
            dies = behaviour == f"fail:{precision}" or (behaviour == "die_once" and not resumed)
            if step == 2 and dies:
                print("ValueError: layer 3 differs", flush=True)
                os._exit(3)
            if step == 2 and behaviour in ("hang", "reward_model"):
                time.sleep(600)
    (checkpoints / f"global_step_{STEPS}" / "actor").mkdir(parents=True, exist_ok=True)
    latest.write_text(str(STEPS))


def judge(request: Request, most: int | None = None) -> None:
    """Problems 0 to 3 are right before training; each run gets one more right per precision and seed."""
    settings = request.settings(load_config(request.config))
    with Path(request.out, "engines").open("a") as engines:
        engines.write(f"{sorted(request.checkpoints)} {request.before}\n")
    names = [BEFORE] if request.before else []
    for i, name in enumerate([*names, *request.checkpoints]):
        if i == most:
            raise RuntimeError("CUDA out of memory")
        right = 4 + ("jet" in name) + ("seed2" in name) if name != BEFORE else 4
        table = [[float(problem < right)] for problem in range(PROBLEMS)]
        scores = {str(temperature): table for temperature in request.temperatures}
        file_of(request.out, name).write_text(json.dumps({"settings": settings, "scores": scores}))
        print(f"evaluated {name}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3:])
    else:
        judge(Request(**json.loads(Path(sys.argv[-1]).read_text())), int(sys.argv[2]) if len(sys.argv) > 3 else None)
