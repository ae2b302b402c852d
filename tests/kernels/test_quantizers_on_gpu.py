# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton quantizers on a GPU: the bytes of ``reference`` on the CPU, for every case, rule and shape."""

import pytest
import torch
from contract_inputs import CASES, gaussian, heavy_tailed
from quantizer_checks import assert_same_bytes, check_all_quantizers

from jetrl_verl import reference
from jetrl_verl.reference import SCALE_RULES


@pytest.fixture(scope="module")
def triton_kernels():
    from backends import triton_kernels

    return triton_kernels


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(1, 128), (3, 300), (129, 257), (132, 150), (256, 512), (1000, 1536)])
@pytest.mark.parametrize("case", CASES)
def test_every_quantizer_matches_the_reference(triton_kernels, case, shape, rule):
    check_all_quantizers(triton_kernels, case(*shape), rule, "cuda")


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(0, 300), (1, 1), (130, 7), (128, 4096), (4099, 1)])
def test_edges(triton_kernels, shape, rule):
    check_all_quantizers(triton_kernels, heavy_tailed(*shape), rule, "cuda")


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_input_types(triton_kernels, dtype, rule):
    check_all_quantizers(triton_kernels, gaussian(200, 384).to(dtype), rule, "cuda")


def test_the_quotient_equals_division_for_every_bf16_value(triton_kernels):
    """The kernels divide by a reciprocal and residual steps; here every BF16 magnitude with many maxima."""
    values = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values > 2.0**-80]
    generator = torch.Generator().manual_seed(0)
    groups = []
    for _ in range(16):
        amax = values[torch.randint(values.numel(), (values.numel(),), generator=generator)]
        groups.append(torch.stack([torch.maximum(amax, values), torch.minimum(amax, values)], dim=1))
    x = torch.cat(groups)
    assert_same_bytes(triton_kernels.quantize_1x128(x.cuda(), "fp32"), reference.quantize_1x128(x, "fp32"))


def test_the_quotient_equals_division_for_random_fp32_values(triton_kernels):
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-60, 120, (1 << 14, 1), generator=generator).double()
    x = torch.ldexp(1 + torch.rand(1 << 14, 128, generator=generator, dtype=torch.float64), exponent)
    x = (x * torch.rand(1 << 14, 128, generator=generator, dtype=torch.float64)).float()
    assert_same_bytes(triton_kernels.quantize_1x128(x.cuda(), "fp32"), reference.quantize_1x128(x, "fp32"))


def test_offsets_beyond_two_to_the_31(triton_kernels):
    rows, k = (1 << 31) // 4096 + 3, 4096
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
    x[-3:] = gaussian(3, k).cuda()
    want = reference.quantize_1x128(x[-3:].cpu(), "fp32")
    got = triton_kernels.quantize_1x128(x, "fp32")
    assert_same_bytes(reference.QuantizedTensor(got.qdata[-3:], got.scales[-3:]), want)
