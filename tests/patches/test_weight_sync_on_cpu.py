# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout worker that is dead ends the weight sync with an error in bounded time."""

import asyncio
import time

import pytest
import torch
import zmq
from patch_home import home

from jetrl_verl.patches.weight_sync import TIME_LIMIT


def test_a_dead_rollout_worker_is_an_error_in_bounded_time(cpu_platform, monkeypatch, tmp_path):
    """Nobody listens at the other end, as after a kill; stock verl's sender would wait for ever."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    monkeypatch.setattr(home(TIME_LIMIT), "TIMEOUT_SECONDS", 1.0)
    sender = BucketedWeightSender(f"ipc://{tmp_path}/socket", bucket_size_mb=1, use_shm=True)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rollout worker did not answer within 1 s; it has died"):
        asyncio.run(sender.async_send_weights(iter([("weight", torch.zeros(4))])))
    assert time.monotonic() - started < 10


def test_a_worker_that_dies_between_buckets_is_an_error(cpu_platform, monkeypatch, tmp_path):
    import threading

    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    monkeypatch.setattr(home(TIME_LIMIT), "TIMEOUT_SECONDS", 1.0)
    address = f"ipc://{tmp_path}/socket"

    def acknowledge_once_then_vanish() -> None:
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            socket.connect(address)
            socket.recv()
            socket.send(b"")

    thread = threading.Thread(target=acknowledge_once_then_vanish)
    thread.start()
    sender = BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
    with pytest.raises(RuntimeError, match="rollout worker (did not answer|went away)"):
        asyncio.run(sender.async_send_weights(iter([("weight", torch.zeros(4))])))
    thread.join()


def test_a_request_lost_with_its_connection_is_an_error(cpu_platform):
    """libzmq's state after a worker dies between the frames of a request: no request is pending."""
    gone = pytest.raises(RuntimeError, match="rollout worker went away .*; it has died")
    with zmq.Context() as context, context.socket(zmq.REQ) as socket, gone:
        home(TIME_LIMIT)._TimedSocket(socket).recv()
