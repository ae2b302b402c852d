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
"""What the tests of the study share: its smallest configuration, the stand-in for verl, and an arm that it trains."""

import sys
from dataclasses import replace
from pathlib import Path

from recipe_cases import ROOT  # puts the checkout on the path
from rich.console import Console

from jetrl_verl.demo.policy import PolicyConfig
from recipes.study import run, warm_up

ARMS = run.read_arms()["arms"]
FAKE = ROOT / "tests/observe/fake_compare.py"

SMALL = replace(
    warm_up.TINY, policy=PolicyConfig(hidden_size=128, layers=1, heads=1, intermediate_size=128), batch_size=8,
    ramp_steps=5, max_steps=12, check_every=4, save_every=6, target=0.0,
)  # fmt: skip


def train(label: str, seed: int, prepared: Path, out: Path, *words: str, behaviour: str = "succeed") -> int:
    arm = run.arm_of(label, seed, out)
    trainer = (sys.executable, str(FAKE), "train", behaviour)
    return run.run_arm(arm, run.job_of(arm, prepared, "cpu", 4, words, trainer), Console(quiet=True))


def judge_that(does: str) -> tuple[str, ...]:
    """An engine's program that does ``does`` with the request ``r``, the ``names`` of its arms in order, and
    ``judge(names, before)``, which scores some of them as the stand-in does."""
    program = (
        "import json, sys, time; from dataclasses import replace; from pathlib import Path;"
        "sys.path.insert(0, sys.argv[1]); import fake_compare;"
        "r = fake_compare.Request(**json.loads(open(sys.argv[2]).read())); names = list(r.checkpoints)\n"
        "def judge(some, before): fake_compare.judge(replace(r, checkpoints=dict.fromkeys(some, ''), before=before))\n"
    )
    return (sys.executable, "-c", program + does, str(FAKE.parent))


def save(arm: run.StudyArm, *lengths: int) -> None:
    """Checkpoints of ``arm``, as far as they are looked at."""
    for n in lengths:
        (arm.checkpoints / f"global_step_{n}/actor").mkdir(parents=True)
        (arm.checkpoints / f"global_step_{n}/data.pt").touch()
