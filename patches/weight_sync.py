# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A time limit on the weight sync's handshakes: a dead rollout worker is an error, not a hang.

verl 0.9.1's ``BucketedWeightSender`` waits for each acknowledgement without a limit. A worker that raises while loading
still acknowledges (rollout/worker.py); one that was killed never does. Applied with our engine only.
"""

import zmq

from jetrl_verl.patches.patch import Patch

REACHES = ("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender.async_send_weights",)
"""``async_send_weights`` uses the socket whose waits are bounded here; scripts/reach.py watches it."""

TIMEOUT_SECONDS = 45.0
"""Longest wait for one acknowledgement. A bucket is copied in milliseconds to seconds."""


class _TimedSocket:
    """A ZMQ socket with bounded waits."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_SECONDS * 1000))
        socket.setsockopt(zmq.SNDTIMEO, int(TIMEOUT_SECONDS * 1000))
        # An unread message must not keep the process alive.
        socket.setsockopt(zmq.LINGER, 0)

    def __getattr__(self, name: str):
        return getattr(self._socket, name)

    def _bounded(self, call, *args):
        try:
            return call(*args)
        except zmq.Again:
            what = f"did not answer within {TIMEOUT_SECONDS:.0f} s"
        except zmq.ZMQError as error:
            # A connection that ends between the two frames of a request loses the request, and libzmq reports it as
            # sent; the wait for an answer then fails with EFSM.
            if error.errno != zmq.EFSM:
                raise
            what = "went away while weights were sent to it"
        raise RuntimeError(
            f"weight sync: the rollout worker {what}; it has died or failed before it could receive weights, see its "
            "messages above"
        )

    def recv(self, *args):
        return self._bounded(self._socket.recv, *args)

    def send_pyobj(self, *args):
        return self._bounded(self._socket.send_pyobj, *args)


def init_socket(stock, self) -> None:
    stock(self)
    self.socket = _TimedSocket(self.socket)


TIME_LIMIT = Patch(
    replaces="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender._init_socket",
    sha256={"0.9.1": "8d56f6f57486d748ae4955254b12356ef113a37e6471cc74ca157e863141a649"},
    by=init_socket,
    symptom="a run whose rollout worker was killed waits for ever and not 45 s",
    upstream="every wait is without a limit; no issue is known",
    until="verl bounds these waits itself",
    needed=False,
)
PATCHES = (TIME_LIMIT,)
