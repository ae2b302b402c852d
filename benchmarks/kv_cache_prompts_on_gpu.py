# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What an FP8 KV cache costs where a token's key is read by many queries: prompts of a rollout, and the trainer.

    PYTHONPATH=. python3 benchmarks/kv_cache_prompts_on_gpu.py --out benchmarks/results/kv_cache_prompts_h200.json

One layer of 32 query heads on 8 KV heads of 128 (Qwen3-8B).

**Prompts**, whole, in chunks that come one after another, and behind tokens that the cache holds; pages of 16 tokens in
any order. Writing into the pages is in no figure.

- *fp8*: ``kernels.chunk_attention``, as a rollout calls it: pages to rows of BF16, then FlashAttention 3.
- *bf16*: FlashAttention 3 of vLLM's wheel over BF16 pages with ``num_splits=1``; *bf16, any split*: as stock vLLM.

**Training**, packed sequences: forward, and backward by itself.

- *fp8*: ``kernels.attention_fp8``, which quantizes keys and values, keeps FP8 data and dequantizes them for backward.
- *fp8, recomputed*: the same with ``keep_fp8=False``, as the trainer calls it under activation checkpointing, where
  what is kept lives for one layer: no FP8 data.
- *bf16*: ``kernels.attention``; *flash attention 3*: with any split, and the same backward, which is torch's.

*fp8*, both, and *bf16* have the same numbers to read, and must give the same bits in forward. Exit code 1 if they do
not. Bars: prompts and forward have 0.90 of the speed of the fastest other one, backward is no slower than *bf16*'s. A
missed bar is printed and changes no exit code. Medians over rounds in turn, as all of ``jetrl bench``.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from kv_cache_on_gpu import BLOCK_SIZE, HEAD_DIM, HEADS, SCALE, filled_caches, flash_attention
from rich.console import Console

from jetrl_verl import kernels
from jetrl_verl.kernels.attention import PackedAttention
from jetrl_verl.kernels.dispatch import lookup
from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.machine import Machine, this_machine
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.bench.timing import Spread

KV_HEADS = 8
PROMPTS = {
    "16 x 1024": (16, 0, (1024,)),
    "1 x 8192": (1, 0, (8192,)),
    "1 x 8192 in chunks of 2048": (1, 0, (2048,) * 4),
    "1 x 2048 behind 16384": (1, 16384, (2048,)),
}
"""Requests, tokens of each that the cache holds, new tokens of each in one call after the other."""
PACKED = {"16 x 1024": [1024] * 16, "4 x 4096": [4096] * 4, "1 x 16384": [16384]}
"""Lengths of the sequences of a row."""
SPEED_BAR, BACKWARD_BAR = 0.90, 1.0
FP8, RECOMPUTED = "fp8", "fp8, recomputed"
BF16, FLASH, ANY_SPLIT = "bf16", "flash attention 3", "bf16, any split"

Call = Callable[[], list[torch.Tensor]]


def starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    """First token of each, and, last, how many there are."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


# ---- prompts --------------------------------------------------------------------------------------------------------


def prompts(requests: int, held: int, chunks: tuple[int, ...], device: torch.device) -> dict[str, Call]:
    """Calls that return the output of each chunk, over the same tokens."""
    torch.manual_seed(requests)
    tokens = held + sum(chunks)
    pages = requests * -(-tokens // BLOCK_SIZE)
    table = torch.randperm(pages, device=device).to(torch.int32).view(requests, -1)
    fp8, bf16 = filled_caches(pages, KV_HEADS, device)
    ours, theirs = [], {1: [], 0: []}
    for new, length in zip(chunks, list(accumulate(chunks, initial=held))[1:], strict=True):
        q = torch.randn(requests * new, HEADS, HEAD_DIM, device=device).bfloat16()
        lengths = torch.full((requests,), length, dtype=torch.int32, device=device)
        cu_queries, out = starts([new] * requests, device), torch.empty_like(q)
        call = (q, fp8, cu_queries, new, lengths, [length] * requests, table, SCALE, out)
        ours.append(partial(chunk_of_ours, *call))
        for splits, calls in theirs.items():
            calls.append(partial(flash_attention, q, bf16, lengths, table, length, splits, cu_queries, new))
    return {
        name: partial(one_after_another, calls)
        for name, calls in ((FP8, ours), (BF16, theirs[1]), (ANY_SPLIT, theirs[0]))
    }


def chunk_of_ours(*call) -> torch.Tensor:
    kernels.chunk_attention(*call)
    return call[-1]


def one_after_another(calls: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    return [call() for call in calls]


# ---- training -------------------------------------------------------------------------------------------------------


def flash_attention_packed(q, k, v, cu_seqlens, longest: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 3 of whole sequences, with any split: output and log-sum-exp."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=longest,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_k=longest,
        cu_seqlens_k=cu_seqlens,
        softmax_scale=scale,
        causal=True,
        num_splits=0,
        fa_version=3,
        return_softmax_lse=True,
    )


def stock_attention(*call) -> torch.Tensor:
    backward = lookup("attention_backward", call[0].device)
    return PackedAttention.apply(*call, flash_attention_packed, backward)


def training(lengths: list[int], device: torch.device) -> tuple[dict[str, Call], dict[str, Call]]:
    """Forward and backward of each: calls that return the output, and the gradients of q, k and v."""
    torch.manual_seed(len(lengths))
    tokens = sum(lengths)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(tokens, n, HEAD_DIM, device=device).bfloat16() for n in heads)
    grad_out = torch.randn_like(q)
    of_call = (starts(lengths, device), max(lengths), SCALE)
    recomputed = partial(kernels.attention_fp8, keep_fp8=False)
    found = {FP8: (kernels.attention_fp8, (q, k, v)), RECOMPUTED: (recomputed, (q, k, v))}
    # What an FP8 cache gives of these keys and values, for equal results.
    seen = (q, *kernels.quantize_dequantize_kv(k, v))
    found |= {BF16: (kernels.attention, seen), FLASH: (stock_attention, seen)}
    forward, backward = {}, {}
    for name, (attend, operands) in found.items():
        leaves = [x.clone().requires_grad_() for x in operands]
        forward[name] = partial(one_after_another, [partial(attend, *leaves, *of_call)])
        backward[name] = partial(torch.autograd.grad, attend(*leaves, *of_call), leaves, grad_out, retain_graph=True)
    return forward, backward


# ---- what is found --------------------------------------------------------------------------------------------------


def same_bits(ours: Call, theirs: Call) -> bool:
    """Whether a call over FP8 data gives what *bf16* gives."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(ours(), theirs(), strict=True))


def judged(
    what: str, shape: str, times: Mapping[str, Spread], against: tuple[str, ...], bar: float, of: str = FP8
) -> dict:
    """A record: microseconds of all, speed of one by that of the fastest of ``against``, and whether it is enough."""
    best = min(against, key=lambda name: times[name].median)
    speed = times[best].median / times[of].median
    us = {name: spread._asdict() for name, spread in times.items()}
    found = {"against": best, "speed": speed, "bar": bar, "met": speed >= bar}
    return {"what": what, "shape": shape, "of": of, "us": us, **found}


def report(record: Mapping, console: Console) -> None:
    us = ", ".join(f"{name} {spread['median']:.1f}" for name, spread in record["us"].items())
    verdict = "met" if record["met"] else "MISSED"
    console.print(
        f"{record['what']:8} {record['shape']:28} us: {us}; {record['of']}: {record['speed']:.3f} of "
        f"{record['against']}'s speed, bar {record['bar']:.2f}: {verdict}",
        highlight=False,
    )


def run(machine: Machine, out: Path | None, console: Console) -> int:
    """Measure every shape; 1 if bits differ."""
    result = Result(out, {"command": "kv_cache_prompts", **machine.facts(), "records": [], "wrong": []})

    def keep(*of_record) -> None:
        result["records"].append(judged(*of_record))
        report(result["records"][-1], console)
        result["not_captured"] = sorted(machine.timer.not_captured)
        result.save()

    def check(what: str, shape: str, calls: Mapping[str, Call]) -> None:
        for name in (FP8, RECOMPUTED):
            if name in calls and not same_bits(calls[name], calls[BF16]):
                result["wrong"].append(f"{what} of {shape}: {name} and bf16 have other bits")
                console.print(f"WRONG {result['wrong'][-1]}", highlight=False)

    for shape, of_prompt in PROMPTS.items():
        calls = prompts(*of_prompt, machine.device)
        check("prompts", shape, calls)
        times = machine.timer.interleaved({name: [call] for name, call in calls.items()})
        keep("prompts", shape, times, (BF16, ANY_SPLIT), SPEED_BAR)
        del calls
        machine.clear()
    for shape, lengths in PACKED.items():
        forward, backward = training(lengths, machine.device)
        check("forward", shape, forward)
        for what, calls, against, bar in (
            ("forward", forward, (BF16, FLASH), SPEED_BAR),
            ("backward", backward, (BF16,), BACKWARD_BAR),
        ):
            # No graph: autograd runs a backward on the stream of its forward.
            times = machine.timer.interleaved({name: [call] for name, call in calls.items()}, graphs=False)
            for of in (FP8, RECOMPUTED):
                keep(what, shape, times, against, bar, of)
        del forward, backward, calls
        machine.clear()
    met = sum(record["met"] for record in result["records"])
    console.print(f"bars met: {met} of {len(result['records'])}", highlight=False)
    result.save()
    return 1 if result["wrong"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    args = parser.parse_args()
    console = Console(width=200)
    try:
        return run(this_machine(args.repeats), args.out, console)
    except BenchError as error:
        console.print(f"{error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
