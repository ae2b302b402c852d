# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Notice finished rollouts within 50 ms instead of 2 s.

verl 0.9.1's ``ReplayBuffer`` polls its queue every ``poll_interval`` (2 s), which no option sets, so a step waits 1 s
on average for rollouts that are done. ``VERL_REPLAY_BUFFER_POLL_SECONDS`` sets the interval here. A slow answer (it
lists every trajectory) lengthens the next wait, up to verl's interval: polling takes at most a tenth of the time.
``poll_interval`` itself stays: verl also reads it as the wait after which a step counts as idle.
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
    sha256={"0.9.1": "bcec1c7876f3ef3173fe83c4396df9ab8afcd866b029a2e5ef822ab713ed5042"},
    by=wait_for_next_poll,
    symptom="each step waits up to two seconds for rollouts that are done",
    upstream="poll_interval is a parameter of the constructor that the trainer does not pass; no issue is known",
    until="poll_interval becomes an option",
    needed=False,
)
PATCHES = (POLL,)
