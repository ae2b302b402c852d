# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fake of verl for tests of the driver: its files, its log lines, and children as hard to end as Ray's.

Arguments: ``succeed``, ``fail``, ``stop_early`` or ``hang``, then the demo's overrides."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

DAEMON = (
    "import os, signal, sys, time\n"
    "if os.fork(): os._exit(0)\n"  # orphaned
    "os.setsid()\n"  # in a session of its own
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
    "time.sleep(600)\n"
)


def main(behaviour: str, overrides: list[str]) -> None:
    steps = next(int(o.partition("=")[2]) for o in overrides if o.startswith("trainer.total_training_steps="))
    metrics = Path(os.environ["VERL_FILE_LOGGER_PATH"])
    # An empty environment: no marker in it finds this process.
    subprocess.run([sys.executable, "-c", DAEMON, str(metrics.with_name("daemon.pid"))], env={}, check=True)
    session = Path(os.environ["RAY_TMPDIR"]) / "ray" / "session_2026-01-01" / "logs"
    session.mkdir(parents=True)
    (session / "raylet.out").write_text("a daemon's own log\n")
    segment = shared_memory.SharedMemory(create=True, size=4096)
    metrics.with_name("segment").write_text(segment.name)
    time.sleep(0.5)

    for line in (
        "INFO worker.py:2038 -- Started a local Ray instance.",
        "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m INFO:Total training steps: 2",
        "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m INFO:actor and ref model engine initialized",
        "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m INFO:all initialize finished, ready to fit",
    ):
        print(line, flush=True)
        time.sleep(0.6)
    with metrics.open("w", buffering=1) as log:
        for step in range(steps + 1):
            accuracy = {"val-core/jetrl/addition/acc/mean@1": 0.4 + 0.1 * step} if step in (0, steps) else {}
            data = {
                "critic/score/mean": 0.4 + 0.1 * step,
                "rollout_corr/k3_kl": 1e-4,
                "actor/entropy": 0.1,
                "actor/pg_clipfrac": 0.01,
                "response_length/mean": 43.0,
                "timing_s/gen": 1.0,
                "timing_s/update_actor": 2.0,
                "timing_s/step": 3.5,
            }
            log.write(json.dumps({"step": step, "data": (data if step else {}) | accuracy}) + "\n")
            if step and "trainer.save_freq=1" in overrides:
                metrics.with_name("checkpoints").joinpath(f"global_step_{step}", "actor", "huggingface").mkdir(
                    parents=True
                )
            if step == 0 and {"trainer.val_only=True", "trainer.val_only=true"} & {*overrides}:
                return
            if step == 1 and behaviour == "fail":
                print("\x1b[36m(WorkerDict pid=7)\x1b[0m ValueError: layer 3 differs")
                print("ray.exceptions.RayTaskError(ValueError): ray::TaskRunnerV1.run() (pid=1)")
                print("ValueError: layer 3 differs")
                print("noise after the error", flush=True)
                os._exit(3)
            if step == 1 and behaviour == "stop_early":
                os._exit(0)
            if step == 1 and behaviour == "hang":
                signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
