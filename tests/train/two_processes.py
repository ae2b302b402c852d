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
"""Runs a function in two processes joined by gloo."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def _run(rank: int, store: str, function: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    # Ranks as torchrun gives them, for code that reads the environment.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    # After a backward under FSDP2, torch 2.11 aborts one exit in five ("terminate called without an active exception"):
    # a thread of its own is still alive when the interpreter's static objects go. The test is over by then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_in_two_processes(function: Callable[..., None], *args) -> None:
    """``function(rank, *args)`` in each of two processes; an exception in either is raised here."""
    with TemporaryDirectory() as folder:
        mp.spawn(_run, (str(Path(folder) / "store"), function, args), nprocs=WORLD)
