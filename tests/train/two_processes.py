# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a function in two processes joined by gloo, or in any number of processes that are not joined. Processes are
reused: importing torch, verl and vLLM takes ten seconds. A changed environment or a failure starts new ones."""

import functools
import inspect
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
    """The function raised in a process, whose traceback is the message, or a process ended."""


@contextmanager
def joined(rank: int, world: int, store: str | Path, backend: str = "gloo") -> Iterator[None]:
    """A group of ``world`` processes; ``store`` is the path of a new file."""
    # As torchrun sets them.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _serve(number: int, jobs: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:] = jobs.recv()  # before the function, which is unpickled by its module's name
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


class _Pool:
    """Idle processes and the environment that they were started in."""

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
            parent, child = context.Pipe()
            process = context.Process(target=_serve, args=(number, child), daemon=True)
            process.start()
            child.close()
            self.processes.append((process, parent))
        return self.processes[:count]

    def end(self) -> None:
        for process, connection in self.processes:
            process.kill()
            process.join()
            connection.close()
        self.processes = []


_POOL = _Pool()


def _run_joined(rank: int, store: str, function: Callable[..., None], args: tuple) -> None:
    with joined(rank, WORLD, store):
        getattr(function, "__wrapped__", function)(rank, *args)


def run_in_processes(count: int, function: Callable[..., None], *args) -> None:
    """``function(number, *args)`` in each of ``count`` processes, not joined; an exception in any is raised here."""
    running = _POOL.take(count)
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
                    failure = "it ended without a message"
                if failure:
                    raise ProcessFailed(f"process {number} of {count}: {failure}")
    except BaseException:
        # A process would wait for a failed one for ever; a time limit may have raised here.
        _POOL.end()
        raise


def run_in_two_processes(function: Callable[..., None], *args) -> None:
    """``function(rank, *args)`` in each of two joined processes; an exception in either is raised here."""
    with TemporaryDirectory() as folder:
        run_in_processes(WORLD, _run_joined, str(Path(folder) / "store"), function, args)


def in_two_processes(function: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in each of two joined processes, given its rank and the values of its fixtures (pickled)."""
    _, *fixtures = inspect.signature(function).parameters.values()

    @functools.wraps(function)
    def test(**values):
        run_in_two_processes(test, *(values[fixture.name] for fixture in fixtures))

    test.__signature__ = inspect.Signature(fixtures)
    return test
