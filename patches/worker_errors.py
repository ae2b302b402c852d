# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a vLLM worker refuses reaches verl's trainer as an exception of its own, with its sentence.

vLLM reports a worker that fails at start as "Engine core initialization failed. See root cause above", and one that
fails in a call as a string inside others. The worker therefore writes the sentence to a file of its server, which
raises it.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jetrl_verl.patches.patch import Patch

FILE = "JETRL_WORKER_ERROR"
"""Variable of the server and its workers: the file for the sentence, which exists once a worker has refused."""


class WorkerError(RuntimeError):
    """What a worker of vLLM refused, in one sentence."""


_IN_A_CHECKOUT = ("WorkerError", "DeadServerError", "DamagedCheckpointError")
"""Exceptions that ``jetrl patch`` writes into verl."""


def sentence_of(error: BaseException | None) -> str:
    """The sentence of an exception of this package, or of one that it was caused by; empty if there is none."""
    for cause in causes(error):
        kind = type(cause)
        if kind.__module__.partition(".")[0] == "jetrl_verl" or kind.__name__ in _IN_A_CHECKOUT:
            return str(cause)
    return ""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that caused it: Ray wraps one once for each actor that it passes through."""
    while isinstance(error, BaseException):  # `cause` of another library's may be anything
        yield error
        error = getattr(error, "cause", None) or error.__cause__


@contextmanager
def reported_to_server() -> Iterator[None]:
    """In a worker: write what this package raises to the server's file."""
    try:
        yield
    except Exception as error:
        if FILE in os.environ and (sentence := sentence_of(error)):
            with open(os.environ[FILE], "w") as file:
                file.write(sentence)
        raise


async def _with_worker_error(call: Any) -> Any:
    try:
        return await call
    except Exception:
        file = os.environ.get(FILE, "")
        if not os.path.exists(file):
            raise
        with open(file) as lines:
            sentence = lines.read()
        os.remove(file)
        raise WorkerError(sentence) from None


async def launch_server(stock, self, *args: Any, **kwargs: Any) -> None:
    file = os.path.join(tempfile.gettempdir(), f"jetrl-worker-error-{os.getpid()}")
    if os.path.exists(file):  # of an earlier process of this number
        os.remove(file)
    os.environ[FILE] = file
    await _with_worker_error(stock(self, *args, **kwargs))


async def collective_rpc(stock, self, *args: Any, **kwargs: Any) -> None:
    await _with_worker_error(stock(self, *args, **kwargs))


_WHY = dict(
    symptom="what a rollout worker refuses stands in the middle of the log, and the run ends with another error",
    upstream="vLLM's front end passes on no exception of a worker; no issue is known",
    until="vLLM raises a worker's exception in its front end",
    needed=False,
)

START = Patch(
    replaces="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.launch_server",
    sha256={"0.9.1": "38bac9a952e3183454225d1c1bcf6169d9e979ebfab77510d2c780a87bd3df5c"},
    by=launch_server,
    **_WHY,
)
CALL = Patch(
    replaces="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.collective_rpc",
    sha256={"0.9.1": "5b0e7f6f403c86ee0ec8b52db5ded38cece59af6fe7c38b851c6ab5263c739e5"},
    by=collective_rpc,
    **_WHY,
)
PATCHES = (START, CALL)
