# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The source of the native GEMMs on the CPU emulator: index arithmetic, barriers, edges, interleavings.

Every sum is exact and must equal a float64 product; the seed's parity chooses scales for TMA or for cp.async.
"""

import native_emulator
import pytest
import torch
from native_emulator import Emulator, operands, plant, product
from slow import mostly_slow, slow

from jetrl_verl.reference import BLOCK, k_slices, sum_of_ranks

pytestmark = pytest.mark.timeout(900)


def check(emulator: Emulator, kernel: str, m: int, n: int, k: int, *, dtype=torch.bfloat16, bias=None, seed=0, **plan):
    """The result is right, the NaN around it untouched. With ``ranks``: the sum of the rounded products of K slices."""
    block_scaled = kernel != "wgrad"
    a, b = operands(m, n, k, block_scaled, seed)
    around = torch.full((m + 2, n + 16), torch.nan, dtype=dtype)
    out = around[1:-1, 8:-8]
    emulator.run(kernel, a, b, out, bias=bias, seed=seed, **plan)
    if (ranks := plan.get("ranks")) is not None:
        slices = zip(k_slices(a, ranks), k_slices(b, ranks), strict=True)
        want = sum_of_ranks([product(x, w, True).bfloat16() for x, w in slices])
    else:
        want = product(a, b, block_scaled)
    if bias is not None:
        want += bias.double()
    assert torch.equal(out, want.to(dtype))
    assert around.isnan().sum() == around.numel() - m * n


@pytest.mark.parametrize("seed", [0, 1, slow(2)])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [64, 128, 192, 256])
def test_fprop_over_more_tiles_than_multiprocessors(emulator, block, cluster, seed):
    """Tiles of three K blocks: the last round of each leaves some stages unused."""
    check(emulator, "fprop", 150, 264, 336, block=block, cluster=cluster, multiprocessors=2, seed=seed)


@pytest.mark.parametrize("block", [0, 64, 192])
@pytest.mark.parametrize("m", [1, 63, 64, 65, 127, 129, 255, 257])
def test_fprop_around_tile_edges(emulator, m, block):
    check(emulator, "fprop", m, 136, 64, block=block, seed=m)


@pytest.mark.parametrize("n", [8, 56, 64, 72, 120, 136, 184, 192, 200, 248, 320, 328, 376, 384, 392, 456])
def test_fprop_tiles_of_192_columns_start_inside_a_scale_group_of_w(emulator, n):
    """Every second tile does; the last one, and its scale, may reach past N."""
    check(emulator, "fprop", 65, n, 336, block=192, multiprocessors=2, seed=n)


@pytest.mark.parametrize(
    ("m", "n", "multiprocessors", "blocks"), [(256, 128, 6, 4), (128, 384, 4, 3), (128, 768, 5, 4), (128, 1024, 5, 4)]
)
def test_fprop_chooses_the_tile_width_with_the_fewest_rounds(emulator, m, n, multiprocessors, blocks):
    """Widths of 64, 128, 192 and 256 in turn: only this one gives one round of so many blocks."""
    check(emulator, "fprop", m, n, 144, multiprocessors=multiprocessors)
    assert emulator.blocks() == blocks


@pytest.mark.parametrize(("cluster", "seed"), mostly_slow([(1, 0), (1, 1), (2, 0), (2, 1)], fast=[(1, 0), (2, 1)]))
@pytest.mark.parametrize("block", [64, 128, 192, 256])
def test_fprop_wraps_its_ring_of_stages_several_times_a_tile(emulator, block, cluster, seed):
    """Ten K blocks: scales of W for two or three rounds of each tile, the last one partial."""
    check(emulator, "fprop", 150, 264, 1158, block=block, cluster=cluster, multiprocessors=2, seed=seed)


@pytest.mark.parametrize(
    ("kernel", "block"), [("fprop", 64), ("fprop", 128), ("fprop", 192), ("fprop", 256), ("wgrad", 128), ("wgrad", 256)]
)
@pytest.mark.parametrize("k", [16, slow(128), 144, 512, 640, slow(768), slow(900), 1024, 1100])
def test_rings_of_stages_that_wrap_and_that_do_not(emulator, kernel, k, block):
    """Three tiles in turn on one multiprocessor; the last round uses all stages of the ring, or some."""
    shape = (3 * block - 1, 64) if kernel == "wgrad" else (64, 3 * block - 8)
    check(emulator, kernel, *shape, k, block=block, cluster=1, multiprocessors=1, seed=k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", ["fprop", "decode"])
def test_bias_is_added_before_rounding(emulator, kernel, dtype):
    check(emulator, kernel, 20, 72, 256, bias=(torch.arange(72) / 8 - 4).to(dtype))


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [64, 128, 192, 256])
def test_bias_of_a_tile_stored_during_the_next_one(emulator, block, cluster):
    """Several tiles in turn, the last one ragged; each has the bias of its own columns."""
    plan = {"block": block, "cluster": cluster, "multiprocessors": 2}
    check(emulator, "fprop", 150, 528, 256, bias=torch.arange(528) / 8 - 33, **plan, seed=block)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("ranks", "blocks"), [(1, 3), (2, 1), (2, 3), slow(4, 1), slow(4, 3), (8, 1), slow(8, 3)])
def test_rank_products_are_rounded_and_added_in_rank_order(emulator, ranks, blocks, block, cluster):
    """Several tiles in turn, each with sums that begin at zero; slices of one K block and of three."""
    plan = {"ranks": ranks, "block": block, "cluster": cluster, "multiprocessors": 2}
    check(emulator, "fprop_of_ranks", 150, 264, ranks * blocks * BLOCK, **plan, seed=blocks)


@pytest.mark.parametrize("m", [1, 63, 64, 65, 127, 129, 257])
def test_rank_products_around_tile_edges(emulator, m):
    check(emulator, "fprop_of_ranks", m, 136, 4 * BLOCK, ranks=2, seed=m)


@pytest.mark.parametrize(
    ("block", "blocks"),
    mostly_slow(
        [(block, blocks) for block in (64, 128) for blocks in (4, 5, 6, 8, 9)],
        fast=[(64, 5), (64, 8), (64, 9), (128, 4), (128, 5), (128, 6)],
    ),
)
def test_k_slices_end_at_any_stage_of_the_ring(emulator, blocks, block):
    """At, before and after its end; three tiles in turn on one multiprocessor. The ring has 5 stages for 128 columns, 8
    for 64."""
    shape, plan = (64, 3 * block - 8, 3 * blocks * BLOCK), {"block": block, "cluster": 1, "multiprocessors": 1}
    check(emulator, "fprop_of_ranks", *shape, ranks=3, **plan, seed=blocks)


def test_sum_of_rank_products_differs_from_the_whole_product():
    """So the tests above depend on the rounding of each rank."""
    a, b = operands(290, 264, 4 * BLOCK, True, 1)
    parts = [product(x, w, True).bfloat16() for x, w in zip(k_slices(a, 4), k_slices(b, 4), strict=True)]
    assert not torch.equal(sum_of_ranks(parts), product(a, b, True).bfloat16())


@pytest.mark.parametrize(
    ("parts", "want"), [((2.0**25, -(2.0**25), 1), 1), ((1, 2.0**25, -(2.0**25)), 0), ((2.0**25, 1, -(2.0**25)), 0)]
)
def test_rank_products_are_added_from_the_left(emulator, parts, want):
    """2^25 + 1 in FP32 is 2^25."""
    a, b = operands(3, 16, 3 * BLOCK, True)
    a.qdata.view(torch.uint8).zero_(), b.qdata.view(torch.uint8).zero_()
    a.qdata[:, ::BLOCK] = torch.tensor(parts).sign().to(a.qdata.dtype)
    b.qdata[:, ::BLOCK] = 1
    a.scales.copy_(torch.tensor(parts).abs()), b.scales.fill_(1)
    out = torch.full((3, 16), torch.nan, dtype=torch.bfloat16)
    emulator.run("fprop_of_ranks", a, b, out, ranks=3)
    assert (out == want).all()


def test_rank_products_keep_the_sign_of_zero(emulator):
    """Products too small for FP32 are -0 on each rank, and so is their sum."""
    a, b = operands(1, 16, 2 * BLOCK, True)
    a.qdata.view(torch.uint8).zero_()[:, ::BLOCK] = 0x01
    b.qdata.view(torch.uint8).zero_()[:, ::BLOCK] = 0x81
    a.scales.fill_(2.0**-75), b.scales.fill_(2.0**-74)
    out = torch.ones(1, 16, dtype=torch.bfloat16)
    emulator.run("fprop_of_ranks", a, b, out, ranks=2)
    assert (out == 0).all() and out.signbit().all()


@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize(
    ("m", "rows"),
    [(m, rows) for m in (1, 16, 17, 32) for rows in (16, 48)]
    + [(m, rows) for m in (64, 128) for rows in (16, 32, 48, 64)]
    + [(33, 32), (65, 64), (100, 32), (200, 48), (257, 64)],
)
def test_decode_with_every_tile_size_also_across_scale_blocks(emulator, m, rows, seed):
    """Two and three rounds of tiles; the last ones reach past N."""
    seed += m % 2
    check(emulator, "decode", m, 264, 336 + 112 * (seed % 2), block=rows, multiprocessors=4, seed=seed)


@pytest.mark.parametrize("m", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_decode_around_tile_edges(emulator, m):
    check(emulator, "decode", m, 72, 208, seed=m)


@pytest.mark.parametrize(("m", "rows"), [(5, 16), (5, 64), (40, 48), (70, 32)])
@pytest.mark.parametrize("blocks", [1, 2, 3, slow(4), slow(5), slow(6), 7, 8, 17, slow(34), slow(71)])
def test_decode_with_any_number_of_k_blocks(emulator, blocks, m, rows):
    """Stages of two K blocks, or of one with 70 tokens; a tile starts at the stage where the last one ended."""
    n = 3 * rows - 8 if blocks < 17 else rows - 8
    check(emulator, "decode", m, n, blocks * BLOCK - 16 * (blocks % 3), block=rows, multiprocessors=1, seed=blocks)


def test_decode_keeps_the_sign_of_zero_with_half_a_stage_past_k(emulator):
    """-2^-18 times a scale of 2^-149 rounds to -0, and stays -0."""
    a, b = operands(1, 16, BLOCK, True)
    a.qdata.view(torch.uint8).zero_()[:, 5] = 0x01
    b.qdata.view(torch.uint8).zero_()[:, 5] = 0x81
    a.scales.fill_(2.0**-75), b.scales.fill_(2.0**-74)
    out = torch.ones(1, 16, dtype=torch.bfloat16)
    emulator.run("decode", a, b, out)
    assert (out == 0).all() and out.signbit().all()


@pytest.mark.parametrize("n", [8, 200, 520])
def test_decode_chooses_tiles_that_cover_the_weight(emulator, n):
    check(emulator, "decode", 12, n, 256, multiprocessors=6)


@pytest.mark.parametrize("seed", [0, 1, slow(2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [128, 256])
def test_wgrad_with_a_ragged_token_count(emulator, block, cluster, dtype, seed):
    """The padding of the rows is NaN, which must not reach the sum."""
    check(emulator, "wgrad", 136, 264, 331, dtype=dtype, block=block, cluster=cluster, seed=seed)


@pytest.mark.parametrize(
    ("dtype", "seed"), [(torch.bfloat16, 0), slow(torch.bfloat16, 1), slow(torch.float32, 0), (torch.float32, 1)]
)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [128, 256])
def test_wgrad_over_more_tiles_than_multiprocessors(emulator, block, cluster, dtype, seed):
    """Tiles that end inside the matrix, two rounds or more, a ring that wraps, a short last group."""
    plan = {"block": block, "cluster": cluster, "multiprocessors": 2}
    check(emulator, "wgrad", block + 14, 264, 713, dtype=dtype, seed=seed, **plan)


@pytest.mark.parametrize("tokens", [40, 128])
@pytest.mark.parametrize("block", [128, 256])
def test_wgrad_with_a_single_token_group(emulator, block, tokens):
    check(emulator, "wgrad", 270, 140, tokens, dtype=torch.float32, block=block, multiprocessors=2, seed=tokens)


FPROP, RING = "fprop.cuh", "tile_ring.cuh"
WAIT = "      sm90::wgmma_wait<0>(partial);\n"
RELEASE = """      if (c == kChunks - 1) {
        ring.used(stage);
        ring.template release<Shape::kCluster>(stage, lane, place_of_releases);
      }
"""
NEXT = "if (!last) ring.wait_full((stage + 1) % kStages);"
LATE = "    sm90::sync_warp();  // else a late lane may miss"
GIVES_BACK = "      if (lane < kCluster) sm90::barrier_arrive_in_cluster"
READS_STAGING = "  if (acts_for_copies<Shape::kGrouped>(lane)) sm90::tma_store_wait_read();\n"
EXPECTED = "barrier_arrive_expect(full, Shape::kTileX + "
SCALES = "kAtScalesW + 2 * kScalesW * 4"

FAULTS = {
    "a stage is given back early": ("fprop", FPROP, WAIT + RELEASE, RELEASE + WAIT),
    "the next block is not waited for": ("fprop", FPROP, NEXT, ""),
    "a block of the next tile is waited for": ("fprop", FPROP, NEXT, NEXT.removeprefix("if (!last) ")),
    "blocks leave early": ("fprop", FPROP, "if (Shape::kCluster > 1) sm90::sync_cluster();", ""),
    "a warp leaves while its staging is read": ("fprop", FPROP, READS_STAGING, ""),
    "the expected bytes miss a tile": ("fprop", FPROP, f"{EXPECTED}Shape::kTileW +", EXPECTED),
    "barriers lie where scales go": ("fprop", FPROP, SCALES, "kAtScalesW + round_up(kScalesW * 4, 8)"),
    "lanes still read a stage": ("fprop", RING, f"      sm90::sync_warp();\n{GIVES_BACK}", GIVES_BACK),
    "new barriers are not published": ("fprop", RING, "    sm90::fence_barrier_init();\n", ""),
    "a late lane may miss its phase": ("fprop", RING, LATE, LATE.replace("sm90::sync_warp();", "")),
    "staging is not fenced": ("fprop", "epilogue.cuh", "  sm90::fence_for_copies();\n", ""),
    "a chain starts without a fence": ("fprop", "pipeline.cuh", "  sm90::wgmma_fence();\n", ""),
    "a warpgroup keeps its turn": (
        *("wgrad", "sm90_wgrad_1x128_1x128.cu", "if (lane == 0) sm90::barrier_arrive(other_turn);", ""),
    ),
    "X is copied early": ("decode", "sm90_decode_fprop.cu", "    sm90::wait_for_previous_kernel();\n", ""),
}
"""Fault -> kernel that runs, file, its line, replacement. One for each rule of the emulator that a GPU shows rarely and
results alone might not: order, bounds, phases, fences. Wrong arithmetic needs no proof."""
AT_AN_END = ("a warp leaves while its staging is read", "staging is not fenced", "a chain starts without a fence")
"""Faults of a tile's first or last K block and of the epilogue: two K blocks show them."""
SAMPLE = ("a stage is given back early", "a warpgroup keeps its turn", "X is copied early")
"""One fault per kernel that every run plants."""


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, SAMPLE))
def test_a_planted_fault_is_detected(fault, tmp_path):
    """The same cases fail, under any seed, on a kernel with one wrong line.

    Ten K blocks go more than twice round four stages, two tiles of the decode kernel more than once round seven.
    """
    kernel, file, line, wrong = FAULTS[fault]
    faulty = plant(tmp_path, f"sm90_{kernel}*", file, line, wrong)
    shape, plan = ((60, 264), {"block": 48}) if kernel == "decode" else ((290, 264), {"block": 256, "cluster": 2})
    plan |= {"dtype": torch.float32} if kernel == "wgrad" else {}  # where its warpgroups take turns
    k = 144 if fault in AT_AN_END or kernel == "decode" else 1158
    for seed in (0, 2) if line == LATE else (0, 1):  # the copying warp has late lanes where TMA brings its scales
        with pytest.raises((RuntimeError, AssertionError)):
            check(faulty, kernel, *shape, k, **plan, multiprocessors=2, seed=seed)


def test_a_missing_compiler_raises_instead_of_skipping(monkeypatch):
    monkeypatch.setattr(native_emulator.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"not tested without a C\+\+ compiler. Install g\+\+"):
        native_emulator.build()
