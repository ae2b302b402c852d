# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""INT8 through the dispatch table and the operator, and PTX of its Triton kernels for Hopper."""

import pytest
import torch
from contract_inputs import gaussian

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.gemm_int8 import cutlass_supports_gemm_int8


@pytest.mark.parametrize("with_bias", [True, False])
def test_fprop_is_quantize_then_gemm(with_bias):
    x, w = gaussian(6, 300), kernels.quantize_int8(gaussian(130, 300))
    bias = gaussian(1, 130)[0] if with_bias else None
    want = reference.gemm_int8(reference.quantize_int8(x), w, bias=bias)
    assert torch.equal(kernels.fprop_int8(x, w.qdata, w.scales, bias), want)
    folded = kernels.fprop_int8(x.reshape(2, 3, 300), w.qdata, w.scales, bias)
    assert torch.equal(folded, want.reshape(2, 3, 130))
    assert kernels.fprop_int8(x[:0], w.qdata, w.scales, bias).shape == (0, 130)


def test_fprop_raises_for_wrong_inputs():
    w = kernels.quantize_int8(gaussian(130, 256))
    with pytest.raises(ValueError, match="quantized from BF16 values"):
        kernels.fprop_int8(torch.zeros(2, 256), w.qdata, w.scales, None)
    with pytest.raises(ValueError, match="does not fit the weight"):
        kernels.fprop_int8(gaussian(2, 128), w.qdata, w.scales, None)
    with pytest.raises(ValueError, match="weight qdata is torch.float32, expected torch.int8"):
        kernels.fprop_int8(gaussian(2, 256), w.qdata.float(), w.scales, None)


def test_what_cutlass_supports(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    a, b = kernels.quantize_int8(gaussian(3, 256)), kernels.quantize_int8(gaussian(64, 256))
    assert cutlass_supports_gemm_int8(a, b)
    assert cutlass_supports_gemm_int8(a, b, bias=gaussian(1, 64)[0])
    assert not cutlass_supports_gemm_int8(a, b, bias=torch.zeros(64)), "its bias has the type of the result"
    assert not cutlass_supports_gemm_int8(a, b, out_dtype=torch.float32)
    assert not cutlass_supports_gemm_int8(a, kernels.quantize_int8(gaussian(65, 256)))
