# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of the study share: its smallest configuration, the stand-in for verl, and a run that it trains."""

import sys
from dataclasses import replace
from pathlib import Path

from recipe_cases import ROOT  # puts the checkout on the path
from rich.console import Console

from benchmarks.study import run as study
from benchmarks.study import warm_up
from jetrl_verl.tools.demo.policy import PolicyConfig

RUNS = study.read_study()["runs"]
FAKE = ROOT / "tests/tools/fake_compare.py"

SMALL = replace(
    warm_up.TINY, policy=PolicyConfig(hidden_size=128, layers=1, heads=1, intermediate_size=128), batch_size=8,
    ramp_steps=5, max_steps=12, check_every=4, save_every=6, target=0.0,
)  # fmt: skip


def train(label: str, seed: int, prepared: Path, out: Path, *words: str, behaviour: str = "succeed") -> int:
    run = study.run_of(label, seed, out)
    trainer = (sys.executable, str(FAKE), "train", behaviour)
    return study.train_run(run, study.job_of(run, prepared, "cpu", 4, words, trainer), Console(quiet=True))


def judge_that(does: str) -> tuple[str, ...]:
    """An engine's program that does ``does`` with the request ``r``, the ``names`` of its runs in order, and
    ``judge(names, before)``, which scores some of them as the stand-in does."""
    program = (
        "import json, sys, time; from dataclasses import replace; from pathlib import Path;"
        "sys.path.insert(0, sys.argv[1]); import fake_compare;"
        "r = fake_compare.Request(**json.loads(open(sys.argv[2]).read())); names = list(r.checkpoints)\n"
        "def judge(some, before): fake_compare.judge(replace(r, checkpoints=dict.fromkeys(some, ''), before=before))\n"
    )
    return (sys.executable, "-c", program + does, str(FAKE.parent))


def save(run: study.StudyRun, *lengths: int) -> None:
    """Checkpoints of ``run``, as far as they are looked at."""
    for n in lengths:
        (run.checkpoints / f"global_step_{n}/actor").mkdir(parents=True)
        (run.checkpoints / f"global_step_{n}/data.pt").touch()
