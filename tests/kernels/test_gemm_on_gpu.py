# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The GEMM backends on a GPU: accuracy against float64, a row's bits in every batch, equality between backends."""

from functools import partial

import pytest
import torch
from backends import Backend, triton_kernels
from contract_inputs import gaussian, heavy_tailed

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.gemm_nt import TILES
from jetrl_verl.reference import BLOCK, FP8_DTYPE, SCALE_RULES, QuantizedTensor

GEMMS = ("gemm_nt", "wgrad")
ROWS = (1, 2, 3, 5, 7, 8, 13, 16, 31, 33, 63, 64, 65, 100, 128, 129, 200, 256, 257, 500, 1000, 2048, 4095, 4096, 4097)
SHAPES = [(64, 256, 512), (129, 640, 1024), (1000, 384, 4096), (65, 130, 300), (1, 1, 1), (300, 200, 136)]


def cuda(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(q.qdata.cuda(), q.scales.cuda())


def operands(m: int, n: int, k: int, gemm: str, rule: str = "fp32") -> tuple[QuantizedTensor, QuantizedTensor]:
    """Heavy-tailed A and Gaussian B, quantized on the GPU, so in the memory layouts of the GEMMs."""
    quantize_b = kernels.quantize_128x128 if gemm == "gemm_nt" else kernels.quantize_1x128
    return kernels.quantize_1x128(heavy_tailed(m, k).cuda(), rule), quantize_b(gaussian(n, k).cuda(), rule)


def bits(y: torch.Tensor) -> torch.Tensor:
    """The bits, for comparison with NaN: Cauchy data has some Inf, whose products are NaN on every backend."""
    return y.contiguous().view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def float64(gemm: str, a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    return getattr(reference, f"{gemm}_float64")(a, b)


def supporting(name: str, gemm: str, a, b, **arguments):
    """Backend ``name``, or a skip where it is missing or does not support the shapes."""
    backend = Backend(name)
    if not backend.supports(gemm, a, b, **arguments):
        pytest.skip(f"{name} does not support this call here")
    return getattr(backend, gemm)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "gemm"), [("triton", "gemm_nt"), ("triton", "wgrad"), ("vllm_cutlass", "gemm_nt")])
def test_error_against_float64(name, shape, gemm, rule):
    a, b = operands(*shape, gemm, rule)
    want = float64(gemm, a, b)
    for out_dtype, limit in ((torch.float32, 5e-4), (torch.bfloat16, 2.5e-3)):
        if name == "vllm_cutlass" and out_dtype == torch.float32:
            continue
        got = supporting(name, gemm, a, b, out_dtype=out_dtype)(a, b, out_dtype=out_dtype)
        assert got.dtype == out_dtype
        assert relative_error(got, want) < limit


@pytest.mark.parametrize("tile", range(4))
@pytest.mark.parametrize("gemm", GEMMS)
def test_every_triton_tile_gives_every_row_the_same_bits(gemm, tile):
    a, b = operands(1000, 384, 2048, gemm)
    product = partial(getattr(triton_kernels, gemm), a, b, out_dtype=torch.float32)
    assert torch.equal(product(tile=TILES[tile]), product(tile=TILES[0]))


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("nk", [(6144, 4096), (4096, 12288), (448, 2368), (384, 1000)])
def test_a_row_has_the_same_bits_in_every_batch(nk, gemm):
    """The choice of a backend by shape must not change a bit."""
    a, b = operands(max(ROWS), *nk, gemm)
    full = getattr(kernels, gemm)(a, b)
    for m in ROWS:
        part = QuantizedTensor(a.qdata[:m], a.scales[:m].t().contiguous().t())
        got = getattr(kernels, gemm)(part, b)
        assert torch.equal(bits(got), bits(full[:m])), f"M={m}"


@pytest.mark.parametrize("gemm", GEMMS)
def test_backends_agree_in_every_bit(gemm):
    names = kernels.OPERATIONS[gemm].backends[kernels.platform_of(torch.device("cuda"))]
    for m, n, k in ((8, 6144, 4096), (64, 4096, 12288), (1000, 4096, 12288), (4096, 2368, 4736)):
        a, b = operands(m, n, k, gemm)
        want = getattr(triton_kernels, gemm)(a, b)
        for name in names:
            if Backend(name).supports(gemm, a, b):
                assert torch.equal(bits(getattr(Backend(name), gemm)(a, b)), bits(want)), name


def test_k_blocks_are_added_in_ascending_order():
    """2^24 + 1 + 1 in FP32 is 2^24 from the left and 2^24 + 2 from the right."""
    qdata = torch.zeros(64, 3 * BLOCK, device="cuda")
    qdata[:, ::BLOCK] = 1.0
    one = QuantizedTensor(qdata.to(FP8_DTYPE), torch.ones(64, 3, device="cuda"))
    for scales, want in (([2.0**24, 1, 1], 2.0**24), ([1, 1, 2.0**24], 2.0**24 + 2)):
        a = QuantizedTensor(one.qdata, torch.tensor([scales], device="cuda").repeat(64, 1))
        got = kernels.wgrad(a, one, out_dtype=torch.float32)
        assert (got == want).all()


@pytest.mark.parametrize("gemm", GEMMS)
def test_all_ones_with_distinct_scales_sum_exactly(gemm):
    m, n, k = 200, 390, 5 * BLOCK
    rows_b = -(-n // BLOCK) if gemm == "gemm_nt" else n
    a_scales = 2.0 ** ((torch.arange(m)[:, None] * 5 + torch.arange(5)[None, :]) % 11 - 5.0)
    b_scales = 2.0 ** ((torch.arange(rows_b)[:, None] * 3 + torch.arange(5)[None, :] * 7) % 13 - 6.0)
    a, b = (
        QuantizedTensor(torch.ones(m, k).to(FP8_DTYPE), a_scales),
        QuantizedTensor(torch.ones(n, k).to(FP8_DTYPE), b_scales),
    )
    got = getattr(kernels, gemm)(cuda(a), cuda(b), out_dtype=torch.float32)
    wide = b_scales.repeat_interleave(BLOCK, dim=0)[:n] if gemm == "gemm_nt" else b_scales
    assert torch.equal(got.cpu().double(), BLOCK * (a_scales.double() @ wide.double().t()))


def test_bias_is_added_before_the_one_rounding():
    """257 rounds to BF16 256; rounding, then adding 1 gives 257 -> 256, adding first gives 258."""
    a = QuantizedTensor(torch.ones(1, 1).to(FP8_DTYPE), torch.tensor([[257.0]]))
    b = QuantizedTensor(torch.ones(1, 1).to(FP8_DTYPE), torch.ones(1, 1))
    bias = torch.ones(1, dtype=torch.bfloat16, device="cuda")
    assert kernels.gemm_nt(cuda(a), cuda(b), bias).item() == 258.0


def test_nan_qdata_poison_only_their_row():
    x = gaussian(200, 256)
    x[150, 200] = torch.inf
    a, b = kernels.quantize_1x128(x.cuda(), "fp32"), kernels.quantize_128x128(gaussian(130, 256).cuda(), "fp32")
    y = kernels.gemm_nt(a, b)
    clean = torch.arange(200, device="cuda") != 150
    assert y[150].isnan().all()
    assert y[clean].isfinite().all()


def test_a_cuda_graph_replays_fprop_on_new_inputs_and_new_weights():
    """As vLLM does: capture once, decode with other activations and, after a weight sync, with other qdata in place."""
    weight = kernels.quantize_128x128(gaussian(640, 1024).cuda(), "fp32")
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
