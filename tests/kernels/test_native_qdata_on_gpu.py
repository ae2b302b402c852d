# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The native kernels that transpose qdata on a Hopper GPU: the bytes of the reference, around every edge.

compute-sanitizer --tool memcheck  python -m pytest --gpu=only tests/kernels/test_native_qdata_on_gpu.py -k sanitizer
"""

import pytest
import torch
from backends import triton_kernels
from contract_inputs import CASES, gaussian, heavy_tailed
from fused_checks import INPUTS, assert_same_bytes, bf16, canaries

from jetrl_verl import kernels, reference
from jetrl_verl.kernels import dispatch
from jetrl_verl.kernels.quantize_128x128 import native_transpose_128x128
from jetrl_verl.kernels.relayout_128x1 import native_relayout_128x1, native_supports_relayout_128x1
from jetrl_verl.kernels.silu_mul import native_silu_mul_backward_quantize, native_supports_silu_mul_backward
from jetrl_verl.reference import FP8_DTYPE, SCALE_RULES, QuantizedTensor

pytestmark = pytest.mark.usefixtures("native_library")

SIZES = (16, 64, 448, 2368, 4736)
EDGES = (1, 15, 16, 17, 127, 128, 129, 255, 257, 1000)


def moved(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(*(part.cuda() for part in q))


def check_relayout(x: torch.Tensor, rule: str, monkeypatch) -> None:
    q = reference.quantize_1x128(x, rule)
    want = reference.relayout_128x1(q, rule)
    on_gpu = moved(q)
    with canaries(monkeypatch):
        got = native_relayout_128x1(on_gpu, rule)
    assert_same_bytes(got, want)
    column_major = kernels.quantize_1x128(x.cuda(), rule)
    assert_same_bytes(native_relayout_128x1(column_major, rule), want)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(1, 128), (131, 272), (256, 512), (1000, 1536)])
@pytest.mark.parametrize("case", CASES)
def test_relayout_matches_the_reference(case, shape, rule, monkeypatch):
    check_relayout(case(*shape), rule, monkeypatch)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("rows", EDGES)
def test_relayout_around_every_edge(rows, k, rule, monkeypatch):
    check_relayout(heavy_tailed(rows, k), rule, monkeypatch)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_relayout_of_a_part_of_a_matrix_between_nans(rule):
    """Rows of a wider matrix: no read or write reaches past them."""
    wide = kernels.quantize_1x128(gaussian(333, 640).cuda(), rule)
    wide.qdata.view(torch.uint8)[:, :128] = wide.qdata.view(torch.uint8)[:, 528:] = 0x7F
    wide.qdata.view(torch.uint8)[300:] = 0x7F
    part = QuantizedTensor(wide.qdata[:300, 128:528], wide.scales[:300, 1:5])
    assert native_supports_relayout_128x1(part)
    on_cpu = QuantizedTensor(part.qdata.cpu().contiguous(), part.scales.cpu().contiguous())
    assert_same_bytes(native_relayout_128x1(part, rule), reference.relayout_128x1(on_cpu, rule))


def test_relayout_of_random_scales_matches_triton():
    """FP32 quotients of 16 million values; scales of rows spread over 2^60."""
    scales = torch.ldexp(1 + torch.rand(4096, 32, device="cuda"), torch.randint(-30, 30, (4096, 32), device="cuda"))
    qdata = torch.randint(0, 0x7F, (4096, 4096), dtype=torch.uint8, device="cuda")
    qdata |= 0x80 * torch.randint(0, 2, qdata.shape, dtype=torch.uint8, device="cuda")
    q = QuantizedTensor(qdata.view(FP8_DTYPE), scales)
    for rule in SCALE_RULES:
        assert_same_bytes(native_relayout_128x1(q, rule), triton_kernels.relayout_128x1(q, rule))


def test_a_hundred_repeats_match_also_in_a_graph():
    q = kernels.quantize_1x128(heavy_tailed(3001, 2368).cuda(), "fp32")
    first = native_relayout_128x1(q, "fp32")
    graph = torch.cuda.CUDAGraph()
    native_relayout_128x1(q, "fp32")
    with torch.cuda.graph(graph):
        captured = native_relayout_128x1(q, "fp32")
    for _ in range(100):
        captured.qdata.view(torch.uint8).fill_(0x7F), captured.scales.fill_(torch.nan)
        graph.replay()
        assert_same_bytes(captured, first)


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("n", (16, 64, 112, 128, 144, 448, 2368))
def test_the_transpose_moves_every_byte_and_scale(n, k, monkeypatch):
    qdata = torch.randint(0, 256, (n, k), dtype=torch.uint8).view(FP8_DTYPE)
    weight = QuantizedTensor(qdata, torch.rand(-(-n // 128), -(-k // 128)))
    on_gpu = moved(weight)
    with canaries(monkeypatch):
        got = native_transpose_128x128(on_gpu)
    assert_same_bytes(got, reference.transpose_128x128(weight))


@pytest.mark.parametrize(("operation", "shape"), [("relayout_128x1", (64, 72)), ("transpose_128x128", (72, 64))])
def test_triton_runs_for_sizes_that_are_no_multiples_of_16(operation, shape):
    q = (reference.quantize_1x128 if operation == "relayout_128x1" else reference.quantize_128x128)(
        gaussian(*shape), "fp32"
    )
    rule = ("fp32",) if operation == "relayout_128x1" else ()
    assert not dispatch.supports(operation, "native", moved(q))
    assert_same_bytes(getattr(kernels, operation)(moved(q), *rule), getattr(reference, operation)(q, *rule))
    with pytest.raises(ValueError, match=f"native does not support {operation}.*use backend triton"):
        dispatch.implementation(operation, "native")(moved(q), *rule)


def silu_operands(case, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dY, and gate and up as halves of one tensor; gates of all magnitudes."""
    gate, up = (bf16(gaussian, m, k, "cuda", seed) for seed in (0, 1))
    gate[:, ::5] *= 40
    return bf16(case, m, k, "cuda", 2), *torch.cat([gate, up], dim=1).chunk(2, dim=1)


def check_silu_mul_backward(operands: tuple[torch.Tensor, ...], rule: str, monkeypatch) -> None:
    """Against the gradients of the plain kernel, quantized on the CPU."""
    with canaries(monkeypatch):
        results = native_silu_mul_backward_quantize(*operands, rule)
    wanted = [
        q
        for gradient in triton_kernels.silu_mul_backward(*operands)
        for q in reference.quantize_1x128_and_128x1(gradient.cpu(), rule)
    ]
    for got, want in zip(results, wanted, strict=True):
        assert_same_bytes(got, want)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(256, 512), *((rows, 384) for rows in EDGES)])
@pytest.mark.parametrize("case", INPUTS)
def test_gated_mlp_gradients_match_the_separate_steps(case, shape, rule, monkeypatch):
    check_silu_mul_backward(silu_operands(case, *shape), rule, monkeypatch)


def test_the_gradients_for_every_gate(monkeypatch):
    """All BF16 numbers as gates, also those where the exponential overflows or its reciprocal is subnormal."""
    gate = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).cuda()
    gate = torch.cat([gate, torch.linspace(-90, -86, 2**16).bfloat16().view(256, 256).cuda()])
    dy, up = (bf16(gaussian, 512, 256, "cuda", seed) for seed in (1, 2))
    for rule in SCALE_RULES:
        check_silu_mul_backward((dy, gate, up), rule, monkeypatch)
        check_silu_mul_backward((dy, gate.nan_to_num(0, 3, -3).clamp(-95, 95), up), rule, monkeypatch)


def test_triton_runs_for_rows_the_native_kernel_does_not_support(monkeypatch):
    calls = []
    own = native_silu_mul_backward_quantize
    counted = dispatch.Implementation(lambda *call: calls.append(call) or own(*call), native_supports_silu_mul_backward)
    monkeypatch.setitem(dispatch._implementations, ("silu_mul_backward_quantize", "native"), counted)
    operands = silu_operands(gaussian, 130, 256)
    for got, want in zip(kernels.silu_mul_backward_quantize(*operands, "fp32"), own(*operands, "fp32"), strict=True):
        assert_same_bytes(got, want)
    assert len(calls) == 1
    odd = tuple(torch.cat([x, x[:, :4]], dim=1)[:, :256] for x in operands)
    assert not native_supports_silu_mul_backward(*odd)
    for got, want in zip(kernels.silu_mul_backward_quantize(*odd, "fp32"), own(*operands, "fp32"), strict=True):
        assert_same_bytes(got, want)
    assert len(calls) == 1


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_gradients_for_the_sanitizer(rule):
    operands = [bf16(gaussian, 300, 256, "cpu", seed).cuda() for seed in range(3)]
    row_qdata = native_silu_mul_backward_quantize(*operands, rule)[0]
    assert row_qdata.scales.isfinite().all()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_a_relayout_for_the_sanitizer(rule):
    """Operands and the expected bytes come from the CPU: only the kernel runs on the GPU."""
    q = reference.quantize_1x128(gaussian(300, 400), rule)
    assert_same_bytes(native_relayout_128x1(moved(q), rule), reference.relayout_128x1(q, rule))


def test_a_transpose_for_the_sanitizer():
    weight = reference.quantize_128x128(gaussian(272, 400), "fp32")
    assert_same_bytes(native_transpose_128x128(moved(weight)), reference.transpose_128x128(weight))
