# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout worker that is dead or has raised ends the weight sync with an error in bounded time."""

import asyncio
import threading
import time

import pytest
import torch
import zmq
from patch_home import current, home

from jetrl_verl.patches.tied_head import EMBEDDING
from jetrl_verl.patches.weight_sync import WATCH


def send(address: str, call=None) -> float:
    """Seconds that verl's sender takes to fail; ``call`` is Ray's of the workers."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    if call is not None:
        home(WATCH).CALLS[address] = call
    sender = BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
    started = time.monotonic()
    try:
        asyncio.run(sender.async_send_weights(iter([("weight", torch.zeros(4))])))
    finally:
        assert sender.socket is None and time.monotonic() - started < 15


def acknowledge(address: str, times: int) -> threading.Thread:
    """A worker that goes away after some acknowledgements, as one that raises in ``load_weights`` does."""

    def work() -> None:
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            socket.connect(address)
            for _ in range(times):
                socket.recv()
                socket.send(b"")
            socket.recv()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_worker_that_never_connects_is_an_error_in_bounded_time(cpu_platform, monkeypatch, tmp_path):
    monkeypatch.setattr(home(WATCH), "TIMEOUT_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match="rollout worker did not answer within 1 s; it has died"):
        send(f"ipc://{tmp_path}/socket")


@pytest.mark.parametrize("times", [0, 1])
def test_a_worker_that_goes_away_is_an_error_at_once(cpu_platform, tmp_path, times):
    """Before the buffer and before the last bucket; stock verl's sender would wait for ever."""
    thread = acknowledge(f"ipc://{tmp_path}/socket", times)
    with pytest.raises(RuntimeError, match="rollout worker went away"):
        send(f"ipc://{tmp_path}/socket")
    thread.join()


@pytest.mark.parametrize("connects", [True, False])
def test_the_error_is_the_workers_own_where_ray_has_it(cpu_platform, tmp_path, monkeypatch, connects):
    import ray

    def get(call):
        raise ValueError(call)

    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(ray, "get", get)
    thread = acknowledge(f"ipc://{tmp_path}/socket", 1) if connects else None
    with pytest.raises(ValueError, match="layer 3 has no weight of that name"):
        send(f"ipc://{tmp_path}/socket", "layer 3 has no weight of that name")
    if thread is not None:
        thread.join()
    assert not home(WATCH).CALLS


@pytest.mark.skipif(not EMBEDDING.applies, reason="vLLM 0.24 does not look for the embedding of a tied head")
def test_a_tied_head_may_come_in_a_later_bucket_than_the_embedding():
    from vllm.model_executor.models.utils import AutoWeightsLoader

    EMBEDDING.apply()
    model = torch.nn.Module()

    def bucket(*names: str) -> None:
        loader = AutoWeightsLoader(model)
        loader.aliased_params = {"lm_head.weight": "embed_tokens.weight"}
        loaded = {name for name, _ in loader._filter_skipped((name, torch.zeros(())) for name in names)}
        current(EMBEDDING)(loader, loaded - set(loader.aliased_params))

    with pytest.raises(ValueError, match="the tied weight is uninitialized"):
        bucket("norm.weight", "lm_head.weight")
    bucket("embed_tokens.weight", "norm.weight")
    bucket("lm_head.weight")
