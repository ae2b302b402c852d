# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The source of the native decode attention kernels on the CPU emulator: the bits of flash_attention_order.py.

test_decode_attention_on_gpu.py compares with FlashAttention 3 itself.
"""

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


LENGTHS = (1, 16, 17, 127, 128, 129, 300)
FAST_FP8 = {1: LENGTHS, 2: LENGTHS, 4: (17, 300), 8: (129,)}
OF_BF16 = {1: (*LENGTHS, 64), 2: (1, 300), 4: (129, 300), 8: (17, 300)}
"""Blocks of a cluster -> lengths; of FP8 the slow ones are all others."""


@pytest.mark.parametrize(
    ("cache", "cluster", "alone", "length"),
    mostly_slow(
        [(*plan, n) for plan in EVERY_PLAN for n in (LENGTHS if plan[0] == "fp8" else OF_BF16[plan[1]])],
        fast=[(*plan, n) for plan in EVERY_PLAN for n in (FAST_FP8 if plan[0] == "fp8" else OF_BF16)[plan[1]]],
    ),
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


INTERLEAVINGS = [
    *(("fp8", 1, False, 700, 12), ("fp8", 2, False, 1000, 8), ("fp8", 4, False, 1700, 4), ("fp8", 8, False, 2200, 2)),
    *(
        ("bf16", 1, False, 700, 6),
        ("bf16", 2, False, 1000, 4),
        ("bf16", 4, False, 1300, 2),
        ("bf16", 8, False, 2200, 1),
    ),
    *(("fp8", 2, True, 400, 8), ("fp8", 2, True, 1700, 6), ("fp8", 4, True, 2600, 2), ("fp8", 8, True, 3500, 1)),
    *(("bf16", 2, True, 1200, 3), ("bf16", 4, True, 1700, 1)),
]
"""A plan, a length and how many seeds of it; the first seed of a short one runs always."""


@pytest.mark.parametrize(
    ("cache", "cluster", "alone", "length", "seed"),
    mostly_slow(
        [(*case, seed) for *case, seeds in INTERLEAVINGS for seed in range(seeds)],
        fast=[(*case, 0) for *case, _ in INTERLEAVINGS if case[-1] < 1300],
    ),
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


OF_CLUSTERS, OF_BF16_CACHE = f"{KERNELS}_cluster", f"{KERNELS}_bf16"
SHARED, READ = "decode_attention_cluster.cuh", "if constexpr (kBlocks > 1) sm90::sync_cluster();  // sends read"
P_EMPTY = 'if (i >= 2) sm90::barrier_wait(barriers.p_empty(ring), ((i >> 1) - 1) & 1, "p_empty", ring);'
IS_FREE = "if (lap > 0) sm90::barrier_wait(barriers.scores_empty"
KEYS_EMPTY = 'sm90::barrier_wait(barriers.keys_empty(keys.stage), keys.parity ^ 1, "keys_empty", keys.stage);'
FAULTS = {
    "P is overwritten": (KERNELS, f"{KERNELS}.cu", P_EMPTY, ""),
    "a block leaves while what it sends is read": (OF_CLUSTERS, SHARED, READ, "// sends read"),
    "barriers are used early": (OF_CLUSTERS, SHARED, "  sync_cluster_or_block<kBlocks>();", "  sm90::sync_block();"),
    "scores are overwritten": (OF_CLUSTERS, SHARED, IS_FREE, IS_FREE.replace("lap > 0", "false")),
    "values past the last one are read": (
        *(OF_CLUSTERS, SHARED, "if (4 * lane + b >= left) scales", "if (false) scales"),
    ),
    "pages outside the table are read": (
        *(OF_CLUSTERS, SHARED, "return left < kUnitsOfABlock ? left : kUnitsOfABlock;", "return 8;"),
    ),
    "a stage is full before its copies have landed": (
        *(OF_CLUSTERS, SHARED, "sm90::cp_async_arrive(full);", "sm90::barrier_arrive(full);"),
    ),
    "keys are overwritten": (OF_BF16_CACHE, f"{OF_BF16_CACHE}.cu", KEYS_EMPTY, ""),
}
"""Fault -> kernel that runs, file, its line, the line planted there."""
FAULTY_CASES = {
    KERNELS: lambda: (Case([700, 30], kv_heads=1), 1),
    OF_CLUSTERS: lambda: (Case([30, 1000], kv_heads=1, value=huge_at_first), 2),
    OF_BF16_CACHE: lambda: (Case([30, 600], group=2, kv_heads=1, cache="bf16"), 2),
}
"""Of each kernel a case with more blocks than any ring has stages, and its cluster. Some scales are above 2^7."""


def detects(faulty: Emulator, case: Case, cluster: int) -> bool:
    want = case.want()
    for seed in range(12):
        try:
            if not torch.equal(case.run(faulty, cluster, seed=seed).view(torch.int16), want.view(torch.int16)):
                return True
        except RuntimeError:
            return True
    return False


SAMPLE = ["P is overwritten", "scores are overwritten", "keys are overwritten"]


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, SAMPLE))
def test_a_planted_fault_is_detected(tmp_path, fault):
    kernel, *change = FAULTS[fault]
    others = tuple(other for other in FAULTY_CASES if other != kernel)
    assert detects(native_emulator.plant(tmp_path, kernel, *change, others), *FAULTY_CASES[kernel]())


@pytest.mark.parametrize("cache", ["fp8", "bf16"])
def test_unsupported_clusters_raise(emulator, cache):
    with pytest.raises(RuntimeError, match="clusters of 3 blocks is not supported. Set 1, 2, 4 or 8."):
        Case([20], kv_heads=1, cache=cache).run(emulator, cluster=3)
