# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The native kernels of a mixture's experts, their own source run on a CPU by tests/emulator.

As in test_native_emulated_on_cpu.py every sum is exact, and what is expected is the reference's, on those operands a
float64 product an expert. The rows of an expert, and where they begin, are what these tests go through.
"""

import itertools
from pathlib import Path

import native_emulator
import pytest
import torch
from native_emulator import Emulator, operand, product

from jetrl_verl.reference import BLOCK, QuantizedTensor

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return native_emulator.build(tmp_path_factory.mktemp("grouped"), kernels="sm90_grouped_*")


@pytest.fixture(scope="module")
def emulator(library) -> Emulator:
    return Emulator(library)


def starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def experts_operand(experts: int, n: int, k: int, seed: int, beside: bool) -> QuantizedTensor:
    """[E, N, K] with scales; experts below each other, or beside each other as a transpose has them."""
    flat = operand(experts * n, k, experts * n // BLOCK, 2 * seed + 1)
    qdata = flat.qdata.unflatten(0, (experts, n))
    scales = flat.scales.unflatten(0, (experts, n // BLOCK))
    if beside:
        around = torch.zeros(n, experts * k + 16, dtype=torch.uint8).view(qdata.dtype)
        placed = around[:, : experts * k].unflatten(1, (experts, k)).transpose(0, 1)
        placed.view(torch.uint8).copy_(qdata.view(torch.uint8))
        qdata = placed
    return QuantizedTensor(qdata, scales)


def check(emulator: Emulator, kernel: str, counts: list[int], n: int, k: int, *, more=0, beside=False, seed=0, **plan):
    """Rows of all experts, and canaries of NaN: around the result, and behind the last segment."""
    start = starts(counts)
    used = int(start[-1])
    a = operand(used + more, k, used + more, 2 * seed)
    b = experts_operand(len(counts), n, k, seed, beside)
    around = torch.full((used + more + 2, n + 16), torch.nan, dtype=torch.bfloat16)
    out = around[1:-1, 8:-8]
    emulator.run_grouped(kernel, a, b, start, out, seed=seed, **plan)
    for expert, count in enumerate(counts):
        rows = slice(int(start[expert]), int(start[expert]) + count)
        mine = QuantizedTensor(a.qdata[rows], a.scales[rows])
        want = product(mine, QuantizedTensor(b.qdata[expert], b.scales[expert]), True)
        assert torch.equal(out[rows], want.bfloat16()), expert
    assert around.isnan().sum() == around.numel() - used * n


RAGGED = [3, 0, 130, 0, 0, 17, 128, 1, 0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [128, 256])
def test_fprop_of_ragged_segments_over_more_tiles_than_multiprocessors(emulator, block, cluster, seed):
    plan = {"block": block, "cluster": cluster, "multiprocessors": 2}
    check(emulator, "grouped_fprop", RAGGED, 384, 384, more=5, beside=seed == 1, seed=seed, **plan)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [32, 64, 128])
def test_decode_of_ragged_segments_over_more_tiles_than_multiprocessors(emulator, block, seed):
    """Three K blocks leave half a stage past K; behind an expert's K lies the next one's where experts are beside each
    other, NaN among it."""
    check(
        emulator,
        "grouped_decode",
        RAGGED,
        256,
        384,
        block=block,
        more=5,
        beside=seed == 1,
        multiprocessors=2,
        seed=seed,
    )


def check_wgrad(emulator: Emulator, groups: list[int], n: int, k: int, *, more=0, seed=0, **plan):
    """Weight gradients of experts with so many groups of 128 tokens, and canaries of NaN around them."""
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [128, 256])
def test_wgrad_of_ragged_segments_over_more_tiles_than_multiprocessors(emulator, block, cluster, seed):
    plan = {"block": block, "cluster": cluster, "multiprocessors": 2}
    check_wgrad(emulator, [2, 0, 1, 7, 0], 384, 256, more=1, seed=seed, **plan)
