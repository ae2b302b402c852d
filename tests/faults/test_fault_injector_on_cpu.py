# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The fault injector fires once, at the right phase and step, and kills the last rank of the chosen process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_injector import AT_ITS_END, IN_THE_PHASE, VARIABLE, Fault, identity

STAND_IN = {
    "verl/trainer/ppo/v1/trainer_base.py": """
import time
class PPOTrainer:
    global_steps = 0
    def on_sample_begin(self): pass
    def phase(self, name):
        print(self.global_steps, name, "begins", flush=True)
        time.sleep(SECONDS)
        print(self.global_steps, name, "ends", flush=True)
    def _compute_old_log_prob(self, batch, metrics): self.phase("log_prob"); return batch
    def _update_actor(self, batch, metrics): self.phase("update"); return batch
    def _save_checkpoint(self): pass
""",
    "verl/trainer/ppo/v1/trainer_sync.py": """
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
class PPOTrainerSync(PPOTrainer):
    def on_sample_end(self): self.phase("generation")
    def on_step_end(self): self.phase("sync")
""",
    "verl/workers/rollout/vllm_rollout/utils.py": """
class vLLMColocateWorkerExtension:
    def update_weights_from_ipc(self):
        for bucket in (1, 2):
            self._update_weights(bucket)
""",
}
"""The parts of verl's trainer and rollout worker that the injector changes."""

TRAIN = """
import fault_injector
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
fault_injector.Fault(**{fault})._introduce("rollout")
trainer = PPOTrainerSync()
for step in (1, 2, 3):
    trainer.global_steps = step
    trainer.on_sample_begin()
    trainer.on_sample_end()
    assert trainer._compute_old_log_prob("batch", metrics={{}}) == "batch"
    assert trainer._update_actor("batch", metrics={{}}) == "batch"
    trainer._save_checkpoint()
    trainer.on_step_end()
"""


SYNC = """
import fault_injector
from types import SimpleNamespace
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
class Extension(vLLMColocateWorkerExtension):
    rank, parallel_config = 1, SimpleNamespace(world_size=2)
    def _update_weights(self, bucket): print("bucket", bucket, "is loaded", flush=True)
worker, trainer = Extension(), PPOTrainerSync()
trainer.phase = lambda name: worker.update_weights_from_ipc()
for trainer.global_steps in (1, 2):
    trainer.on_step_end()
"""


@pytest.mark.parametrize(
    ("phase", "seconds", "last", "when"),
    [
        ("log_prob", 1.5, "2 log_prob begins", IN_THE_PHASE),
        ("log_prob", 0, "2 log_prob ends", AT_ITS_END),
        ("update", 0, "2 update ends", AT_ITS_END),
        ("generation", 1.5, "1 sync ends", AT_ITS_END),  # it ends where the rollouts are put to sleep
        ("checkpoint", 0, "2 update ends", IN_THE_PHASE),
    ],
)
def test_a_process_is_killed_in_the_chosen_phase_or_at_its_end(tmp_path, phase, seconds, last, when):
    """Here the controller kills itself, so its last line shows when it died."""
    fault = Fault("kill", "rollout", phase, 2, str(tmp_path))
    script = TRAIN.format(fault=json.loads(fault.environment()[VARIABLE]))
    assert printed_before_death(fault, script, tmp_path, seconds)[-1] == last
    assert fault.killed() == when
    assert fault.fired() is not None and time.time() - fault.fired() < 60


def printed_before_death(fault: Fault, script: str, folder: Path, seconds: float = 0.0) -> list[str]:
    """Lines that a killed process of the fake verl printed."""
    for name, text in STAND_IN.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("SECONDS", str(seconds)))
        for level in list(file.relative_to(folder).parents)[:-1]:
            (folder / level / "__init__.py").touch()  # a regular package, which hides the installed verl
    environment = fault.environment()
    environment["PYTHONPATH"] = f"{folder}:{environment['PYTHONPATH']}"
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == -9, run.stderr
    return run.stdout.splitlines()


def test_a_worker_is_killed_in_its_first_bucket_of_the_sync(tmp_path):
    fault = Fault("kill", "rollout", "sync", 2, str(tmp_path))
    assert printed_before_death(fault, SYNC, tmp_path) == ["bucket 1 is loaded", "bucket 2 is loaded"]  # of step 1
    assert fault.killed() == IN_THE_PHASE


def test_an_unregistered_process_is_not_killed(tmp_path):
    fault = Fault("kill", "rollout", "update", 1, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"rollout\.pid"):
        fault.strike()
    assert fault.killed() is None


def test_a_fault_fires_once(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as victim:
        fault = Fault("kill", "trainer", "checkpoint", 1, str(tmp_path))
        (tmp_path / "trainer.pid").write_text(identity(victim.pid))
        assert fault.fired() is None and fault.killed() is None
        fault.fire()
        assert victim.wait(10) == -9
    (tmp_path / "trainer.pid").unlink()
    fault.fire()  # does not read the process id again
    fault.finish()
    assert fault.killed() == IN_THE_PHASE


def test_a_process_that_has_ended_is_not_recorded_as_killed(tmp_path):
    fault = Fault("kill", "trainer", "update", 1, str(tmp_path))
    with subprocess.Popen(["true"]) as victim:
        (tmp_path / "trainer.pid").write_text(identity(victim.pid))
        victim.wait(10)
    with pytest.raises(FileNotFoundError):
        fault.strike()
    (tmp_path / "trainer.pid").write_text(f"{os.getpid()} 1")  # another process has its id
    with pytest.raises(FileNotFoundError, match="the trainer, has ended; another process"):
        fault.strike()
    assert fault.killed() is None


def test_the_last_rank_is_the_one_killed(tmp_path):
    fault = Fault("kill", "trainer", "update", 1, str(tmp_path))
    fault._introduce("trainer", 0, 2)
    assert not (tmp_path / "trainer.pid").exists()
    fault._introduce("trainer", 1, 2)
    assert (tmp_path / "trainer.pid").exists()


def test_a_kill_in_the_sync_waits_for_a_worker_with_a_bucket(tmp_path, monkeypatch):
    """The controller only records the start of the sync; the next worker that loads a bucket kills."""
    fault = Fault("kill", "trainer", "sync", 1, str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as victim:
        (tmp_path / "trainer.pid").write_text(identity(victim.pid))
        fault.fire()
        assert fault.fired() is not None and fault.killed() is None and victim.poll() is None
        fault.strike()
        assert victim.wait(10) == -9 and fault.killed() == IN_THE_PHASE
