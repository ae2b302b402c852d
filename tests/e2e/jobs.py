# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Real jobs of verl, Ray and vLLM on this machine's CPU for the end-to-end tests, and their results."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.run import DemoOptions, baseline_run, run_demo
from jetrl_verl.tools.report import MISMATCH, load_run

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SYNC = re.compile(
    r"jetrl weight sync: loaded in ([\d.]+) s, contract of (\d+) quantized and (\d+) BF16 tensors held in ([\d.]+) s, "
    r"live digest (0x\w+)"
)

DIFFERENCES = (
    "rollout_corr/k3_kl",
    "rollout_corr/kl",
    "rollout_corr/log_ppl_abs_diff",
    "training/rollout_probs_diff_max",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
)
"""Metrics that are 0 where trainer and rollout agree in every bit, and a batch has one update."""


@dataclass(frozen=True)
class Run:
    """Results of a finished run. ``baseline``: k3_kl of ``fp8_rollout`` on its policies, by step."""

    metrics: list[dict]
    syncs: list[tuple[str, ...]]
    log: str
    baseline: dict[int, float] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        return fmean(self.steps(name))

    def steps(self, name: str) -> list[float]:
        return [step[name] for step in self.metrics if name in step]

    def check_updates(self, steps: int) -> None:
        """There were ``steps`` steps, and each moved the weights."""
        assert len(self.metrics) == steps
        assert all(0 < norm < math.inf for norm in self.steps("actor/grad_norm"))

    def check_exact(self, steps: int) -> None:
        """:meth:`check_updates`, and no bit differed."""
        self.check_updates(steps)
        for metric in DIFFERENCES:
            assert self.steps(metric) == [0.0] * steps, metric


def train(
    policy: cache.Prepared,
    precision: str,
    out: Path,
    steps: int,
    *overrides: str,
    kind: str = "dense",
    baseline: bool = False,
    status: int = 0,
) -> Run:
    """A run of the demo without evaluation. ``kind``: ``policy``'s. ``status``: with which it has to end."""
    fixed = (
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
    )
    options = DemoOptions(
        precision, steps, out, policy.folder.parent, "cpu", kind, (*fixed, *overrides), baseline=baseline
    )
    ended = run_demo(options)
    (folder,) = out.iterdir()
    log = (folder / "run.log").read_text()
    assert ended == status, log[-3000:]
    metrics = [data for _, data in load_run(folder).records if MISMATCH in data]
    if precision != "bf16":
        ((exact, shared),) = {(step["jetrl/exact"], step["jetrl/shared_operations"]) for step in metrics}
        assert exact == shared == 1 or precision != "jet_fp8_exact"
        unreported = [step for step in metrics if not step.get("training/old_log_probs_differing_tokens")]
        # Asynchronous trainers have tokens of older weights, too.
        promised = "rollout_corr/lag_0/k3_kl" if any("_async" in word for word in overrides) else MISMATCH
        assert not exact or all(step.get(promised, 0) == 0 for step in unreported), "what the job promises"
    measured = baseline_run(folder)
    return Run(metrics, SYNC.findall(log), log, dict(zip(*measured.series(MISMATCH))) if measured else {})
