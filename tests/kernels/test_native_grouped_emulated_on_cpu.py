# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The source of the native grouped GEMMs of experts on the CPU emulator, with segments of any size and place.

As in test_native_emulated_on_cpu.py every sum is exact and must equal each expert's float64 product.
"""

import itertools

import native_emulator
import pytest
import torch
from native_emulator import Emulator, experts_operand, operand, plant, product
from slow import mostly_slow, slow

from jetrl_verl.reference import BLOCK, QuantizedTensor, k_slices

pytestmark = pytest.mark.timeout(900)


def starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def check(
    emulator: Emulator,
    kernel: str,
    counts: list[int],
    n: int,
    k: int,
    *,
    slices: int = 1,
    more=0,
    adjacent=False,
    seed=0,
    **call,
):
    """All rows of every expert and K slice are right; NaN around and after them is untouched."""
    start = starts(counts)
    used = int(start[-1])
    a = operand(used + more, k, used + more, 2 * seed)
    b = experts_operand(len(counts), n, k, seed, adjacent)
    around = torch.full((slices * (used + more) + 2, n + 16), torch.nan, dtype=torch.bfloat16)
    out = around[1:-1, 8:-8]
    emulator.run_grouped(kernel, a, b, start, out, slices=slices, seed=seed, **call)
    for number, (x, w) in enumerate(zip(k_slices(a, slices), k_slices(b, slices), strict=True)):
        of_slice = out[number * (used + more) :]
        for expert, count in enumerate(counts):
            rows = slice(int(start[expert]), int(start[expert]) + count)
            x_rows = QuantizedTensor(x.qdata[rows], x.scales[rows])
            want = product(x_rows, QuantizedTensor(w.qdata[expert], w.scales[expert]), True)
            assert torch.equal(of_slice[rows], want.bfloat16()), (number, expert)
    assert around.isnan().sum() == around.numel() - slices * used * n


RAGGED = [3, 0, 130, 0, 0, 17, 128, 1, 0]


@pytest.mark.parametrize(
    ("block", "cluster", "seed"),
    mostly_slow(
        itertools.product([128, 256], [1, 2], range(3)), fast=[(128, 1, 0), (128, 2, 1), (256, 1, 1), (256, 2, 0)]
    ),
)
def test_fprop_of_ragged_segments_over_more_tiles_than_multiprocessors(emulator, block, cluster, seed):
    plan = {"block": block, "cluster": cluster, "multiprocessors": 2}
    check(emulator, "grouped_fprop", RAGGED, 384, 384, more=5, adjacent=seed == 1, seed=seed, **plan)


@pytest.mark.parametrize("seed", [0, 1, slow(2)])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_decode_of_ragged_segments_over_more_tiles_than_multiprocessors(emulator, block, seed):
    """Three K blocks leave half a stage past K. Where experts lie next to each other, K of the next one follows."""
    plan = {"block": block, "adjacent": seed == 1, "multiprocessors": 2}
    check(emulator, "grouped_decode", RAGGED, 256, 384, more=5, seed=seed, **plan)


@pytest.mark.parametrize(
    ("block", "blocks"),
    [
        *itertools.product([32, 64, 128], [1, 3]),
        (64, 19),
        slow(32, 19),
        slow(128, 19),
        *map(slow, (32, 64, 128), [10] * 3),
    ],
)
def test_copies_of_w_that_start_during_the_previous_kernel(emulator, block, blocks):
    """Fewer K blocks than stages, and more; blocks with several tiles, one and none; slices. The previous kernel writes
    X, and in all other tests here the segments too."""
    case = {"block": block, "static_segments": True, "seed": blocks}
    for multiprocessors in (2, 64):
        plan = case | {"multiprocessors": multiprocessors, "adjacent": blocks in (3, 10)}
        check(emulator, "grouped_decode", [3, 0, 70, 0, 1], 256, blocks * BLOCK, more=5, **plan)
    check(emulator, "grouped_decode", [5, 9], 128, 2 * blocks * BLOCK, slices=2, **case)
    check(emulator, "grouped_decode", [0, 0], 128, BLOCK, more=4, **case)


def check_wgrad(emulator: Emulator, groups: list[int], n: int, k: int, *, more=0, seed=0, **plan):
    """Gradients of experts with these numbers of groups of 128 tokens are right, and NaN around them untouched."""
    start = starts([BLOCK * count for count in groups])
    tokens = int(start[-1]) + BLOCK * more
    a, b = operand(n, tokens, n, 4 * (seed // 2)), operand(k, tokens, k, 4 * (seed // 2) + 1)
    around = torch.full((len(groups) * n + 2, k + 16), torch.nan, dtype=torch.bfloat16)
    out = around[1:-1, 8:-8]
    emulator.run_grouped("grouped_wgrad", a, b, start, out, seed=seed, **plan)
    for expert, count in enumerate(groups):
        rows, first = slice(expert * n, (expert + 1) * n), int(start[expert])
        parts = (
            QuantizedTensor(q.qdata[:, first : first + BLOCK * count], q.scales[:, first // BLOCK :][:, :count])
            for q in (a, b)
        )
        assert torch.equal(out[rows], product(*parts, False).bfloat16()), expert
    assert around.isnan().sum() == around.numel() - len(groups) * n * k


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [128, 256])
def test_wgrad_of_ragged_segments_over_more_tiles_than_multiprocessors(emulator, block, cluster, seed):
    plan = {"block": block, "cluster": cluster, "multiprocessors": 2}
    check_wgrad(emulator, [2, 0, 1, 7, 0], 384, 256, more=1, seed=seed, **plan)


FORWARD = ["grouped_fprop", "grouped_decode"]
COUNTS = {
    "one token": [0, 0, 1, 0],
    "all tokens on one expert": [0, 0, 0, 300, 0],
    "all tokens on the last of many": [0] * 70 + [65],
    "every expert one": [1] * 35,
    "whole tiles": [128, 64, 0, 256],
    "one more and one less than a tile": [63, 65, 127, 129],
    "eight rows and one more": [8, 9, 32, 33],
    "one expert": [40],
}


@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_distributions_of_rows_over_experts(emulator, counts, kernel):
    check(emulator, kernel, counts, 128, 256, more=3, adjacent=len(counts) % 2 == 0, seed=len(counts))


@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.parametrize("blocks", [1, 2, slow(3), 4, 5, slow(6), slow(8), 9])
def test_the_ring_continues_across_tiles_with_any_number_of_k_blocks(emulator, kernel, blocks):
    """Seven tiles in turn on one multiprocessor, of an expert and of the next."""
    plan = {"block": 128, "cluster": 1, "multiprocessors": 1}
    check(emulator, kernel, [70, 0, 3, 130, 1], 128, blocks * BLOCK, adjacent=blocks % 2 == 0, seed=blocks, **plan)


PLANS = [
    *(("grouped_fprop", {"block": block, "cluster": cluster}) for block in (128, 256) for cluster in (1, 2)),
    *(("grouped_decode", {"block": block}) for block in (32, 64, 128)),
]


@pytest.mark.parametrize(("slices", "blocks"), [(2, 3), (3, 2), slow(4, 1)])
@pytest.mark.parametrize(("kernel", "plan"), PLANS)
def test_each_k_slice_gives_its_own_product(emulator, kernel, plan, slices, blocks):
    """With scales that TMA can and cannot read, experts one after the other and adjacent, and rows between the
    products of two slices."""
    counts, more = ([4, 0, 132], 4) if slices % 2 == 0 else ([3, 0, 130], 0)
    k = slices * blocks * BLOCK
    check(emulator, kernel, counts, 256, k, slices=slices, more=more, adjacent=blocks % 2 == 0, seed=slices, **plan)


@pytest.mark.parametrize("kernel", FORWARD)
def test_the_kernel_chooses_a_plan_for_k_slices(emulator, kernel):
    check(emulator, kernel, [3, 0, 130], 256, 6 * BLOCK, slices=2, multiprocessors=3)


def check_no_other_slice(emulator: Emulator, kernel: str, adjacent: bool = False) -> None:
    """X and W of the other slices are NaN. With an odd number of K blocks a slice, half of a stage of two is empty."""
    start, (n, width) = starts([5, 9]), (128, 3 * BLOCK)
    a, b = operand(14, 3 * width, 14, 0), experts_operand(2, n, 3 * width, 0, adjacent)
    x, w = k_slices(a, 3)[1], k_slices(b, 3)[1]
    want = [
        product(QuantizedTensor(x.qdata[rows], x.scales[rows]), QuantizedTensor(w.qdata[e], w.scales[e]), True)
        for e, rows in enumerate((slice(0, 5), slice(5, 14)))
    ]
    for columns in (slice(0, width), slice(2 * width, 3 * width)):
        b.qdata.view(torch.uint8)[..., columns] = native_emulator.NAN_CODE
        a.qdata.view(torch.uint8)[:, columns] = native_emulator.NAN_CODE
    out = torch.zeros(3 * 14, n, dtype=torch.bfloat16)
    block = {"grouped_decode": 64}.get(kernel, 0)
    emulator.run_grouped(kernel, a, b, start, out, slices=3, block=block, multiprocessors=1)
    assert torch.equal(out[14:28], torch.cat(want).bfloat16())
    assert out[:14].isnan().all() and out[28:].isnan().all()


@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.parametrize("adjacent", [False, True])
def test_a_product_reads_its_own_k_slice_alone(emulator, kernel, adjacent):
    check_no_other_slice(emulator, kernel, adjacent)


@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.parametrize("slices", [0, 3, 4])
def test_slices_that_cut_a_k_block_raise(emulator, kernel, slices):
    a, b = operand(8, 2 * BLOCK, 8, 0), experts_operand(1, BLOCK, 2 * BLOCK, 0, False)
    with pytest.raises(RuntimeError, match="a slice of K must be a multiple of 128; use fewer slices"):
        emulator.run_grouped(kernel, a, b, starts([8]), torch.empty(32, BLOCK).bfloat16(), slices=slices)


@pytest.mark.parametrize(("kernel", "block"), [("grouped_fprop", 256), ("grouped_decode", 64)])
def test_blocks_without_a_tile_end(emulator, kernel, block):
    """The grid is that of the worst case."""
    check(emulator, kernel, [0, 5, 0], 256, 256, block=block, more=400, multiprocessors=9)
    check(emulator, kernel, [0, 0, 0], 256, 256, block=block, more=4, multiprocessors=3)


@pytest.mark.parametrize("kernel", FORWARD)
def test_a_row_reads_its_own_expert_alone(emulator, kernel):
    """Weights and rows of the other experts are NaN; odd number of K blocks, experts next to each other."""
    start, (n, k) = starts([5, 9, 3]), (128, 3 * BLOCK)
    a, b = operand(17, k, 17, 0), experts_operand(3, n, k, 0, True)
    want = product(QuantizedTensor(a.qdata[5:14], a.scales[5:14]), QuantizedTensor(b.qdata[1], b.scales[1]), True)
    for expert, rows in ((0, slice(0, 5)), (2, slice(14, 17))):
        b.qdata[expert].view(torch.uint8).fill_(native_emulator.NAN_CODE)
        a.qdata[rows].view(torch.uint8).fill_(native_emulator.NAN_CODE)
    out = torch.zeros(17, n, dtype=torch.bfloat16)
    emulator.run_grouped(kernel, a, b, start, out, multiprocessors=1)
    assert torch.equal(out[5:14], want.bfloat16())
    assert out[:5].isnan().all() and out[14:].isnan().all()


@pytest.mark.parametrize("kernel", FORWARD)
def test_the_sign_of_zero_is_kept(emulator, kernel):
    """-2^-18 times a scale of 2^-149 rounds to -0; half a stage past K adds nothing to it."""
    a, b = operand(1, BLOCK, 1, 0), experts_operand(2, BLOCK, BLOCK, 0, False)
    a.qdata.view(torch.uint8).zero_()[:, 5] = 0x01
    b.qdata.view(torch.uint8).zero_()[..., 5] = 0x81
    a.scales.fill_(2.0**-75), b.scales.fill_(2.0**-74)
    out = torch.ones(1, BLOCK, dtype=torch.bfloat16)
    emulator.run_grouped(kernel, a, b, starts([0, 1]), out, block={"grouped_decode": 64}.get(kernel, 0))
    assert (out == 0).all() and out.signbit().all()


@pytest.mark.parametrize(("multiprocessors", "blocks"), [(20, 16), (36, 32), (70, 64)])
def test_decode_chooses_tiles_for_one_round_over_the_active_experts(emulator, multiprocessors, blocks):
    """Eight rows go to eight of 128 experts, as one token's do: of 256 columns 128, 64 and 32 a tile, in turn."""
    counts = [int(expert % 16 == 0) for expert in range(128)]
    check(emulator, "grouped_decode", counts, 256, BLOCK, multiprocessors=multiprocessors)
    assert emulator.blocks() == blocks


@pytest.mark.parametrize("groups", [[0, 0, 3], [1], [0, 0], [1] * 34, [5, 4, 3, 2, 1, 0, 0]], ids=str)
@pytest.mark.parametrize("block", [128, 256])
def test_wgrad_of_any_number_of_groups(emulator, groups, block):
    check_wgrad(emulator, groups, 136, 128, block=block, cluster=1, more=not any(groups), multiprocessors=1)


@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("groups", [1, slow(2), 3, 4, 5, 6, 7, slow(8), slow(9)])
def test_wgrad_ends_at_any_stage_of_the_ring(emulator, groups, block):
    """Tiles in turn on one multiprocessor; sums of a tile are stored under the first chains of the next."""
    check_wgrad(emulator, [groups, 1, groups], block, 128, block=block, cluster=1, multiprocessors=1, seed=groups)


@pytest.mark.parametrize("clusters", [1, 2, slow(3), 5, slow(7)])
def test_wgrad_visits_the_experts_back_and_forth(emulator, clusters):
    """Every tile is computed once, also where the last round is not whole, in both directions."""
    check_wgrad(emulator, [2, 0, 3, 1, 0, 2], 128, 384, block=128, cluster=1, multiprocessors=clusters)
    check_wgrad(emulator, [2, 0, 1], 128, 512, block=128, cluster=2, multiprocessors=2 * clusters)


FPROP, DECODE, WGRAD = "grouped_fprop", "grouped_decode", "grouped_wgrad"
AT_THE_END = "  if (!waited) sm90::wait_for_previous_kernel();  // no tile for this block\n"
WAITS = "      sm90::wait_for_previous_kernel();\n      waited = true;\n    }\n    for"
FAULTS = {
    "rows of the next expert are stored": (FPROP, "fprop.cuh", "of_tile.row + kStoreRows <= of_tile.end", "true"),
    "a tile's place lies where an int4 may not": (
        *(FPROP, "fprop.cuh", "round_up(kAtEmpty + 8 * kStages, 16)", "kAtEmpty + 8 * kStages"),
    ),
    "scales are read from any row on": (FPROP, f"sm90_{FPROP}.cu", "segments.aligned && ", ""),
    "X is copied early": (DECODE, f"sm90_{DECODE}.cu", WAITS, "    }\n    waited = true;\n    for"),
    "a block without a tile leaves early": (DECODE, f"sm90_{DECODE}.cu", AT_THE_END, ""),
    "staging is overwritten": (
        *(WGRAD, f"sm90_{WGRAD}.cu", "p.k, own_lane);\n      sm90::sync_warp();\n", "p.k, own_lane);\n"),
    ),
}
"""Fault -> kernel that runs, file, its line, replacement."""
SAMPLE = ("rows of the next expert are stored", "X is copied early", "staging is overwritten")
"""One fault per kernel that every run plants."""


def check_early(emulator: Emulator, **plan) -> None:
    """Copies of W that start during the previous kernel, on a grid with more blocks than tiles."""
    check(emulator, DECODE, [3, 0, 9], 256, 5 * BLOCK, more=70, static_segments=True, **plan | {"multiprocessors": 12})


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, SAMPLE))
def test_a_planted_fault_is_detected(fault, tmp_path):
    """The same cases fail on a kernel with one wrong line."""
    kernel, *change = FAULTS[fault]
    faulty = plant(tmp_path, f"sm90_{kernel}*", *change)
    with pytest.raises((RuntimeError, AssertionError)):
        if kernel == WGRAD:
            check_wgrad(faulty, [2, 0, 1, 7, 0], 384, 256, block=256, cluster=2, multiprocessors=2)
        else:
            for block in (256, 128) if kernel == FPROP else (64,):
                plan = {"block": block, "cluster": 1, "multiprocessors": 2}
                check(faulty, kernel, [70, 0, 3, *[0] * 40, 17], 256, 5 * BLOCK, **plan)
                if kernel == DECODE:
                    check_early(faulty, **plan)
