# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The source of the native kernels that transpose qdata on the CPU emulator: the bytes of the reference."""

from pathlib import Path

import pytest
import torch
from contract_inputs import CASES, gaussian
from native_emulator import Emulator, plant, silu_gradients, silu_operands
from slow import mostly_slow, slow

from jetrl_verl import reference
from jetrl_verl.reference import BLOCK, FP8_DTYPE, SCALE_RULES, QuantizedTensor

pytestmark = pytest.mark.timeout(600)
SHAPES = [(1, 16), (15, 144), (129, 48), (131, 272), (256, 128)]
CANARY = 0x5A


def padded(q: QuantizedTensor) -> QuantizedTensor:
    """The same between NaN: rows of 16 more bytes, one more row, column-major scales."""
    qdata = torch.full((q.qdata.shape[0] + 1, q.qdata.shape[1] + 16), 0x7F, dtype=torch.uint8).view(FP8_DTYPE)
    qdata[:-1, :-16] = q.qdata
    scales = torch.full((q.scales.shape[1], q.scales.shape[0] + 3), torch.nan)
    scales[:, :-3] = q.scales.t()
    return QuantizedTensor(qdata[:-1, :-16], scales[:, :-3].t())


def run(emulator: Emulator, rule: str | None, q: QuantizedTensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes [columns, rows, with a rule rounded up to 128], scales) of the call; nothing around them is written."""
    rows, columns = q.qdata.shape
    width = -(-rows // BLOCK) * BLOCK if rule else rows
    around = torch.full((columns + 2, width), CANARY, dtype=torch.uint8)
    shape = (-(-rows // BLOCK), columns) if rule else q.scales.shape[::-1]
    scales_around = torch.full((shape[0] + 2, shape[1]), torch.nan)
    emulator.transpose(rule, q, around[1:-1], scales_around[1:-1], seed)
    assert (around[[0, -1]] == CANARY).all() and scales_around[[0, -1]].isnan().all()
    return around[1:-1], scales_around[1:-1]


def check_relayout(emulator: Emulator, x: torch.Tensor, rule: str, seed: int = 0) -> None:
    q = reference.quantize_1x128(x, rule)
    qdata, scales = run(emulator, rule, padded(q), seed)
    want = reference.relayout_128x1(q, rule)
    assert torch.equal(qdata[:, : len(x)], want.qdata.view(torch.uint8))
    assert torch.equal(scales.t().contiguous().view(torch.int32), want.scales.view(torch.int32))
    # Zeros after the tokens add nothing to a gradient; NaN where the last group is NaN.
    rest = qdata[:, len(x) :]
    poisoned = want.qdata[:, -1].isnan()
    assert (rest[~poisoned] == 0).all() and (rest[poisoned] == 0x7F).all()


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_relayout_matches_the_reference(emulator, case, shape, rule):
    check_relayout(emulator, case(*shape), rule)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("seed", [1, 2, *map(slow, range(3, 7))])
def test_relayout_under_other_interleavings(emulator, seed, rule):
    check_relayout(emulator, gaussian(140, 144), rule, seed)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_relayout_of_row_major_scales_and_every_code(emulator, rule):
    qdata = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPE).repeat(130, 1)
    scales = torch.tensor([2.0**-60, 1.0, 3e30, torch.inf, 1e-38]).repeat(26)[:, None].repeat(1, 2)
    q = QuantizedTensor(qdata, scales.contiguous())
    got, got_scales = run(emulator, rule, q)
    want = reference.relayout_128x1(q, rule)
    assert torch.equal(got[:, :130], want.qdata.view(torch.uint8))
    assert torch.equal(got_scales.t(), want.scales)


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
@pytest.mark.parametrize("shape", [(16, 16), (144, 272), (256, 128), (400, 48)])
def test_the_transpose_moves_every_byte_and_scale(emulator, shape, seed):
    qdata = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    scales = torch.rand(-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    got, got_scales = run(emulator, None, padded(QuantizedTensor(qdata.view(FP8_DTYPE), scales)), seed)
    assert torch.equal(got, qdata.t())
    assert torch.equal(got_scales, scales.t())


def check_silu_mul_backward(emulator: Emulator, rows: int, k: int, rule: str, seed: int, poison: float = 0.0) -> None:
    dy, gate, up = silu_operands(rows, k, seed)
    dy[rows // 2, k // 3] += poison
    gradients = silu_gradients(dy, gate, up)
    groups = -(-rows // BLOCK)
    results = []
    for _ in gradients:
        results += [torch.full((rows + 1, k), CANARY, dtype=torch.uint8), torch.full((k // BLOCK + 1, rows), torch.nan)]
        results += [
            torch.full((k + 1, groups * BLOCK), CANARY, dtype=torch.uint8),
            torch.full((groups + 1, k), torch.nan),
        ]
    emulator.silu_mul_backward(rule, (dy, gate, up), results, seed)
    for i, gradient in enumerate(gradients):
        qdata, scales, column_qdata, column_scales = results[4 * i : 4 * i + 4]
        row, column = reference.quantize_1x128_and_128x1(gradient, rule)
        assert torch.equal(qdata[:-1], row.qdata.view(torch.uint8))
        assert torch.equal(scales[:-1].t(), row.scales)
        assert torch.equal(column_qdata[:-1, :rows], column.qdata.view(torch.uint8))
        assert torch.equal(column_scales[:-1].t(), column.scales)
        assert (qdata[-1] == CANARY).all() and (column_qdata[-1] == CANARY).all()
        assert scales[-1].isnan().all() and column_scales[-1].isnan().all()


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize(("rows", "k"), [(1, 128), (31, 256), (33, 128), (128, 256), (141, 128)])
def test_gated_mlp_gradients_match_the_separate_steps(emulator, rows, k, rule):
    check_silu_mul_backward(emulator, rows, k, rule, seed=rows)


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_a_non_finite_gradient_poisons_only_its_groups(emulator, poison):
    check_silu_mul_backward(emulator, 140, 256, "fp32", 3, poison)


RELAYOUT, SILU = "sm90_relayout_128x1.cu", "sm90_silu_mul_backward.cu"
FAULTS = {
    "a thread does not wait for its own copies": (RELAYOUT, "  sm90::cp_async_wait();\n", ""),
    "a row past the end is copied": ("byte_tile.cuh", "32 * i < left", "32 * i <= left"),
    "a column is read before all rows are there": (SILU, "  sm90::sync_block();\n", ""),
    "gradients lie past the end of shared memory": (SILU, "kBytes = 2 * kMatrix;", "kBytes = 2 * kMatrix - 512;"),
}
"""Fault -> file, its line, the line planted there."""
SAMPLE = ("a thread does not wait for its own copies", "a column is read before all rows are there")
"""One fault per kernel that every run plants."""


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, SAMPLE))
def test_a_planted_fault_is_detected(fault, tmp_path):
    of_silu = FAULTS[fault][0] == SILU
    faulty = plant(tmp_path, Path(SILU if of_silu else RELAYOUT).stem, *FAULTS[fault])
    for seed in range(2):
        with pytest.raises((AssertionError, RuntimeError)):
            if of_silu:
                check_silu_mul_backward(faulty, 140, 128, "fp32", seed)
            else:
                check_relayout(faulty, gaussian(140, 144), "fp32", seed)
