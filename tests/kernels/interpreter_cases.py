# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantizers, operations that quantize their result, and GEMMs under Triton's interpreter
(test_interpreted_on_cpu.py)."""

import pytest
import torch
from backends import triton_kernels
from contract_inputs import CASES, gaussian, heavy_tailed
from fused_checks import (
    CHECKS,
    INPUTS,
    assert_same_bytes,
    canaries,
    check_all_quantizers,
    check_norm,
    check_norm_after_experts,
)
from slow import one_rule_fast, slow
from tensors import truncated

from jetrl_verl import reference
from jetrl_verl.kernels.gemm_nt import TILES
from jetrl_verl.reference import BLOCK, FP8_DTYPE, SCALE_RULES, QuantizedTensor, k_slices


@pytest.mark.parametrize("shape", [slow((3, 300)), (132, 150)])
@pytest.mark.parametrize(("case", "rule"), one_rule_fast(CASES))
def test_every_quantizer_matches_the_reference(case, shape, rule):
    check_all_quantizers(triton_kernels, case(*shape), rule, "cpu")


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 128), slow((129, 256)), (130, 7), (0, 300)])
def test_ragged_edges(shape, rule):
    check_all_quantizers(triton_kernels, heavy_tailed(*shape), rule, "cpu")


def test_leading_dimensions_and_strides_of_the_input():
    x = gaussian(256, 6).t().reshape(2, 3, 256)
    assert not x.reshape(6, 256).is_contiguous()
    assert_same_bytes(triton_kernels.quantize_1x128(x, "fp32"), reference.quantize_1x128(x, "fp32"))


@pytest.mark.parametrize("operation", ["quantize_128x128_and_transpose", "quantize_1x128_and_128x1"])
def test_a_single_row_with_an_arbitrary_stride(operation):
    x = gaussian(3, 133)[:1, :132]
    assert x.is_contiguous() and x.stride(0) == 133
    got, want = getattr(triton_kernels, operation)(x, "fp32"), getattr(reference, operation)(x, "fp32")
    for one, other in zip(got, want, strict=True):
        assert_same_bytes(one, other)


def test_transposed_qdata_have_aligned_rows_padded_with_zeros():
    qdata = triton_kernels.quantize_128x1(gaussian(130, 5), "fp32").qdata
    assert qdata.stride() == (256, 1)
    padding = torch.as_strided(qdata.view(torch.uint8), (5, 126), (256, 1), 130)
    assert (padding & 0x7F == 0).all()


@pytest.mark.parametrize("quantize", ["quantize_1x128", "quantize_128x1", "quantize_128x128"])
def test_an_unknown_scale_rule_raises(quantize):
    with pytest.raises(ValueError, match="unknown scale rule 'mx'"):
        getattr(triton_kernels, quantize)(gaussian(2, 128), "mx")


@pytest.mark.parametrize("gemm", ["gemm_nt", "wgrad"])
@pytest.mark.parametrize("shape", [(65, 130, 300), (1, 256, 256), (130, 66, 128), (3, 5, 0), (0, 128, 128)])
def test_gemm_follows_the_contract(shape, gemm):
    """To FP32 accuracy: the interpreter rounds the promotion twice, where a GPU fuses it, and truncates to BF16."""
    m, n, k = shape
    quantize_b = reference.quantize_128x128 if gemm == "gemm_nt" else reference.quantize_1x128
    a, b = reference.quantize_1x128(heavy_tailed(m, k), "fp32"), quantize_b(gaussian(n, k), "fp32")
    product, contract = getattr(triton_kernels, gemm), getattr(reference, gemm)
    biases = ({"bias": bias} for bias in (gaussian(1, n)[0], gaussian(n, 2)[:, 1]))
    for bias in ({}, *biases) if gemm == "gemm_nt" else ({},):
        got, want = (run(a, b, **bias, out_dtype=torch.float32) for run in (product, contract))
        assert got.shape == (m, n)
        assert (got - want).norm() <= 1e-6 * want.norm()
    assert product(a, b).dtype == torch.bfloat16


@pytest.mark.parametrize("gemm", ["gemm_nt", "wgrad"])
def test_gemm_reads_the_layouts_that_the_quantizers_write(gemm):
    """WGrad's operands are views with padded rows and column-major scales."""
    x, dy = gaussian(130, 40), heavy_tailed(130, 70)
    if gemm == "gemm_nt":
        a, b = triton_kernels.quantize_1x128(dy, "fp32"), reference.quantize_128x128(gaussian(9, 70), "fp32")
    else:
        a, b = triton_kernels.quantize_128x1(dy, "fp32"), triton_kernels.quantize_128x1(x, "fp32")
    got, want = (getattr(side, gemm)(a, b, out_dtype=torch.float32) for side in (triton_kernels, reference))
    assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize(
    ("ranks", "with_bias"), [(1, False), slow(1, True), slow(2, False), (2, True), slow(4, False), slow(4, True)]
)
def test_rank_products_are_rounded_and_added_in_order(ranks, with_bias):
    """Small integers, whose FP32 sums are exact; the interpreter truncates to BF16."""
    m, n, k = 70, 130, 4 * BLOCK
    a, b = (
        QuantizedTensor(torch.randint(-4, 5, (rows, k)).float().to(FP8_DTYPE), torch.ones(scale_rows, k // BLOCK))
        for rows, scale_rows in ((m, m), (n, 2))
    )
    bias = torch.arange(n).bfloat16() if with_bias else None
    parts = [(x.qdata.double() @ w.qdata.double().t()) for x, w in zip(k_slices(a, ranks), k_slices(b, ranks))]
    if with_bias:
        parts[0] += bias.double()
    total = truncated(parts[0])
    for part in parts[1:]:
        total += truncated(part)
    got = triton_kernels.gemm_nt_of_ranks(a, b, ranks, bias)
    assert got.dtype == torch.bfloat16 and torch.equal(got.float(), truncated(total))
    whole = truncated(sum(parts))
    assert torch.equal(got.float(), whole) == (ranks == 1)
    for tile in TILES:
        assert torch.equal(triton_kernels.gemm_nt_of_ranks(a, b, ranks, bias, tile=tile), got)


def test_every_tile_shape_computes_the_same():
    a, b = (
        reference.quantize_1x128(heavy_tailed(70, 256), "fp32"),
        reference.quantize_128x128(gaussian(140, 256), "fp32"),
    )
    results = [triton_kernels.gemm_nt(a, b, out_dtype=torch.float32, tile=tile) for tile in TILES]
    for other in results[1:]:
        assert (other - results[0]).norm() <= 1e-6 * results[0].norm()


# --- operations that quantize their result ----------------------------------------------------------------------------


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


# --- INT8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (17, 256), (2, 9000)])
def test_the_int8_quantizer_matches_the_reference(case, shape):
    x = case(*shape)
    assert_same_bytes(triton_kernels.quantize_int8(x), reference.quantize_int8(x))


def test_int8_of_leading_dimensions_strides_and_empty_batches():
    x = gaussian(256, 6).t().reshape(2, 3, 256)
    assert_same_bytes(triton_kernels.quantize_int8(x), reference.quantize_int8(x))
    assert_same_bytes(triton_kernels.quantize_int8(x[:0]), reference.quantize_int8(x[:0]))


@pytest.mark.parametrize("shape", [(65, 130, 300), (1, 256, 256), (130, 66, 128), (3, 5, 0), (0, 128, 128)])
def test_the_int8_gemm_matches_the_reference(shape):
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
