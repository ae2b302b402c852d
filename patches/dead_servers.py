# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A run whose rollout server has died ends with one sentence, and the server's engine with it.

verl 0.9.1's asynchronous trainers replace prompts that failed. A server whose engine has died fails every prompt at
once and then looks idle to the balancer, so the run neither trains nor ends. Before it replaces prompts, the trainer
now asks its servers, at most every ten seconds; and after a weight sync to GPUs of their own that failed.

vLLM's engine does not notice that its server was killed, and would keep its GPU memory after the run. Its workers,
which verl ends with the engine, now end the engine with the server.
"""

import contextlib
import os
import select
import signal
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jetrl_verl.patches.patch import Patch

REACHES = ("verl.trainer.ppo.v1.trainer_base:PPOTrainer._rollout_server_managers",)

ASK_SECONDS = 10.0
"""Shortest time between two rounds of questions: group filtering replaces prompts all the time."""


class DeadServerError(RuntimeError):
    """A server of the rollout has died."""


def add_prompts_to_generate(stock, self: Any, num_prompts: int) -> int:
    if time.monotonic() - getattr(self, "_servers_asked", -ASK_SECONDS) >= ASK_SECONDS:
        self._servers_asked = time.monotonic()
        _check_servers(self)
    return stock(self, num_prompts)


def sync_weights(stock, self: Any) -> None:
    try:
        stock(self)
    except Exception:
        _check_servers(self)
        raise


def set_death_signal(stock) -> None:
    stock()
    if "RAY_RAYLET_PID" not in os.environ:  # outside Ray there is no server
        return
    threading.Thread(target=_end_with_server, args=(os.getppid(),), daemon=True).start()


def _end_with_server(engine: int) -> None:
    with contextlib.suppress(OSError):  # the engine has ended, or the server is outside this container
        server = Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1]
        select.select([os.pidfd_open(int(server))], [], [])
        os.kill(engine, signal.SIGKILL)


def _check_servers(trainer: Any) -> None:
    addresses = [address for manager in trainer._rollout_server_managers() for address in manager.server_addresses]
    if addresses:
        with ThreadPoolExecutor(len(addresses)) as pool:  # at once: each busy one is waited for
            list(pool.map(_check_server, addresses))


def _check_server(address: str) -> None:
    try:
        without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        without_proxy.open(f"http://{address}/health", timeout=30).close()
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):  # busy
            return
        raise DeadServerError(
            f"rollout: the vLLM server at {address} has died ({reason}), so every prompt that it gets fails; see its "
            "messages above, and resume from the last checkpoint (trainer.resume_mode=auto)."
        ) from None


_UPSTREAM = "failed prompts are replaced without a limit; no issue is known"
_UNTIL = "verl notices that a server has died"

ASK = Patch(
    replaces="verl.trainer.ppo.v1.trainer_base:PPOTrainer._add_prompts_to_generate",
    sha256={"0.9.1": "26c17c87ef890cf0b7d734d08dcbf3136ef4ec3492f5a836e53d8d2f57005444"},
    by=add_prompts_to_generate,
    symptom="a run whose rollout server has died waits for ever",
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=False,
)
_OF_A_SYNC = dict(
    by=sync_weights,
    symptom="a run whose rollout server has died says so in the middle of the log",
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=False,
)
FIRST_SYNC = Patch(
    replaces="verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.on_init_end",
    sha256={"0.9.1": "4d2d5fa196a14ab4af494969ed76017fe658d630295cdb582c9ccf4ed7318e5b"},
    **_OF_A_SYNC,
)
SYNC = Patch(
    replaces="verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.on_step_end",
    sha256={"0.9.1": "cb0bfad84d0cad5d43685962c9a11c67d25387fc8661d49821de92e8295bcfdd"},
    **_OF_A_SYNC,
)
ENGINE = Patch(
    replaces="verl.workers.rollout.vllm_rollout.utils:set_death_signal",
    sha256={"0.9.1": "554d84d0d41ebb0a6de184c6f8f68fcdc0cad87537b18d7538a08394490abbcb"},
    by=set_death_signal,
    symptom="an engine whose server was killed outlives the run and keeps its GPU memory",
    upstream="a worker ends with its engine, and the engine with nothing; no issue is known",
    until="vLLM's engine ends with the process that started it",
    needed=False,
)
PATCHES = (ASK, FIRST_SYNC, SYNC, ENGINE)
