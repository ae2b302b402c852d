# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scales and quantizers of the contract, bit for bit against the oracle."""

import e4m3_oracle
import numpy as np
import pytest
import torch
from contract_inputs import CASES, gaussian, heavy_tailed

from jetrl_verl import reference
from jetrl_verl.reference import BLOCK, SCALE_RULES, QuantizedTensor, amax_bits, scale_from_amax_bits

NAN_CODE = 0x7F
SHAPES = [(7, 128), (3, 300), (129, 257)]


def assert_bytes(got: QuantizedTensor, qdata: np.ndarray, scales: np.ndarray) -> None:
    np.testing.assert_array_equal(got.qdata.view(torch.uint8).numpy(), qdata)
    np.testing.assert_array_equal(got.scales.numpy().view(np.uint32), scales.view(np.uint32))


def assert_equal(got: QuantizedTensor, want: QuantizedTensor) -> None:
    assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [(1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)])
def test_quantizers_equal_the_oracle(block, case, shape, rule):
    x = case(*shape)
    qdata, scales = e4m3_oracle.quantize(x, block, rule)
    if block == (BLOCK, 1):
        qdata, scales = qdata.T, np.ascontiguousarray(scales.T)
    assert_bytes(getattr(reference, f"quantize_{block[0]}x{block[1]}")(x, rule), qdata, scales)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_relayout_equals_the_oracle_on_dequantized_values(case, shape, rule):
    q = reference.quantize_1x128(case(*shape), rule)
    values = e4m3_oracle.CODE_VALUES[q.qdata.view(torch.uint8).numpy()]
    scales = np.repeat(q.scales.numpy().astype(np.float64), BLOCK, axis=1)[:, : shape[1]]
    with np.errstate(over="ignore"):  # near the end of FP32 a rounded-up code times its scale is Inf: a NaN group
        dequantized = torch.from_numpy((values * scales).astype(np.float32))
    qdata, new_scales = e4m3_oracle.quantize(dequantized, (BLOCK, 1), rule)
    assert_bytes(reference.relayout_128x1(q, rule), qdata.T, np.ascontiguousarray(new_scales.T))


def test_every_finite_bit_pattern_survives_a_round_trip():
    qdata = torch.tensor([c for c in range(256) if c & 0x7F != NAN_CODE], dtype=torch.uint8)
    values = torch.tensor(e4m3_oracle.CODE_VALUES)[qdata.long()].float()
    groups = torch.stack([torch.full_like(values, 448.0), values], dim=1)
    for rule in SCALE_RULES:
        q = reference.quantize_1x128(groups, rule)
        assert (q.scales == 1).all()
        torch.testing.assert_close(q.qdata[:, 1].view(torch.uint8), qdata, rtol=0, atol=0)


def test_pow2_relayout_is_exact_for_values_that_stay_normal():
    q = reference.quantize_1x128(heavy_tailed(256, 256), "pow2")
    before = reference.dequantize_1x128(q).t()
    relaid = reference.relayout_128x1(q, "pow2")
    after = reference.dequantize_1x128(relaid)
    new_scales = relaid.scales.repeat_interleave(BLOCK, dim=1)
    normal = before.abs() >= new_scales * 2.0**-6
    assert normal.float().mean() > 0.5
    assert torch.equal(before[normal], after[normal])


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (1, 1)])
def test_a_transposed_weight_shares_qdata_and_scales(rule, shape):
    w = heavy_tailed(*shape)
    weight, transposed = reference.quantize_128x128_and_transpose(w, rule)
    direct = reference.quantize_128x128(w.t().contiguous(), rule)
    assert_equal(transposed, direct)
    assert torch.equal(transposed.qdata.view(torch.uint8).t(), weight.qdata.view(torch.uint8))
    assert transposed.qdata.is_contiguous() and transposed.scales.is_contiguous()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_quantizing_both_ways_equals_two_single_calls(rule):
    x = heavy_tailed(200, 300)
    rowwise, colwise = reference.quantize_1x128_and_128x1(x, rule)
    assert_equal(rowwise, reference.quantize_1x128(x, rule))
    assert_equal(colwise, reference.quantize_128x1(x, rule))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_leading_dimensions_are_rows(rule):
    x = gaussian(6, 300)
    q, folded = reference.quantize_1x128(x, rule), reference.quantize_1x128(x.reshape(2, 3, 300), rule)
    assert folded.qdata.shape == (2, 3, 300) and folded.scales.shape == (2, 3, 3)
    assert_equal(QuantizedTensor(folded.qdata.reshape(6, 300), folded.scales.reshape(6, 3)), q)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_an_empty_batch_keeps_its_shapes(rule):
    x = torch.empty(0, 300, dtype=torch.bfloat16)
    rowwise, colwise = reference.quantize_1x128_and_128x1(x, rule)
    assert (rowwise.qdata.shape, rowwise.scales.shape) == ((0, 300), (0, 3))
    for q in (colwise, reference.relayout_128x1(rowwise, rule)):
        assert (q.qdata.shape, q.scales.shape) == ((300, 0), (300, 0))
    empty = reference.quantize_128x128(x, rule)
    assert (empty.qdata.shape, empty.scales.shape) == ((0, 300), (0, 3))


@pytest.mark.parametrize("quantize", [reference.quantize_1x128, reference.quantize_128x128, reference.quantize_128x1])
def test_unknown_rule_is_refused_by_name(quantize):
    with pytest.raises(ValueError, match="unknown scale rule 'mx'; choose one of fp32, pow2"):
        quantize(gaussian(2, 128), "mx")


MIN_NORMAL = 2.0**-126


def interesting_maxima() -> torch.Tensor:
    """Every power of two down to the subnormals, every 448 * 2^k, both neighbours, and random bit patterns."""
    powers = [2.0**e for e in range(-149, 128)] + [448.0 * 2.0**e for e in range(-149, 119)]
    exact = torch.tensor(powers, dtype=torch.float64).float()
    up, down = exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(0.0))
    patterns = torch.randint(1, 0x7F800000, (2000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    maxima = torch.cat([exact, up, down, patterns.view(torch.float32)])
    return maxima[torch.isfinite(maxima) & (maxima > 0)]


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_scales_equal_the_oracle_for_every_exponent(rule):
    maxima = interesting_maxima()
    got = scale_from_amax_bits(maxima.view(torch.int32), rule)
    want = np.array([e4m3_oracle.scale(float(a), rule) for a in maxima], dtype=np.float32)
    np.testing.assert_array_equal(got.numpy().view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_reciprocals_and_products_of_scales_stay_normal(rule):
    scales = scale_from_amax_bits(interesting_maxima().view(torch.int32), rule)
    assert scales.min() == 2.0**-63
    assert (scales * scales.min() >= MIN_NORMAL).all()
    assert ((1 / scales >= MIN_NORMAL) & torch.isfinite(1 / scales)).all()


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("special", [0.0, -0.0, torch.inf, -torch.inf, torch.nan])
def test_zero_and_non_finite_groups_have_scale_one(rule, special):
    bits = amax_bits(torch.tensor([[special, 0.0]]))
    assert scale_from_amax_bits(bits, rule).item() == 1.0


def test_the_integer_maximum_keeps_a_nan_at_any_position():
    for position in range(128):
        group = torch.full((128,), 3.0)
        group[position] = -torch.nan
        assert amax_bits(group).item() > 0x7F800000
