# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout worker that fails during a weight sync ends the run with its own error, not a hang.

verl 0.9.1's ``BucketedWeightSender`` waits for each acknowledgement without a limit and blocks the trainer's event loop
meanwhile, so nobody learns that the worker has raised or was killed. Its socket now also watches the connection, which
ends with the worker, and Ray's call of ``update_weights_from_ipc``, which the worker may fail before it connects.
"""

import time
from typing import Any

import zmq

from jetrl_verl.patches.patch import Patch

REACHES = ("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender.async_send_weights",)
"""``async_send_weights`` uses the socket whose waits are bounded here; scripts/reach.py watches it."""

TIMEOUT_SECONDS = 300.0
"""Longest wait for a worker that neither fails nor goes away: long, since stock verl under ``bf16`` has no limit."""

CALLS: dict[str, Any] = {}
"""Address of a sync's socket -> Ray's reference to the call of its workers, on the rank that made the call."""


class _WatchedSocket:
    """A ZMQ socket whose waits end when the worker at its other end has failed; ``call`` as in :data:`CALLS`."""

    def __init__(self, socket: zmq.Socket, call: Any = None) -> None:
        self._socket, self._call = socket, call
        self._disconnected = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        # An unread message must not keep the process alive.
        socket.setsockopt(zmq.LINGER, 0)

    def __getattr__(self, name: str):
        return getattr(self._socket, name)

    def recv(self, *args):
        self._wait(zmq.POLLIN)
        return self._socket.recv(*args)

    def send_pyobj(self, *args):
        self._wait(zmq.POLLOUT)
        return self._socket.send_pyobj(*args)

    def close(self, *args) -> None:
        self._socket.disable_monitor()
        self._socket.close(*args)

    def _wait(self, event: int) -> None:
        poller, deadline = zmq.Poller(), time.monotonic() + TIMEOUT_SECONDS
        poller.register(self._socket, event)
        poller.register(self._disconnected, zmq.POLLIN)
        reason = f"did not answer within {TIMEOUT_SECONDS:.0f} s"
        while time.monotonic() < deadline:
            ended = self._disconnected in dict(poller.poll(200))
            # Asked again: the last answer may have come with the end of the connection.
            if self._socket.poll(0, event):
                return
            if ended:
                reason = "went away while weights were sent to it"
                break
            if self._call is not None and self._call_has_ended(0):
                break
        if self._call is not None and self._call_has_ended(10):
            import ray

            ray.get(self._call)  # raises what the worker raised
        raise RuntimeError(
            f"weight sync: the rollout worker {reason}; it has died or failed before it could receive weights, see its "
            "messages above"
        )

    def _call_has_ended(self, seconds: float) -> bool:
        import ray

        return bool(ray.wait([self._call], timeout=seconds)[0])


def init_socket(stock, self) -> None:
    stock(self)
    self.socket = _WatchedSocket(self.socket, CALLS.pop(self.zmq_handle, None))


async def execute_method(stock, self, method: str, *args: Any, **kwargs: Any) -> Any:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import CALLS

    answer = await stock(self, method, *args, **kwargs)
    if method == "update_weights_from_ipc" and answer is not None:
        CALLS[self.zmq_handle] = answer
    return answer


_WHY = dict(
    symptom="a run whose rollout worker fails or is killed during a weight sync waits for ever",
    upstream="every wait is without a limit; no issue is known",
    until="verl's sender learns that its worker has failed",
    needed=False,
)

WATCH = Patch(
    replaces="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender._init_socket",
    sha256={"0.9.1": "8d56f6f57486d748ae4955254b12356ef113a37e6471cc74ca157e863141a649"},
    by=init_socket,
    **_WHY,
)
CALL = Patch(
    replaces="verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter._execute_method",
    sha256={"0.9.1": "208d0eb41494460b8d3063dd7183f4394115b947d25e76cf8a1fad7a074077e3"},
    by=execute_method,
    **_WHY,
)
PATCHES = (WATCH, CALL)
