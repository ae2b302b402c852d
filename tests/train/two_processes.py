# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a function in two processes joined by gloo, or in any number of them that join as they like."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


@contextmanager
def joined(rank: int, world: int, store: str | Path, backend: str = "gloo") -> Iterator[None]:
    """A group of ``world`` processes; ``store`` is a file of this group alone, which need not exist."""
    # Ranks as torchrun gives them, for code that reads the environment.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _run(rank: int, function: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    function(rank, *args)
    # After a backward under FSDP2, torch 2.11 aborts one exit in five ("terminate called without an active exception"):
    # a thread of its own is still alive when the interpreter's static objects go. The test is over by then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run_joined(rank: int, store: str, function: Callable[..., None], args: tuple) -> None:
    with joined(rank, WORLD, store):
        function(rank, *args)


def run_in_processes(count: int, function: Callable[..., None], *args) -> None:
    """``function(number, *args)`` in each of ``count`` processes, not joined; an exception in any is raised here."""
    mp.spawn(_run, (function, args), nprocs=count)


def run_in_two_processes(function: Callable[..., None], *args) -> None:
    """``function(rank, *args)`` in each of two joined processes; an exception in either is raised here."""
    with TemporaryDirectory() as folder:
        run_in_processes(WORLD, _run_joined, str(Path(folder) / "store"), function, args)
