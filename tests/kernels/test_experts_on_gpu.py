# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The operations of a mixture of experts on a GPU: bits of the reference and of dense products, for any batch.

Memory and races of the native kernels, as in test_native_gemm_on_gpu.py:

    compute-sanitizer --tool memcheck  python -m pytest tests/kernels/test_experts_on_gpu.py -k sanitizer
    compute-sanitizer --tool racecheck python -m pytest tests/kernels/test_experts_on_gpu.py -k sanitizer
"""

import itertools

import pytest
import torch
from contract_inputs import gaussian
from torch import nn

from jetrl_verl import formats, kernels, reference
from jetrl_verl.kernels.grouped_gemm import (
    native_grouped_gemm_nt,
    native_grouped_gemm_nt_of_ranks,
    native_grouped_wgrad,
    triton_grouped_gemm_nt,
    triton_grouped_gemm_nt_of_ranks,
    triton_grouped_wgrad,
)
from jetrl_verl.kernels.native import Plan
from jetrl_verl.models.families.base import Experts
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.reference import BLOCK, QuantizedTensor, Segments, k_slices

DEVICE = torch.device("cuda")
FLOW = formats.get("fp8")
QWEN3_30B = dict(experts=128, k=8, hidden=2048, inner=768)
QWEN3_235B = dict(experts=128, k=8, hidden=4096, inner=1536)
QWEN3_5_35B = dict(experts=256, k=8, hidden=2048, inner=512)
OVER_RANKS = [(2, QWEN3_30B), (2, QWEN3_235B), (4, QWEN3_235B)]
"""Slices of three and six K blocks."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, torch.bfloat16)


def to_cpu(value):
    return QuantizedTensor(value.qdata.cpu(), value.scales.cpu()) if isinstance(value, QuantizedTensor) else value.cpu()


def logits_of(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    return normal(tokens, experts, seed=seed).float() * 2


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 128, 8), (777, 256, 8), (4096, 60, 4), (33, 8, 2)])
def test_route_and_segments(tokens, experts, k, renormalize):
    logits = logits_of(tokens, experts)
    logits[:, 3] = logits[:, 5]  # ties
    chosen, weights = kernels.route(logits, k, renormalize)
    assert torch.equal(chosen.cpu(), reference.top_k(logits.cpu(), k))
    exact = logits.double().softmax(dim=1).gather(1, chosen.long())
    exact = exact / exact.sum(dim=1, keepdim=True) if renormalize else exact
    assert (weights - exact).abs().max() < 1e-6
    for align in (1, 128):
        where = kernels.segments(chosen, experts, align)
        for name, got, want in zip(where._fields, where, reference.segments(chosen.cpu(), experts, align), strict=True):
            assert torch.equal(got.cpu(), want), (name, align)


@pytest.mark.parametrize("tokens", [1, 100, 3000])
def test_rows_are_gathered_and_combined(tokens):
    chosen, _ = kernels.route(logits_of(tokens, 128), 8, True)
    where = kernels.segments(chosen, 128, 128)
    x = normal(tokens, 2048)
    quantized = FLOW.quantize_activation(x, "fp32")
    got, want = kernels.gather_quantized(quantized, where.pair, 8), to_cpu(quantized)
    want = reference.gather_quantized(want, where.pair.cpu(), 8)
    assert torch.equal(got.qdata.view(torch.uint8).cpu(), want.qdata.view(torch.uint8))
    assert torch.equal(got.scales.cpu(), want.scales)
    y = normal(len(where.pair), 2048, seed=5)
    assert torch.equal(kernels.combine(y, where.row).cpu(), reference.combine(y.cpu(), where.row.cpu()))


@pytest.mark.parametrize("shape", [QWEN3_30B, QWEN3_235B], ids=["30B", "235B"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 2000])
def test_combine_add_rms_norm_matches_combine_then_norm(tokens, shape):
    """With and without qdata, for any batch; also sums that cancel."""
    chosen, _ = kernels.route(logits_of(tokens, 128), shape["k"], True)
    where, hidden = kernels.segments(chosen, 128, 1), shape["hidden"]
    y, residual = (normal_on_device(rows, hidden) for rows in (len(where.pair), tokens))
    y[where.row[:, 0].long()] *= 2**12
    y[where.row[:, 3].long()] = -y[where.row[:, 0].long()]
    weight = normal_on_device(hidden)
    x, of_norm = kernels.combine(y, where.row), (weight, 1e-6)
    normed, total = kernels.add_rms_norm(x, residual, *of_norm)
    got = kernels.combine_add_rms_norm(y, where.row, residual, *of_norm)
    assert torch.equal(bits(got[0]), bits(normed)) and torch.equal(bits(got[1]), bits(total))
    assert torch.equal(total, reference.combine(y, where.row) + residual)
    for rule in reference.SCALE_RULES:
        call = y, where.row, residual, *of_norm, rule
        want, _ = kernels.add_rms_norm_quantize_1x128(x, residual, *of_norm, rule, with_normed=False)
        for with_normed in (True, False):
            quantized, total_too = kernels.combine_add_rms_norm_quantize_1x128(*call, with_normed=with_normed)
            assert torch.equal(bits(total_too), bits(total))
            assert torch.equal(quantized.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
            assert torch.equal(quantized.scales, want.scales)
            assert torch.equal(quantized.source, normed) if with_normed else quantized.source is None
    last = slice(tokens // 2, tokens)
    alone = kernels.combine_add_rms_norm(y, where.row[last], residual[last].contiguous(), *of_norm)
    assert torch.equal(alone[0], normed[last])


def experts_weights(experts: int, hidden: int, inner: int, **_) -> tuple[QuantizedTensor, QuantizedTensor]:
    shapes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
    return tuple(FLOW.quantize_weight(normal(*shape, seed=i) * 0.05, "fp32") for i, shape in enumerate(shapes))


@pytest.mark.parametrize("tokens", [1, 100, 3000])
def test_add_shared_expert(tokens):
    """One rounding; a token's bits do not depend on the others; gradients of all three."""
    routed, shared, dy = (normal(tokens, 2048, seed=seed) for seed in range(3))
    leaves = [x.requires_grad_() for x in (routed, shared, logits_of(tokens, 1))]
    out, exact = kernels.add_shared_expert(*leaves), [x.detach().double().requires_grad_() for x in leaves]
    want = exact[0] + exact[2].sigmoid() * exact[1]
    assert ((out - want).abs() <= 2**-8 * want.abs() + 1e-6 * (routed.abs() + shared.abs())).all()
    last = slice(tokens // 2, tokens)
    assert torch.equal(kernels.add_shared_expert(*(x[last] for x in leaves)), out[last])
    out.backward(dy)
    want.backward(dy.double())
    assert torch.equal(routed.grad, dy)
    for leaf, other, bound in zip(leaves[1:], exact[1:], (2**-8, 1e-4), strict=True):
        assert (leaf.grad - other.grad).norm() <= bound * other.grad.norm()


@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize(("tokens", "shape"), [*((n, QWEN3_30B) for n in (1, 16, 300, 4096)), (300, QWEN3_5_35B)])
def test_grouped_gemm_rows_match_the_dense_product(tokens, shape, align):
    """Every expert, FProp and DGrad, with every kernel of the dense product."""
    gate_up, _ = experts_weights(**shape)
    chosen, _ = kernels.route(logits_of(tokens, shape["experts"]), shape["k"], True)
    where = kernels.segments(chosen, shape["experts"], align)
    bounds = where.start.tolist()
    rows = FLOW.quantize_activation(normal(len(where.pair), shape["hidden"], seed=3), "fp32")
    got = kernels.grouped_gemm_nt(rows, gate_up, where.start, align)
    dy = FLOW.quantize_activation(normal(len(where.pair), 2 * shape["inner"], seed=4), "fp32")
    dx = FLOW.experts_dgrad(dy, gate_up, where.start, align=align)
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if last == first:
            continue
        weight = QuantizedTensor(gate_up.qdata[expert], gate_up.scales[expert])
        of_expert = QuantizedTensor(rows.qdata[first:last].contiguous(), rows.scales[first:last].contiguous())
        assert torch.equal(got[first:last], kernels.gemm_nt(of_expert, weight)), expert
        of_expert = QuantizedTensor(dy.qdata[first:last].contiguous(), dy.scales[first:last].contiguous())
        assert torch.equal(dx[first:last], FLOW.dgrad(of_expert, FLOW.transpose_weight(weight))), expert


@pytest.mark.parametrize("tokens", [5, 4096])
def test_grouped_wgrad_matches_the_dense_one(tokens):
    shape = QWEN3_30B
    chosen, _ = kernels.route(logits_of(tokens, shape["experts"]), shape["k"], True)
    where = kernels.segments(chosen, shape["experts"], 128)
    bounds = where.start.tolist()
    dy, x = (normal(len(where.pair), columns, seed=6) for columns in (2 * shape["inner"], shape["hidden"]))
    dy, x = (FLOW.quantize_gradient(t, "fp32", rowwise=False, colwise=True)[1] for t in (dy, x))
    got = kernels.grouped_wgrad(dy, x, where.start)
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if last == first:
            assert not got[expert].any()
            continue
        groups = slice(first // 128, last // 128)
        parts = [
            QuantizedTensor(q.qdata[:, first:last].contiguous(), q.scales[:, groups].contiguous()) for q in (dy, x)
        ]
        assert torch.equal(got[expert], kernels.wgrad(*parts)), expert


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
def test_the_weighted_activation(rule):
    chosen, weights = kernels.route(logits_of(500, 128), 8, True)
    where = kernels.segments(chosen, 128, 128)
    used = int(where.start[-1])
    gate_up = normal(len(where.pair), 2 * 768, seed=7) * 2
    got = kernels.weighted_silu_mul_quantize(gate_up, weights, where.pair, rule)
    gate, up = gate_up.double().chunk(2, dim=1)
    of_row = torch.where(where.pair < 0, 0, weights.flatten()[where.pair.clamp(min=0).long()]).double()[:, None]
    exact = nn.functional.silu(gate) * up * of_row
    restored = FLOW.dequantize_activation(got)
    assert (restored - exact)[:used].norm() < 0.03 * exact[:used].norm()
    again = FLOW.quantize_activation(exact.to(torch.bfloat16), rule)
    same = (got.qdata.view(torch.uint8) == again.qdata.view(torch.uint8))[:used].float().mean()
    assert same > 0.999, "but for ties that the last bit of an exponential decides"


def experts_module(ranks: int = 1, **shape) -> JetExperts:
    module = nn.Module()
    torch.manual_seed(0)
    for name, size in (
        ("gate_up_proj", (shape["experts"], 2 * shape["inner"], shape["hidden"])),
        ("down_proj", (shape["experts"], shape["hidden"], shape["inner"])),
    ):
        module.register_parameter(name, nn.Parameter(torch.randn(size, device=DEVICE, dtype=torch.bfloat16) * 0.02))
    return JetExperts.replace(module, FLOW, Experts(), scale_rule="fp32", ranks=ranks)


def test_gradients_against_float64():
    shape = dict(experts=16, k=4, hidden=512, inner=256)
    layer, x, logits = experts_module(**shape), normal(700, 512, seed=10), logits_of(700, 16)
    leaves = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
    chosen, weights = kernels.route(leaves[1], 4, True)
    dy = normal(700, 512, seed=11)
    layer(leaves[0], chosen, weights).backward(dy)
    exact = [t.double().requires_grad_() for t in (x, logits, layer.gate_up_proj.detach(), layer.down_proj.detach())]
    shares = exact[1].softmax(dim=1).gather(1, chosen.long())
    shares = shares / shares.sum(dim=1, keepdim=True)
    out = torch.zeros(700, 512, dtype=torch.float64, device=DEVICE)
    for expert in range(16):
        token, slot = torch.where(chosen == expert)
        gate, up = (exact[0][token] @ exact[2][expert].t()).chunk(2, dim=1)
        out = out.index_add(0, token, nn.functional.silu(gate) * up * shares[token, slot, None] @ exact[3][expert].t())
    out.backward(dy.double())
    gradients = (leaves[0].grad, leaves[1].grad, layer.gate_up_proj.grad, layer.down_proj.grad)
    for got, want in zip(gradients, exact, strict=True):
        assert (got.double() - want.grad).norm() < 0.1 * want.grad.norm()


# --- the launches around the products -------------------------------------------------------------------------------


def same_qdata(got: QuantizedTensor, want: QuantizedTensor) -> bool:
    got, want = to_cpu(got), to_cpu(want)
    return torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8)) and torch.equal(
        got.scales, want.scales
    )


def before(end: int, rowwise: QuantizedTensor, colwise: QuantizedTensor) -> tuple[QuantizedTensor, ...]:
    """The part before the end of the last segment."""
    return (
        QuantizedTensor(rowwise.qdata[:end], rowwise.scales[:end]),
        QuantizedTensor(colwise.qdata[:, :end], colwise.scales[:, : end // 128]),
    )


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9, 100, 511, 512, 513, 2000])
def test_route_and_permute_matches_its_separate_operations(tokens, renormalize):
    """Bitwise, weights included, the separate operations of a training step, with every kernel."""
    logits, x = logits_of(tokens, 128), FLOW.quantize_activation(normal(tokens, 2048), "fp32")
    logits[:, 3] = logits[:, 5]
    weights, where, rows = kernels.route_and_permute(logits, x, 8, renormalize)
    chosen, expected = kernels.route(logits, 8, renormalize)
    assert torch.equal(weights, expected)
    wanted = reference.segments(chosen.cpu(), 128, 1)
    for name, got, want in zip(where._fields, where, wanted, strict=True):
        assert torch.equal(got.cpu(), want), name
    assert same_qdata(rows, reference.gather_quantized(to_cpu(x), wanted.pair, 8))


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
@pytest.mark.parametrize("tokens", [1, 100, 3000])
def test_tokens_are_quantized_and_laid_out_in_segments(tokens, rule):
    chosen, _ = kernels.route(logits_of(tokens, 128), 8, True)
    where = kernels.segments(chosen, 128, 128)
    end, pair = int(where.start[-1]), where.pair.cpu()
    dout = normal(tokens, 2048, seed=12)
    dout[0, 5], dout[-1] = torch.inf, 0
    got = kernels.gather_quantize_1x128_and_128x1(dout, where.pair, 8, rule)
    want = reference.quantize_1x128_and_128x1(reference.gather_rows(dout.cpu(), pair, 8), rule)
    for actual, desired in zip(before(end, *got), before(end, *want), strict=True):
        assert same_qdata(actual, desired)
    x = FLOW.quantize_activation(dout, rule)
    got = kernels.gather_relayout_128x1(x, where.pair, 8, rule)
    want = reference.relayout_128x1(reference.gather_quantized(to_cpu(x), pair, 8), rule)
    assert same_qdata(before(end, x, got)[1], before(end, x, want)[1])


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
def test_gradients_of_the_weighted_activation(rule):
    chosen, weights = kernels.route(logits_of(500, 128), 8, True)
    where = kernels.segments(chosen, 128, 128)
    end, filled = int(where.start[-1]), where.pair >= 0
    gate_up = (normal(len(where.pair), 2 * 768, seed=7) * 2).masked_fill_(~filled[:, None], 0)
    dy = normal(len(where.pair), 768, seed=8).masked_fill_(~filled[:, None], 0)
    *got, dweights = kernels.weighted_silu_mul_backward_quantize(dy, gate_up, weights, where.pair, rule)
    inputs = [t.double().requires_grad_() for t in (gate_up, weights)]
    gate, up = inputs[0].chunk(2, dim=1)
    flat = inputs[1].flatten()[where.pair[filled].long()][:, None]
    ((nn.functional.silu(gate) * up)[filled] * flat).backward(dy[filled].double())
    assert (dweights - inputs[1].grad).norm() < 1e-4 * inputs[1].grad.norm()
    exact = inputs[0].grad.to(torch.bfloat16)
    want = FLOW.quantize_gradient(exact, rule, rowwise=True, colwise=True)
    for actual, desired in zip(before(end, *got), before(end, *want), strict=True):
        same = (actual.qdata.view(torch.uint8) == desired.qdata.view(torch.uint8)).float().mean()
        assert same > 0.999, "but for ties that the last bit of an exponential decides"
        assert (actual.scales - desired.scales).abs().max() <= 2**-7 * desired.scales.abs().max()
    again = kernels.weighted_silu_mul_backward_quantize(dy, gate_up, weights, where.pair, rule)
    assert torch.equal(again[2], dweights), "no atomics"


def test_the_rollouts_moe_block_matches_the_trainer_at_any_batch():
    """Logits, routing, products and sum; steps of 8 and 9 tokens use other kernels than one of 2000."""
    layer, x, gate = experts_module(**QWEN3_30B), normal(2000, 2048, seed=13), normal(128, 2048, seed=14) * 0.05
    gate_up, down = layer.gate_up_qdata(layer.gate_up_proj), layer.down_qdata(layer.down_proj)

    def rollout(rows: torch.Tensor) -> torch.Tensor:
        logits = kernels.logits(rows, gate)
        weights, where, permuted = kernels.route_and_permute(logits, FLOW.quantize_activation(rows, "fp32"), 8, True)
        y, *_ = FLOW.experts(permuted, weights, where, gate_up, down, "fp32", static_weight=True)
        return kernels.combine(y, where.row)

    def training(rows: torch.Tensor) -> torch.Tensor:
        return layer(rows, *kernels.route(kernels.logits(rows, gate), 8, True))

    trained, order = training(x), torch.randperm(2000, device=DEVICE)
    with torch.no_grad():
        assert torch.equal(training(x[order]), trained[order])
        for tokens in (1, 2, 3, 4, 8, 9, 16, 63, 64, 65, 500, 512, 513, 2000):
            for side in (rollout, training):
                assert torch.equal(side(x[:tokens]), trained[:tokens]), tokens
        for tokens in (1, 16, 64):
            kept = x[:tokens].clone()
            rollout(kept)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = rollout(kept)
            for first in (100, 900):
                kept.copy_(x[first : first + tokens])
                graph.replay()
                assert torch.equal(out, trained[first : first + tokens]), tokens


FORWARD_PLANS = [
    Plan(),
    *(Plan("fprop", block, cluster) for block in (128, 256) for cluster in (1, 2)),
    *(Plan("decode", block) for block in (32, 64, 128)),
]
WGRAD_PLANS = [Plan("", block, cluster) for block in (0, 128, 256) for cluster in (1, 2)]
ROUTINGS = {
    "even": lambda tokens: logits_of(tokens, 128),
    "uneven": lambda tokens: logits_of(tokens, 128) + 3 * normal(128, seed=1).float(),
    "eight experts for all": lambda tokens: logits_of(tokens, 128) + 100 * (torch.arange(128, device=DEVICE) >= 120),
}


def transposed(weight: QuantizedTensor) -> QuantizedTensor:
    """W^T of each expert, adjacent within a row, as in DGrad."""
    experts, n, k = weight.qdata.shape
    qdata, scales = kernels.transpose_128x128(QuantizedTensor(*(part.flatten(0, 1) for part in weight)))
    scales = scales.view(-1, experts, n // BLOCK).transpose(0, 1)
    return QuantizedTensor(qdata.view(k, experts, n).transpose(0, 1), scales)


@pytest.mark.usefixtures("native_library")
@pytest.mark.timeout(280, method="thread")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 4096])
def test_native_grouped_gemm_matches_triton_under_every_plan(tokens, align, routing):
    gate_up, down = experts_weights(**QWEN3_30B)
    chosen, _ = kernels.route(ROUTINGS[routing](tokens), 8, True)
    where = kernels.segments(chosen, 128, align)
    used = int(where.start[-1])
    for weight in (gate_up, down, transposed(gate_up), transposed(down)):
        rows = FLOW.quantize_activation(normal(len(where.pair), weight.qdata.shape[2], seed=12), "fp32")
        want = triton_grouped_gemm_nt(rows, weight, where.start)[:used]
        for plan in FORWARD_PLANS:
            got = native_grouped_gemm_nt(rows, weight, where.start, align, plan=plan)[:used]
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (tuple(weight.qdata.shape), plan)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


def normal_on_device(*shape: int) -> torch.Tensor:
    """On the device, since the host needs seconds for a GB."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def down_over_ranks(tokens: int, align: int, shape: dict):
    """Input, weight and segments of the down projection."""
    chosen, _ = kernels.route(ROUTINGS["uneven"](tokens), shape["k"], True)
    where = kernels.segments(chosen, shape["experts"], align)
    rows = FLOW.quantize_activation(normal_on_device(len(where.pair), shape["inner"]), "fp32")
    weight = normal_on_device(shape["experts"], shape["hidden"], shape["inner"]) * 0.05
    return rows, FLOW.quantize_weight(weight, "fp32"), where


def slice_by_slice(rows: QuantizedTensor, weight: QuantizedTensor, where: Segments, ranks: int) -> list[torch.Tensor]:
    """A product for each rank with its own operands, as in the rollout."""
    slices = zip(k_slices(rows, ranks), k_slices(weight, ranks), strict=True)
    copies = ([QuantizedTensor(*(part.contiguous() for part in q)) for q in operands] for operands in slices)
    return [triton_grouped_gemm_nt(*operands, where.start) for operands in copies]


@pytest.mark.usefixtures("native_library")
@pytest.mark.timeout(280, method="thread")
@pytest.mark.parametrize(("ranks", "shape"), OVER_RANKS, ids=["30B, 2", "235B, 2", "235B, 4"])
@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("tokens", [1, 16, 300, 4096])
def test_native_rank_products_match_separate_products_under_every_plan(tokens, align, ranks, shape):
    rows, weight, where = down_over_ranks(tokens, align, shape)
    used, want = int(where.start[-1]), slice_by_slice(rows, weight, where, ranks)
    for plan in ("triton", *FORWARD_PLANS):
        if plan == "triton":
            got = triton_grouped_gemm_nt_of_ranks(rows, weight, where.start, ranks, align)
        else:
            got = native_grouped_gemm_nt_of_ranks(rows, weight, where.start, ranks, align, plan=plan)
        for rank, (actual, desired) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(bits(actual[:used]), bits(desired[:used])), (plan, rank)


@pytest.mark.parametrize(("ranks", "shape"), OVER_RANKS, ids=["30B, 2", "235B, 2", "235B, 4"])
@pytest.mark.parametrize("tokens", [1, 16, 300, 4096])
def test_combine_of_ranks_matches_ranks_added_in_order(tokens, ranks, shape):
    where = kernels.segments(kernels.route(logits_of(tokens, 128), shape["k"], True)[0], 128, 1)
    y = normal_on_device(ranks, len(where.pair), shape["hidden"])
    y[:, ::3] *= 64
    got = kernels.combine_of_ranks(y, where.row)
    assert torch.equal(got, kernels.sum_of_ranks([kernels.combine(part, where.row) for part in y]))
    first = slice(0, 300)
    assert torch.equal(got[first], reference.combine_of_ranks(y, where.row[first]))
    few = y[:, :, :256].cpu()
    assert torch.equal(got[first, :256].cpu(), reference.combine_of_ranks(few, where.row[first].cpu()))
    added_first = kernels.combine(kernels.sum_of_ranks(y.unbind(0)), where.row)
    assert not torch.equal(got, added_first)


@pytest.mark.parametrize(("ranks", "shape"), [*OVER_RANKS, (4, QWEN3_5_35B)])
@pytest.mark.parametrize("tokens", [5, 2000])
def test_the_trainer_matches_tensor_parallel_experts(tokens, ranks, shape):
    layer, x = experts_module(ranks, **shape), normal(tokens, shape["hidden"], seed=18)
    logits = logits_of(tokens, shape["experts"])
    gate_up, down = layer.gate_up_qdata(layer.gate_up_proj), layer.down_qdata(layer.down_proj)
    chosen, shares = kernels.route(logits, shape["k"], True)
    trained = layer(x, chosen, shares)

    def of_rank(part: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's rows of gate and of up."""
        return part.unflatten(1, (2, ranks, -1))[:, :, rank].flatten(1, 2).contiguous()

    parts = []
    for rank, slice_of_down in enumerate(k_slices(down, ranks)):
        weights, where, rows = kernels.route_and_permute(logits, FLOW.quantize_activation(x, "fp32"), shape["k"], True)
        of_this_rank = (
            QuantizedTensor(*(of_rank(part, rank) for part in gate_up)),
            QuantizedTensor(*(part.contiguous() for part in slice_of_down)),
        )
        y, *_ = FLOW.experts(rows, weights, where, *of_this_rank, "fp32")
        parts.append(kernels.combine(y, where.row))
    assert torch.equal(trained, kernels.sum_of_ranks(parts))
    with torch.no_grad():
        assert torch.equal(layer(x, chosen, shares), trained)


@pytest.mark.usefixtures("native_library")
@pytest.mark.timeout(280, method="thread")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_native_grouped_wgrad_matches_triton_under_every_plan(tokens, routing):
    chosen, _ = kernels.route(ROUTINGS[routing](tokens), 8, True)
    where = kernels.segments(chosen, 128, 128)
    for n, k in ((1536, 2048), (2048, 768)):
        parts = (normal(len(where.pair), columns, seed=13) for columns in (n, k))
        dy, x = (FLOW.quantize_gradient(t, "fp32", rowwise=False, colwise=True)[1] for t in parts)
        want = triton_grouped_wgrad(dy, x, where.start)
        for plan in WGRAD_PLANS:
            got = native_grouped_wgrad(dy, x, where.start, plan=plan)
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (n, k, plan)


@pytest.mark.usefixtures("native_library")
@pytest.mark.timeout(120, method="thread")
def test_a_graph_of_native_products_follows_the_experts_first_rows():
    """Captured once, replayed for other routings that the host does not know."""
    gate_up, _ = experts_weights(**QWEN3_30B)
    for tokens, align in ((16, 1), (2048, 128)):
        routings = [
            kernels.segments(kernels.route(logits_of(tokens, 128, seed), 8, True)[0], 128, align) for seed in (1, 2)
        ]
        start = routings[0].start.clone()
        rows = FLOW.quantize_activation(normal(len(routings[0].pair), 2048, seed=14), "fp32")
        native_grouped_gemm_nt(rows, gate_up, start, align)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = native_grouped_gemm_nt(rows, gate_up, start, align)
        for where in routings:
            start.copy_(where.start)
            graph.replay()
            used = int(where.start[-1])
            assert torch.equal(out[:used], triton_grouped_gemm_nt(rows, gate_up, where.start)[:used])


@pytest.mark.usefixtures("native_library")
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_products_that_start_early_match_those_that_wait(tokens):
    """Thirty times with other tokens and routings, enqueued at once, called and replayed: rows, qdata or segments that
    are read too early are those of the previous call in the same memory."""
    gate_up, down = experts_weights(**QWEN3_30B)
    xs = [FLOW.quantize_activation(normal(tokens, 2048, seed=seed), "fp32") for seed in range(30)]
    routings = [logits_of(tokens, 128, seed) for seed in range(30)]

    def outputs(kept: torch.Tensor, static_weight: bool) -> None:
        for x, logits, result in zip(xs, routings, kept, strict=True):
            weights, where, rows = kernels.route_and_permute(logits, x, 8, True)
            call = rows, weights, where, gate_up, down, "fp32"
            y, *_ = FLOW.experts(*call, static_weight=static_weight)
            result.copy_(kernels.combine(y, where.row))

    want = torch.empty(30, tokens, 2048, dtype=torch.bfloat16, device=DEVICE)
    outputs(want, False)
    assert want.isfinite().all() and not (want[1:] == want[:-1]).all(dim=(1, 2)).any()
    got = torch.full_like(want, torch.nan)
    torch.cuda._sleep(40_000_000)  # cycles, while the host enqueues all
    outputs(got, True)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs(got, True)
    for _ in range(2):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


@pytest.mark.usefixtures("native_library")
@pytest.mark.timeout(280, method="thread")
@pytest.mark.parametrize(("columns", "ranks"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("plan", FORWARD_PLANS[1:], ids=str)
def test_a_forward_call_of_experts_for_the_sanitizer(plan, columns, ranks):
    """Nothing but the kernel runs on the GPU. Six experts, one of them without rows, and more tiles than
    multiprocessors; the pipeline continues across experts and slices of K."""
    counts, k = [3, 130, 0, 17, 128, 65], 9 * BLOCK
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    n = BLOCK * (plan.block * (multiprocessors // 6 + 2) // BLOCK + 1)
    start, x = starts(counts), reference.quantize_1x128(gaussian(sum(counts) + 7, k), "fp32")
    weights = reference.quantize_128x128(gaussian(6 * n, k), "fp32")
    w = QuantizedTensor(weights.qdata.view(6, n, k), weights.scales.view(6, n // BLOCK, -1))
    if columns:
        x = QuantizedTensor(x.qdata, x.scales.t().contiguous().t())
    want = reference.grouped_gemm_nt_of_ranks(x, w, start, ranks)[:, : sum(counts)].float()
    x, w = (QuantizedTensor(q.qdata.cuda(), q.scales.cuda()) for q in (x, w))
    got = native_grouped_gemm_nt_of_ranks(x, w, start.cuda(), ranks, plan=plan)[:, : sum(counts)].cpu().float()
    assert (got - want).norm() < 2.5e-3 * want.norm()


@pytest.mark.usefixtures("native_library")
@pytest.mark.timeout(280, method="thread")
@pytest.mark.parametrize("plan", WGRAD_PLANS[2:], ids=str)
def test_a_weight_gradient_of_experts_for_the_sanitizer(plan):
    groups = [1, 0, 9, 4, 5]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    n, k = plan.block + 8, BLOCK * (multiprocessors // 8 + 1)
    start = starts([BLOCK * count for count in groups])
    dy, x = (reference.quantize_1x128(gaussian(columns, int(start[-1])), "fp32") for columns in (n, k))
    dy, x = (QuantizedTensor(q.qdata, q.scales.t().contiguous().t()) for q in (dy, x))
    want = reference.grouped_wgrad(dy, x, start).float()
    dy, x = (QuantizedTensor(q.qdata.cuda(), q.scales.cuda()) for q in (dy, x))
    got = native_grouped_wgrad(dy, x, start.cuda(), plan=plan).cpu().float()
    assert (got - want).norm() < 2.5e-3 * want.norm() and not got[1].any()
