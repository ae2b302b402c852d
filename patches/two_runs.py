# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A name for the weight sync's socket that two runs on one host do not share.

verl 0.9.1 names the socket after Ray's job id, replica and rank. Each Ray cluster starts counting jobs at 01000000, so
two runs on one host get the same name. The sender removes the file before it binds, so a rollout worker may silently
load the other run's weights; the contract check passes, because the sums come with them.

The patch adds the process id of Ray's daemon on this node, which both ends have in their environment, and its pid
namespace, since containers may share ``/tmp``. Outside Ray there is no run, and the name stays verl's.
"""

import os
from typing import Any

from jetrl_verl.patches.patch import Patch

_STEM = "ipc:///tmp/rl-colocate-zmq-"


def address_of_this_run(address: str) -> str:
    """verl's address, made unique for this run in a process of Ray.

    Args:
        address: ``ipc:///tmp/rl-colocate-zmq-<job>-replica-<n>-rank-<n>.sock``, as verl's two ends build it.

    Raises:
        RuntimeError: the address has another form.
    """
    if not address.startswith(_STEM):
        raise RuntimeError(
            f"weight sync: verl names its socket {address} and not {_STEM}..., so two runs on this host could not be "
            "told apart; install verl 0.9.1"
        )
    daemon = os.environ.get("RAY_RAYLET_PID")
    if daemon is None:
        return address
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{_STEM}{daemon}-{namespace}-{address.removeprefix(_STEM)}"


def adapter_of_this_run(stock, self: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, *args, **kwargs)
    self.zmq_handle = address_of_this_run(self.zmq_handle)


def handle_of_this_run(stock, self: Any) -> str:
    return address_of_this_run(stock(self))


_WHY = dict(
    symptom="a rollout worker may load the weights of another run on its host",
    upstream="the name holds Ray's job id to tell jobs of one cluster apart; no issue about two clusters is known",
    until="verl names the socket after something that no two runs share",
    needed=True,
)

SENDER = Patch(
    replaces="verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.__init__",
    sha256={"0.9.1": "d89ae15fa053a2deb94aff0c3c4b0a533052eb67688b5143e29311edb0fc2e8d"},
    by=adapter_of_this_run,
    **_WHY,
)
RECEIVER = Patch(
    replaces="verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension._get_zmq_handle",
    sha256={"0.9.1": "adc428ed9290d87d1563245eb382fc0e8bdff9620c2e5f14e165fab5ff717274"},
    by=handle_of_this_run,
    **_WHY,
)
PATCHES = (SENDER, RECEIVER)
