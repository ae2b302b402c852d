# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The native bindings and csrc/binding.cpp on a CPU, over the emulated kernels: arguments and errors.

The kernels themselves: test_native_*emulated_on_cpu.py.
"""

import ctypes
import itertools
import random
from collections.abc import Callable
from functools import partial

import native_emulator
import pytest
import torch
from contract_inputs import gaussian
from native_calls import OUTPUT_ROWS, REFUSED, apart, arguments_of, gaps, is_untouched, shifted, three_dimensional
from native_emulator import experts_operand, operands, product, silu_gradients, silu_operands
from slow import slow
from tensors import packed
from test_delta_net_on_cpu import HEADS, check_cuts
from test_delta_net_on_cpu import inputs as delta_inputs

from jetrl_verl import reference
from jetrl_verl.kernels import dispatch, native
from jetrl_verl.kernels.gemm_nt import native_gemm_nt
from jetrl_verl.kernels.gemm_nt_of_ranks import native_gemm_nt_of_ranks, sliced_gemm_nt_of_ranks
from jetrl_verl.kernels.grouped_gemm import native_supports_grouped_gemm_nt_of_ranks, native_supports_grouped_wgrad
from jetrl_verl.kernels.silu_mul import native_supports_silu_mul_backward
from jetrl_verl.kernels.wgrad import native_wgrad
from jetrl_verl.reference import BLOCK, FP8_DTYPE, SCALE_RULES, GemmCall, QuantizedTensor, k_slices, sum_of_ranks
from jetrl_verl.tools.doctor import self_check

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("on_a_cpu")]


def test_the_library_has_the_operators_that_the_backend_calls():
    assert native.mismatch("jetrl_emulated") is None


def test_doctor_self_check_matches_the_reference(monkeypatch):
    native_calls = [
        call for call in self_check.calls() if "native" in dispatch.OPERATIONS[call.operation].backends["sm90"]
    ]
    for call in native_calls:
        monkeypatch.setitem(dispatch.OPERATIONS[call.operation].backends, "cpu", ("native", "reference"))
    outcomes = self_check.outcomes(torch.device("cpu"))
    assert outcomes == [self_check.Outcome(call.subject, call.name, "native", "") for call in native_calls]


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("plan", [native.Plan(), native.Plan("fprop", 128, 2), native.Plan("decode", 32, 1)])
@pytest.mark.parametrize("m", [1, 20, 130])
def test_a_forward_product(m, plan, bias):
    a, b = operands(m, 72, 336, True)
    bias = None if bias is None else (torch.arange(72) / 8 - 4).to(bias)
    want = product(a, b, True) + (0 if bias is None else bias.double())
    got = native_gemm_nt(GemmCall.by_weight(a, b, bias, static_weight=m == 20), plan=plan)
    assert torch.equal(got, want.bfloat16())


@pytest.mark.parametrize("plan", [native.Plan(), native.Plan(block=64, cluster=2)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 20, 130])
def test_a_sum_of_ranks_products(m, ranks, plan):
    a, b = operands(m, 72, 4 * BLOCK, True)
    slices = zip(k_slices(a, ranks), k_slices(b, ranks), strict=True)
    want = sum_of_ranks([product(x, w, True).bfloat16() for x, w in slices])
    call = GemmCall.over_ranks(a, b, ranks)
    assert torch.equal(native_gemm_nt_of_ranks(call, plan=plan), want)
    assert torch.equal(sliced_gemm_nt_of_ranks(call), want)


def test_a_sum_of_ranks_products_with_a_bias_uses_backend_slices():
    a, b = operands(20, 72, 2 * BLOCK, True)
    bias = torch.arange(72).bfloat16() / 8
    call = GemmCall.over_ranks(a, b, 2, bias)
    assert dispatch.supports("gemm_nt_of_ranks", "native", GemmCall.over_ranks(a, b, 2))
    assert not dispatch.supports("gemm_nt_of_ranks", "native", call)
    assert dispatch.supports("gemm_nt_of_ranks", "slices", call)
    first, second = (product(x, w, True) for x, w in zip(k_slices(a, 2), k_slices(b, 2), strict=True))
    want = sum_of_ranks([(first + bias.double()).bfloat16(), second.bfloat16()])
    assert torch.equal(sliced_gemm_nt_of_ranks(call), want)


@pytest.mark.parametrize("block", [0, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_gradient(dtype, block):
    a, b = operands(136, 72, 331, False)
    got = native_wgrad(GemmCall.by_tokens(a, b, dtype), plan=native.Plan(block=block))
    assert torch.equal(got, product(a, b, False).to(dtype))


def test_results_are_written_to_the_callers_rows():
    a, b = operands(20, 72, 144, True)
    around = torch.full((22, 80), torch.nan, dtype=torch.bfloat16)
    out = around[1:-1, :72]
    assert native_gemm_nt(GemmCall.by_weight(a, b), out=out).data_ptr() == around[1].data_ptr()
    assert torch.equal(out, product(a, b, True).bfloat16())
    assert around.isnan().sum() == around.numel() - 20 * 72


@pytest.mark.parametrize("operator", native._ARGUMENTS)
def test_a_valid_call_writes_every_result(operator):
    arguments, results = arguments_of(operator)
    getattr(torch.ops.jetrl_emulated, operator)(**arguments)
    assert not any(map(is_untouched, results.values()))


@pytest.mark.parametrize(
    ("operator", "argument", "change", "sentence"),
    REFUSED,
    ids=[f"{i}-{operator}-{argument}" for i, (operator, argument, *_) in enumerate(REFUSED)],
)
def test_unsupported_calls_raise(operator, argument, change, sentence):
    arguments, results = arguments_of(operator)
    arguments[argument] = change(arguments[argument])
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        getattr(torch.ops.jetrl_emulated, operator)(**arguments)
    assert all(map(is_untouched, results.values()))


def test_partial_groups_of_tokens_raise():
    arguments, results = arguments_of("grouped_wgrad")
    arguments |= {name: arguments[name][:, :-16] for name in ("a", "b")}
    with pytest.raises(RuntimeError, match="experts' tokens must be whole groups of 128, not 240"):
        torch.ops.jetrl_emulated.grouped_wgrad(**arguments)
    assert all(map(is_untouched, results.values()))


def test_more_experts_than_a_block_can_sort_raise():
    arguments, results = arguments_of("grouped_wgrad")
    many = native.MOST_EXPERTS + 1
    arguments |= {"a": arguments["a"][:1], "a_scales": arguments["a_scales"][:1]}
    arguments |= {"start": torch.zeros(many + 1, dtype=torch.int32)}
    arguments |= {"dw": torch.full((many, 1, 144), torch.nan, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="more than 512 experts are not supported"):
        torch.ops.jetrl_emulated.grouped_wgrad(**arguments)
    assert is_untouched(arguments["dw"])


@pytest.mark.parametrize("operator", ["fprop", "decode"])
def test_output_rows_that_are_no_multiple_of_16_bytes_raise(operator):
    """With a width of 140 the copy engine would write past the row."""
    arguments, results = arguments_of(operator)
    arguments |= {"w": arguments["w"][:140], "y": results["y"][:, :140]}
    with pytest.raises(RuntimeError, match=OUTPUT_ROWS):
        getattr(torch.ops.jetrl_emulated, operator)(**arguments)
    assert is_untouched(results["y"])


def test_sizes_beyond_32_bits_raise():
    arguments, results = arguments_of("wgrad")
    many_tokens = torch.empty(1, 2**31, dtype=torch.uint8).view(FP8_DTYPE)  # never touched
    with pytest.raises(RuntimeError, match=f"a dimension of {2**31} is not supported"):
        torch.ops.jetrl_emulated.wgrad(**arguments | {"a": many_tokens, "b": many_tokens})

    arguments, results = arguments_of("relayout")
    far = {"qdata": arguments["qdata"].as_strided((1, 272), (2**31, 1)), "scales": arguments["scales"][:1]}
    with pytest.raises(RuntimeError, match=f"a stride of {2**31} is not supported"):
        torch.ops.jetrl_emulated.relayout(**arguments | far)
    assert all(map(is_untouched, results.values()))


def laid_out(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """The same matrix with a random offset and row stride, mostly ones that a kernel supports."""
    rows, columns = x.shape
    start, gap = (draw.choice([0, 0, 0, 16, 32, misfit]) // x.itemsize for misfit in (8, 4))
    memory = torch.zeros(start + rows * (columns + gap), dtype=x.dtype)
    placed = memory[start:].view(rows, columns + gap)[:, :columns]
    byte_like = torch.uint8 if x.itemsize == 1 else x.dtype
    placed.view(byte_like).copy_(x.view(byte_like))
    return placed


def relaid(q: QuantizedTensor, draw: random.Random) -> QuantizedTensor:
    scales = draw.choice([q.scales.contiguous(), q.scales.t().contiguous().t(), laid_out(q.scales, draw)])
    if draw.random() < 0.1:  # one row for all: only where it is one may a kernel take it
        return QuantizedTensor(q.qdata[:1].expand(q.qdata.shape), scales)
    return QuantizedTensor(laid_out(q.qdata, draw), scales)


def flattened(results) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else [x for result in results for x in flattened(result)]


def any_gemm(draw: random.Random) -> tuple[bool, Callable, list[torch.Tensor]]:
    """(whether the backend supports it, the call, the results it should have)"""
    m, n, k = (draw.choice(sizes) for sizes in ([1, 8, 40, 129], [8, 72, 130, 136], [16, 100, 144, 272]))
    block_scaled = draw.random() < 0.5
    a, b = (relaid(q, draw) for q in operands(m, n, k, block_scaled, draw.randrange(9)))
    out_dtype = draw.choice([torch.bfloat16, torch.float32])
    want, bias = product(a, b, block_scaled), None
    if block_scaled and draw.random() < 0.3:
        bias = torch.arange(2 * n)[:: draw.choice([1, 2])][:n] / 8
        bias = bias.to(draw.choice([torch.bfloat16, torch.float32, torch.float16]))
        want += bias.double()
    gemm = "gemm_nt" if block_scaled else "wgrad"
    call = GemmCall.by_weight(a, b, bias, out_dtype) if block_scaled else GemmCall.by_tokens(a, b, out_dtype)
    supported = dispatch.supports(gemm, "native", call)
    return supported, partial(dispatch.implementation(gemm, "native"), call), [want.to(out_dtype)]


def any_transposition(draw: random.Random) -> tuple[bool, Callable, list[torch.Tensor]]:
    operation = draw.choice(["relayout_128x1", "transpose_128x128"])
    rule = [draw.choice(SCALE_RULES)] if operation == "relayout_128x1" else []
    quantize = reference.quantize_1x128 if rule else reference.quantize_128x128
    x = gaussian(draw.choice([1, 16, 130, 144]), draw.choice([16, 24, 128, 272]))
    q = relaid(quantize(x, "fp32"), draw)
    call, want = (
        partial(dispatch.implementation(operation, "native"), q, *rule),
        getattr(reference, operation)(q, *rule),
    )
    return dispatch.supports(operation, "native", q), call, list(want)


def any_gated_mlp(draw: random.Random) -> tuple[bool, Callable, list[torch.Tensor]]:
    shape = draw.choice([1, 5, 130]), draw.choice([128, 200, 256])
    x = [laid_out(one, draw) for one in silu_operands(*shape, draw.randrange(9))]
    want = [part for y in silu_gradients(*x) for q in reference.quantize_1x128_and_128x1(y, "pow2") for part in q]
    run = dispatch.implementation("silu_mul_backward_quantize", "native")
    return native_supports_silu_mul_backward(*x), partial(run, *x, "pow2"), want


def any_experts_forward(draw: random.Random) -> tuple[bool, Callable, list[torch.Tensor]]:
    experts, n, ranks = draw.choice([1, 2, 5]), draw.choice([128, 256]), draw.choice([1, 1, 2, 3])
    k = ranks * draw.choice([128, 256])
    counts = [draw.choice(draw.choice(([0, 0, 1, 3, 40], [0, 4, 40]))) for _ in range(experts)]
    start = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    a = relaid(native_emulator.operand(sum(counts), k, sum(counts), draw.randrange(9)), draw)
    b = experts_operand(experts, n, k, draw.randrange(9), draw.random() < 0.5)
    if draw.random() < 0.4:
        b = QuantizedTensor(draw.choice([apart, shifted, three_dimensional(gaps)])(b.qdata), b.scales)
        b.qdata.view(torch.uint8).zero_()
    if draw.random() < 0.1:
        start = start.repeat_interleave(2)[::2]
    plan = draw.choice([native.Plan(), native.Plan("fprop"), native.Plan("decode")])
    align = 4 if (start % 4 == 0).all() else 1
    supported = native_supports_grouped_gemm_nt_of_ranks(a, b, start, ranks)
    run = dispatch.implementation("grouped_gemm_nt_of_ranks", "native")
    want = [reference.grouped_gemm_nt_of_ranks(a, b, start, ranks)]
    return supported, partial(run, a, b, start, ranks, align, plan=plan), want


def any_experts_gradient(draw: random.Random) -> tuple[bool, Callable, list[torch.Tensor]]:
    experts, n, k = draw.choice([1, 2, 5]), draw.choice([1, 128, 136]), draw.choice([8, 128, 140, 256])
    groups = [draw.choice([0, 0, 1, 2]) for _ in range(experts)]
    start = BLOCK * torch.tensor([0, *itertools.accumulate(groups)], dtype=torch.int32)
    more = draw.choice([0, 0, 0, 16, 128])
    tokens = int(start[-1]) + more
    dy, x = (native_emulator.operand(columns, tokens, columns, draw.choice([0, 1, 2])) for columns in (n, k))
    if draw.random() < 0.2:
        dy = relaid(dy, draw)
    call = partial(dispatch.implementation("grouped_wgrad", "native"), dy, x, start)
    return native_supports_grouped_wgrad(dy, x, start), call, [reference.grouped_wgrad(dy, x, start)]


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
@pytest.mark.parametrize(
    "drawn", [any_gemm, any_transposition, any_gated_mlp, any_experts_forward, any_experts_gradient]
)
def test_supported_random_calls_are_computed_and_others_raise(drawn, seed):
    draw = random.Random(seed)
    supported_calls = 0
    for _ in range(150):
        supported, call, want = drawn(draw)
        if not supported:
            with pytest.raises(ValueError):
                call()
            continue
        supported_calls += 1
        for one, other in zip(flattened(call()), want, strict=True):
            assert one.dtype == other.dtype and torch.equal(one.double(), other.double())
    assert 15 <= supported_calls <= 135


# --- gated delta rule -------------------------------------------------------------------------------------------------


@pytest.fixture
def delta_rule():
    override = dispatch.override_backend
    with override("gated_delta_rule", "native"), override("gated_delta_rule_update", "native"):
        yield


@pytest.fixture
def set_multiprocessors():
    """Of the emulated GPU; the more there are, the fewer values of a head has a warp of the delta rule."""
    set_count = ctypes.CDLL(str(native_emulator.build(operators="jetrl_emulated"))).jetrl_set_multiprocessors
    yield set_count
    set_count(4)


@pytest.mark.usefixtures("delta_rule")
@pytest.mark.parametrize(("strided", "multiprocessors"), [(False, 4), (False, 16), slow(True, 32), slow(True, 64)])
def test_every_cut_of_a_sequence_has_the_bits_of_the_whole(strided, multiprocessors, set_multiprocessors):
    """What a token's blocks share is computed apart for whole sequences, and by each block for the shorter steps. On 48
    multiprocessors three whole sequences are computed two values at a time, on 24 four; shorter steps on fewer."""
    set_multiprocessors(multiprocessors)
    check_cuts(1, 4, strided, lengths=(3, 1, 9))


@pytest.mark.parametrize(("lengths", "multiprocessors"), [((21,), 4), ((21,), 8), ((1, 2, 0, 3), 4), ((37,), 16)])
def test_the_delta_rule_is_the_references(lengths, multiprocessors, set_multiprocessors):
    """Random states, of which one is not read; a padded request; tokens after the last one. As in vLLM, vectors begin
    at any address. One sequence: eight, four and two values at a time."""
    set_multiprocessors(multiprocessors)
    qkv, b, a, _, _, a_log, dt_bias, _ = delta_inputs(sum(lengths) + 2)
    a_log, dt_bias = (torch.cat([x[:1], x])[1:] for x in (a_log, dt_bias))
    states, requests = torch.randn(6, HEADS, 128, 128), slice(1, 1 + len(lengths))
    slots, computed = torch.tensor([[9, 4, -1, 0, 2], [9, 7, 1, 2, 0]], dtype=torch.int32)[:, requests]
    call = slots, computed, torch.cat([packed(0), packed(*lengths)])[2:]
    got, want = states.clone(), states.clone()
    outputs = [torch.full((*b.shape, 128), torch.nan).bfloat16() for _ in range(2)]
    for backend, target, out in (("native", got, outputs[0]), ("reference", want, outputs[1])):
        dispatch.implementation("gated_delta_rule_update", backend)(qkv, b, a, a_log, dt_bias, target, *call, out)
    for x, y in (outputs, (got, want)):
        assert (x.float() - y.float()).norm() <= 2**-8 * y.float().norm()
    assert (outputs[0][-2:] == 0).all() and torch.equal(got[5], states[5])
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_states_of_another_layout_have_no_backend():
    names = "qkv b a a_log dt_bias states slots computed cu_seqlens out"
    call = [arguments_of("delta_rule")[0][name] for name in names.split()]
    call[5] = call[5].mT
    with pytest.raises(ValueError, match="no other backend computes it"):
        dispatch.implementation("gated_delta_rule_update", "native")(*call)
