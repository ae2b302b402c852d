# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of a decode step over an FP8 and a BF16 KV cache, beside FlashAttention 3 over the BF16 one; under 150 s.

    PYTHONPATH=. python3 benchmarks/kv_cache_on_gpu.py --out benchmarks/results/kv_cache_h200.json

One layer of 32 query heads on 8 KV heads of 128 (Qwen3-8B) or 4 (Qwen3-30B-A3B), pages of 16 tokens in any order:

- *fp8*: the native kernels, as a rollout calls them: with the cluster that choose_cluster says.
- *fp8, C*: with C blocks for each request and KV head, csrc/sm90_decode_attention.cu or, above 1, its cluster's.
- *ours*, *ours, C*: the same over the BF16 cache, csrc/sm90_decode_attention_bf16.cu; *ours* whatever
  ``kernels.decode_attention_bf16`` runs, which is *bf16* above MOST_PAIRS_OF_BF16.
- *bf16*: FlashAttention 3 as vLLM calls it, with ``num_splits=1``: a rollout with zero mismatch.
- *bf16, any split*: as stock vLLM calls it.

All but the last must have the same bits. Beside times: bytes of the tokens that a call reads, per second, against a
copy's rate on the same machine (bytes read and written). Exit code 1 if bits differ.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.decode_attention import (
    CLUSTERS,
    choose_cluster,
    decodes_natively,
    native_decode_attention,
    native_decode_attention_bf16,
)
from jetrl_verl.kernels.native import Plan
from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.machine import this_machine
from jetrl_verl.tools.bench.report import Result

HEADS, HEAD_DIM = 32, 128
BLOCK_SIZE = 16
SCALE = HEAD_DIM**-0.5
CASES = (
    (1, 1024, 4),
    (256, 384, 8),
    (32, 384, 8),
    (64, 4096, 8),
    (32, 16384, 8),
    (8, 32768, 8),
    (1, 16384, 8),
    (1, 32768, 8),
)
"""Requests, tokens of each, KV heads."""
PAGES_AT_ONCE = 4096


def flash_attention(
    q, cache, lengths, table, longest: int, num_splits: int, cu_queries=None, most_queries: int = 1
) -> torch.Tensor:
    """FlashAttention 3 over BF16 pages, of one new token of each request or of as many as ``cu_queries`` says."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    keys, values = cache.unbind(1)
    if cu_queries is None:
        cu_queries = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return flash_attn_varlen_func(
        q,
        keys,
        values,
        max_seqlen_q=most_queries,
        cu_seqlens_q=cu_queries,
        max_seqlen_k=longest,
        seqused_k=lengths,
        block_table=table,
        softmax_scale=SCALE,
        causal=True,
        num_splits=num_splits,
        fa_version=3,
    )


def filled_caches(pages: int, kv_heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP8 and a BF16 cache of so many pages that hold the same numbers, which are drawn."""
    fp8 = torch.empty(reference.cache_shape(pages, BLOCK_SIZE, kv_heads), dtype=torch.uint8, device=device)
    bf16 = torch.empty(pages, 2, BLOCK_SIZE, kv_heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    for first in range(0, pages, PAGES_AT_ONCE):
        some = slice(first, min(first + PAGES_AT_ONCE, pages))
        slots = torch.arange(some.start * BLOCK_SIZE, some.stop * BLOCK_SIZE, device=device)
        k, v = (torch.randn(len(slots), kv_heads, HEAD_DIM, device=device).bfloat16() for _ in range(2))
        kernels.write_kv(k, v, fp8, slots)
        for i, seen in enumerate(kernels.quantize_dequantize_kv(k, v)):
            bf16[some, i] = seen.view(-1, BLOCK_SIZE, kv_heads, HEAD_DIM)
    return fp8, bf16


def by_clusters(run: Callable, cluster: int, *call) -> torch.Tensor:
    run(*call, plan=Plan(cluster=cluster))
    return call[-1]


def contenders(
    requests: int, tokens: int, kv_heads: int, device: torch.device
) -> tuple[dict[str, Callable[[], torch.Tensor]], bool]:
    """The calls over the same tokens, in caches of their own that hold the same numbers; and whether the native kernel
    is what is chosen over the BF16 one."""
    torch.manual_seed(requests)
    pages = requests * tokens // BLOCK_SIZE
    table = torch.randperm(pages, device=device).to(torch.int32).view(requests, -1)
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device=device)
    q = torch.randn(requests, HEADS, HEAD_DIM, device=device).bfloat16()
    fp8, bf16 = filled_caches(pages, kv_heads, device)
    call = (q, fp8, lengths, table, SCALE, torch.empty_like(q))
    flash = partial(flash_attention, q, bf16, lengths, table, tokens)
    found = {"bf16": partial(flash, 1), "bf16, any split": partial(flash, 0)}
    found["fp8"] = partial(kernels.decode_attention, *call)
    found |= {f"fp8, {c}": partial(by_clusters, native_decode_attention, c, *call) for c in CLUSTERS}
    call = (q, *bf16.unbind(1), lengths, table, SCALE, torch.empty_like(q))
    found["ours"] = partial(kernels.decode_attention_bf16, *call)
    found |= {f"ours, {c}": partial(by_clusters, native_decode_attention_bf16, c, *call) for c in CLUSTERS}
    return found, decodes_natively(requests, HEADS, kv_heads, HEAD_DIM, BLOCK_SIZE, bf16.dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console = Console(width=200)
    try:
        machine = this_machine(args.repeats)
    except BenchError as error:
        console.print(f"{error}")
        return 2
    result = Result(args.out, {"command": "kv_cache", **machine.facts(), "records": []})
    same, multiprocessors = True, torch.cuda.get_device_properties(machine.device).multi_processor_count
    for requests, tokens, kv_heads in CASES:
        calls, native = contenders(requests, tokens, kv_heads, machine.device)
        want = calls["bf16"]().view(torch.int16)
        equal = all(torch.equal(call().view(torch.int16), want) for name, call in calls.items() if "any" not in name)
        same &= equal
        times = machine.timer.interleaved({name: [call] for name, call in calls.items()})
        us = {name: spread._asdict() for name, spread in times.items()}
        chosen = choose_cluster(requests * kv_heads, multiprocessors)
        read = {"fp8": requests * tokens * kv_heads * 2 * (HEAD_DIM + 1)}
        read["ours"] = requests * tokens * kv_heads * 2 * 2 * HEAD_DIM
        record = {"requests": requests, "tokens": tokens, "kv_heads": kv_heads, "cluster": chosen, "native": native}
        record |= {"us": us, "same_bits": equal, "bytes": read}
        result["records"].append(record)
        theirs, any_split = (times[name].median for name in ("bf16", "bf16, any split"))
        console.print(
            f"{requests} x {tokens}, {kv_heads} KV heads: FlashAttention 3 {theirs:.1f} us, any split {any_split:.1f};",
            f"same bits: {equal}; ours {'chosen' if native else 'not chosen'} over BF16, cluster {chosen}",
        )
        for name, size in read.items():
            ours = times[name].median
            of_clusters = ", ".join(f"{times[f'{name}, {c}'].median:.1f}" for c in CLUSTERS)
            console.print(
                f"  {name} {ours:.1f} us (clusters of 1, 2, 4, 8: {of_clusters}):",
                f"{ours / theirs:.3f} of one split, {ours / any_split:.3f} of any;",
                f"{size / ours / 1e6:.2f} TB/s, a copy's {machine.bandwidth / 1e12:.2f}",
            )
        del calls
        machine.clear()
        result.save()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
