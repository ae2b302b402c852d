# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton quantizers, and operations that quantize their result, on a GPU: bits, bytes, edges, repeats."""

import itertools
from functools import partial

import pytest
import torch
from backends import triton_kernels
from contract_inputs import CASES, gaussian, heavy_tailed
from fused_checks import CHECKS, EPS, INPUTS, assert_same_bytes, bf16, canaries, check_all_quantizers, qdata_in

from jetrl_verl import formats, kernels, reference
from jetrl_verl.kernels.fprop import fprop_quantized
from jetrl_verl.kernels.rms_norm import add_rms_norm_quantize_1x128, rms_norm_quantize_1x128
from jetrl_verl.kernels.silu_mul import silu_mul_backward_quantize, silu_mul_quantize
from jetrl_verl.nn.linear import JetLinear, quantize_input
from jetrl_verl.reference import SCALE_RULES, QuantizedTensor

TOKENS = (1, 3, 127, 128, 129, 4096 + 5)
COLUMNS = (128, 1536, 4096, 12288)
OPERATIONS = (
    "quantize_1x128_and_128x1",
    "quantize_128x128_and_transpose",
    "relayout_128x1",
    "transpose_128x128",
    "rms_norm_quantize_1x128",
    "add_rms_norm_quantize_1x128",
    "combine_add_rms_norm",
    "combine_add_rms_norm_quantize_1x128",
    "silu_mul_quantize",
    "silu_mul_backward_quantize",
)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("check", CHECKS)
def test_fused_operations_match_the_plain_ones_and_the_reference(monkeypatch, check, m, k, rule):
    with canaries(monkeypatch):
        check(gaussian, m, k, rule, "cuda")


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("check", CHECKS)
def test_fused_operations_on_outliers_masked_rows_inf_and_nan(monkeypatch, check, case, rule):
    with canaries(monkeypatch):
        check(case, 300, 1536, rule, "cuda")


EDGES = [(0, 300), (1, 1), (130, 7), (128, 4096), (4099, 1)]


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize(("m", "k"), [*itertools.product(TOKENS, COLUMNS), *EDGES])
def test_the_quantizers_write_their_outputs_and_nothing_else(monkeypatch, m, k, rule):
    with canaries(monkeypatch):
        check_all_quantizers(triton_kernels, heavy_tailed(m, k), rule, "cuda")


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(1, 128), (3, 300), (129, 257), (132, 150), (256, 512), (1000, 1536)])
@pytest.mark.parametrize("case", CASES)
def test_every_quantizer_matches_the_reference(case, shape, rule):
    check_all_quantizers(triton_kernels, case(*shape), rule, "cuda")


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_input_types(dtype, rule):
    check_all_quantizers(triton_kernels, gaussian(200, 384).to(dtype), rule, "cuda")


def test_the_quotient_equals_division_for_every_bf16_value():
    """The kernels divide by a reciprocal and residual steps; here every BF16 magnitude with many maxima."""
    values = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values > 2.0**-80]
    generator = torch.Generator().manual_seed(0)
    groups = []
    for _ in range(16):
        amax = values[torch.randint(values.numel(), (values.numel(),), generator=generator)]
        groups.append(torch.stack([torch.maximum(amax, values), torch.minimum(amax, values)], dim=1))
    x = torch.cat(groups)
    assert_same_bytes(triton_kernels.quantize_1x128(x.cuda(), "fp32"), reference.quantize_1x128(x, "fp32"))


def test_the_quotient_equals_division_for_random_fp32_values():
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-60, 120, (1 << 14, 1), generator=generator).double()
    x = torch.ldexp(1 + torch.rand(1 << 14, 128, generator=generator, dtype=torch.float64), exponent)
    x = (x * torch.rand(1 << 14, 128, generator=generator, dtype=torch.float64)).float()
    assert_same_bytes(triton_kernels.quantize_1x128(x.cuda(), "fp32"), reference.quantize_1x128(x, "fp32"))


def test_offsets_beyond_two_to_the_31():
    rows, k = (1 << 31) // 4096 + 3, 4096
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
    x[-3:] = gaussian(3, k).cuda()
    want = reference.quantize_1x128(x[-3:].cpu(), "fp32")
    got = triton_kernels.quantize_1x128(x, "fp32")
    assert_same_bytes(QuantizedTensor(got.qdata[-3:], got.scales[-3:]), want)


def call_of(name: str, m: int, k: int, rule: str) -> partial:
    """Operation ``name`` on fixed inputs."""
    x, gate, up, residual = (bf16(gaussian, m, k, "cuda", seed) for seed in range(4))
    weight = bf16(gaussian, 1, k, "cuda", 4)[0]
    # Any row may belong to a pair: here each belongs to three tokens.
    row = torch.stack([torch.randperm(m, device="cuda") for _ in range(3)], dim=1).to(torch.int32)
    if name.startswith("quantize"):
        return partial(getattr(kernels, name), x, rule)
    return {
        "relayout_128x1": partial(kernels.relayout_128x1, kernels.quantize_1x128(x, rule), rule),
        "transpose_128x128": partial(kernels.transpose_128x128, kernels.quantize_128x128(x, rule)),
        "rms_norm_quantize_1x128": partial(rms_norm_quantize_1x128, x, weight, EPS, rule),
        "add_rms_norm_quantize_1x128": partial(
            add_rms_norm_quantize_1x128, x, residual, weight, EPS, rule, with_normed=False
        ),
        "combine_add_rms_norm": partial(kernels.combine_add_rms_norm, x, row, residual, weight, EPS),
        "combine_add_rms_norm_quantize_1x128": partial(
            kernels.combine_add_rms_norm_quantize_1x128, x, row, residual, weight, EPS, rule, with_normed=True
        ),
        "silu_mul_quantize": partial(silu_mul_quantize, gate, up, rule, with_product=False),
        "silu_mul_backward_quantize": partial(silu_mul_backward_quantize, x, gate, up, rule),
    }[name]


@pytest.mark.parametrize("name", OPERATIONS)
def test_twenty_repeats_are_equal_and_so_is_a_cuda_graph(name):
    call = call_of(name, 4096 + 5, 4096, "fp32")
    first = qdata_in(call())
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(qdata_in(call()), first, strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(qdata_in(results), first, strict=True))


def test_a_row_does_not_depend_on_the_batch():
    x, weight = bf16(gaussian, 4101, 4096, "cuda"), bf16(gaussian, 1, 4096, "cuda", 1)[0]
    whole = rms_norm_quantize_1x128(x, weight, EPS, "fp32")
    for count in (1, 7, 64, 1000):
        rows = torch.randperm(4101, device="cuda")[:count]
        some = rms_norm_quantize_1x128(x[rows], weight, EPS, "fp32")
        assert_same_bytes(some, QuantizedTensor(whole.qdata[rows], whole.scales[rows]))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("m", [1, 16, 65, 1000])
@torch.no_grad()
def test_linears_of_qdata_match_linears_that_quantize(m, rule):
    """The rollout's MLP with qdata between its operations: eager, compiled, and in a CUDA graph."""
    x, residual = bf16(gaussian, m, 1024, "cuda"), bf16(gaussian, m, 1024, "cuda", 1)
    weight = bf16(gaussian, 1, 1024, "cuda", 2)[0]
    gate_up = kernels.quantize_128x128(bf16(gaussian, 2 * 1536, 1024, "cuda", 3), rule)
    down = kernels.quantize_128x128(bf16(gaussian, 1024, 1536, "cuda", 4), rule)
    bias = bf16(gaussian, 1, 1024, "cuda", 5)[0]

    # By name: torch.compile unpacks only tuples.
    def qdata_between(x, residual):
        qdata, total = add_rms_norm_quantize_1x128(x, residual, weight, EPS, rule, with_normed=False)
        gate, up = fprop_quantized(qdata, gate_up.qdata, gate_up.scales, None, static_weight=True).chunk(2, dim=-1)
        qdata = silu_mul_quantize(gate, up, rule, with_product=False)
        return fprop_quantized(qdata, down.qdata, down.scales, bias, static_weight=True), total

    normed, total = kernels.add_rms_norm(x, residual, weight, EPS)
    gate, up = kernels.fprop(normed, *gate_up, None, rule).chunk(2, dim=-1)
    wanted = kernels.fprop(kernels.silu_mul(gate, up), *down, bias, rule), total
    for form in (qdata_between, torch.compile(qdata_between, fullgraph=True, dynamic=True)):
        assert all(torch.equal(a, b) for a, b in zip(form(x, residual), wanted, strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = qdata_between(x, residual)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_layers_that_share_an_input_match_separate_layers(rule):
    torch.manual_seed(0)
    layers = [
        JetLinear.replace(torch.nn.Linear(1536, n, device="cuda"), formats.get("fp8"), scale_rule=rule, backward="fp8")
        for n in (1536, 256, 256)
    ]
    x, weight = bf16(gaussian, 1000, 1536, "cuda"), bf16(gaussian, 1, 1536, "cuda")[0]
    qdata = rms_norm_quantize_1x128(x, weight, EPS, rule)
    normed = qdata.source

    def gradients(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        for layer in layers:
            layer.weight.grad = None
        outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        sum(y.float().square().sum() for y in outputs).backward()
        return [*outputs, *(layer.weight.grad for layer in layers)]

    apart = gradients([kernels.rms_norm(x, weight, EPS).requires_grad_() for _ in layers])
    together = gradients([quantize_input(normed.clone().requires_grad_(), layers[0].format, rule)] * 3)
    given = QuantizedTensor(qdata.qdata, qdata.scales, normed.clone().requires_grad_())
    for got in (together, gradients([given] * 3)):
        assert all(torch.equal(a, b) for a, b in zip(got, apart, strict=True))


@pytest.mark.parametrize("name", [*OPERATIONS, "quantize_1x128", "quantize_128x1", "quantize_128x128"])
def test_a_small_call_for_the_sanitizer(name):
    """compute-sanitizer --tool memcheck (racecheck) python -m pytest <this file> -k sanitizer: once per kernel."""
    call = call_of(name, 130, 384, "fp32")
    first = qdata_in(call())
    assert all(torch.equal(a, b) for a, b in zip(qdata_in(call()), first, strict=True))
