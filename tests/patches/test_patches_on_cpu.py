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
"""Every run-time change to verl and vLLM: what it replaces is what the pinned version has, and what it is for holds.

The sums are of the replaced functions' source in verl 0.9.1 and vLLM 0.24.0. A new version with other source fails here
first, before it fails in a run.
"""

import ast
import asyncio
import hashlib
import importlib.util
import time
from pathlib import Path

import pytest
import torch
import zmq

from jetrl_verl.patches import weight_sync

REPLACED = {
    "verl/trainer/ppo/core_algos.py:get_policy_loss_fn": "d1267c6bd5ff402f",
    "verl/trainer/ppo/rollout_corr_helper.py:_parse_rollout_is_threshold": "612f97c4a2d427a7",
    "verl/trainer/ppo/v1/trainer_base.py:_compute_advantage": "88d9c72a30f7f49c",
    "verl/trainer/ppo/v1/utils.py:compute_advantage_for_multi_trajectories": "46c7a2240d72f694",
    "verl/utils/checkpoint/checkpoint_manager.py:find_latest_ckpt_path": "b9bfacf072753475",
    "verl/utils/debug/metrics.py:calculate_debug_metrics": "5e8ae0689ea96c24",
    "verl/utils/distributed.py:initialize_global_process_group_ray": "e9ec517a0089c3c5",
    "verl/utils/torch_functional.py:logprobs_from_logits_v2": "e2abcaee01a294f1",
    "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py:_init_socket": "677f158faa00015d",
    "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py:async_send_weights": "6be5e9d989aadc85",
    "verl/workers/rollout/vllm_rollout/utils.py:_get_zmq_handle": "5aa212f30783b183",
    "verl/workers/rollout/vllm_rollout/vllm_rollout.py:__init__": "e33055e903e36eb4",
    "verl/workers/utils/losses.py:ppo_loss": "d7a7f4ab82c8a092",
    "vllm/model_executor/layers/utils.py:dispatch_cpu_unquantized_gemm": "7a8cd246f64d9b0c",
    "vllm/utils/system_utils.py:_maybe_force_spawn": "7f0ccd84dac60ec9",
}


def source_sum(place: str) -> str:
    """Sum of a function's source, read from the file: nothing is imported, so no patch can be in the way."""
    path, name = place.split(":")
    package, _, rest = path.partition("/")
    (root,) = importlib.util.find_spec(package).submodule_search_locations
    text = (Path(root) / rest).read_text()
    function = next(n for n in ast.walk(ast.parse(text)) if getattr(n, "name", None) == name)
    return hashlib.sha256(ast.get_source_segment(text, function).encode()).hexdigest()[:16]


@pytest.mark.parametrize("place", REPLACED)
def test_the_replaced_function_is_the_pinned_one(place):
    assert source_sum(place) == REPLACED[place]


def test_a_dead_rollout_worker_is_an_error_in_bounded_time(cpu_platform, monkeypatch, tmp_path):
    """Nobody listens at the other end, as after a kill; verl's own sender would wait for ever."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    monkeypatch.setattr(weight_sync, "TIMEOUT_SECONDS", 1.0)
    weight_sync.install()
    sender = BucketedWeightSender(f"ipc://{tmp_path}/socket", bucket_size_mb=1, use_shm=True)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rollout worker did not answer within 1 s; it has died"):
        asyncio.run(sender.async_send_weights(iter([("weight", torch.zeros(4))])))
    assert time.monotonic() - started < 10


def test_a_worker_that_dies_between_buckets_is_an_error_too(cpu_platform, monkeypatch, tmp_path):
    import threading

    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    monkeypatch.setattr(weight_sync, "TIMEOUT_SECONDS", 1.0)
    weight_sync.install()
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


def test_a_request_that_its_connection_lost_is_an_error_too():
    """What libzmq leaves behind when the worker goes away between the frames of a request: nothing was asked."""
    gone = pytest.raises(RuntimeError, match="rollout worker went away .*; it has died")
    with zmq.Context() as context, context.socket(zmq.REQ) as socket, gone:
        weight_sync._TimedSocket(socket).recv()


def test_the_time_limit_is_under_a_minute():
    assert weight_sync.TIMEOUT_SECONDS < 60
