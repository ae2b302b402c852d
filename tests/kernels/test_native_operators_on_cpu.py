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
from test_delta_net_on_cpu import HEADS, check_cuts, check_sequences_alone
from test_delta_net_on_cpu import inputs as delta_inputs

from jetrl_verl import reference
from jetrl_verl.kernels import dispatch, native
from jetrl_verl.kernels.gemm_nt import native_gemm_nt
from jetrl_verl.kernels.gemm_nt_of_ranks import native_gemm_nt_of_ranks, sliced_gemm_nt_of_ranks
from jetrl_verl.kernels.grouped_gemm import native_supports_grouped_gemm_nt_of_ranks, native_supports_grouped_wgrad
from jetrl_verl.kernels.silu_mul import native_supports_silu_mul_backward
from jetrl_verl.kernels.wgrad import native_wgrad
from jetrl_verl.reference import BLOCK, FP8_DTYPE, SCALE_RULES, GemmCall, QuantizedTensor, k_slices, sum_of_ranks
from jetrl_verl.reference.delta_net import state_of
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
def emulator():
    library = ctypes.CDLL(str(native_emulator.build(operators="jetrl_emulated")))
    yield library
    library.jetrl_set_multiprocessors(4)
    library.jetrl_set_seed(0)


@pytest.mark.usefixtures("delta_rule")
@pytest.mark.parametrize(("seed", "most", "strided", "lengths"), [(1, 4, False, (3, 1, 9)), slow(2, 70, True, (67, 3))])
def test_mixtures_of_requests_have_the_bits_of_their_sequences(seed, most, strided, lengths):
    check_cuts(seed, most, strided, lengths=lengths)


@pytest.mark.usefixtures("delta_rule")
@pytest.mark.parametrize("lengths", [slow((131, 1, 2, 64, 3))])
def test_a_token_depends_on_no_other_sequence_and_no_later_token(lengths):
    check_sequences_alone(lengths=lengths)


def as_steps(call: list[torch.Tensor], cuts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states of one sequence's tokens, cut at these places; steps of one token are decodes."""
    states, slot, outputs = torch.full((2, HEADS, 193, 128), torch.nan), torch.ones(1, dtype=torch.int32), []
    for start, stop in itertools.pairwise((0, *cuts)):
        step, computed = [x[start:stop] for x in call[:3]], torch.tensor([start], dtype=torch.int32)
        out = call[0].new_full((stop - start, HEADS, 128), torch.nan)
        run = dispatch.implementation("gated_delta_rule_update", "native")
        run(*step, *call[3:], states, slot, computed, packed(stop - start), out)
        outputs.append(out)
    assert states[0].isnan().all()
    return torch.cat(outputs), states[1]


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_decodes_and_cuts_anywhere_have_the_bits_of_the_whole(emulator, seed):
    """Around the ends of blocks and of chunks; without states by whole heads and by halves of them, as where there are
    twice as many multiprocessors as heads. A seed is an order of threads and copies."""
    cuts = (1, 15, 16, 17, 62, 63, 64, 65, 66, 127, 128, 130)
    emulator.jetrl_set_seed(seed)
    qkv, b, a, _, _, a_log, dt_bias, _ = delta_inputs(130)
    call = [qkv, b, a, a_log, dt_bias]
    outputs, state = as_steps(call, cuts)
    whole = dispatch.implementation("gated_delta_rule", "native")
    for multiprocessors in (4, 64):
        emulator.jetrl_set_multiprocessors(multiprocessors)
        assert torch.equal(whole(*call, packed(130)), outputs)
    at_once, stored = (state_of(x) for x in (as_steps(call, (130,))[1], state))
    for part, want in zip(at_once, stored, strict=True):
        rows = slice(None) if part.shape[1] == 128 else slice(2)
        assert torch.equal(part[:, rows], want[:, rows])


@pytest.mark.parametrize("lengths", [(70,), (1, 2, 0, 3)])
def test_the_delta_rule_is_the_references(lengths):
    """Random states, of which one is not read; a padded request; tokens after the last one. As in vLLM, vectors begin
    at any address."""
    qkv, b, a, _, _, a_log, dt_bias, _ = delta_inputs(sum(lengths) + 2)
    a_log, dt_bias = (torch.cat([x[:1], x])[1:] for x in (a_log, dt_bias))
    states, requests = torch.zeros(6, HEADS, 193, 128), slice(1, 1 + len(lengths))
    slots, computed = torch.tensor([[9, 4, -1, 0, 2], [9, 77, 1, 2, 0]], dtype=torch.int32)[:, requests]
    parts = state_of(states)
    parts.upper.copy_(torch.randn(parts.upper.shape) / 8), parts.lower.random_(-999, 999)
    for part in (parts.k, parts.u):
        part.copy_(torch.randn(part.shape) / 11)
    parts.total.copy_(-torch.rand(parts.total.shape).cumsum(2) / 9)
    call = slots, computed, torch.cat([packed(0), packed(*lengths)])[2:]
    got, want = states.clone(), states.clone()
    outputs = [torch.full((*b.shape, 128), torch.nan).bfloat16() for _ in range(2)]
    for backend, target, out in (("native", got, outputs[0]), ("reference", want, outputs[1])):
        dispatch.implementation("gated_delta_rule_update", backend)(qkv, b, a, a_log, dt_bias, target, *call, out)
    assert (outputs[0].float() - outputs[1].float()).norm() <= 2**-7 * outputs[1].float().norm()
    assert (outputs[0][-2:] == 0).all() and torch.equal(*(x[5].view(torch.int32) for x in (got, states)))
    for slot, place in zip(slots[slots >= 0].tolist(), (computed + call[2].diff())[slots >= 0].tolist(), strict=True):
        upper, _, *rows = ((x, y) for x, y in zip(state_of(got[slot]), state_of(want[slot]), strict=True))
        closed = [upper] if place >= 64 else []  # before, S is zero and not in the state
        for x, y in closed + [(x[:, : place % 64], y[:, : place % 64]) for x, y in rows]:
            assert (x.float() - y.float()).norm() <= 2**-7 * y.float().norm()


def test_states_of_another_layout_have_no_backend():
    names = "qkv b a a_log dt_bias states slots computed cu_seqlens out"
    call = [arguments_of("delta_rule")[0][name] for name in names.split()]
    call[5] = call[5].mT
    with pytest.raises(ValueError, match="no other backend computes it"):
        dispatch.implementation("gated_delta_rule_update", "native")(*call)
