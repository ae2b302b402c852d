# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The runs of docs/evidence.md, side by side on the GPUs of one machine for as long as it is booked.

    python3 -m benchmarks.evidence.booking OUT --seconds 1480                        # the next runs of the protocol
    python3 -m benchmarks.evidence.booking OUT bf16:grpo:1 jet_fp8:grpo:1 --gpus 1   # these

Without RUN it takes those of the protocol that have no result in OUT that counts, so OUT travels from machine to
machine. A run that fails before its first rollout begins once more: of many that start at once one may find its port
taken.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.evidence.picture import result_of
from benchmarks.evidence.run import Trial, parser_of_runs, positive, settings_of, sizes_of, trials_of
from benchmarks.published_shapes import ROOT
from jetrl_verl.inputs import UserError, reading
from jetrl_verl.tools.process_tree import signals_raise

DOSES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Noise for a k3_kl of 1e-5, 1e-4, 1e-3, 1e-2, 1e-1."""

NOISE = [f"jet_fp8@{sigma:g}" for sigma in DOSES]
CONTROLS = ["bf16", "fp8_rollout", "jet_fp8", *NOISE]
METHODS = ["fp8_rollout_tis", "int8_rollout", "jet_fp8_stock", "jet_fp8_cache"]
ARMS_OF = {
    "reinforce": [*CONTROLS, f"{NOISE[3]}stays", *METHODS],
    "grpo": [*CONTROLS, "jet_fp8_calibrated"],
}
PROTOCOL = [f"{arm}:{loss}:{seed}" for seed in (1, 2, 3) for loss, arms in ARMS_OF.items() for arm in arms]


def missing(runs: Iterable[Trial], out: Path) -> list[Trial]:
    """Those without a result in ``out`` that counts."""
    return [run for run in runs if (result := result_of(run.results(out))) is None or not result.counts]


def check_results(runs: Iterable[Trial], out: Path, options: argparse.Namespace) -> None:
    """Raise ``UserError`` if results in ``out`` are of other settings than this booking's, which would count for it."""
    others = []
    for run in runs:
        file, settings = run.results(out), settings_of(run, options.factor, sizes_of(run, options))
        if file.exists():
            with reading(file, "result", "Delete it"):
                facts = json.loads(file.read_text().splitlines()[0])
            if changed := [f"{key} {facts[key]}" for key, value in settings.items() if facts.get(key, value) != value]:
                others.append(f"{file.name} ({', '.join(changed)})")
    if others:
        raise UserError(f"Runs of other settings in {out / 'results'} would count: {', '.join(others)}. Move them.")


def take_all(
    runs: Sequence[Trial], out: Path, gpus: Sequence[str], slots: int, ends: float, words: Sequence[str]
) -> None:
    """Take ``runs``, ``slots`` on each GPU at once, until ``ends`` by ``time.monotonic()``."""
    latest = (time.monotonic() + ends) / 2  # a run that begins later does not end
    waiting, running, again = list(runs), {}, set()
    try:
        while running or (waiting and time.monotonic() < latest):
            while waiting and len(running) < slots * len(gpus) and time.monotonic() < latest:
                run = waiting.pop(0)
                gpu = min(gpus, key=[gpu for _, gpu in running.values()].count)
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.evidence.run", out, str(run), *words]
                command += ["--seconds", str(ends - time.monotonic())]
                running[run] = subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, cwd=ROOT), gpu
                time.sleep(2)  # fewer meet in their choice of ports
            for run in [run for run, (process, _) in running.items() if process.poll() is not None]:
                status = running.pop(run)[0].returncode
                if status and result_of(run.results(out)) is None and run not in again:
                    again.add(run)
                    waiting.insert(0, run)
            time.sleep(0.2)
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.wait()


def main() -> int:
    began = time.monotonic()
    parser = parser_of_runs(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="those of the protocol that have no result if not set")
    parser.add_argument("--gpus", default="0,1", help="separated by commas, 0,1 if not set")
    parser.add_argument("--slots", type=positive, default=7, help="runs side by side on a GPU, 7 if not set")
    options = parser.parse_args()
    out, gpus = options.out.resolve(), options.gpus.split(",")
    try:
        runs = trials_of(options.runs or PROTOCOL, out, options.tiny)
        check_results([] if options.runs else runs, out, options)
    except UserError as error:
        parser.error(str(error))
    if not options.runs:
        runs = missing(runs, out)[: options.slots * len(gpus)]
    shared = ("factor", "rollouts", "prompts", "lr")
    words = [f"--{name}={value}" for name in shared if (value := getattr(options, name)) is not None]
    words += ["--tiny"] if options.tiny else []
    with signals_raise():
        take_all(runs, out, gpus, options.slots, began + options.seconds, words)
    left = missing(runs, out)
    print(f"{len(runs) - len(left)} runs have a result; {len(left)} have none: {' '.join(map(str, left))}")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
