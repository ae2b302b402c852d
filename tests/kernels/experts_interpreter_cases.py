# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of a mixture of experts under Triton's interpreter (test_interpreted_on_cpu.py).

Integers, copies and FP32 sums match in every bit; BF16 products to one step, since the interpreter truncates.
"""

from importlib import import_module

import pytest
import torch
from backends import triton_kernels
from fused_checks import assert_same_bytes
from slow import slow
from tensors import normal, truncated

from jetrl_verl import reference
from jetrl_verl.kernels import dispatch
from jetrl_verl.kernels import weighted_silu_mul as operation
from jetrl_verl.kernels.add_shared_expert import reference_add_shared_expert_backward
from jetrl_verl.kernels.route import reference_route
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.doctor import self_check

BF16_STEP = 2**-7


def set_of(monkeypatch: pytest.MonkeyPatch, name: str, **sizes: int) -> None:
    """Set smaller program sizes in a kernel module, so that few rows reach the paths of many."""
    module = import_module(f"jetrl_verl.kernels.{name}")
    for size, value in sizes.items():
        monkeypatch.setattr(module, size, value)


def chosen(tokens: int, experts: int, k: int, seed: int = 0) -> torch.Tensor:
    """Experts of each token, ``[T, k]`` int32, none twice."""
    generator = torch.Generator().manual_seed(seed + tokens)
    return torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :k].to(torch.int32)


def one_expert(tokens: int, k: int) -> torch.Tensor:
    """All tokens on the same experts, the others empty."""
    return torch.arange(k, dtype=torch.int32).flip(0).expand(tokens, k).contiguous()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    got, want = got.double(), want.double()
    assert ((got - want).abs() <= BF16_STEP * want.abs() + BF16_STEP * 2**-6).all()


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (7, 8, 2), (3, 128, 8), (5, 60, 4), (0, 8, 2)])
def test_route(tokens, experts, k, renormalize):
    logits = normal(tokens, experts).float() * 3
    got, want = triton_kernels.route(logits, k, renormalize), reference_route(logits, k, renormalize)
    assert torch.equal(got[0], want[0])
    assert got[1].shape == want[1].shape and not ((got[1] - want[1]).abs() > 1e-6).any()


def test_ties_choose_the_lowest_expert_and_both_zeros_tie():
    logits = torch.zeros(4, 8)
    logits[1] = -0.0
    logits[2, 3] = -0.0
    logits[3, 5:] = 1.0
    logits[3, :5] = -1e-30
    experts, weights = triton_kernels.route(logits, 4, True)
    assert experts.tolist() == [[0, 1, 2, 3]] * 3 + [[5, 6, 7, 0]]
    assert torch.equal(experts, reference.top_k(logits, 4))
    assert torch.equal(weights[:3], torch.full((3, 4), 0.25))


def test_inf_and_nan_logits_give_nan_weights():
    logits = torch.zeros(3, 8)
    logits[0, 6] = torch.nan
    logits[1, 2] = torch.inf
    experts, weights = triton_kernels.route(logits, 2, True)
    assert experts[:2, 0].tolist() == [6, 2]
    assert weights[:2].isnan().any(dim=1).all() and weights[2].isfinite().all()


@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("experts_of", [chosen(1, 8, 2), chosen(700, 8, 2), chosen(9, 60, 4), one_expert(40, 3)])
def test_segments(experts_of, align):
    experts = 60 if experts_of.shape[1] == 4 else 8
    got, want = (f(experts_of, experts, align) for f in (triton_kernels.segments, reference.segments))
    for name, actual, desired in zip(("row", "pair", "start"), got, want, strict=True):
        assert torch.equal(actual, desired), name


def test_segments_of_no_pair_and_of_many_pieces(monkeypatch):
    none = torch.zeros(0, 2, dtype=torch.int32)
    assert [t.tolist() for t in triton_kernels.segments(none, 4, 128)] == [[], [], [0] * 5]
    set_of(monkeypatch, "segments", _PIECE=32, _TILE=16)
    many = chosen(300, 4, 2)
    assert many.numel() > 16 * 32
    for actual, desired in zip(triton_kernels.segments(many, 4, 16), reference.segments(many, 4, 16), strict=True):
        assert torch.equal(actual, desired)


PERMUTED = [(0, 8, 2), (1, 8, 2), (3, 60, 6), (16, 128, 8), (17, 128, 8), (40, 8, 2), (41, 8, 2)]
"""Tokens, experts, experts per token: one launch, two and five, and more pairs than one comparison covers."""


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), PERMUTED)
def test_route_and_permute_matches_its_separate_operations(tokens, experts, k, renormalize, monkeypatch):
    """Bitwise, weights included: a decoded token equals a training step's."""
    set_of(monkeypatch, "route_and_permute", _MOST_TOKENS=40, _PAIRS=64)
    logits = normal(tokens, experts).float() * 3
    logits[:, 1] = logits[:, 0]
    x = reference.quantize_1x128(normal(tokens, 384), "fp32")
    x = QuantizedTensor(x.qdata, x.scales.t().contiguous().t())
    weights, where, rows = triton_kernels.route_and_permute(logits, x, k, renormalize)
    experts_of, expected = triton_kernels.route(logits, k, renormalize)
    assert torch.equal(weights, expected)
    wanted = reference.segments(experts_of, experts, 1)
    for name, actual, desired in zip(where._fields, where, wanted, strict=True):
        assert torch.equal(actual, desired), name
    assert_same_bytes(rows, reference.gather_quantized(x, wanted.pair, k))


def test_every_program_routes_alike_also_with_inf_and_nan():
    logits = normal(9, 8).float()
    logits[2, 6], logits[4, 1], logits[5, 3] = torch.nan, torch.inf, -torch.inf
    x = reference.quantize_1x128(normal(9, 128), "fp32")
    for renormalize in (True, False):
        weights, where, _ = triton_kernels.route_and_permute(logits, x, 2, renormalize)
        experts_of, expected = triton_kernels.route(logits, 2, renormalize)
        assert torch.equal(weights.isnan(), expected.isnan()) and weights[[2, 4]].isnan().any(dim=1).all()
        assert torch.equal(weights.nan_to_num(), expected.nan_to_num())
        assert torch.equal(where.row, reference.segments(experts_of, 8, 1).row)


@pytest.mark.parametrize("align", [1, 128])
def test_rows_are_gathered(align):
    pairs = reference.segments(chosen(11, 2, 2), 2, align).pair
    quantized = reference.quantize_1x128(normal(11, 256), "fp32")
    for scales in (quantized.scales, quantized.scales.t().contiguous().t()):
        got = triton_kernels.gather_quantized(QuantizedTensor(quantized.qdata, scales), pairs, 2)
        assert_same_bytes(got, reference.gather_quantized(quantized, pairs, 2))


def before(start: torch.Tensor, rowwise: QuantizedTensor | None, colwise: QuantizedTensor | None):
    """The part before the end of the last segment."""
    end = int(start[-1])
    if rowwise is not None:
        rowwise = QuantizedTensor(rowwise.qdata[:end], rowwise.scales[:end])
    if colwise is not None:
        colwise = QuantizedTensor(colwise.qdata[:, :end], colwise.scales[:, : end // 128])
    return rowwise, colwise


SEGMENTS_OF_128 = [
    (chosen(140, 2, 2), 2, "fp32"),
    slow(chosen(150, 4, 2), 4, "pow2"),
    (one_expert(140, 1), 3, "pow2"),
    slow(one_expert(140, 2), 4, "fp32"),
    (chosen(3, 4, 4), 4, "fp32"),
    slow(chosen(3, 8, 8), 8, "pow2"),
]
"""Experts with several groups, with no tokens, and with few tokens."""


@pytest.mark.parametrize(("experts_of", "experts", "rule"), SEGMENTS_OF_128)
def test_gradients_of_tokens_are_quantized_both_ways_in_segments(experts_of, experts, rule):
    where, k = reference.segments(experts_of, experts, 128), experts_of.shape[1]
    dout = normal(len(experts_of), 256, seed=1)
    dout[1, 7], dout[2, 130] = torch.inf, torch.nan
    want = reference.quantize_1x128_and_128x1(reference.gather_rows(dout, where.pair, k), rule)
    # Once more from an odd address, where neighbours are no word.
    odd = torch.empty(dout.numel() + 1, dtype=dout.dtype)[1:].view_as(dout).copy_(dout)
    for x in (dout, odd):
        got = triton_kernels.gather_quantize_1x128_and_128x1(x, where.pair, k, rule)
        for actual, desired in zip(before(where.start, *got), before(where.start, *want), strict=True):
            assert_same_bytes(actual, desired)


@pytest.mark.parametrize(("experts_of", "experts", "rule"), SEGMENTS_OF_128)
def test_qdata_of_tokens_are_laid_out_colwise_in_segments(experts_of, experts, rule):
    where, k = reference.segments(experts_of, experts, 128), experts_of.shape[1]
    x = normal(len(experts_of), 256, seed=2)
    x[1, 7], x[2] = torch.inf, 0.0
    quantized = reference.quantize_1x128(x, rule)
    want = reference.relayout_128x1(reference.gather_quantized(quantized, where.pair, k), rule)
    for scales in (quantized.scales, quantized.scales.t().contiguous().t()):
        got = triton_kernels.gather_relayout_128x1(QuantizedTensor(quantized.qdata, scales), where.pair, k, rule)
        assert_same_bytes(before(where.start, None, got)[1], before(where.start, None, want)[1])


@pytest.mark.parametrize(("few", "k"), [(2**17, 1), (2**17, 8), (0, 2)])
def test_combine(few, k, monkeypatch):
    set_of(monkeypatch, "combine", _FEW_ELEMENTS=few)
    where = reference.segments(chosen(9, 8, k), 8, 16)
    y = normal(len(where.pair), 300)
    exact = y.double()[where.row.long()].sum(dim=1)
    assert_close(triton_kernels.combine(y, where.row), exact)


def test_add_shared_expert():
    """Two tiles of columns; gradients of the reference against those of autograd."""
    routed, shared, dy = (normal(5, 1280, seed=seed) for seed in range(3))
    logits = torch.tensor([[-200.0], [-1.5], [0.0], [3.0], [200.0]])
    assert_close(triton_kernels.add_shared_expert(routed, shared, logits), routed + logits.double().sigmoid() * shared)
    leaves = [x.double().requires_grad_() for x in (routed, shared, logits)]
    (leaves[0] + leaves[2].sigmoid() * leaves[1]).backward(dy.double())
    for backward in (triton_kernels.add_shared_expert_backward, reference_add_shared_expert_backward):
        dshared, dlogits = backward(dy, shared, logits)
        assert_close(dshared, leaves[1].grad)
        assert (dlogits - leaves[2].grad).abs().max() <= 1e-5 * leaves[2].grad.abs().max()


@pytest.mark.parametrize(("few", "ranks", "k"), [(2**17, 2, 8), (0, 2, 3), (2**17, 4, 1), (0, 1, 2)])
def test_combine_of_ranks(few, ranks, k, monkeypatch):
    """FP32 sums are exact and need more bits than BF16 has: each rank's sum is rounded, then the total."""
    set_of(monkeypatch, "combine", _FEW_ELEMENTS=few)
    where = reference.segments(chosen(9, 8, k), 8, 16)
    y = torch.randint(-255, 256, (ranks, len(where.pair), 300)) * 2 ** torch.randint(0, 4, (ranks, 1, 300))
    want = sum(truncated(part[where.row.long()].sum(dim=1)) for part in y)
    got = triton_kernels.combine_of_ranks(y.bfloat16(), where.row)
    assert got.dtype == torch.bfloat16 and torch.equal(got.float(), truncated(want))
    added_first = truncated(sum(truncated(rows.float()) for rows in y)[where.row.long()].sum(dim=1))
    assert torch.equal(got.float(), added_first) == (ranks == 1 or k == 1)


def experts_weight(experts: int, n: int, k: int) -> QuantizedTensor:
    qdata, scales = reference.quantize_128x128(normal(experts * n, k, seed=3), "fp32")
    return QuantizedTensor(qdata.view(experts, n, k), scales.view(experts, n // 128, k // 128))


@pytest.mark.parametrize(
    ("experts_of", "align"),
    [
        (chosen(5, 4, 2), 1),
        (chosen(5, 4, 2), 128),
        (one_expert(70, 1), 1),
        slow(one_expert(70, 1), 128),
        slow(chosen(90, 4, 2), 1),
        slow(chosen(90, 4, 2), 128),
    ],
)
def test_grouped_gemm(experts_of, align):
    experts = 4
    where = reference.segments(experts_of, experts, align)
    a = reference.quantize_1x128(normal(len(where.pair), 256, seed=4), "fp32")
    b = experts_weight(experts, 128, 256)
    used = int(where.start[-1])
    want = reference.grouped_gemm_nt(a, b, where.start)[:used]
    assert_close(triton_kernels.grouped_gemm_nt(a, b, where.start)[:used], want)
    transposed = QuantizedTensor(b.qdata.transpose(1, 2), b.scales.transpose(1, 2))
    dy = reference.quantize_1x128(normal(len(where.pair), 128, seed=5), "fp32")
    want = reference.grouped_gemm_nt(dy, transposed, where.start)[:used]
    assert_close(triton_kernels.grouped_gemm_nt(dy, transposed, where.start)[:used], want)


@pytest.mark.parametrize(("ranks", "align"), [(2, 1), slow(3, 128), slow(6, 1)])
def test_grouped_gemm_of_ranks(ranks, align):
    """A rank's rows are the product of its slices and follow those of the previous rank."""
    where = reference.segments(chosen(40, 4, 2), 4, align)
    a, b = reference.quantize_1x128(normal(len(where.pair), 768, seed=4), "fp32"), experts_weight(4, 256, 768)
    got, used = triton_kernels.grouped_gemm_nt_of_ranks(a, b, where.start, ranks), int(where.start[-1])
    assert got.shape == (ranks, len(where.pair), 256)
    assert_close(got[:, :used], reference.grouped_gemm_nt_of_ranks(a, b, where.start, ranks)[:, :used])
    slices = zip(got, reference.k_slices(a, ranks), reference.k_slices(b, ranks), strict=True)
    for rows, x, w in slices:
        assert torch.equal(rows[:used], triton_kernels.grouped_gemm_nt(x, w, where.start)[:used])


@pytest.mark.parametrize("experts_of", [chosen(5, 4, 2), slow(chosen(150, 4, 2)), one_expert(140, 1)])
def test_grouped_weight_gradient(experts_of):
    where = reference.segments(experts_of, 4, 128)
    dy, x = (normal(len(where.pair), columns, seed=6) for columns in (128, 256))
    operands = [reference.quantize_128x1(t, "fp32") for t in (dy, x)]
    got = triton_kernels.grouped_wgrad(*operands, where.start)
    assert_close(got, reference.grouped_wgrad(*operands, where.start))
    empty = where.start.diff() == 0
    assert int(empty.sum()) == 4 - len(experts_of.unique())
    assert not got[empty].any()


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
@pytest.mark.parametrize("many", [0, 2**13])
def test_weighted_activation(many, rule, monkeypatch):
    """Programs of many groups and of few."""
    set_of(monkeypatch, "weighted_silu_mul", _MANY_GROUPS=many)
    where = reference.segments(chosen(11, 8, 2), 8, 16)
    gate_up, weights = normal(len(where.pair), 512) * 2, torch.rand(11, 2)
    got = operation.triton_weighted_silu_mul_quantize(gate_up, weights, where.pair, rule)
    want = operation.reference_weighted_silu_mul_quantize(gate_up, weights, where.pair, rule)
    assert_close_qdata(got, want)
    assert not reference.dequantize_1x128(got)[where.pair < 0].any()


def assert_close_qdata(got: QuantizedTensor, want: QuantizedTensor) -> None:
    got, want = (reference.dequantize_1x128(q).double() for q in (got, want))
    # One step of E4M3, where truncation instead of rounding to BF16 has moved a value across a tie.
    assert ((got - want).abs() <= 2**-3 * want.abs() + 2**-9 * want.abs().amax(dim=1, keepdim=True)).all()
    assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize(("experts_of", "experts", "rule"), SEGMENTS_OF_128)
def test_gradients_of_the_weighted_activation(experts_of, experts, rule):
    """Both layouts come from one BF16 gradient."""
    where = reference.segments(experts_of, experts, 128)
    filled = where.pair >= 0
    gate_up = normal(len(where.pair), 512, seed=3) * 2
    dy = normal(len(where.pair), 256, seed=4)
    gate_up[~filled], dy[~filled] = 0, 0
    weights = torch.rand(experts_of.shape[::-1]).t()
    call = dy, gate_up, weights, where.pair, rule
    *got, dweights = triton_kernels.weighted_silu_mul_backward_quantize(*call)
    *want, exact = operation.reference_weighted_silu_mul_backward_quantize(*call)
    for actual, desired in zip(before(where.start, *got), before(where.start, *want), strict=True):
        assert_close_qdata(actual, desired)
    assert (dweights - exact).abs().max() <= 1e-4 * exact.abs().max()


WITHOUT_ROUNDING = ("router's choice", "segments", "a rollout's rows", "gathered rows", "gathered gradients", "combine")
COPIES = [call for call in self_check.calls() if call.name in WITHOUT_ROUNDING]


@pytest.mark.parametrize("call", COPIES, ids=lambda call: call.name)
def test_doctor_self_check_of_operations_without_rounding(call, monkeypatch):
    monkeypatch.setitem(dispatch.OPERATIONS[call.operation].backends, "cpu", ("triton", "reference"))
    assert list(self_check._of_call(call, torch.device("cpu"))) == [(call.subject, call.name, "triton", "")]
