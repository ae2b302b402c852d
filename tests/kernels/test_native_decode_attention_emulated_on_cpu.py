# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The source of the native decode attention kernels on the CPU emulator: the bits of flash_attention_order.py.

test_decode_attention_on_gpu.py compares with FlashAttention 3 itself.
"""

from pathlib import Path

import flash_attention_order
import native_emulator
import numpy as np
import pytest
import torch
from native_emulator import Emulator
from slow import mostly_slow, slow

from jetrl_verl import reference
from jetrl_verl.kernels.decode_attention import CLUSTERS, choose_cluster

pytestmark = pytest.mark.timeout(600)
SCALE = 128**-0.5
KERNELS = "sm90_decode_attention"
WITH_TURNS = {"fp8": (2, 4, 8), "bf16": (2, 4)}
"""Blocks of a cluster whose warps of O take turns if each block has a multiprocessor to itself."""
EVERY_PLAN = [
    (cache, cluster, alone)
    for cache, with_turns in WITH_TURNS.items()
    for cluster in CLUSTERS
    for alone in ((False, True) if cluster in with_turns else (False,))
]
SOME_PLANS = [("fp8", 1, False), ("fp8", 2, True), ("fp8", 4, False), ("bf16", 1, False), ("bf16", 2, True)]
"""Cache, blocks of a cluster, and whether each has a multiprocessor to itself."""


class Case:
    """Requests with tokens in scattered pages, between bytes that are NaN."""

    def __init__(self, lengths, group=4, kv_heads=2, block_size=16, seed=0, key=None, value=None, cache="fp8"):
        generator = torch.Generator().manual_seed(seed + sum(lengths))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.group, self.lengths = group, torch.tensor(lengths, dtype=torch.int32)
        pages = [-(-n // block_size) for n in lengths]
        numbers = torch.randperm(sum(pages), generator=generator).to(torch.int32).split(pages)
        self.table = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True, padding_value=-1)
        if cache == "bf16":
            both = torch.full((sum(pages), 2, block_size, kv_heads, 128), torch.nan, dtype=torch.bfloat16)
            self.cache = both.unbind(1)
        else:
            # NaN as data and as scales.
            self.cache = torch.full(reference.cache_shape(sum(pages), block_size, kv_heads), 255, dtype=torch.uint8)
        # Queries in a wider row, as of a merged projection.
        wide = normal(len(lengths), (group + 2) * kv_heads, 128).bfloat16()
        self.q = wide[:, : group * kv_heads]
        self.keys, self.values = [], []
        for request, n in enumerate(lengths):
            k, v = normal(n, kv_heads, 128), normal(n, kv_heads, 128)
            k, v = (x if change is None else change(x) for x, change in ((k, key), (v, value)))
            k, v = k.bfloat16(), v.bfloat16()
            place = torch.arange(n)
            slots = self.table[request, place // block_size].long() * block_size + place % block_size
            if cache == "bf16":
                for pages_of, x in zip(self.cache, (k, v), strict=True):
                    pages_of[slots // block_size, slots % block_size] = x
            else:
                quantized = [reference.quantize_heads(x) for x in (k, v)]
                reference.write_cache(self.cache, *quantized, slots)
                k, v = map(reference.dequantize_heads, quantized)
            self.keys.append(k)
            self.values.append(v)

    def want(self) -> torch.Tensor:
        out = torch.empty(self.q.shape, dtype=torch.bfloat16)
        for r, head in np.ndindex(len(self.lengths), self.keys[0].shape[1]):
            heads = slice(head * self.group, head * self.group + self.group)
            operands = (self.q[r, heads], self.keys[r][:, head], self.values[r][:, head])
            output = flash_attention_order.attention(*(x.double().numpy() for x in operands), SCALE)
            out[r, heads] = torch.from_numpy(output).bfloat16()
        return out

    def run(self, emulator: Emulator, cluster: int = 1, alone: bool = False, seed: int = 0) -> torch.Tensor:
        out, multiprocessors = torch.full(self.q.shape, torch.nan, dtype=torch.bfloat16), 1024 if alone else 1
        call = self.q, self.cache, self.lengths, self.table, SCALE, out
        emulator.decode_attention(*call, cluster, multiprocessors, seed)
        return out


def check(emulator: Emulator, case: Case, cluster: int, alone: bool = False, seed: int = 0) -> None:
    got, want = case.run(emulator, cluster, alone, seed), case.want()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize(
    ("cache", "cluster", "alone", "length"),
    mostly_slow(
        [(*plan, n) for plan in EVERY_PLAN if plan[0] == "fp8" for n in (1, 16, 17, 127, 128, 129, 300)],
        fast=[
            (*plan, n)
            for plan in EVERY_PLAN
            if plan[0] == "fp8"
            for n in ((1, 16, 17, 127, 128, 129, 300) if plan[1] < 4 else (17, 300) if plan[1] == 4 else (129,))
        ],
    )
    + [("bf16", 1, False, n) for n in (1, 16, 17, 64, 127, 128, 129, 300)]
    + [
        ("bf16", cluster, alone, n)
        for cluster, n in ((2, 1), (2, 300), (4, 129), (4, 300), (8, 17), (8, 300))
        for alone in (False, True)
        if not alone or cluster in WITH_TURNS["bf16"]
    ],
)
def test_lengths(emulator, length, cache, cluster, alone):
    """Most have fewer blocks of keys than a cluster has thread blocks."""
    check(emulator, Case([length], kv_heads=1, cache=cache), cluster, alone, seed=length)


@pytest.mark.parametrize(("cache", "cluster", "alone"), SOME_PLANS)
@pytest.mark.parametrize("group", mostly_slow(range(1, 9), fast=(1, 3, 8)))
def test_query_heads_of_a_kv_head(emulator, group, cache, cluster, alone):
    check(emulator, Case([140], group=group, kv_heads=1, cache=cache), cluster, alone)


@pytest.mark.parametrize(("cache", "cluster", "alone"), SOME_PLANS)
@pytest.mark.parametrize("block_size", [16, slow(32), 48, slow(128), slow(256)])
def test_requests_and_pages(emulator, block_size, cache, cluster, alone):
    check(emulator, Case([130, 1, 37], group=2, block_size=block_size, cache=cache), cluster, alone, seed=block_size)


def test_pages_with_heads_before_tokens(emulator):
    case = Case([130, 37], group=2, block_size=32, cache="bf16")
    case.cache = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.cache)
    check(emulator, case, 1)


def interleaved(cache: str, cluster: int, alone: bool, length: int, seed: int):
    case = cache, cluster, alone, length, seed
    return case if seed == 0 and length < 1300 else slow(*case)


@pytest.mark.parametrize(
    ("cache", "cluster", "alone", "length", "seed"),
    [
        interleaved("fp8", cluster, False, n, seed)
        for cluster, n, seeds in ((1, 700, 12), (2, 1000, 8), (4, 1700, 4), (8, 2200, 2))
        for seed in range(seeds)
    ]
    + [
        interleaved("bf16", cluster, False, n, seed)
        for cluster, n, seeds in ((1, 700, 6), (2, 1000, 4), (4, 1300, 2), (8, 2200, 1))
        for seed in range(seeds)
    ]
    + [
        interleaved(cache, cluster, True, n, seed)
        for cache, cluster, n, seeds in (
            *(("fp8", 2, 400, 8), ("fp8", 2, 1700, 6), ("fp8", 4, 2600, 2), ("fp8", 8, 3500, 1)),
            *(("bf16", 2, 1200, 3), ("bf16", 4, 1700, 1)),
        )
        for seed in range(seeds)
    ],
)
def test_interleavings(emulator, cache, cluster, alone, length, seed):
    """More blocks than the rings have stages, except in the first case with turns."""
    check(emulator, Case([length], group=4, kv_heads=1, cache=cache), cluster, alone, seed)


def outlier(x: torch.Tensor) -> torch.Tensor:
    x[..., 9] *= 100
    return x


def of_every_size(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0 ** (torch.arange(x.shape[0]) % 41 - 20)[:, None, None]


def huge(x: torch.Tensor) -> torch.Tensor:
    """Scales above 2^7, which need two factors; one of them alone in its group."""
    x[::3] *= 2.0**30
    return x


def huge_at_first(x: torch.Tensor) -> torch.Tensor:
    x[:50] *= 2.0**30
    return x


def tiny(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0**-58


@pytest.mark.parametrize(("cache", "cluster", "alone"), SOME_PLANS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        (outlier, outlier),
        (None, of_every_size),
        (None, huge),
        (None, huge_at_first),
        (tiny, tiny),
        (of_every_size, None),
    ],
)
def test_outliers_and_values_of_every_magnitude(emulator, key, value, cache, cluster, alone):
    check(emulator, Case([200], kv_heads=1, key=key, value=value, cache=cache), cluster, alone)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_inf_and_nan_reach_the_output(emulator, which, number, cluster):
    def plant(x: torch.Tensor) -> torch.Tensor:
        x[5, 0, 3] = number
        return x

    assert Case([40], kv_heads=1, **{which: plant}).run(emulator, cluster).isnan().all()


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_nan_value_poisons_only_its_feature(emulator, cluster):
    """A BF16 cache has no scale that spreads it over the head."""

    def plant(x: torch.Tensor) -> torch.Tensor:
        x[5, 0, 3] = torch.nan
        return x

    out = Case([40], kv_heads=1, cache="bf16", value=plant).run(emulator, cluster)
    assert out[..., 3].isnan().all() and out.isnan().sum() == out[..., 3].numel()
    assert Case([40], kv_heads=1, cache="bf16", key=plant).run(emulator, cluster).isnan().all()


@pytest.mark.parametrize(("cache", "cluster", "alone"), EVERY_PLAN)
def test_a_request_of_no_tokens_is_zero(emulator, cache, cluster, alone):
    case = Case([20, 30], cache=cache)
    case.lengths[1] = 0
    out = case.run(emulator, cluster, alone)
    assert (out[1] == 0).all() and torch.equal(out[0], case.want()[0])


def test_clusters_fill_the_multiprocessors():
    """On 132 multiprocessors."""
    chosen = {pairs: choose_cluster(pairs, 132) for pairs in (1, 8, 16, 17, 33, 34, 64, 132, 133, 256, 2048)}
    assert chosen == {1: 8, 8: 8, 16: 8, 17: 4, 33: 4, 34: 2, 64: 2, 132: 2, 133: 1, 256: 1, 2048: 1}


def test_flash_attention_order_computes_attention():
    case = Case([333], group=4, kv_heads=1)
    q, k, v = case.q[0].double(), case.keys[0][:, 0].double(), case.values[0][:, 0].double()
    exact = (q @ k.T * SCALE).softmax(dim=-1) @ v
    assert (case.want()[0].double() - exact).norm() < 2**-8 * exact.norm()


GIVES_BACK = """    sm90::sync_warp();
    if (arrives()) {
      sm90::barrier_arrive(barriers.scores_full(ring));"""
KERNEL, OF_CLUSTERS, OF_BF16 = KERNELS, f"{KERNELS}_cluster", f"{KERNELS}_bf16"
CLUSTERS_SHARED = "decode_attention_cluster.cuh"
FAULTS = {
    "scores are released before all lanes have written them": (
        f"{KERNEL}.cu",
        GIVES_BACK,
        GIVES_BACK.partition("\n")[2],
    ),
    "P is overwritten": (
        f"{KERNEL}.cu",
        'if (i >= 2) sm90::barrier_wait(barriers.p_empty(ring), ((i >> 1) - 1) & 1, "p_empty", ring);',
        "",
    ),
}
"""Fault -> file, its line, the line planted there."""

FAULTS_OF_CLUSTERS = {
    "a block leaves while what it sends is read": (
        "if constexpr (kBlocks > 1) sm90::sync_cluster();  // sends read",
        "// sends read",
    ),
    "a block's barriers are used before they are": ("  sync_cluster_or_block<kBlocks>();", "  sm90::sync_block();"),
    "a wait for a free place names the wrong phase": ('(lap - 1) & 1, "scores_empty"', 'lap & 1, "scores_empty"'),
    "scores are overwritten": (
        "if (lap > 0) sm90::barrier_wait(barriers.scores_empty",
        "if (false) sm90::barrier_wait(barriers.scores_empty",
    ),
    "a place is free before one block has read it": (
        "sm90::barrier_init(scores_empty(place), kArrivals * Cache::kBlocks);",
        "sm90::barrier_init(scores_empty(place), kArrivals * (Cache::kBlocks - 1));",
    ),
    "scores are sent before the copy engine sees them": (
        "    if constexpr (kBlocks > 1) sm90::fence_for_copies();\n",
        "",
    ),
    "a query's scores are not sent": ("from, part_bytes<Shape>(p.group),", "from, part_bytes<Shape>(p.group - 1),"),
    "the maximum so far is not waited for": (
        'sm90::barrier_wait(barriers.max_full(other), handed & 1, "max_full", other);',
        "",
    ),
    "values past the last one are read": ("if (4 * lane + b >= left) scales", "if (false) scales"),
    "factors are overwritten": (
        "kFactorPlaces = Cache::kHasScales ? 2 * kSoftmaxWarps : 0;",
        "kFactorPlaces = Cache::kHasScales ? kSoftmaxWarps : 0;",
    ),
    "pages outside the table are read": ("return left < kUnitsOfABlock ? left : kUnitsOfABlock;", "return 8;"),
    "a stage is full before its copies have landed": ("sm90::cp_async_arrive(full);", "sm90::barrier_arrive(full);"),
    "a lane that copies does not arrive": (
        "sm90::cp_async_arrive(full);",
        "if (sm90::own_lane()) sm90::cp_async_arrive(full);",
    ),
}
"""Faults in the code that the cluster kernels of both caches share."""

FAULTS_OF_TURNS = {
    "O so far is not waited for": (
        'sm90::barrier_wait(barriers.output_full(other), (i - 1) / kTurns & 1, "output_full", other);',
        "",
    ),
    "O is handed over before all lanes have written it": (
        "    sm90::sync_warp();\n    if (arrives()) sm90::barrier_arrive(barriers.output_full(warp));",
        "    if (arrives()) sm90::barrier_arrive(barriers.output_full(warp));",
    ),
    "both warps begin at the same stage": ("  values.skip(turn * Cache::kPieces);\n", ""),
}
"""Faults where each block has a multiprocessor to itself and its warps of O take turns."""

FAULTS_OF_BF16 = {
    "keys are overwritten": (
        'sm90::barrier_wait(barriers.keys_empty(keys.stage), keys.parity ^ 1, "keys_empty", keys.stage);',
        "",
    ),
    "values past the last one are read": (
        "const bool exists = kRows * piece + key < left;",
        "const bool exists = true;",
    ),
}


def plant(folder: Path, file: str, kernel: str, before: str, after: str) -> Emulator:
    """The emulator with ``kernel`` compiled from a changed ``file``."""
    others = tuple(other for other in (KERNEL, OF_CLUSTERS, OF_BF16) if other != kernel)
    return native_emulator.plant(folder, kernel, file, before, after, others)


def detects(faulty: Emulator, case: Case, cluster: int, alone: bool = False) -> bool:
    want = case.want()
    for seed in range(12):
        try:
            if not torch.equal(case.run(faulty, cluster, alone, seed).view(torch.int16), want.view(torch.int16)):
                return True
        except RuntimeError:
            return True
    return False


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, ["P is overwritten"]))
def test_a_planted_fault_is_detected(tmp_path, fault):
    file, before, after = FAULTS[fault]
    assert detects(plant(tmp_path, file, KERNEL, before, after), Case([700, 30], kv_heads=1), 1)


@pytest.mark.parametrize("fault", mostly_slow(FAULTS_OF_CLUSTERS, ["scores are overwritten"]))
def test_a_planted_fault_of_clusters_is_detected(tmp_path, fault):
    """More blocks than any ring has stages; scales above 2^7 in some of them."""
    faulty = plant(tmp_path, CLUSTERS_SHARED, OF_CLUSTERS, *FAULTS_OF_CLUSTERS[fault])
    assert detects(faulty, Case([30, 1000], kv_heads=1, value=huge_at_first), 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS_OF_TURNS)
def test_a_planted_fault_of_turns_is_detected(tmp_path, fault):
    faulty = plant(tmp_path, CLUSTERS_SHARED, OF_CLUSTERS, *FAULTS_OF_TURNS[fault])
    assert detects(faulty, Case([30, 1700], kv_heads=1, value=huge_at_first), 2, alone=True)


@pytest.mark.parametrize("fault", mostly_slow(FAULTS_OF_BF16, ["keys are overwritten"]))
def test_a_planted_fault_of_a_bf16_cache_is_detected(tmp_path, fault):
    faulty = plant(tmp_path, f"{OF_BF16}.cu", OF_BF16, *FAULTS_OF_BF16[fault])
    assert detects(faulty, Case([30, 600], group=2, kv_heads=1, cache="bf16"), 2)


@pytest.mark.parametrize("cache", ["fp8", "bf16"])
def test_unsupported_clusters_raise(emulator, cache):
    with pytest.raises(RuntimeError, match="clusters of 3 blocks is not supported. Set 1, 2, 4 or 8."):
        Case([20], kv_heads=1, cache=cache).run(emulator, cluster=3)
