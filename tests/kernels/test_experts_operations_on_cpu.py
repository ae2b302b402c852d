# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Operations of a mixture of experts on the CPU."""

import pytest
import torch

from jetrl_verl import kernels, reference


def test_route_and_permute_equals_its_separate_operations():
    logits, x = torch.randn(40, 8), kernels.quantize_1x128(torch.randn(40, 256).bfloat16(), "fp32")
    weights, where, rows = kernels.route_and_permute(logits, x, 2, True)
    chosen, expected = kernels.route(logits, 2, True)
    assert torch.equal(weights, expected)
    assert all(map(torch.equal, where, kernels.segments(chosen, 8, 1)))
    gathered = kernels.gather_quantized(x, where.pair, 2)
    assert torch.equal(rows.qdata.view(torch.uint8), gathered.qdata.view(torch.uint8))
    assert torch.equal(rows.scales, gathered.scales)


def test_mismatched_operands_raise():
    x, where = torch.zeros(4, 200, dtype=torch.bfloat16), reference.segments(torch.zeros(4, 1, dtype=torch.int32), 2, 1)
    with pytest.raises(ValueError, match="not whole groups of 128"):
        kernels.gather_quantize_1x128_and_128x1(x, where.pair, 1, "fp32")
    quantized = reference.quantize_1x128(torch.zeros(4, 256), "fp32")
    with pytest.raises(ValueError, match="4 rows are not whole groups of 128; align segments to 128"):
        kernels.gather_relayout_128x1(quantized, where.pair, 1, "fp32")
    with pytest.raises(TypeError, match="x is torch.float32"):
        kernels.gather_quantize_1x128_and_128x1(torch.zeros(4, 256), where.pair, 1, "fp32")
    with pytest.raises(ValueError, match="k=3"):
        kernels.route_and_permute(torch.zeros(4, 2), quantized, 3, True)
    a, b = (
        reference.quantize_1x128(torch.zeros(4, 384), "fp32"),
        reference.quantize_128x128(torch.zeros(256, 384), "fp32"),
    )
    b = reference.QuantizedTensor(b.qdata.view(2, 128, 384), b.scales.view(2, 1, 3))
    with pytest.raises(ValueError, match="K = 384 does not divide into 2 slices of multiples of 128"):
        kernels.grouped_gemm_nt_of_ranks(a, b, where.start, 2)
    with pytest.raises(TypeError, match=r"combine_of_ranks: y is torch.float32"):
        kernels.combine_of_ranks(torch.zeros(2, 4, 128), where.row)
    with pytest.raises(ValueError, match="got .5, 2. torch.float32, .4, 256. and k=1"):
        kernels.route_and_permute(torch.zeros(5, 2), quantized, 1, True)
