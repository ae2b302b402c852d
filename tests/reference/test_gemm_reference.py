# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The reference GEMM: every bit, errors against float64, edge cases."""

from functools import partial

import e4m3_oracle
import numpy as np
import pytest
import torch

from jetrl_verl import reference
from jetrl_verl.reference import BLOCK, SCALE_RULES, QuantizedTensor

ROWS = (1, 2, 7, 8, 16, 63, 64, 65, 128, 129, 300)


def operands(
    m: int, n: int, k: int, gemm: str = "gemm_nt", rule: str = "fp32", seed: int = 0
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Heavy-tailed A, Gaussian B."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=g) / torch.randn(m, k, generator=g)
    b = torch.randn(n, k, generator=g)
    quantize_b = reference.quantize_128x128 if gemm == "gemm_nt" else reference.quantize_1x128
    return reference.quantize_1x128(a.bfloat16(), rule), quantize_b(b.bfloat16(), rule)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def exact_partial_sums(a: QuantizedTensor, b: QuantizedTensor) -> list[np.ndarray]:
    """One exact sum per K block in integers: every E4M3 value is a multiple of 2^-9."""
    integers = [
        np.rint(e4m3_oracle.CODE_VALUES[q.qdata.view(torch.uint8).numpy()] * 512).astype(np.int64) for q in (a, b)
    ]
    k = a.qdata.shape[1]
    cuts = [slice(start, start + BLOCK) for start in range(0, k, BLOCK)]
    return [(integers[0][:, cut] @ integers[1][:, cut].T) / 2.0**18 for cut in cuts]


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("gemm", ["gemm_nt", "wgrad"])
@pytest.mark.parametrize("shape", [(5, 130, 384), (64, 128, 1000)])
def test_every_bit_follows_the_contract(shape, gemm, rule):
    """Exact partial sums rounded once to FP32, scales multiplied first, K blocks ascending, bias added in FP32."""
    a, b = operands(*shape, gemm, rule)
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(9)).bfloat16()
    b_scales = b.scales.repeat_interleave(BLOCK, dim=0)[: shape[1]] if gemm == "gemm_nt" else b.scales
    acc = np.zeros(shape[:2], dtype=np.float32)
    for block, partial_sum in enumerate(exact_partial_sums(a, b)):
        product = a.scales.numpy()[:, block, None] * b_scales.numpy()[None, :, block]
        acc = acc + product * partial_sum.astype(np.float32)
    biased = {"bias": bias} if gemm == "gemm_nt" else {}
    acc = acc + bias.float().numpy() if biased else acc
    for out_dtype in (torch.float32, torch.bfloat16):
        got = getattr(reference, gemm)(a, b, **biased, out_dtype=out_dtype)
        assert torch.equal(got, torch.from_numpy(acc).to(out_dtype))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("gemm", ["gemm_nt", "wgrad"])
@pytest.mark.parametrize("shape", [(65, 200, 1024), (1, 1, 1), (3, 129, 130), (128, 128, 4096)])
def test_error_against_float64(shape, gemm, rule):
    a, b = operands(*shape, gemm, rule)
    want = getattr(reference, f"{gemm}_float64")(a, b)
    for out_dtype, limit in ((torch.float32, 5e-4), (torch.bfloat16, 2.5e-3)):
        got = getattr(reference, gemm)(a, b, out_dtype=out_dtype)
        assert got.dtype == out_dtype
        assert relative_error(got, want) < limit


@pytest.mark.parametrize("gemm", ["gemm_nt", "wgrad"])
def test_a_row_has_the_same_bits_in_every_batch(gemm):
    a, b = operands(max(ROWS), 200, 512, gemm)
    product = partial(getattr(reference, gemm), out_dtype=torch.float32)
    full = product(a, b)
    for m in ROWS:
        part = QuantizedTensor(a.qdata[:m], a.scales[:m])
        assert torch.equal(product(part, b), full[:m])


def test_nan_qdata_make_only_their_row_nan():
    x = torch.randn(4, 256)
    x[1, 200] = torch.inf
    a = reference.quantize_1x128(x, "fp32")
    _, b = operands(4, 130, 256)
    y = reference.gemm_nt(a, b)
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()


def test_an_empty_batch_gives_an_empty_result():
    a, b = operands(0, 130, 256)
    assert reference.gemm_nt(a, b).shape == (0, 130)


def test_a_weight_gradient_of_no_tokens_is_zero():
    dy = reference.quantize_128x1(torch.empty(0, 130), "fp32")
    x = reference.quantize_128x1(torch.empty(0, 70), "fp32")
    dw = reference.wgrad(dy, x, torch.float32)
    assert dw.shape == (130, 70) and not dw.any()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_products_of_ranks_are_rounded_and_added_in_rank_order(ranks, with_bias):
    a, b = operands(70, 130, 2048)
    bias = torch.arange(130).bfloat16() / 8 if with_bias else None
    width, groups = 2048 // ranks, 16 // ranks
    total = None
    for rank in range(ranks):
        columns, scales = slice(rank * width, (rank + 1) * width), slice(rank * groups, (rank + 1) * groups)
        x, w = (QuantizedTensor(q.qdata[:, columns].contiguous(), q.scales[:, scales].contiguous()) for q in (a, b))
        part = reference.gemm_nt(x, w, None if rank else bias).float()
        total = part if total is None else total + part
    y = reference.gemm_nt_of_ranks(a, b, ranks, bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y, total.bfloat16())
    whole = reference.gemm_nt(a, b, bias)
    assert torch.equal(y, whole) == (ranks == 1)
    rows = QuantizedTensor(a.qdata[:7], a.scales[:7])
    assert torch.equal(reference.gemm_nt_of_ranks(rows, b, ranks, bias), y[:7])


def test_slices_of_k_that_cut_a_block_are_refused():
    a, b = operands(4, 130, 384)
    with pytest.raises(ValueError, match="K = 384 does not divide into 2 slices of multiples of 128"):
        reference.gemm_nt_of_ranks(a, b, 2)


def test_mismatched_shapes_are_refused():
    a, b = operands(4, 130, 256)
    with pytest.raises(ValueError, match=r"wgrad: A .* does not fit B .* 1x128 scales on A and 1x128 on B"):
        reference.wgrad(a, b)
    with pytest.raises(ValueError, match=r"bias has shape \(129,\), expected \(130,\)"):
        reference.gemm_nt(a, b, torch.zeros(129))
    with pytest.raises(ValueError, match=r"B torch.bfloat16 .* expected E4M3"):
        reference.gemm_nt(a, QuantizedTensor(b.qdata.bfloat16(), b.scales))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_wgrad_from_relaid_qdata_approximates_the_true_gradient(rule):
    """dW = dY^T X with X quantized twice and dY once differs only by quantization noise."""
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(300, 256, generator=g).bfloat16(), torch.randn(300, 130, generator=g).bfloat16()
    relaid = reference.relayout_128x1(reference.quantize_1x128(x, rule), rule)
    dw = reference.wgrad(reference.quantize_128x1(dy, rule), relaid, torch.float32)
    assert relative_error(dw, dy.double().t() @ x.double()) < 0.06
