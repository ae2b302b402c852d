# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The INT8 kernels under Triton's interpreter (test_interpreted_on_cpu.py)."""

import pytest
import torch
from backends import triton_kernels
from contract_inputs import CASES, gaussian, heavy_tailed
from quantizer_checks import assert_same_bytes

from jetrl_verl import reference


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (17, 256), (2, 9000)])
def test_the_quantizer_matches_the_reference(case, shape):
    x = case(*shape)
    assert_same_bytes(triton_kernels.quantize_int8(x), reference.quantize_int8(x))


def test_leading_dimensions_strides_and_empty_batches():
    x = gaussian(256, 6).t().reshape(2, 3, 256)
    assert_same_bytes(triton_kernels.quantize_int8(x), reference.quantize_int8(x))
    assert_same_bytes(triton_kernels.quantize_int8(x[:0]), reference.quantize_int8(x[:0]))


@pytest.mark.parametrize("shape", [(65, 130, 300), (1, 256, 256), (130, 66, 128), (3, 5, 0), (0, 128, 128)])
def test_gemm_matches_the_reference(shape):
    """Bitwise without a bias; the interpreter rounds a fused multiply-add twice and truncates to BF16."""
    m, n, k = shape
    a, b = reference.quantize_int8(heavy_tailed(m, k)), reference.quantize_int8(gaussian(n, k))
    bias = gaussian(n, 2)[:, 1]
    plain = triton_kernels.gemm_int8(a, b, out_dtype=torch.float32)
    assert torch.equal(plain, reference.gemm_int8(a, b, out_dtype=torch.float32))
    biased = triton_kernels.gemm_int8(a, b, bias=bias, out_dtype=torch.float32)
    want = reference.gemm_int8(a, b, bias=bias, out_dtype=torch.float32)
    assert (biased - want).norm() <= 1e-6 * want.norm()
    assert triton_kernels.gemm_int8(a, b).dtype == torch.bfloat16
