# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The GEMM backends on a GPU: accuracy against float64, a row's bits in every batch, equality between backends."""

import pytest
import torch
from backends import Backend, triton_kernels
from contract_inputs import gaussian, heavy_tailed

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.gemm_nt import TILES
from jetrl_verl.reference import BLOCK, FP8_DTYPE, SCALE_RULES, QuantizedTensor

ROWS = (1, 2, 7, 8, 16, 63, 64, 65, 128, 129, 1000, 4096)
SHAPES = [(64, 256, 512), (129, 640, 1024), (1000, 384, 4096), (65, 130, 300), (1, 1, 1), (300, 200, 136)]


def cuda(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(q.qdata.cuda(), q.scales.cuda())


def operands(
    m: int, n: int, k: int, b_block_scaled: bool, rule: str = "fp32"
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Heavy-tailed A and Gaussian B, quantized on the GPU, so in the memory layouts of the GEMMs."""
    quantize_b = kernels.quantize_128x128 if b_block_scaled else kernels.quantize_1x128
    return kernels.quantize_1x128(heavy_tailed(m, k).cuda(), rule), quantize_b(gaussian(n, k).cuda(), rule)


def bits(y: torch.Tensor) -> torch.Tensor:
    """The bits, for comparison with NaN: Cauchy data has some Inf, whose products are NaN on every backend."""
    return y.contiguous().view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def supporting(name: str, a, b, **arguments):
    """Backend ``name``, or a skip where it is missing or does not support the shapes."""
    backend = Backend(name)
    if not backend.supports_gemm_nt(a, b, **arguments):
        pytest.skip(f"{name} does not support this call here")
    return backend


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("b_block_scaled", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["triton", "vllm_cutlass"])
def test_error_against_float64(name, shape, b_block_scaled, rule):
    a, b = operands(*shape, b_block_scaled, rule)
    want = reference.gemm_nt_float64(a, b, b_block_scaled=b_block_scaled)
    for out_dtype, limit in ((torch.float32, 5e-4), (torch.bfloat16, 2.5e-3)):
        if name == "vllm_cutlass" and out_dtype == torch.float32:
            continue
        backend = supporting(name, a, b, b_block_scaled=b_block_scaled, out_dtype=out_dtype)
        got = backend.gemm_nt(a, b, b_block_scaled=b_block_scaled, out_dtype=out_dtype)
        assert got.dtype == out_dtype
        assert relative_error(got, want) < limit


@pytest.mark.parametrize("tile", range(4))
@pytest.mark.parametrize("b_block_scaled", [True, False])
def test_every_triton_tile_gives_every_row_the_same_bits(b_block_scaled, tile):
    a, b = operands(1000, 384, 2048, b_block_scaled)
    arguments = {"b_block_scaled": b_block_scaled, "out_dtype": torch.float32}
    want = triton_kernels.gemm_nt(a, b, **arguments, tile=TILES[0])
    assert torch.equal(triton_kernels.gemm_nt(a, b, **arguments, tile=TILES[tile]), want)


@pytest.mark.parametrize("b_block_scaled", [True, False])
@pytest.mark.parametrize("nk", [(6144, 4096), (4096, 12288), (384, 1000)])
def test_a_row_has_the_same_bits_in_every_batch(nk, b_block_scaled):
    """Through the dispatch table: the choice of a backend by shape must not change a bit."""
    a, b = operands(max(ROWS), *nk, b_block_scaled)
    full = kernels.gemm_nt(a, b, b_block_scaled=b_block_scaled)
    for m in ROWS:
        part = QuantizedTensor(a.qdata[:m], a.scales[:m].t().contiguous().t())
        got = kernels.gemm_nt(part, b, b_block_scaled=b_block_scaled)
        assert torch.equal(bits(got), bits(full[:m])), f"M={m}"


@pytest.mark.parametrize("operation", ["gemm_nt_128x128", "gemm_nt_1x128"])
def test_backends_that_share_a_table_entry_agree_in_every_bit(operation):
    names = kernels.OPERATIONS[operation].backends[kernels.platform_of(torch.device("cuda"))]
    b_block_scaled = operation == "gemm_nt_128x128"
    for m, n, k in ((8, 6144, 4096), (1000, 4096, 12288)):
        a, b = operands(m, n, k, b_block_scaled)
        want = triton_kernels.gemm_nt(a, b, b_block_scaled=b_block_scaled)
        for name in names:
            if Backend(name).supports_gemm_nt(a, b, b_block_scaled=b_block_scaled):
                got = Backend(name).gemm_nt(a, b, b_block_scaled=b_block_scaled)
                assert torch.equal(bits(got), bits(want)), name


def test_k_blocks_are_added_in_ascending_order():
    """2^24 + 1 + 1 in FP32 is 2^24 from the left and 2^24 + 2 from the right."""
    qdata = torch.zeros(64, 3 * BLOCK, device="cuda")
    qdata[:, ::BLOCK] = 1.0
    one = QuantizedTensor(qdata.to(FP8_DTYPE), torch.ones(64, 3, device="cuda"))
    for scales, want in (([2.0**24, 1, 1], 2.0**24), ([1, 1, 2.0**24], 2.0**24 + 2)):
        a = QuantizedTensor(one.qdata, torch.tensor([scales], device="cuda").repeat(64, 1))
        got = kernels.gemm_nt(a, one, b_block_scaled=False, out_dtype=torch.float32)
        assert (got == want).all()


@pytest.mark.parametrize("b_block_scaled", [True, False])
def test_all_ones_with_distinct_scales_sum_exactly(b_block_scaled):
    m, n, k = 200, 390, 5 * BLOCK
    rows_b = -(-n // BLOCK) if b_block_scaled else n
    a_scales = 2.0 ** ((torch.arange(m)[:, None] * 5 + torch.arange(5)[None, :]) % 11 - 5.0)
    b_scales = 2.0 ** ((torch.arange(rows_b)[:, None] * 3 + torch.arange(5)[None, :] * 7) % 13 - 6.0)
    a, b = (
        QuantizedTensor(torch.ones(m, k).to(FP8_DTYPE), a_scales),
        QuantizedTensor(torch.ones(n, k).to(FP8_DTYPE), b_scales),
    )
    got = kernels.gemm_nt(cuda(a), cuda(b), b_block_scaled=b_block_scaled, out_dtype=torch.float32)
    wide = b_scales.repeat_interleave(BLOCK, dim=0)[:n] if b_block_scaled else b_scales
    assert torch.equal(got.cpu().double(), BLOCK * (a_scales.double() @ wide.double().t()))


def test_bias_is_added_before_the_one_rounding():
    """257 rounds to BF16 256; rounding, then adding 1 gives 257 -> 256, adding first gives 258."""
    a = QuantizedTensor(torch.ones(1, 1).to(FP8_DTYPE), torch.tensor([[257.0]]))
    b = QuantizedTensor(torch.ones(1, 1).to(FP8_DTYPE), torch.ones(1, 1))
    bias = torch.ones(1, dtype=torch.bfloat16, device="cuda")
    assert kernels.gemm_nt(cuda(a), cuda(b), b_block_scaled=True, bias=bias).item() == 258.0


def test_nan_qdata_poison_only_their_row():
    x = gaussian(200, 256)
    x[150, 200] = torch.inf
    a, b = kernels.quantize_1x128(x.cuda(), "fp32"), kernels.quantize_128x128(gaussian(130, 256).cuda(), "fp32")
    y = kernels.gemm_nt(a, b, b_block_scaled=True)
    clean = torch.arange(200, device="cuda") != 150
    assert y[150].isnan().all()
    assert y[clean].isfinite().all()


def test_wgrad_from_the_layouts_of_the_backward():
    """dW = dY^T X for a ragged token count, operands as the quantizers write them."""
    x, dy = gaussian(1003, 640).cuda(), heavy_tailed(1003, 384).cuda()
    relaid = kernels.relayout_128x1(kernels.quantize_1x128(x, "fp32"), "fp32")
    _, dy_t = kernels.quantize_1x128_and_128x1(dy, "fp32")
    want = reference.gemm_nt_float64(dy_t, relaid, b_block_scaled=False)
    assert relative_error(kernels.gemm_nt(dy_t, relaid, b_block_scaled=False, out_dtype=torch.float32), want) < 5e-4
