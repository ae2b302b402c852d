# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The injector does what run_faults.py relies on: it fires once, at the right phase and step, and kills the victim."""

import json
import subprocess
import sys
import time

import pytest
from fault_injector import VARIABLE, Fault

STAND_IN = """
class PPOTrainer:
    global_steps = 0
    def on_sample_begin(self): pass
    def _compute_old_log_prob(self, batch, metrics): return batch
    def _update_actor(self, batch, metrics): return batch
    def _save_checkpoint(self): pass
"""
"""verl's trainer as far as the injector changes it."""

TRAIN = """
import fault_injector, os, time
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
fault_injector.Fault(**{fault})._introduce("rollout")
trainer = PPOTrainer()
for step in (1, 2, 3):
    trainer.global_steps = step
    for call in ("on_sample_begin", "_save_checkpoint"):
        getattr(trainer, call)()
    for call in ("_compute_old_log_prob", "_update_actor"):
        assert getattr(trainer, call)("batch", metrics={{}}) == "batch"
        print(step, call, flush=True)
        time.sleep(1.5)
"""


@pytest.mark.parametrize(("phase", "last"), [("log_prob", "2 _compute_old_log_prob"), ("update", "2 _update_actor")])
def test_a_victim_dies_in_the_middle_of_the_chosen_phase(tmp_path, phase, last):
    """Here the controller is the victim itself, so what it printed last says when it died."""
    package = tmp_path / "verl" / "trainer" / "ppo" / "v1"
    package.mkdir(parents=True)
    for level in (package, *list(package.parents)[:3]):
        (level / "__init__.py").touch()  # a regular package, which the installed verl is not looked up behind
    (package / "trainer_base.py").write_text(STAND_IN)
    fault = Fault("kill", "rollout", phase, 2, str(tmp_path))
    environment = fault.environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    script = TRAIN.format(fault=json.loads(environment[VARIABLE]))
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == -9, run.stderr
    assert run.stdout.splitlines()[-1] == last
    assert fault.fired() is not None and time.time() - fault.fired() < 60


def test_a_fault_fires_once(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as victim:
        fault = Fault("kill", "trainer", "sync", 1, str(tmp_path))
        (tmp_path / "trainer.pid").write_text(str(victim.pid))
        fault.fire()
        assert victim.wait(10) == -9
    (tmp_path / "trainer.pid").unlink()
    fault.fire()  # nobody is looked up a second time
