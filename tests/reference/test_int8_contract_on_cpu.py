# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The INT8 contract: scales, qdata, edges and the GEMM, against numpy's IEEE arithmetic and exact integers."""

import numpy as np
import pytest
import torch
from contract_inputs import CASES, gaussian, heavy_tailed

from jetrl_verl.reference import QuantizedTensor, gemm_int8, quantize_int8
from jetrl_verl.reference.int8 import MAX_K


def by_numpy(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """qdata and scales of finite rows by numpy's division and rounding."""
    rows = x.float().numpy()
    amax = np.abs(rows).max(axis=-1, keepdims=True)
    scales = np.maximum(amax / np.float32(127), np.float32(2.0**-63))
    scales[amax == 0] = 1
    return np.clip(np.rint(rows / scales), -127, 127).astype(np.int8), scales


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (40, 256)])
def test_qdata_and_scales_equal_numpys(case, shape):
    x = case(*shape)
    finite = torch.isfinite(x).all(dim=-1)
    q = quantize_int8(x)
    assert q.qdata.dtype == torch.int8 and q.scales.shape == (shape[0], 1)
    qdata, scales = by_numpy(x[finite])
    assert np.array_equal(q.qdata[finite].numpy(), qdata)
    assert np.array_equal(q.scales[finite].numpy(), scales)
    assert q.scales[~finite].isnan().all() and not q.qdata[~finite].any()


def test_a_row_by_hand():
    """amax 254, s = 2: 254 -> 127, -254 -> -127, 3 / 2 and 5 / 2 are ties and go to the even 2, -1 / 2 goes to 0."""
    q = quantize_int8(torch.tensor([[254.0, -254.0, 3.0, 5.0, -1.0, 7.0]]))
    assert q.scales.tolist() == [[2.0]]
    assert q.qdata.tolist() == [[127, -127, 2, 2, 0, 4]]


def test_given_scales_are_kept_and_larger_values_saturate():
    """s = 2: 300 / 2 is cut to 127, 5 / 2 is a tie and goes to 2; a row with an Inf still has scale NaN."""
    x = torch.tensor([[300.0, -300.0, 5.0, 7.0], [1.0, torch.inf, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    q = quantize_int8(x, torch.full((3, 1), 2.0))
    assert q.qdata.tolist() == [[127, -127, 2, 4], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert q.scales[::2].tolist() == [[2.0], [2.0]] and q.scales[1].isnan()
    x = heavy_tailed(16, 200)
    own = quantize_int8(x)
    assert torch.equal(quantize_int8(x, own.scales).qdata, own.qdata)


def test_leading_dimensions_and_empty_batches():
    x = gaussian(6, 96).reshape(2, 3, 96)
    assert torch.equal(quantize_int8(x).qdata.reshape(6, 96), quantize_int8(x.reshape(6, 96)).qdata)
    assert quantize_int8(x[:0]).scales.shape == (0, 3, 1)
    assert quantize_int8(x[..., :0]).qdata.shape == (2, 3, 0)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 300), (600, 16, 128)])
def test_gemm_is_the_exact_integer_product_times_both_scales(shape):
    m, n, k = shape
    a, b = quantize_int8(heavy_tailed(m, k)), quantize_int8(gaussian(n, k))
    acc = (a.qdata.numpy().astype(np.int64) @ b.qdata.numpy().astype(np.int64).T).astype(np.float32)
    expected = torch.from_numpy(a.scales.numpy() * (b.scales.numpy().T * acc))
    assert torch.equal(gemm_int8(a, b, out_dtype=torch.float32), expected)
    assert torch.equal(gemm_int8(a, b), expected.to(torch.bfloat16))


def test_the_integer_sum_is_exact_beyond_fp32():
    """128 * 127 * 127 * 16 and one: the FP32 product loses the one, the integer does not."""
    k = 4096
    ones = torch.full((1, k), 127, dtype=torch.int8)
    b = ones.clone()
    b[0, -1] = 126
    acc = 127 * 127 * k - 127
    got = gemm_int8(
        QuantizedTensor(ones, torch.ones(1, 1)), QuantizedTensor(b, torch.ones(1, 1)), out_dtype=torch.float32
    )
    assert got.item() == np.float32(acc) != np.float32(acc + 127)


def test_bias_is_added_before_rounding():
    """1 + 2^-9 is not a BF16 number: rounding before adding -1 would give 0."""
    a = QuantizedTensor(torch.tensor([[1]], dtype=torch.int8), torch.tensor([[1 + 2.0**-9]]))
    b = QuantizedTensor(torch.tensor([[1]], dtype=torch.int8), torch.ones(1, 1))
    assert gemm_int8(a, b, bias=torch.tensor([-1.0])).item() == 2.0**-9


def test_nan_stays_in_its_row_and_its_channel():
    x, w = gaussian(3, 128), gaussian(4, 128)
    x[1, 5], w[2, 9] = torch.nan, -torch.inf
    y = gemm_int8(quantize_int8(x), quantize_int8(w))
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[1], expected[:, 2] = True, True
    assert torch.equal(y.isnan(), expected)


def test_mismatched_shapes_are_refused():
    q = quantize_int8(gaussian(4, 128))
    with pytest.raises(ValueError, match=r"A qdata \(4, 128\) .* do not fit B qdata \(4, 64\)"):
        gemm_int8(q, quantize_int8(gaussian(4, 64)))
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected \(4,\)"):
        gemm_int8(q, q, bias=torch.zeros(3))
    long = QuantizedTensor(torch.zeros(1, MAX_K + 1, dtype=torch.int8), torch.ones(1, 1))
    with pytest.raises(ValueError, match=f"K at most {MAX_K}"):
        gemm_int8(long, long)
