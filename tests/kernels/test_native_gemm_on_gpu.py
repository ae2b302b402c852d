# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The native GEMMs on a Hopper GPU: edges, races, Triton's bits under every plan; test_gemm_on_gpu.py has the rest.

A hung kernel cannot be interrupted, so a test that takes too long ends the process (``method="thread"``); then run
``JETRL_NATIVE_DEBUG=1 python -m pytest ...``, where a wait of a second names its barrier. Memory and races:

    compute-sanitizer --tool memcheck  python -m pytest tests/kernels/test_native_gemm_on_gpu.py -k sanitizer
    compute-sanitizer --tool racecheck python -m pytest tests/kernels/test_native_gemm_on_gpu.py -k sanitizer
"""

import pytest
import torch
from backends import CALLS, triton_kernels
from contract_inputs import gaussian, heavy_tailed
from test_gemm_on_gpu import bits, float64, operands, relative_error

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.gemm_nt import native_gemm_nt
from jetrl_verl.kernels.native import DEFAULT_PLAN, Plan
from jetrl_verl.kernels.wgrad import native_wgrad
from jetrl_verl.reference import FP8_DTYPE, QuantizedTensor
from jetrl_verl.reference.constants import E4M3_NAN_BITS

pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("native_library")]

SIZES = (64, 448, 2368, 4736)
EDGES = (1, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513)
TILES = [(block, cluster) for block in (128, 256) for cluster in (1, 2)]
FPROP_PLANS = [Plan("fprop", *tile) for tile in [(64, 1), (64, 2), (192, 1), (192, 2), *TILES]]
WGRAD_PLANS = [Plan("", *tile) for tile in TILES]
# Tokens of the decode kernel's variant, and rows of W per tile.
DECODE_PLANS = [(tokens, Plan("decode", rows)) for tokens in (16, 32, 64, 128) for rows in (16, 32, 48, 64)]


def native(gemm: str, a: QuantizedTensor, b: QuantizedTensor, plan: Plan = DEFAULT_PLAN, out=None, **arguments):
    run = {"gemm_nt": native_gemm_nt, "wgrad": native_wgrad}[gemm]
    return run(CALLS[gemm](a, b, **arguments), plan=plan, out=out)


def first_rows(q: QuantizedTensor, m: int) -> QuantizedTensor:
    """The first ``m`` rows in the memory layout of a batch of ``m``."""
    return QuantizedTensor(q.qdata[:m], q.scales[:m].t().contiguous().t())


def padded(q: QuantizedTensor, columns: int = 64) -> QuantizedTensor:
    """The same qdata in rows padded with NaN."""
    rows, k = q.qdata.shape
    wide = torch.full((rows, k + columns), E4M3_NAN_BITS, dtype=torch.uint8, device=q.qdata.device)
    wide[:, :k] = q.qdata.view(torch.uint8)
    return QuantizedTensor(wide.view(FP8_DTYPE)[:, :k], q.scales)


def poisoned_call(
    gemm: str, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16, **arguments
):
    """The result, written into the middle of a matrix of NaN that must stay NaN around it."""
    m, n = a.qdata.shape[0], b.qdata.shape[0]
    around = torch.full((m + 2, n + 32), torch.nan, dtype=out_dtype, device="cuda")
    out = around[1:-1, 16:-16]
    native(gemm, a, b, out=out, out_dtype=out_dtype, **arguments)
    edges = (around[0], around[-1], around[:, :16], around[:, -16:])
    assert all(edge.isnan().all() for edge in edges), "a store outside the output"
    return out


@pytest.mark.parametrize("plan", FPROP_PLANS, ids=str)
def test_every_fprop_plan_matches_triton(plan):
    a, b = operands(1000, 712, 1088, "gemm_nt")
    got = poisoned_call("gemm_nt", padded(a), padded(b), plan=plan)
    assert torch.equal(bits(got), bits(triton_kernels.gemm_nt(a, b)))


@pytest.mark.parametrize(("tokens", "plan"), DECODE_PLANS, ids=str)
def test_every_decode_plan_matches_triton(tokens, plan):
    for m in (tokens // 2 + 1, tokens):
        a, b = operands(m, 712, 1088, "gemm_nt")
        got = poisoned_call("gemm_nt", padded(a), padded(b), plan=plan)
        assert torch.equal(bits(got), bits(triton_kernels.gemm_nt(a, b)))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("plan", WGRAD_PLANS, ids=str)
def test_every_wgrad_plan_matches_triton(plan, out_dtype):
    a, b = operands(712, 1000, 1008, "wgrad")
    got = poisoned_call("wgrad", padded(a), padded(b), out_dtype, plan=plan)
    assert torch.equal(bits(got), bits(triton_kernels.wgrad(a, b, out_dtype=out_dtype)))


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("n", SIZES)
def test_fprop_and_decode_at_every_tile_edge(n, k):
    a, b = operands(max(EDGES), n, k, "gemm_nt")
    want = triton_kernels.gemm_nt(a, b)
    exact = reference.gemm_nt_float64(a, b)
    finite = exact.isfinite().all(dim=1)
    assert relative_error(native("gemm_nt", a, b)[finite], exact[finite]) < 2.5e-3
    for m in EDGES:
        part = first_rows(a, m)
        for kernel in ("fprop", "decode"):
            got = poisoned_call("gemm_nt", part, b, plan=Plan(kernel))
            assert torch.equal(bits(got), bits(want[:m])), f"{kernel} M={m}"


@pytest.mark.parametrize("tokens", [1, 16, 127, 128, 129, 1000, 2005])
@pytest.mark.parametrize("nk", [(64, 448), (2368, 64), (448, 4736)])
def test_wgrad_from_the_layouts_of_the_backward(nk, tokens):
    n, k = nk
    x, dy = gaussian(tokens, k).cuda(), heavy_tailed(tokens, n).cuda()
    a = kernels.quantize_1x128_and_128x1(dy, "fp32")[1]
    b = kernels.relayout_128x1(kernels.quantize_1x128(x, "fp32"), "fp32")
    for out_dtype, limit in ((torch.float32, 5e-4), (torch.bfloat16, 2.5e-3)):
        got = poisoned_call("wgrad", a, b, out_dtype)
        assert torch.equal(bits(got), bits(triton_kernels.wgrad(a, b, out_dtype=out_dtype)))
        exact = reference.wgrad_float64(a, b)
        finite = exact.isfinite().all(dim=1)
        assert relative_error(got[finite], exact[finite]) < limit


@pytest.mark.parametrize(
    ("gemm", "m", "n", "k"),
    [("gemm_nt", 4096, 2368, 1024), ("gemm_nt", 5, 6144, 2048), ("gemm_nt", 64, 4736, 4096)]
    + [("gemm_nt", 128, 4736, 4096), ("wgrad", 2368, 1024, 1003)],
)
def test_a_hundred_repeats_give_the_same_bits(gemm, m, n, k):
    """Differences between repeats are races; fresh outputs show missing stores."""
    a, b = operands(m, n, k, gemm) if gemm == "gemm_nt" else wgrad_operands(m, n, k)
    first = bits(poisoned_call(gemm, a, b)).clone()
    for _ in range(100):
        assert torch.equal(bits(poisoned_call(gemm, a, b)), first)


def wgrad_operands(n: int, k: int, tokens: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    return tuple(kernels.quantize_128x1(gaussian(tokens, width).cuda(), "fp32") for width in (n, k))


@pytest.mark.parametrize("kernel", ["fprop", "decode"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_is_added_in_fp32_before_the_one_rounding(kernel, dtype):
    a, b = operands(90, 712, 1024, "gemm_nt")
    bias = (100 * gaussian(1, 712)[0]).to(dtype).cuda()
    got = native("gemm_nt", a, b, Plan(kernel), bias=bias)
    assert torch.equal(bits(got), bits(triton_kernels.gemm_nt(a, b, bias=bias)))


def quantize_and_multiply(xs, m: int, weight: QuantizedTensor, kept: torch.Tensor, poison: str, static_weight: bool):
    """Quantizes each of ``xs`` [rows, K] and multiplies its last ``m`` rows, which are written last, into one output
    of NaN; the outputs are copied to ``kept`` [repeats, m, N]. FP8 data reuse the memory of the previous repeat.
    """
    y, nothing = torch.empty_like(kept[0]), torch.full_like(kept[0], torch.nan)
    for x, result in zip(xs, kept, strict=True):
        if poison == "in front":
            y.fill_(torch.nan)
        qdata, scales = kernels.quantize_1x128(x, "fp32")
        if poison == "by a kernel between":
            y.fill_(torch.nan)
        elif poison == "by a copy between":
            y.copy_(nothing)
        a = QuantizedTensor(qdata[-m:], scales[-m:])
        native("gemm_nt", a, weight, out=y, static_weight=static_weight)
        del qdata, scales, a  # the next repeat reuses their memory
        result.copy_(y)


@pytest.mark.parametrize("poison", ["in front", "by a kernel between", "by a copy between"])
@pytest.mark.parametrize("more_rows", [0, 4096])
@pytest.mark.parametrize("m", [1, 16, 33, 64, 100, 128])
@pytest.mark.parametrize("nk", [(1536, 1024), (1024, 1024), (6144, 1024), (1024, 3072)])
def test_a_gemm_that_starts_early_matches_one_that_waits(nk, m, more_rows, poison):
    """Fifty times with other inputs, enqueued at once, called and replayed: qdata that were read too early are those of
    the previous repeat, an output stored too early is NaN. ``more_rows`` keep the quantizer busy for longer."""
    n, k = nk
    torch.manual_seed(m)
    inputs = torch.randn(7, m + more_rows, k, device="cuda").bfloat16()
    xs = [inputs[i % len(inputs)] for i in range(50)]
    weight = kernels.quantize_128x128(torch.randn(n, k, device="cuda").bfloat16(), "fp32")
    want = torch.empty(len(xs), m, n, dtype=torch.bfloat16, device="cuda")
    got = torch.full_like(want, torch.nan)
    quantize_and_multiply(xs, m, weight, want, poison, static_weight=False)
    assert want.isfinite().all()
    torch.cuda._sleep(40_000_000)  # cycles, while the host enqueues all
    quantize_and_multiply(xs, m, weight, got, poison, static_weight=True)
    assert torch.equal(bits(got), bits(want))

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_and_multiply(xs, m, weight, got, poison, static_weight=True)
    for _ in range(2):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(bits(got), bits(want))


SANITIZED = [
    *(("fprop", plan) for plan in FPROP_PLANS),
    *(("decode", plan) for tokens, plan in DECODE_PLANS if tokens == 128),
    *((kernel, plan) for kernel in ("wgrad", "wgrad in FP32") for plan in WGRAD_PLANS),
]


@pytest.mark.parametrize("columns", [False, True], ids=["scales in rows", "scales in columns"])
@pytest.mark.parametrize(("kernel", "plan"), SANITIZED)
def test_a_call_for_the_sanitizer(kernel, plan, columns):
    """Nothing but the kernel runs on the GPU: operands and the expected product come from the CPU. A tile's 17 K blocks
    go more than twice round the stages, and there are more tiles than multiprocessors: the pipeline continues across
    tiles, and FProp stores a tile during the first chains of the next. TMA copies column-major scales."""
    gemm, k = "wgrad" if kernel.startswith("wgrad") else "gemm_nt", 16 * 128 + 16
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    tall = 130 if kernel == "decode" else 1032  # two tiles, or nine
    wide = plan.block * (sms // (2 if kernel == "decode" else 9) + 2) + 8
    assert -(-tall // 128) * -(-wide // plan.block) > sms
    m, n = (tall, wide) if gemm == "gemm_nt" else (wide, tall)  # rows of A in a tile of WGrad
    quantize_b = reference.quantize_128x128 if gemm == "gemm_nt" else reference.quantize_1x128
    a, b = reference.quantize_1x128(gaussian(m, k), "fp32"), quantize_b(gaussian(n, k), "fp32")
    want = float64(gemm, a, b)
    if columns:
        a, b = (QuantizedTensor(q.qdata, q.scales.t().contiguous().t()) for q in (a, b))
    a, b = (QuantizedTensor(q.qdata.cuda(), q.scales.cuda()) for q in (a, b))
    out_dtype = torch.float32 if kernel == "wgrad in FP32" else torch.bfloat16
    got = poisoned_call(gemm, a, b, out_dtype, plan=plan)
    assert relative_error(got.cpu(), want) < 2.5e-3


def test_a_decode_step_for_the_sanitizer():
    """Two linears that start before their quantizers end."""
    weights = [kernels.quantize_128x128(torch.randn(512, 512, device="cuda").bfloat16(), "fp32") for _ in range(2)]
    x = torch.randn(33, 512, device="cuda").bfloat16()
    results = []
    for static_weight in (False, True):
        y = x
        for weight in weights:
            a = kernels.quantize_1x128(y, "fp32")
            y = native("gemm_nt", a, weight, static_weight=static_weight)
        results.append(y)
    assert torch.equal(bits(results[0]), bits(results[1])) and results[0].isfinite().all()
