# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Two runs on one host have separate sockets: over verl's transport, and with two Ray clusters at once."""

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch

from jetrl_verl.patches import two_runs

VERLS = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"


def test_both_ends_of_a_run_share_an_address_that_other_runs_do_not(monkeypatch):
    monkeypatch.setenv("RAY_RAYLET_PID", "100")
    first = two_runs.address_of_this_run(VERLS)
    assert first == two_runs.address_of_this_run(VERLS)
    monkeypatch.setenv("RAY_RAYLET_PID", "101")
    assert two_runs.address_of_this_run(VERLS) != first
    monkeypatch.delenv("RAY_RAYLET_PID")  # as in verl's own tests
    assert two_runs.address_of_this_run(VERLS) == VERLS


def test_the_path_fits_a_unix_socket(monkeypatch):
    monkeypatch.setenv("RAY_RAYLET_PID", str(2**22))
    longest = two_runs.address_of_this_run(VERLS.replace("replica-0-rank-0", "replica-999-rank-15"))
    assert len(longest.removeprefix("ipc://")) < 107


def test_an_unknown_form_of_address_is_refused():
    with pytest.raises(RuntimeError, match="could not be told apart; install verl 0.9.1"):
        two_runs.address_of_this_run("tcp://127.0.0.1:5555")


def test_the_patched_sender_and_receiver_share_an_address(cpu_platform, monkeypatch):
    """The receiver's address comes from verl's method, the sender's from verl's constructor."""
    from verl.workers.rollout.vllm_rollout import vllm_rollout
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    monkeypatch.setenv("VERL_RAY_JOB_ID", "01000000")
    monkeypatch.setenv("VERL_REPLICA_RANK", "0")
    monkeypatch.setenv("RAY_RAYLET_PID", "100")
    worker = SimpleNamespace(local_rank=0, model_runner=None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(vllm_rollout.BaseRollout, "__init__", lambda self, config, *_: setattr(self, "config", config))
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr(vllm_rollout.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(vllm_rollout.ServerAdapter, "__init__", vllm_rollout.ServerAdapter.__init__)
    monkeypatch.setattr(vLLMColocateWorkerExtension, "_get_zmq_handle", vLLMColocateWorkerExtension._get_zmq_handle)
    for patch in two_runs.PATCHES * 2:
        patch.apply()
    config = SimpleNamespace(
        tensor_model_parallel_size=1, data_parallel_size=1, pipeline_model_parallel_size=1, layered_summon=False
    )
    receiver = vLLMColocateWorkerExtension._get_zmq_handle(worker)
    sender = vllm_rollout.ServerAdapter(config, None, None).zmq_handle
    assert sender == receiver != VERLS


def received(addresses: tuple[str, str]) -> float:
    """The weights that the first run's rollout gets when it connects after both trainers have bound their sockets."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

    def send(sender, value: float) -> None:
        sender._init_socket = lambda: None
        asyncio.run(sender.async_send_weights(iter([("weight", torch.full((4,), value))])))

    senders = [BucketedWeightSender(address, bucket_size_mb=1, use_shm=True) for address in addresses]
    for sender in senders:
        sender._init_socket()
    values = []
    for number, sender in reversed(list(enumerate(senders))):
        if sender.zmq_handle == addresses[0]:
            thread = threading.Thread(target=send, args=(sender, float(number)), daemon=True)
            thread.start()
            receiver = BucketedWeightReceiver(addresses[0], torch.device("cpu"), use_shm=True)
            receiver.receive_weights(lambda weights, is_last: values.append(float(weights[0][1][0])))
            thread.join(30)
            break
    for sender in senders:
        sender._cleanup()
    return values[0]


@pytest.mark.timeout(60)
def test_a_shared_address_loads_another_runs_weights_and_the_patched_does_not(cpu_platform, monkeypatch):
    """With one address the second trainer binds the first one's socket without an error and gets its rollout."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, as a socket's path must be
        monkeypatch.setattr(two_runs, "_STEM", f"ipc://{folder}/z-")
        verls = f"ipc://{folder}/z-01000000-replica-0-rank-0.sock"
        patched = []
        for daemon in ("100", "101"):
            monkeypatch.setenv("RAY_RAYLET_PID", daemon)
            patched.append(two_runs.address_of_this_run(verls))
        assert received((patched[0], patched[1])) == 0.0
        assert received((verls, verls)) == 1.0, "verl refuses a shared address now; this patch can go"


@pytest.mark.timeout(120)
def test_the_plugin_patches_both_ends_in_every_run():
    """Also in a run of ``precision=bf16``, which imports verl alone."""
    script = "import importlib\n" + "".join(
        f"module = importlib.import_module({end.module!r})\n"
        f"print(getattr(module.{end.function}, '_jetrl_patch', None))\n"
        for end in two_runs.PATCHES
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.stdout.split()[-2:] == [end.replaces for end in two_runs.PATCHES], answer.stderr[-2000:]


CLUSTER = """
import json, subprocess, sys
import ray

ADDRESS = (
    "from jetrl_verl.patches import two_runs;"
    "print(two_runs.address_of_this_run('ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock'))"
)

@ray.remote
class Worker:
    def addresses(self):
        from jetrl_verl.patches import two_runs
        job = ray.get_runtime_context().get_job_id()
        mine = two_runs.address_of_this_run(f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-0.sock")
        # vLLM's worker is a child of the server, not a Ray worker.
        child = subprocess.run([sys.executable, "-c", ADDRESS], capture_output=True, text=True, check=True)
        return job, mine, child.stdout.strip()

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
trainer, server = Worker.remote(), Worker.remote()
(job, sender, _), (_, _, receiver) = ray.get([trainer.addresses.remote(), server.addresses.remote()])
print(json.dumps([job, sender, receiver]), flush=True)
sys.stdin.read()  # both clusters live at the same time
"""


def test_two_ray_clusters_have_one_job_id_and_two_sockets(tmp_path):
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    runs = [
        subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        (job, sender, receiver), (other_job, other_sender, other_receiver) = (
            json.loads(next(line for line in run.stdout if line.startswith("["))) for run in runs
        )
    finally:
        for run in runs:
            run.communicate()
    assert job == other_job == "01000000", "verl's names collide"
    assert sender == receiver and other_sender == other_receiver
    assert sender != other_sender
