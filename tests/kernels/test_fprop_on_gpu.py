# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The forward operator on a GPU: equal to its parts, under torch.compile, and inside a CUDA graph."""

import pytest
import torch
from contract_inputs import gaussian, heavy_tailed

from jetrl_verl import kernels


@pytest.fixture(scope="module")
def weight():
    return kernels.quantize_128x128(gaussian(640, 1024).cuda(), "fp32")


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("m", [1, 8, 65, 1000])
def test_fprop_is_quantize_then_gemm(weight, m, with_bias):
    x = heavy_tailed(m, 1024).cuda()
    bias = gaussian(1, 640)[0].cuda() if with_bias else None
    want = kernels.gemm_nt(kernels.quantize_1x128(x, "fp32"), weight, bias)
    assert torch.equal(kernels.fprop(x, weight.qdata, weight.scales, bias, "fp32"), want)


def test_a_cuda_graph_replays_fprop_on_new_inputs_and_new_weights(weight):
    """As vLLM does: capture once, decode with other activations and, after a weight sync, with other qdata in place."""
    qdata, scales = weight.qdata.clone(), weight.scales.clone()
    x = torch.empty(8, 1024, dtype=torch.bfloat16, device="cuda")
    x.copy_(heavy_tailed(8, 1024))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernels.fprop(x, qdata, scales, None, "fp32")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.fprop(x, qdata, scales, None, "fp32")
    other = kernels.quantize_128x128(heavy_tailed(640, 1024).cuda(), "fp32")
    for new_x, new_w in ((gaussian(8, 1024), weight), (heavy_tailed(8, 1024), other)):
        x.copy_(new_x)
        qdata.view(torch.uint8).copy_(new_w.qdata.view(torch.uint8))
        scales.copy_(new_w.scales)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, kernels.fprop(new_x.cuda(), new_w.qdata, new_w.scales, None, "fp32"))


def test_torch_compile_gives_the_same_bits(weight):
    def layer(x):
        return kernels.fprop(x * 2, weight.qdata, weight.scales, None, "fp32")

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (8, 65):
        x = gaussian(m, 1024).cuda()
        assert torch.equal(compiled(x), layer(x))


def test_the_gpu_and_the_reference_agree_to_fp32_accuracy(weight):
    x = heavy_tailed(65, 1024)
    want = kernels.fprop(x, weight.qdata.cpu(), weight.scales.cpu(), None, "fp32").double()
    got = kernels.fprop(x.cuda(), weight.qdata, weight.scales, None, "fp32").cpu().double()
    assert (got - want).norm() < 2.5e-3 * want.norm()
