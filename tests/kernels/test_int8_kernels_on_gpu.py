# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""INT8 on a GPU: the quantizer's bytes, and every GEMM backend's bits, against ``reference`` on the CPU."""

import pytest
import torch
from contract_inputs import CASES, gaussian, heavy_tailed

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.dispatch import candidates
from jetrl_verl.kernels.gemm_int8 import cutlass_supports_gemm_int8
from jetrl_verl.reference import QuantizedTensor


def on_gpu(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(q.qdata.cuda(), q.scales.cuda())


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (129, 4096), (64, 12288)])
def test_the_quantizer_matches_the_reference(case, shape):
    x = case(*shape)
    got, want = kernels.quantize_int8(x.cuda()), reference.quantize_int8(x)
    assert torch.equal(got.qdata.cpu(), want.qdata)
    torch.testing.assert_close(got.scales.cpu(), want.scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("m", [1, 3, 16, 64, 129, 1000])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1536, 4096), (256, 128), (512, 12288)])
def test_every_backend_gives_the_same_bits(m, n, k, with_bias):
    """The reference's fused sum may differ in a tie, so it has a tolerance of one rounding."""
    a, b = reference.quantize_int8(heavy_tailed(m, k)), reference.quantize_int8(gaussian(n, k))
    bias = gaussian(1, n)[0] if with_bias else None
    moved = None if bias is None else bias.cuda()
    with kernels.override_backend("gemm_int8", "triton"):
        triton = kernels.gemm_int8(on_gpu(a), on_gpu(b), bias=moved).cpu()
    want = reference.gemm_int8(a, b, bias=bias)
    assert torch.equal(triton.isnan(), want.isnan())  # one draw of twelve million is infinite
    if with_bias:
        torch.testing.assert_close(triton, want, rtol=2**-7, atol=0, equal_nan=True)
        assert ((triton != want) & ~want.isnan()).float().mean() < 1e-5
    else:
        assert_same_bits(triton, want)
    if "vllm_cutlass_int8" in candidates("gemm_int8", torch.device("cuda")) and cutlass_supports_gemm_int8(
        on_gpu(a), on_gpu(b), bias=moved
    ):
        with kernels.override_backend("gemm_int8", "vllm_cutlass_int8"):
            assert_same_bits(kernels.gemm_int8(on_gpu(a), on_gpu(b), bias=moved).cpu(), triton)


def test_fprop_may_be_captured_in_a_cuda_graph():
    w = on_gpu(reference.quantize_int8(gaussian(512, 1024)))
    x = gaussian(32, 1024).cuda()
    kernels.fprop_int8(x, w.qdata, w.scales, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.fprop_int8(x, w.qdata, w.scales, None)
    x.copy_(heavy_tailed(32, 1024))
    graph.replay()
    assert torch.equal(y.cpu(), kernels.fprop_int8(x.cpu(), w.qdata.cpu(), w.scales.cpu(), None))
