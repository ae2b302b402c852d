# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A trainer whose rollout server has died says so when it replaces prompts, and when a weight sync fails."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
from patch_home import home

from jetrl_verl.patches.dead_servers import ASK, PATCHES


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.both.wait(5.0)
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


class Trainer:
    """What verl's trainer has whose two servers are one; its weight syncs fail."""

    _next_train_batch, _submit_batch_to_rollout = range, len

    def __init__(self, address: str) -> None:
        self._rollout_server_managers = lambda: [SimpleNamespace(server_addresses=[address, address])]

    @property
    def prev_step_profile(self):
        raise ValueError("the sync failed")


@pytest.fixture
def server():
    """vLLM's server: 200 while its engine lives, 503 afterwards; it answers two questions at once."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    server.status, server.both, server.address = 200, Barrier(2), f"127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def trainer(server, cpu_platform):
    for patch in PATCHES:
        patch.apply()
    return Trainer(server.address)


def replace(trainer: Trainer, seconds: float = 10.0) -> int:
    """verl's trainer replaces three prompts, ``seconds`` after the last ones."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    if hasattr(trainer, "_servers_asked"):
        trainer._servers_asked -= seconds
    return PPOTrainer._add_prompts_to_generate(trainer, 3)


def test_prompts_go_to_servers_that_live(trainer):
    assert [replace(trainer), replace(trainer)] == [3, 3]


def test_a_dead_engine_and_a_server_that_is_gone_end_the_run(trainer, server):
    assert replace(trainer) == 3
    server.status = 503
    assert replace(trainer, seconds=1.0) == 3, "asked a moment ago"
    error = home(ASK).DeadServerError
    with pytest.raises(error, match=rf"the vLLM server at {server.address} has died \(Service Unavailable\)"):
        replace(trainer)
    server.shutdown()
    server.server_close()
    with pytest.raises(error, match="has died .*refused.*resume from the last checkpoint"):
        replace(trainer)


@pytest.mark.parametrize(("status", "words"), [(200, "the sync failed"), (503, "has died")])
def test_a_failed_sync_is_explained_by_a_dead_server_alone(trainer, server, status, words):
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    server.status = status
    with pytest.raises((ValueError, RuntimeError), match=words):
        PPOTrainerSeparateAsync.on_step_end(trainer)
