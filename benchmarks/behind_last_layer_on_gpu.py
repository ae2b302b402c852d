# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What lies behind a rollout's last layer: lm_head and the sampler, on one GPU, kernel by kernel.

    PYTHONPATH=. python3 benchmarks/behind_last_layer_on_gpu.py --out benchmarks/results/behind_last_layer_h200.json

Qwen3-8B's head, 151,936 x 4096, for several batch sizes; some 2 minutes.

*lm_head*: the shared kernel with its own tile and with others, and cuBLAS with BF16 logits, as stock vLLM has them,
and with FP32 logits; the floor is bytes over the copy bandwidth of this run or
operations over the tensor cores' rate, whichever is more. Ours must have the same bits: exit code 1 if one has not.

*sampling*: from logits to tokens, log-probabilities and ranks, as verl asks (temperature 1, the drawn token's
log-probability alone).

- *stock*: vLLM's second model runner on BF16 logits, as stock BF16 runs it.
- *stock, first runner*: the first model runner's on BF16 logits.
- *shared before*: what ``jet_fp8`` ran until its draw was one read: the second runner's sampler on FP32 logits, and
  the log-probabilities once more.
- *shared*: kernels/draw.py.

``decode_on_gpu.py --behind-last-layer`` records the same of a whole engine.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.behind_last_layer import print_shares
from jetrl_verl import kernels
from jetrl_verl.kernels.logits import MANY_ROWS, TILES, Tile, tile_of, triton_logits_by
from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.machine import Machine, this_machine
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.bench.timeline import Share, kernels_of, shares_of

VOCABULARY, WIDTH = 151936, 4096
ROWS = (1, 32, 64, 128, 256, 512)
BF16_RATE = 989.4e12
"""Operations a second, dense, of an H100 or H200 SXM (NVIDIA's data sheet)."""
EXTRA_TILES = (
    *(Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(256, 128, 64, 8, 3)),
    *(Tile(64, 256, 64, 4, 4), Tile(64, 256, 64, 8, 4), Tile(128, 256, 32, 8, 6)),
    *(Tile(64, 128, 64, 4, 6, True), Tile(64, 256, 64, 4, 4, True), Tile(256, 128, 64, 8, 3, True)),
)
"""Beside the kernel's own."""

console = Console(width=160)


# --- lm_head ----------------------------------------------------------------------------------------------------------


def lm_head_floor_us(machine: Machine, rows: int) -> float:
    """By bytes or by operations, with FP32 logits."""
    moved = 2 * VOCABULARY * WIDTH + 2 * rows * WIDTH + 4 * rows * VOCABULARY
    return 1e6 * max(moved / machine.bandwidth, 2 * rows * VOCABULARY * WIDTH / BF16_RATE)


def measure_lm_head(machine: Machine, weight: torch.Tensor, rows: int) -> dict:
    """The record of one batch size."""
    hidden = torch.randn(rows, WIDTH, device=machine.device, dtype=torch.bfloat16)
    own, expected = tile_of(rows, VOCABULARY), kernels.logits(hidden, weight)
    products = {"own tile": partial(triton_logits_by, hidden, weight, own)}
    for tile in dict.fromkeys([*TILES.values(), MANY_ROWS, *EXTRA_TILES]):
        products["x".join(map(str, tile[:-1])) + " tma" * tile.tma] = partial(triton_logits_by, hidden, weight, tile)
    calls = {"cublas, bf16 logits": lambda: hidden @ weight.t()}
    calls["cublas, fp32 logits"] = lambda: torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    differing, refused = [], {}
    for name, product in products.items():
        try:
            if not torch.equal(product(), expected):
                differing.append(name)
        except Exception as error:  # a tile that does not fit shared memory is an answer, too
            refused[name] = str(error).splitlines()[0]
            continue
        calls[name] = product
    times = machine.timer.interleaved({name: [call] for name, call in calls.items()})
    us = {name: spread._asdict() for name, spread in times.items()}
    floor = lm_head_floor_us(machine, rows)
    return {"rows": rows, "own": own._asdict(), "floor_us": floor, "us": us, "differing": differing, "refused": refused}


# --- the sampler ------------------------------------------------------------------------------------------------------


def first_runner(logits: torch.Tensor) -> Callable[[], object]:
    """vLLM's sampler of its first model runner, as that runner calls it."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    rows, numbers = len(logits), torch.ones(len(logits), device=logits.device)
    metadata = SamplingMetadata(
        temperature=numbers,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=numbers,
        presence_penalties=numbers,
        repetition_penalties=numbers,
        output_token_ids=[[]] * rows,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = Sampler(logprobs_mode="processed_logprobs")
    return lambda: sampler(logits, metadata)


def second_runner(logits: torch.Tensor) -> Callable[[], tuple]:
    """The kernels that vLLM's sampler of its second model runner launches at temperature 1."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_logprobs

    requests = torch.arange(len(logits), device=logits.device, dtype=torch.int32)
    ones, seeds = torch.ones(len(logits), device=logits.device), requests.long()

    def run() -> tuple:
        processed = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        tokens = gumbel_sample(processed, requests, ones, seeds, seeds, apply_temperature=False)
        return tokens, compute_topk_logprobs(processed, 0, tokens)

    return run


def samplers(logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Contender -> its call, on FP32 ``logits`` or their BF16 rounding."""
    rounded, ones = logits.bfloat16(), torch.ones(len(logits), device=logits.device)
    stock_on_fp32 = second_runner(logits)
    seeds = torch.arange(len(logits), device=logits.device)

    def before() -> object:
        tokens, _ = stock_on_fp32()
        return kernels.log_probs(logits, tokens[:, None], ones)

    def shared() -> object:
        tokens, normalised = kernels.draw_tokens(logits, ones, seeds, seeds)
        return kernels.drawn_log_probs(logits, tokens, ones, normalised)

    return {
        "stock": second_runner(rounded),
        "stock, first runner": first_runner(rounded),
        "shared before": before,
        "shared": shared,
    }


def measure_sampling(machine: Machine, rows: int) -> dict:
    """The record of one batch size: us of each sampler, and its kernels by name."""
    logits = 1.28 * torch.randn(rows, VOCABULARY, device=machine.device)  # as random weights give them
    calls = samplers(logits)
    with torch.no_grad():
        times = machine.timer.interleaved({name: [call] for name, call in calls.items()}, graphs=False)
        found = {}
        for name, call in calls.items():
            runs = kernels_of(call, times=1)
            found[name] = [share._asdict() for share in shares_of([runs])]
    floor = 1e6 * logits.nbytes / machine.bandwidth
    us = {name: spread._asdict() for name, spread in times.items()}
    return {"rows": rows, "one_read_us": floor, "us": us, "kernels": found}


# --- the whole --------------------------------------------------------------------------------------------------------


def print_report(records: list[dict], first: str) -> None:
    """A row for each batch size: us of each contender."""
    names = list(dict.fromkeys(name for record in records for name in record["us"]))
    table = Table(title=first, box=SIMPLE_HEAD)
    for heading in ("rows", "floor us", *names):
        table.add_column(heading, justify="right")
    for record in records:
        floor = record.get("floor_us", record.get("one_read_us"))
        cells = [f"{record['us'][name]['median']:.0f}" if name in record["us"] else "-" for name in names]
        table.add_row(str(record["rows"]), f"{floor:.0f}", *cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--lm-head-only", action="store_true", help="leave out the sampler, which needs vLLM")
    options = parser.parse_args()
    try:
        machine = this_machine(options.repeats)
    except BenchError as error:
        sys.exit(str(error))
    result = Result(options.out, machine.facts())
    weight = 0.02 * torch.randn(VOCABULARY, WIDTH, device=machine.device, dtype=torch.bfloat16)
    with torch.no_grad():
        heads = [measure_lm_head(machine, weight, rows) for rows in options.rows]
    result["lm_head"] = heads
    result.save()
    del weight
    machine.clear()
    print_report(heads, "lm_head, us")
    if not options.lm_head_only:
        result["sampling"] = sampled = [measure_sampling(machine, rows) for rows in options.rows]
        result.save()
        print_sampling(sampled)
    return 1 if any(record["differing"] for record in heads) else 0


def print_sampling(sampled: list[dict]) -> None:
    """A row for each batch size, and the kernels of the largest."""
    print_report(sampled, "sampling, us (floor: one read of FP32 logits)")
    for name, shares in sampled[-1]["kernels"].items():
        found = [Share(**share) for share in shares]
        print_shares(f"{name}, {sampled[-1]['rows']} rows", found, sum(share.us for share in found))


if __name__ == "__main__":
    sys.exit(main())
