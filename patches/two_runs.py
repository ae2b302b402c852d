# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A socket for the weight sync that two runs on one host do not share.

verl 0.9.1 names the socket of trainer and rollout worker after Ray's job id, replica and rank. Each Ray cluster counts
its jobs from 01000000, so two runs on one host, each with a cluster of its own, get one name. The sender removes what
lies at its name before it binds, so nobody is told: a rollout worker may connect to the other run's trainer and load
its weights, and the contract check holds, because the sums come with them.

The name gets what tells clusters apart and what both ends see without being told: the process id of Ray's daemon on
this node, which Ray leaves in the environment of each of its workers and vLLM's own processes inherit, and the
namespace in which that id counts, since containers may share ``/tmp``.
"""

import os
from typing import Any

from jetrl_verl.patches.patch import Patch

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


def adapter_of_this_run(stock, self: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, *args, **kwargs)
    self.zmq_handle = address_of_this_run(self.zmq_handle)


def handle_of_this_run(stock, self: Any) -> str:
    return address_of_this_run(stock(self))


_SYMPTOM = "a rollout worker may load the weights of another run on its host"
_UPSTREAM = "the name holds Ray's job id to tell jobs of one cluster apart; no issue about two clusters is known"
_UNTIL = "verl names the socket after something that no two runs share"

SENDER = Patch(
    replaces="verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.__init__",
    version="0.9.1",
    sha256="d89ae15fa053a2deb94aff0c3c4b0a533052eb67688b5143e29311edb0fc2e8d",
    by=adapter_of_this_run,
    symptom=_SYMPTOM,
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=True,
)
RECEIVER = Patch(
    replaces="verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension._get_zmq_handle",
    version="0.9.1",
    sha256="adc428ed9290d87d1563245eb382fc0e8bdff9620c2e5f14e165fab5ff717274",
    by=handle_of_this_run,
    symptom=_SYMPTOM,
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=True,
)
PATCHES = (SENDER, RECEIVER)
