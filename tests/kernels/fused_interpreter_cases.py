# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Operations that quantize their result, and guards of all quantizers, under Triton's interpreter
(test_interpreted_on_cpu.py)."""

import pytest
import torch
from backends import triton_kernels
from contract_inputs import gaussian
from fused_checks import CHECKS, INPUTS, canaries, check_norm, check_norm_after_experts
from quantizer_checks import check_all_quantizers
from slow import one_rule_fast, slow

from jetrl_verl import reference
from jetrl_verl.reference import SCALE_RULES

NORMS = (check_norm, check_norm_after_experts)


@pytest.mark.parametrize(("case", "rule"), one_rule_fast(INPUTS))
@pytest.mark.parametrize("check", CHECKS)
def test_operations_that_quantize_their_result(monkeypatch, check, case, rule):
    with canaries(monkeypatch):
        check(case, 3, 384, rule, "cpu")


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in NORMS])
def test_operations_that_quantize_more_than_a_tile_of_rows(monkeypatch, check):
    with canaries(monkeypatch):
        check(gaussian, 130, 128, "fp32", "cpu")


@pytest.mark.parametrize(
    ("m", "k", "slots"), [(1, 2048, 8), (1, 128, 1), (5, 768, 8), slow(33, 128, 3), slow(9, 1024, 1)]
)
def test_combine_add_rms_norm_of_any_number_of_experts(monkeypatch, m, k, slots):
    with canaries(monkeypatch):
        check_norm_after_experts(gaussian, m, k, "fp32", "cpu", slots)


def test_combine_add_rms_norm_sums_as_the_reference():
    """Sums of integers need no rounding, in which the interpreter differs."""
    generator = torch.Generator().manual_seed(0)
    y, residual = (torch.randint(-9, 10, (rows, 256), generator=generator).bfloat16() for rows in (21, 7))
    row = torch.randperm(21, generator=generator).view(7, 3).to(torch.int32)
    _, total = triton_kernels.combine_add_rms_norm(y, row, residual, torch.ones(256).bfloat16(), 1e-6)
    assert torch.equal(total, reference.combine(y, row) + residual)


@pytest.mark.parametrize("check", CHECKS)
def test_operations_that_quantize_an_empty_result(check):
    check(gaussian, 0, 256, "fp32", "cpu")


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(3, 130), (131, 4)])
def test_quantizers_write_their_outputs_and_nothing_else(monkeypatch, shape, rule):
    with canaries(monkeypatch):
        check_all_quantizers(triton_kernels, gaussian(*shape), rule, "cpu")
