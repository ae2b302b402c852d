# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What it costs to add the products of a rollout's ranks in one order, on several GPUs, beside vLLM's own all-reduce.

    python3 -m benchmarks.reduce_ranks --ranks 4 --out reduce_ranks.json
    python3 -m benchmarks.reduce_ranks --ranks 2 --tiny                     # on a CPU by gloo, to try it out

A process on each GPU, joined as vLLM's engine joins its workers. Behind o and down a layer of Qwen3-8B adds ``[rows,
4096]`` BF16. Ways:

- *stock*: vLLM's all-reduce, whichever of its kernels it takes for that size. Its bits depend on that.
- *one stage*, *gathered*, *by rows*: rollout/row_parallel.py's three ways, the same bits; the first one is vLLM's
  custom kernel, told to let each rank read the products of all.

Up to 512 rows the reductions are in a CUDA graph, as a decode step has them, each on buffers of its own; beyond they
are eager, as a prefill has them. Microseconds of one reduction: of each rank the median over replays, and of those the
largest. Every way is held against the reference sum in every bit, on products whose sum rounds otherwise in any other
order; exit status 1 if one that promises the bits does not have them.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl.tools.provenance import provenance

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 4096)
CAPTURED = 512
COLUMNS = 4096
IN_A_GRAPH, REPLAYS = 32, 15
TINY = {"rows": (1, 8), "columns": 256}
STOCK, ONE_STAGE = "stock", "one stage"
GRAPHS_MEMORY = 2**30
"""Bytes of the inputs of a graph at most."""

console = Console(width=120)
Reduce = Callable[[torch.Tensor], torch.Tensor]


def ways(with_one_stage: bool) -> dict[str, Reduce]:
    """Name -> what adds the products of the ranks."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    from jetrl_verl.rollout import row_parallel

    if with_one_stage:
        os.environ[row_parallel.ALGORITHM] = row_parallel.IN_ONE_STAGE  # vLLM reads it at each call
        custom = row_parallel.custom_all_reduce()
        return {} if custom is None else {ONE_STAGE: custom.custom_all_reduce}
    ours = {"gathered": row_parallel._gathered, "by rows": row_parallel._by_rows}
    return {STOCK: tensor_model_parallel_all_reduce, **ours}


@contextmanager
def joined(rank: int, ranks: int, port: int, device: torch.device):
    """vLLM's groups of an engine with so many ranks."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    if device.type == "cpu":
        # Another name on each rank, so that vLLM's communicator in shared memory is off: its ranks wait in loops, which
        # two cores do not carry for four of them.
        os.environ["VLLM_DIST_IDENT"] = f"{port}-{rank}"
    backend = "nccl" if device.type == "cuda" else "gloo"
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, backend)
        initialize_model_parallel(ranks)
        yield
        torch.distributed.barrier()
    cleanup_dist_env_and_memory()


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


def captured(reduce: Reduce, inputs: list[torch.Tensor], expected: torch.Tensor) -> tuple[float, bool]:
    """Microseconds of one reduction in a CUDA graph of one for each of ``inputs``, and whether each has the bits."""
    from vllm.distributed import graph_capture

    graph = torch.cuda.CUDAGraph()
    for x in inputs[:2]:  # what compiles, compiles
        reduce(x)
    torch.cuda.synchronize()
    with graph_capture(device=inputs[0].device) as context:
        reduce(inputs[0])
        context.stream.synchronize()
        with torch.cuda.graph(graph, stream=context.stream):
            results = [reduce(x) for x in inputs]
    us = timed_us(graph.replay) / len(inputs)
    return us, all(same_bits(result, expected) for result in results)


def timed_us(run: Callable[[], object]) -> float:
    """Median over ``REPLAYS``, behind three that warm up; the ranks begin each together."""
    times = []
    for _ in range(REPLAYS + 3):
        torch.distributed.barrier()
        if not torch.cuda.is_available():
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e6)
            continue
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def measure(rank: int, options: argparse.Namespace, with_one_stage: bool) -> list[dict]:
    """Rows of this rank: bits and microseconds of each way and number of rows."""
    from jetrl_verl import kernels
    from jetrl_verl.sync.operations_probe import products_of_ranks

    device, found = torch.device("cpu" if options.tiny else f"cuda:{rank}"), []
    for rows in options.rows:
        shape = (rows, options.columns)
        (products,) = products_of_ranks(device, options.ranks, [shape])
        expected, mine = kernels.sum_of_ranks(products), products[rank]
        many = max(2, min(IN_A_GRAPH, GRAPHS_MEMORY // (mine.numel() * mine.element_size())))
        for name, reduce in ways(with_one_stage).items():
            in_a_graph = not options.tiny and rows <= CAPTURED
            if (result := reduce(mine.clone())) is None:  # vLLM's writes into its input on a CPU
                continue
            equal = same_bits(result, expected)
            inputs = [mine.clone() for _ in range(many)]
            if in_a_graph:
                us, equal_there = captured(reduce, inputs, expected)
                equal &= equal_there
            else:
                us = timed_us(lambda reduce=reduce, inputs=inputs: [reduce(x) for x in inputs]) / many
            found.append({"rows": rows, "way": name, "captured": in_a_graph, "equal": equal, "us": us})
    return found


def rank_program(rank: int, options: argparse.Namespace, port: int, found) -> None:
    """One process: leaves its rows in ``found``."""
    device = torch.device("cpu")
    if not options.tiny:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    with joined(rank, options.ranks, port, device):
        # One stage last: what vLLM's kernel is told for it holds for the rest of the process.
        found[rank] = [row for with_one_stage in (False, True) for row in measure(rank, options, with_one_stage)]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def slowest(ranks: list[list[dict]]) -> list[dict]:
    """One record for each row and way: the largest microseconds, and whether all ranks have the bits."""
    merged = []
    for of_all in zip(*ranks, strict=True):
        first = of_all[0]
        each = {"us": max(row["us"] for row in of_all), "equal": all(row["equal"] for row in of_all)}
        merged.append({**first, **each})
    return merged


def show(records: list[dict], ranks: int) -> None:
    table = Table(box=SIMPLE_HEAD, title=f"us of a reduction over {ranks} ranks")
    names = list(dict.fromkeys(record["way"] for record in records))
    for name in ("rows", "", *names):
        table.add_column(name, justify="right")
    for rows in sorted({record["rows"] for record in records}):
        of = {record["way"]: record for record in records if record["rows"] == rows}
        cells = [f"{of[n]['us']:.1f}{'' if of[n]['equal'] else ' other bits'}" if n in of else "" for n in names]
        table.add_row(str(rows), "graph" if any(record["captured"] for record in of.values()) else "eager", *cells)
    console.print(table)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of one host, 2 if not set")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--tiny", action="store_true", help="small tensors on a CPU, to try this out")
    options = parser.parse_args(words)
    if options.tiny:
        options.rows, options.columns = TINY["rows"], TINY["columns"]
    elif torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks {options.ranks} is not supported with {torch.cuda.device_count()} GPUs. Set fewer.")
    with multiprocessing.get_context("spawn").Manager() as manager:
        found = manager.dict()
        multiprocessing.spawn(rank_program, (options, free_port(), found), nprocs=options.ranks)
        records = slowest([found[rank] for rank in range(options.ranks)])
    show(records, options.ranks)
    if options.out:
        # Without NVLink multicast, which some machines turn off, stock has one kernel less.
        multicast = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1"
        about = {"ranks": options.ranks, "columns": options.columns, "multicast": multicast, "build": provenance()}
        options.out.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    return int(not all(record["equal"] for record in records if record["way"] != STOCK))


if __name__ == "__main__":
    sys.exit(main())
