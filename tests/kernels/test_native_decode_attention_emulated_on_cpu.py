# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The decode kernel of the FP8 KV cache, its own source run on a CPU by tests/emulator: the bits of FlashAttention 3's
order of arithmetic (flash_attention_order.py), and no race, deadlock or stray access under any interleaving tried.

That FlashAttention 3 itself has these bits can only be seen on a GPU: test_kv_cache_on_gpu.py.
"""

import shutil
from pathlib import Path

import flash_attention_order
import native_emulator
import numpy as np
import pytest
import torch
from native_emulator import CSRC, Emulator

from jetrl_verl import reference
from jetrl_verl.kernels.decode_attention import CLUSTERS, choose_cluster

pytestmark = pytest.mark.timeout(600)
SCALE = 128**-0.5
KERNELS = "sm90_decode_attention"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return native_emulator.build(tmp_path_factory.mktemp("emulated"), kernels=f"{KERNELS}*")


@pytest.fixture(scope="module")
def emulator(library) -> Emulator:
    return Emulator(library)


class Case:
    """Requests with tokens in scattered pages, between bytes that nobody has written."""

    def __init__(self, lengths, group=4, kv_heads=2, block_size=16, seed=0, key=None, value=None):
        generator = torch.Generator().manual_seed(seed + sum(lengths))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.group, self.lengths = group, torch.tensor(lengths, dtype=torch.int32)
        pages = [-(-n // block_size) for n in lengths]
        numbers = torch.randperm(sum(pages), generator=generator).to(torch.int32).split(pages)
        self.table = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True, padding_value=-1)
        # As data NaN, as scales NaN.
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
            quantized = [reference.quantize_heads(x) for x in (k, v)]
            reference.write_cache(self.cache, *quantized, slots)
            self.keys.append(reference.dequantize_heads(quantized[0]))
            self.values.append(reference.dequantize_heads(quantized[1]))

    def want(self) -> torch.Tensor:
        out = torch.empty(self.q.shape, dtype=torch.bfloat16)
        for r, head in np.ndindex(len(self.lengths), self.keys[0].shape[1]):
            heads = slice(head * self.group, head * self.group + self.group)
            operands = (self.q[r, heads], self.keys[r][:, head], self.values[r][:, head])
            found = flash_attention_order.attention(*(x.double().numpy() for x in operands), SCALE)
            out[r, heads] = torch.from_numpy(found).bfloat16()
        return out

    def run(self, emulator: Emulator, cluster: int = 1, seed: int = 0) -> torch.Tensor:
        out = torch.full(self.q.shape, torch.nan, dtype=torch.bfloat16)
        emulator.decode_attention(self.q, self.cache, self.lengths, self.table, SCALE, out, cluster, seed)
        return out


def check(emulator: Emulator, case: Case, cluster: int, seed: int = 0) -> None:
    got, want = case.run(emulator, cluster, seed), case.want()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("length", [1, 16, 17, 127, 128, 129, 300])
def test_lengths(emulator, length, cluster):
    """Most of them of fewer blocks of keys than a cluster has blocks."""
    check(emulator, Case([length], kv_heads=1), cluster, seed=length)


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_of_a_kv_head(emulator, group, cluster):
    check(emulator, Case([140], group=group, kv_heads=1), cluster)


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 256])
def test_requests_and_pages(emulator, block_size, cluster):
    check(emulator, Case([130, 1, 37], group=2, block_size=block_size), cluster, seed=block_size)


@pytest.mark.parametrize(
    ("cluster", "length", "seed"),
    [
        (cluster, n, seed)
        for cluster, n, seeds in ((1, 700, 12), (2, 1000, 8), (4, 1700, 4), (8, 2200, 2))
        for seed in range(seeds)
    ],
)
def test_interleavings(emulator, cluster, length, seed):
    """More blocks than the rings have stages."""
    check(emulator, Case([length], group=4, kv_heads=1), cluster, seed)


def outlier(x: torch.Tensor) -> torch.Tensor:
    x[..., 9] *= 100
    return x


def of_every_size(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0 ** (torch.arange(x.shape[0]) % 41 - 20)[:, None, None]


def huge(x: torch.Tensor) -> torch.Tensor:
    """Scales above 2^7, which take two factors; one of them alone in its group."""
    x[::3] *= 2.0**30
    return x


def huge_at_first(x: torch.Tensor) -> torch.Tensor:
    x[:50] *= 2.0**30
    return x


def tiny(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0**-58


@pytest.mark.parametrize("cluster", [1, 4])
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
def test_outliers_and_numbers_of_every_size(emulator, key, value, cluster):
    check(emulator, Case([200], kv_heads=1, key=key, value=value), cluster)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(emulator, which, number, cluster):
    def plant(x: torch.Tensor) -> torch.Tensor:
        x[5, 0, 3] = number
        return x

    assert Case([40], kv_heads=1, **{which: plant}).run(emulator, cluster).isnan().all()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_request_of_no_tokens_is_zero(emulator, cluster):
    case = Case([20, 30])
    case.lengths[1] = 0
    out = case.run(emulator, cluster)
    assert (out[1] == 0).all() and torch.equal(out[0], case.want()[0])


def test_a_cluster_has_as_many_blocks_as_run_at_once():
    """On 132 multiprocessors."""
    chosen = {pairs: choose_cluster(pairs, 132) for pairs in (1, 8, 16, 17, 33, 34, 64, 132, 133, 256, 2048)}
    assert chosen == {1: 8, 8: 8, 16: 8, 17: 4, 33: 4, 34: 2, 64: 2, 132: 2, 133: 1, 256: 1, 2048: 1}


def test_the_order_of_arithmetic_is_attention():
    case = Case([333], group=4, kv_heads=1)
    q, k, v = case.q[0].double(), case.keys[0][:, 0].double(), case.values[0][:, 0].double()
    exact = (q @ k.T * SCALE).softmax(dim=-1) @ v
    assert (case.want()[0].double() - exact).norm() < 2**-8 * exact.norm()


GIVES_BACK = """    sm90::sync_warp();
    if (arrives()) {
      sm90::barrier_arrive(barriers.scores_full(ring));"""
KERNEL, OF_CLUSTERS, SHARED = f"{KERNELS}.cu", f"{KERNELS}_cluster.cu", "decode_attention.cuh"
FAULTS = {
    "scores are given on before all lanes have written them": (KERNEL, GIVES_BACK, GIVES_BACK.partition("\n")[2]),
    "P is overwritten": (
        KERNEL,
        'if (i >= 2) sm90::barrier_wait(barriers.p_empty(ring), ((i >> 1) - 1) & 1, "p_empty", ring);',
        "",
    ),
    "scores are overwritten": (
        KERNEL,
        'if (i >= 2) sm90::barrier_wait(barriers.scores_empty(ring), ((i >> 1) - 1) & 1, "scores_empty", ring);',
        "",
    ),
    "keys are overwritten": (KERNEL, "if (blocks - 1 - block >= Shape::kStages)", "if (false)"),
    "values behind the last are read": (KERNEL, "if (kFirst && 16 * unit + key >= left) scales", "if (false) scales"),
    "a key has another's scale": (SHARED, "s1 = scales[g + 8];", "s1 = scales[g];"),
    "chunks lie where they lie": (SHARED, "(k ^ (g & 7)) * 16", "k * 16"),
}
"""What is wrong with a kernel -> file, what it says, and what it says instead."""

FAULTS_OF_CLUSTERS = {
    "a block leaves while what it sends is read": ("sm90::sync_cluster();  // what this block", "// what this block"),
    "a block's barriers are used before they are": (
        "sm90::sync_cluster();\n  const Units",
        "sm90::sync_block();\n  const Units",
    ),
    "a wait for a free place names the wrong phase": ('(lap - 1) & 1, "scores_empty"', 'lap & 1, "scores_empty"'),
    "scores are overwritten": (
        "if (lap > 0) sm90::barrier_wait(barriers.scores_empty",
        "if (false) sm90::barrier_wait(barriers.scores_empty",
    ),
    "a place is free before one block has read it": (
        "sm90::barrier_init(scores_empty(place), kArrivals * blocks_of_cluster);",
        "sm90::barrier_init(scores_empty(place), kArrivals * (blocks_of_cluster - 1));",
    ),
    "scores are read in a phase too early": (
        'i / Shape::kPlaces & 1, "scores_full"',
        '~(i / Shape::kPlaces) & 1, "scores_full"',
    ),
    "scores are sent before the copy engine sees them": ("    sm90::fence_for_copies();\n", ""),
    "scores are sent before all lanes have written them": (
        "    sm90::fence_for_copies();\n    sm90::sync_warp();\n",
        "    sm90::fence_for_copies();\n",
    ),
    "a query's scores are not sent": ("from, part_bytes<Shape>(p.group),", "from, part_bytes<Shape>(p.group - 1),"),
    "the maximum so far is not waited for": (
        'sm90::barrier_wait(barriers.max_full(other), handed, "max_full", other);',
        "",
    ),
    "the sum so far is not waited for": (
        'sm90::barrier_wait(barriers.sum_full(other), handed, "sum_full", other);',
        "",
    ),
    "a warp's scores are not waited for": ("Shape::kScoreWarps * part_bytes", "(Shape::kScoreWarps - 1) * part_bytes"),
    "two blocks have each other's features": (
        "+ rank * Shape::kValueUnit",
        "+ (kBlocks - 1 - rank) * Shape::kValueUnit",
    ),
    "a unit's values have the other's scales": (
        "lane / 4 * Shape::kKeyUnit + CacheUnit::kValueScales",
        "CacheUnit::kValueScales",
    ),
    "large scales are not seen": ("(larger_scales(pairs[0]) | larger_scales(pairs[1])) != 0", "false"),
    "values behind the last are read": ("if (4 * lane + b >= left) scales", "if (false) scales"),
    "keys are overwritten": ("if (is_reused) ", "if (false) "),
    "values are overwritten": ("if (i >= Shape::kValueStages) ", "if (false) "),
    "P is overwritten": (
        "    if (i >= 2) sm90::barrier_wait(barriers.p_empty",
        "    if (false) sm90::barrier_wait(barriers.p_empty",
    ),
    "rows of odd chunks lie where they lie": ("chunk % 2 != 0);\n    } else", "false);\n    } else"),
}
"""Likewise, of the kernel of clusters."""


def plant(library: Path, tmp_path: Path, file: str, before: str, after: str) -> Emulator:
    csrc = shutil.copytree(CSRC, tmp_path / "csrc")
    text = (csrc / file).read_text()
    assert text.count(before) == 1
    (csrc / file).write_text(text.replace(before, after))
    if file == SHARED:
        return Emulator(native_emulator.build(tmp_path, csrc, f"{KERNELS}*", library.parent))
    planted, other = (Path(name).stem for name in ((KERNEL, OF_CLUSTERS) if file == KERNEL else (OF_CLUSTERS, KERNEL)))
    return Emulator(native_emulator.build(tmp_path, csrc, planted, library.parent, compiled=(other,)))


def is_seen(faulty: Emulator, case: Case, cluster: int) -> bool:
    want = case.want()
    for seed in range(12):
        try:
            if not torch.equal(case.run(faulty, cluster, seed).view(torch.int16), want.view(torch.int16)):
                return True
        except RuntimeError:
            return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(library, tmp_path, fault):
    assert is_seen(plant(library, tmp_path, *FAULTS[fault]), Case([700, 30], kv_heads=1), 1)


@pytest.mark.parametrize("fault", FAULTS_OF_CLUSTERS)
def test_a_planted_fault_of_clusters_is_seen(library, tmp_path, fault):
    """More blocks than any ring has places; scales above 2^7 in some of them, not in others."""
    faulty = plant(library, tmp_path, OF_CLUSTERS, *FAULTS_OF_CLUSTERS[fault])
    assert is_seen(faulty, Case([30, 1000], kv_heads=1, value=huge_at_first), 2)


def test_more_query_heads_are_refused(emulator):
    case = Case([20], group=9, kv_heads=1)
    with pytest.raises(RuntimeError, match="more than 8 query heads of a KV head are not supported"):
        case.run(emulator)


def test_other_clusters_are_refused(emulator):
    with pytest.raises(RuntimeError, match="clusters of 3 blocks is not supported. Set 1, 2, 4 or 8."):
        Case([20], kv_heads=1).run(emulator, cluster=3)
