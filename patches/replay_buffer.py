# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer sees within 50 ms that the rollouts are done, and not within two seconds.

verl 0.9.1's ``ReplayBuffer`` asks its queue every ``poll_interval`` seconds, 2.0, which no option reaches. So a step
waits one second on average for rollouts that are there, and ``timing_s/gen`` comes in multiples of two.

``VERL_REPLAY_BUFFER_POLL_SECONDS`` sets another interval. An answer that itself takes long (it lists every trajectory)
makes the next question wait longer, up to verl's interval, so that asking takes a tenth of the time at most.
``poll_interval`` keeps its value outside of the wait: the trainer that alternates between rollout and update also reads
it as the wait from which on a step counts as idle.
"""

import os
import time
from typing import Any

from jetrl_verl.patches.patch import Patch

POLL_SECONDS = float(os.getenv("VERL_REPLAY_BUFFER_POLL_SECONDS", "0.05"))


def wait_for_next_poll(stock, self: Any, partition_id: str, last_debug_time: float) -> float:
    asked_at = max(last_debug_time, getattr(self, "_waited_until", 0.0))
    interval = self.poll_interval
    self.poll_interval = min(interval, max(POLL_SECONDS, 9 * (time.time() - asked_at)))
    try:
        return stock(self, partition_id, last_debug_time)
    finally:
        self.poll_interval = interval
        self._waited_until = time.time()


POLL = Patch(
    replaces="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll",
    version="0.9.1",
    sha256="bcec1c7876f3ef3173fe83c4396df9ab8afcd866b029a2e5ef822ab713ed5042",
    by=wait_for_next_poll,
    symptom="each step waits up to two seconds for rollouts that are done",
    upstream="poll_interval is a parameter of the constructor that the trainer does not pass; no issue is known",
    until="poll_interval becomes an option",
    needed=False,
)
PATCHES = (POLL,)
