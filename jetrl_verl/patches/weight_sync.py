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
"""A time limit on the weight sync's handshakes, so that a dead rollout worker is an error and not a hang.

verl 0.9.1's ``BucketedWeightSender`` waits for each acknowledgement without a limit. A worker that raises while loading
still acknowledges (rollout/worker.py), but one that was killed never will. Installed with our engine only. Can go when
verl bounds these waits itself; no upstream issue is known.
"""

import zmq

TIMEOUT_SECONDS = 45.0
"""Longest wait for one acknowledgement. A bucket is copied in milliseconds to seconds."""


class _TimedSocket:
    """A ZMQ socket whose waits end in a sentence."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_SECONDS * 1000))
        socket.setsockopt(zmq.SNDTIMEO, int(TIMEOUT_SECONDS * 1000))
        # A message that nobody will read must not keep the process from ending.
        socket.setsockopt(zmq.LINGER, 0)

    def __getattr__(self, name: str):
        return getattr(self._socket, name)

    def _bounded(self, call, *args):
        try:
            return call(*args)
        except zmq.Again:
            what = f"did not answer within {TIMEOUT_SECONDS:.0f} s"
        except zmq.ZMQError as error:
            # A connection that ends between the two frames of a request takes the request with it, and libzmq reports
            # it as sent; only the wait for an answer then fails, since nothing was asked.
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


def install() -> None:
    """Wrap the sender's socket; idempotent."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    stock = BucketedWeightSender._init_socket
    if getattr(stock, "_jetrl", False):
        return

    def init_socket(self) -> None:
        stock(self)
        self.socket = _TimedSocket(self.socket)

    init_socket._jetrl = True
    BucketedWeightSender._init_socket = init_socket
