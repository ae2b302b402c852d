# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real job of verl, Ray and vLLM on this machine's CPU, as the end-to-end tests start it, and what it left behind."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.run import DemoOptions, run_demo

SYNC = re.compile(
    r"jetrl weight sync: loaded in ([\d.]+) s, contract of (\d+) quantized and (\d+) BF16 tensors held in ([\d.]+) s, "
    r"live digest (0x\w+)"
)


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    metrics: list[dict]
    syncs: list[tuple[str, ...]]
    log: str

    def mean(self, name: str) -> float:
        return fmean(self.steps(name))

    def steps(self, name: str) -> list[float]:
        return [step[name] for step in self.metrics if name in step]


def train(policy: cache.Prepared, precision: str, out: Path, steps: int, *overrides: str, kind: str = "dense") -> Run:
    """A run of the demo without held-out accuracy and without baseline. ``kind``: of ``policy``."""
    fixed = (
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
    )
    options = DemoOptions(
        precision, steps, out, policy.folder.parent, "cpu", kind, (*fixed, *overrides), baseline=False
    )
    status = run_demo(options, Console(width=160))
    (folder,) = out.iterdir()
    log = (folder / "run.log").read_text()
    assert status == 0, log[-3000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Run([line["data"] for line in lines if "rollout_corr/k3_kl" in line["data"]], SYNC.findall(log), log)
