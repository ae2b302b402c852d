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
"""A socket for the weight sync that two runs on one host do not share.

verl 0.9.1 names the socket of trainer and rollout worker after Ray's job id, replica and rank. Each Ray cluster counts
its jobs from 01000000, so two runs on one host, each with a cluster of its own, get one name. The sender removes what
lies at its name before it binds, so nobody is told: a rollout worker may connect to the other run's trainer and load
its weights, and the contract check holds, because the sums come with them.

The name gets what tells clusters apart and what both ends see without being told: the process id of Ray's daemon on
this node, which Ray leaves in the environment of each of its workers and vLLM's own processes inherit, and the
namespace in which that id counts, since containers may share ``/tmp``.

Gone when verl names the socket after something that no two runs share; no upstream issue is known.
"""

import functools
import os
from typing import Any

_STEM = "ipc:///tmp/rl-colocate-zmq-"


def address_of_this_run(address: str) -> str:
    """verl's address with this run in it.

    Args:
        address: ``ipc:///tmp/rl-colocate-zmq-<job>-replica-<n>-rank-<n>.sock``, as verl's two ends build it.

    Raises:
        RuntimeError: another form of address, which this patch would leave shared.
    """
    if not address.startswith(_STEM):
        raise RuntimeError(
            f"weight sync: verl names its socket {address} and not {_STEM}..., so two runs on this host could not be "
            "told apart; install verl 0.9.1"
        )
    # Outside Ray, as in a test of one end, there is no daemon and no second run.
    daemon = os.environ.get("RAY_RAYLET_PID", "0")
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{_STEM}{daemon}-{namespace}-{address.removeprefix(_STEM)}"


def install_sender() -> None:
    """Wrap verl's rollout adapter, in a process that trains; idempotent. The receiver is ours (rollout/worker.py)."""
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    stock = ServerAdapter.__init__
    if getattr(stock, "_jetrl", False):
        return

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.zmq_handle = address_of_this_run(self.zmq_handle)

    __init__._jetrl = True
    ServerAdapter.__init__ = __init__
