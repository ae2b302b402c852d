# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's replay buffer notices finished rollouts soon, without polling all the time. The clock is simulated."""

import pytest
from patch_home import home

from jetrl_verl.patches.replay_buffer import POLL


class Clock:
    """The functions of ``time`` that verl and the patch use; ``sleep`` returns at once."""

    def __init__(self) -> None:
        self.now, self.waits = 1000.0, []

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


class Queue:
    """verl's queue with one prompt, done after ``done_after`` seconds; a listing lasts ``listing`` seconds."""

    def __init__(self, clock: Clock, done_after: float, listing: float = 0.0) -> None:
        self.clock, self.done_at, self.listing, self.listings = clock, clock.now + done_after, listing, 0

    def kv_list(self):
        self.listings += 1
        self.clock.now += self.listing
        status = "finished" if self.clock.now >= self.done_at else "running"
        prompt = {"uid": {"is_prompt": True, "global_steps": 1, "status": status}}
        return {"train": prompt | {"uid_0_0": {"length": 1}, "uid_1_0": {"length": 2}}}

    def kv_clear(self, partition_id, keys):
        pass


@pytest.fixture
def clock(cpu_platform, monkeypatch):
    from verl.trainer.ppo.v1 import replay_buffer

    clock = Clock()
    for module in {replay_buffer, home(POLL)}:
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def buffer(clock):
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    return ReplayBuffer("sync", {}, None, "drop", {}, refill_fn=None)


@pytest.fixture
def generate(clock, buffer, monkeypatch):
    """Callable: seconds from the end of a step's rollouts until the trainer has them, and the number of listings."""
    from verl.trainer.ppo.v1 import replay_buffer

    def wait(done_after: float, listing: float = 0.0) -> tuple[float, int]:
        queue = Queue(clock, done_after, listing)
        monkeypatch.setattr(replay_buffer, "tq", queue)
        batch, _ = buffer.sample(1, "train", 1)
        assert batch.keys == ["uid_0_0", "uid_1_0"]
        return clock.now - queue.done_at, queue.listings

    return wait


def test_a_step_does_not_wait_two_seconds_for_finished_rollouts(generate, buffer):
    late, listings = generate(0.32)
    assert late <= 0.05 + 1e-6, "verl's own interval ends 1.68 s after the rollouts"
    assert listings > 2
    assert buffer.poll_interval == 2.0, "the trainer that switches between rollout and update reads it as a threshold"


def test_the_update_does_not_lengthen_the_first_wait_of_the_next_step(generate, clock):
    generate(0.12)
    clock.now += 60.0  # the update; nine times as long is more than verl's interval
    late, _ = generate(0.12)
    assert late <= 0.05 + 1e-6


def test_a_slow_listing_is_polled_less_often(generate, clock):
    _, listings = generate(3.0, listing=0.05)
    assert 0.05 * listings <= 0.11 * (3.0 + 0.5), "listing takes a tenth of the time at most"
    clock.waits.clear()
    generate(3.0, listing=1.0)
    assert max(clock.waits) == 2.0, "no wait is longer than verl's own"


def test_another_interval_can_be_set(generate, clock, monkeypatch):
    monkeypatch.setattr(home(POLL), "POLL_SECONDS", 0.2)
    generate(0.3)
    assert clock.waits == [0.2, 0.2]


def test_a_shorter_interval_of_verl_is_kept(generate, buffer, clock):
    buffer.poll_interval = 0.01
    generate(0.1)
    assert set(clock.waits) == {0.01}


def test_the_interval_comes_from_the_environment():
    import subprocess
    import sys

    script = "from jetrl_verl.patches import replay_buffer; print(replay_buffer.POLL_SECONDS)"
    environment = {"VERL_REPLAY_BUFFER_POLL_SECONDS": "0.5", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0.5"
