# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a function in two processes joined by gloo, or in any number of them that join as they like.

The processes are kept for the next test: importing torch, verl and vLLM takes each of them ten seconds, and two dozen
tests ask for them. A test whose environment differs, or that comes behind one that failed, gets new ones.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


class ProcessFailed(AssertionError):
    """The function raised in one of the processes, or a process ended; the message has the traceback."""


@contextmanager
def joined(rank: int, world: int, store: str | Path, backend: str = "gloo") -> Iterator[None]:
    """A group of ``world`` processes; ``store`` is a file of this group alone, which need not exist."""
    # Ranks as torchrun gives them, for code that reads the environment.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _serve(number: int, jobs: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:] = jobs.recv()  # before the function, which is found by its module's name
            function, args = jobs.recv()
        except EOFError:
            break
        torch.manual_seed(0)
        try:
            function(number, *args)
        except BaseException:
            jobs.send(traceback.format_exc())
            break
        jobs.send("")
    # After a backward under FSDP2, torch 2.11 aborts one exit in five ("terminate called without an active exception"):
    # a thread of its own is still alive when the interpreter's static objects go. The test is over by then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Kept:
    """Processes that wait for work, and the environment that they were started in."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.processes: list[tuple[mp.Process, Connection]] = []

    def take(self, count: int) -> list[tuple[mp.Process, Connection]]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        if environment != self.environment:
            self.end()
            self.environment = environment
        context = mp.get_context("spawn")
        for number in range(len(self.processes), count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(number, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append((process, ours))
        return self.processes[:count]

    def end(self) -> None:
        for process, connection in self.processes:
            process.kill()
            process.join()
            connection.close()
        self.processes = []


_KEPT = _Kept()


def _run_joined(rank: int, store: str, function: Callable[..., None], args: tuple) -> None:
    with joined(rank, WORLD, store):
        function(rank, *args)


def run_in_processes(count: int, function: Callable[..., None], *args) -> None:
    """``function(number, *args)`` in each of ``count`` processes, not joined; an exception in any is raised here."""
    running = _KEPT.take(count)
    try:
        for _, connection in running:
            connection.send(sys.path)
            connection.send((function, args))
        waiting = {connection: number for number, (_, connection) in enumerate(running)}
        while waiting:
            for connection in wait(waiting):
                number = waiting.pop(connection)
                try:
                    failure = connection.recv()
                except EOFError:
                    failure = "it ended without a word"
                if failure:
                    raise ProcessFailed(f"process {number} of {count}: {failure}")
    except BaseException:
        # One that waits for another that failed would wait for ever, and a time limit may have ended the wait here.
        _KEPT.end()
        raise


def run_in_two_processes(function: Callable[..., None], *args) -> None:
    """``function(rank, *args)`` in each of two joined processes; an exception in either is raised here."""
    with TemporaryDirectory() as folder:
        run_in_processes(WORLD, _run_joined, str(Path(folder) / "store"), function, args)
