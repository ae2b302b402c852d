# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A trainer that raises during a weight sync reports its own error at once, and the receiver, which waits without a
limit, ends with the engine that started it, and both with their server (docs/log.md)."""

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
SECONDS = 90.0
"""Longest wait for a process that imports vLLM on a busy machine."""

RECEIVER = """
import sys
from pathlib import Path
from jetrl_verl import cpu_platform
cpu_platform.install()
import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import set_death_signal  # vLLM's worker calls it in its constructor
set_death_signal()
Path(sys.argv[2]).touch()
BucketedWeightReceiver(sys.argv[1], torch.device("cpu"), use_shm=True).receive_weights(lambda weights, is_last: None)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
"""Stands for vLLM's engine, the parent of the worker, and for its server, the engine's parent."""


def until(met, what: str) -> None:
    ends = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < ends, what
        time.sleep(0.1)


def raises_in_the_middle():
    yield "weight", torch.zeros(4)
    # The bucket is full, so the error comes after the receiver's first acknowledgement.
    yield "another", torch.zeros(2**18)
    raise ValueError("the trainer's own error")


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", ["engine", "server"])
def test_the_trainers_error_is_raised_and_the_receiver_ends_with_engine_and_server(cpu_platform, tmp_path, killed):
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    address, waits = f"ipc://{tmp_path}/socket", tmp_path / "waits"
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": str(ROOT), "RAY_RAYLET_PID": "1"}
    words = [sys.executable, "-c", PARENT, PARENT, RECEIVER, address, str(waits)]
    processes = {"server": psutil.Popen(words, env=environment)}
    try:
        until(waits.exists, "the receiver does not wait")
        (processes["engine"],) = processes["server"].children()
        (receiver,) = processes["engine"].children()
        sender = BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
        started = time.monotonic()
        with pytest.raises(ValueError, match="the trainer's own error"):
            asyncio.run(sender.async_send_weights(raises_in_the_middle()))
        assert time.monotonic() - started < 30, "it waited for an acknowledgement"
        time.sleep(1.0)
        assert is_alive(receiver), "the receiver ended without its engine"
        processes[killed].kill()
        until(lambda: not is_alive(receiver), f"the receiver outlives its {killed}")
        until(lambda: not is_alive(processes["engine"]), f"the engine outlives its {killed}")
    finally:
        for process in processes.values():
            if is_alive(process):
                process.kill()
        processes["server"].wait()


def test_the_worker_extension_sets_its_death_signal(cpu_platform, monkeypatch):
    from verl.workers.rollout.vllm_rollout import utils

    from jetrl_verl.rollout.worker import JetWorkerExtension

    calls = []
    monkeypatch.setattr(utils, "set_death_signal", lambda: calls.append(True))
    JetWorkerExtension()
    assert calls == [True]
