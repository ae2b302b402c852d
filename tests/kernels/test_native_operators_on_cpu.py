# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The native bindings and csrc/binding.cpp on a CPU: the library's operators over the emulated kernels.

Here every argument is shown to arrive at its place, and every call that a kernel must not see to be refused with a
sentence and before anything is written. The kernels themselves are gone through in test_native_*emulated_on_cpu.py.
"""

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import flash_attention_order
import native_emulator
import pytest
import torch
from contract_inputs import gaussian
from native_calls import (
    OUTPUT_ROWS,
    REFUSED,
    apart,
    arguments_of,
    decode_call,
    decode_call_bf16,
    gaps,
    is_untouched,
    shifted,
    three_dimensional,
)
from native_emulator import experts_operand, operands, product, silu_gradients, silu_operands
from quantizer_checks import assert_same_bytes

from jetrl_verl import formats, kernels, reference
from jetrl_verl.kernels import dispatch, native
from jetrl_verl.kernels.decode_attention import (
    CLUSTERS,
    choose_cluster,
    decodes_natively,
    native_decode_attention,
    native_decode_attention_bf16,
    native_supports_decode_attention,
    native_supports_decode_attention_bf16,
)
from jetrl_verl.kernels.gemm_nt import native_gemm_nt, native_supports_gemm_nt
from jetrl_verl.kernels.gemm_nt_of_ranks import native_gemm_nt_of_ranks, sliced_gemm_nt_of_ranks
from jetrl_verl.kernels.grouped_gemm import (
    native_grouped_gemm_nt_of_ranks,
    native_grouped_wgrad,
    native_supports_grouped_gemm_nt_of_ranks,
    native_supports_grouped_wgrad,
)
from jetrl_verl.kernels.quantize_128x128 import native_transpose_128x128
from jetrl_verl.kernels.relayout_128x1 import native_relayout_128x1
from jetrl_verl.kernels.silu_mul import native_silu_mul_backward_quantize, native_supports_silu_mul_backward
from jetrl_verl.reference import BLOCK, FP8_DTYPE, SCALE_RULES, QuantizedTensor, k_slices, sum_of_ranks
from jetrl_verl.sync import operations_probe
from jetrl_verl.tools.doctor import self_check

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")  # operators can be registered once in a process
def emulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operators")
    torch.ops.load_library(str(native_emulator.build(folder, operators="jetrl_emulated")))
    return torch.ops.jetrl_emulated


@pytest.fixture(autouse=True)
def on_a_cpu(emulated, monkeypatch):
    """The backend finds its operators and accepts tensors of the CPU."""
    monkeypatch.setattr(native, "unavailable", lambda: None)
    with native.using("jetrl_emulated"):
        yield


def test_the_operators_are_those_that_the_backend_calls():
    assert native.mismatch("jetrl_emulated") is None


def test_the_doctors_self_check_has_the_references_bits(monkeypatch):
    native_calls = [call for call in self_check.calls() if "native" in dispatch.BACKENDS[call.operation]["sm90"]]
    for call in native_calls:
        monkeypatch.setitem(dispatch.BACKENDS[call.operation], "cpu", ("native", "reference"))
    found = self_check.outcomes(torch.device("cpu"))
    assert found == [self_check.Outcome(call.subject, call.name, "native", "") for call in native_calls]


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("plan", [None, native.Plan("fprop", 128, 2), native.Plan("decode", 32, 1)])
@pytest.mark.parametrize("m", [1, 20, 130])
def test_a_forward_product(m, plan, bias):
    a, b = operands(m, 72, 336, True)
    bias = None if bias is None else (torch.arange(72) / 8 - 4).to(bias)
    want = product(a, b, True) + (0 if bias is None else bias.double())
    got = native_gemm_nt(a, b, b_block_scaled=True, bias=bias, plan=plan, static_weight=m == 20)
    assert torch.equal(got, want.bfloat16())


@pytest.mark.parametrize("plan", [None, native.Plan(block=64, cluster=2)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 20, 130])
def test_a_sum_of_ranks_products(m, ranks, plan):
    a, b = operands(m, 72, 4 * BLOCK, True)
    slices = zip(k_slices(a, ranks), k_slices(b, ranks), strict=True)
    want = sum_of_ranks([product(x, w, True).bfloat16() for x, w in slices])
    assert torch.equal(native_gemm_nt_of_ranks(a, b, ranks, plan=plan), want)
    assert torch.equal(sliced_gemm_nt_of_ranks(a, b, ranks), want)


def test_a_sum_of_ranks_products_with_a_bias_goes_by_slices():
    a, b = operands(20, 72, 2 * BLOCK, True)
    bias = torch.arange(72).bfloat16() / 8
    assert dispatch.supports("gemm_nt_of_ranks", "native", a, b, 2)
    assert not dispatch.supports("gemm_nt_of_ranks", "native", a, b, 2, bias)
    with pytest.raises(ValueError, match="over 2 ranks with a bias; use backend triton"):
        native_gemm_nt_of_ranks(a, b, 2, bias)
    assert dispatch.supports("gemm_nt_of_ranks", "slices", a, b, 2, bias)
    first, second = (product(x, w, True) for x, w in zip(k_slices(a, 2), k_slices(b, 2), strict=True))
    want = sum_of_ranks([(first + bias.double()).bfloat16(), second.bfloat16()])
    assert torch.equal(sliced_gemm_nt_of_ranks(a, b, 2, bias), want)


@pytest.mark.parametrize("block", [0, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_gradient(dtype, block):
    a, b = operands(136, 72, 331, False)
    got = native_gemm_nt(a, b, b_block_scaled=False, out_dtype=dtype, plan=native.Plan(block=block))
    assert torch.equal(got, product(a, b, False).to(dtype))


def test_results_go_to_rows_of_the_callers():
    a, b = operands(20, 72, 144, True)
    around = torch.full((22, 80), torch.nan, dtype=torch.bfloat16)
    assert native_gemm_nt(a, b, b_block_scaled=True, out=around[1:-1, :72]).data_ptr() == around[1].data_ptr()
    assert torch.equal(around[1:-1, :72], product(a, b, True).bfloat16())
    assert around.isnan().sum() == around.numel() - 20 * 72

    a, b = operands(20, 72, 144, False)
    start = torch.arange(20.0 * 72).reshape(20, 72)
    sum_of_both = start.clone()
    assert native_gemm_nt(a, b, b_block_scaled=False, out_dtype=torch.float32, add_to=sum_of_both) is sum_of_both
    assert torch.equal(sum_of_both, (start + product(a, b, False)).float())


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(1, 128), (131, 272)])
def test_a_relayout(shape, rule):
    q = reference.quantize_1x128(gaussian(*shape), rule)
    assert_same_bytes(native_relayout_128x1(q, rule), reference.relayout_128x1(q, rule))


def test_a_transpose():
    q = reference.quantize_128x128(gaussian(144, 272), "fp32")
    assert_same_bytes(native_transpose_128x128(q), reference.transpose_128x128(q))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("rows", [1, 140])
def test_the_gradients_of_a_gated_mlp(rows, rule):
    dy_gate_up = silu_operands(rows, 256, seed=rows)
    got = native_silu_mul_backward_quantize(*dy_gate_up, rule)
    want = [q for gradient in silu_gradients(*dy_gate_up) for q in reference.quantize_1x128_and_128x1(gradient, rule)]
    for one, other in zip(got, want, strict=True):
        assert_same_bytes(one, other)


@pytest.mark.parametrize("operator", native._ARGUMENTS)
def test_a_call_as_it_should_be_writes_every_result(operator):
    arguments, results = arguments_of(operator)
    getattr(torch.ops.jetrl_emulated, operator)(**arguments)
    assert not any(map(is_untouched, results.values()))


@pytest.mark.parametrize(
    ("operator", "argument", "change", "sentence"),
    REFUSED,
    ids=[f"{i}-{operator}-{argument}" for i, (operator, argument, *_) in enumerate(REFUSED)],
)
def test_a_call_that_no_kernel_may_see_is_refused(operator, argument, change, sentence):
    arguments, results = arguments_of(operator)
    arguments[argument] = change(arguments[argument])
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        getattr(torch.ops.jetrl_emulated, operator)(**arguments)
    assert all(map(is_untouched, results.values()))


def test_only_fp32_is_added_to():
    arguments, _ = arguments_of("wgrad")
    arguments |= {"accumulate": True, "dw": arguments["dw"].bfloat16()}
    with pytest.raises(ValueError, match="FP32 buffers only"):
        torch.ops.jetrl_emulated.wgrad(**arguments)


def test_groups_of_tokens_are_whole():
    arguments, results = arguments_of("grouped_wgrad")
    arguments |= {name: arguments[name][:, :-16] for name in ("a", "b")}
    with pytest.raises(RuntimeError, match="experts' tokens must be whole groups of 128, not 240"):
        torch.ops.jetrl_emulated.grouped_wgrad(**arguments)
    assert all(map(is_untouched, results.values()))


def test_no_more_experts_than_a_block_can_sort():
    arguments, results = arguments_of("grouped_wgrad")
    many = native.MOST_EXPERTS + 1
    arguments |= {"a": arguments["a"][:1], "a_scales": arguments["a_scales"][:1]}
    arguments |= {"start": torch.zeros(many + 1, dtype=torch.int32)}
    arguments |= {"dw": torch.full((many, 1, 144), torch.nan, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="more than 512 experts are not supported"):
        torch.ops.jetrl_emulated.grouped_wgrad(**arguments)
    assert is_untouched(arguments["dw"])


@pytest.mark.parametrize("operator", ["fprop", "decode"])
def test_rows_of_the_output_are_whole_16_bytes(operator):
    """A width of 140 would have the copy engine write the columns behind it."""
    arguments, results = arguments_of(operator)
    arguments |= {"w": arguments["w"][:140], "y": results["y"][:, :140]}
    with pytest.raises(RuntimeError, match=OUTPUT_ROWS):
        getattr(torch.ops.jetrl_emulated, operator)(**arguments)
    assert is_untouched(results["y"])


def test_what_does_not_fit_32_bits_is_refused():
    arguments, results = arguments_of("wgrad")
    many_tokens = torch.empty(1, 2**31, dtype=torch.uint8).view(FP8_DTYPE)  # never touched
    with pytest.raises(RuntimeError, match=f"a dimension of {2**31} is not supported"):
        torch.ops.jetrl_emulated.wgrad(**arguments | {"a": many_tokens, "b": many_tokens})

    arguments, results = arguments_of("relayout")
    far = {"qdata": arguments["qdata"].as_strided((1, 272), (2**31, 1)), "scales": arguments["scales"][:1]}
    with pytest.raises(RuntimeError, match=f"a stride of {2**31} is not supported"):
        torch.ops.jetrl_emulated.relayout(**arguments | far)
    assert all(map(is_untouched, results.values()))


def test_a_single_row_to_add_to_may_have_any_stride_and_then_is_not_supported():
    a, b = operands(1, 72, 144, False)
    add_to = torch.ones(1, 73)[:, :72]
    assert add_to.is_contiguous()  # by torch's rules for a dimension of one
    options = {"b_block_scaled": False, "out_dtype": torch.float32, "add_to": add_to}
    assert not native_supports_gemm_nt(a, b, **options)
    with pytest.raises(ValueError, match="added to rows of stride 73; use backend triton"):
        native_gemm_nt(a, b, **options)


def test_a_buffer_that_takes_no_weight_gradient_is_named():
    a, b = operands(20, 72, 144, False)
    with pytest.raises(ValueError, match=r"add_to has shape \(20, 72\) and strides \(80, 1\), expected a contiguous"):
        add_to = torch.ones(20, 80)[:, :72]
        native_gemm_nt(a, b, b_block_scaled=False, out_dtype=torch.float32, add_to=add_to)


def test_qdata_whose_rows_overlap_are_not_supported():
    a, b = operands(20, 72, 144, True)
    a = QuantizedTensor(a.qdata[:1].expand(20, 144), a.scales)
    assert not native_supports_gemm_nt(a, b, b_block_scaled=True)


def laid_out(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """The same matrix, more often than not where a kernel takes it: somewhere in memory, rows somehow apart."""
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
    m, n, k = (draw.choice(sizes) for sizes in ([1, 8, 40, 129], [1, 8, 72, 130, 136], [16, 100, 144, 272]))
    block_scaled = draw.random() < 0.5
    a, b = (relaid(q, draw) for q in operands(m, n, k, block_scaled, draw.randrange(9)))
    options = {"b_block_scaled": block_scaled, "out_dtype": draw.choice([torch.bfloat16, torch.float32])}
    want = product(a, b, block_scaled)
    if draw.random() < 0.3:
        bias = torch.arange(2 * n)[:: draw.choice([1, 2])][:n] / 8
        options["bias"] = bias.to(draw.choice([torch.bfloat16, torch.float32, torch.float16]))
        want += options["bias"].double()
    elif not block_scaled and options["out_dtype"] == torch.float32 and draw.random() < 0.5:
        placed = laid_out(torch.ones(m, n), draw)
        options["add_to"] = placed if placed.is_contiguous() else torch.ones(m, n)  # as the contract asks
        want += 1
    return (
        native_supports_gemm_nt(a, b, **options),
        partial(native_gemm_nt, a, b, **options),
        [want.to(options["out_dtype"])],
    )


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
    return native_supports_silu_mul_backward(*x), partial(native_silu_mul_backward_quantize, *x, "pow2"), want


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
    plan = draw.choice([None, native.Plan("fprop"), native.Plan("decode")])
    align = 4 if (start % 4 == 0).all() else 1
    call = partial(native_grouped_gemm_nt_of_ranks, a, b, start, ranks, align, plan=plan)
    want = [reference.grouped_gemm_nt_of_ranks(a, b, start, ranks)]
    return native_supports_grouped_gemm_nt_of_ranks(a, b, start, ranks), call, want


def any_experts_gradient(draw: random.Random) -> tuple[bool, Callable, list[torch.Tensor]]:
    experts, n, k = draw.choice([1, 2, 5]), draw.choice([1, 128, 136]), draw.choice([8, 128, 140, 256])
    groups = [draw.choice([0, 0, 1, 2]) for _ in range(experts)]
    start = BLOCK * torch.tensor([0, *itertools.accumulate(groups)], dtype=torch.int32)
    more = draw.choice([0, 0, 0, 16, 128])
    tokens = int(start[-1]) + more
    dy, x = (native_emulator.operand(columns, tokens, columns, draw.choice([0, 1, 2])) for columns in (n, k))
    if draw.random() < 0.2:
        dy = relaid(dy, draw)
    call = partial(native_grouped_wgrad, dy, x, start)
    return native_supports_grouped_wgrad(dy, x, start), call, [reference.grouped_wgrad(dy, x, start)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "drawn", [any_gemm, any_transposition, any_gated_mlp, any_experts_forward, any_experts_gradient]
)
def test_what_the_backend_says_it_supports_it_computes(drawn, seed):
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


@pytest.mark.parametrize("plan", [None, *(native.Plan(cluster=c) for c in CLUSTERS)])
def test_a_decode_step_of_an_fp8_cache(plan):
    call = decode_call()
    native_decode_attention(**call, plan=plan)
    want = torch.empty(2, 4, 128, dtype=torch.bfloat16)
    dispatch.implementation("decode_attention", "reference")(**call | {"out": want})
    assert (call["out"].float() - want.float()).abs().max() < 2**-6 * want.float().abs().max()


def empty(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def both(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"keys": x, "values": x}


ROWS, HEADS, OTHERS = (
    "queries and results must be BF16",
    "query heads over",
    "of a KV head is not supported. Use 1 to 8",
)
LENGTHS, TABLE = "lengths must be int32", "the block table must be int32"
REFUSED_DECODES = [
    *(
        ({name: change}, ROWS)
        for name in ("q", "out")
        for change in (
            torch.zeros(2, 4, 128),
            empty(2, 4, 64),
            empty(2, 4 * 128),
            empty(2, 128, 4).transpose(1, 2),
            empty(2, 4, 256)[..., ::2],
            empty(2, 8, 128)[:, ::2],
            empty(2, 516).as_strided((2, 4, 128), (516, 128, 1)),
            shifted(empty(2, 4, 128)),
        )
    ),
    ({"out": empty(3, 4, 128)}, ROWS),
    ({"out": empty(2, 2, 128)}, ROWS),
    ({"q": empty(0, 4, 128), "out": empty(0, 4, 128)}, "a dimension of 0 is not supported"),
    ({"q": empty(2, 3, 128), "out": empty(2, 3, 128)}, f"3 {HEADS} 2 KV heads are not supported"),
    ({"q": empty(2, 18, 128), "out": empty(2, 18, 128)}, f"9 query heads {OTHERS}"),
    ({"q": empty(2, 0, 128), "out": empty(2, 0, 128)}, f"0 query heads {OTHERS}"),
    ({"lengths": empty(2, dtype=torch.int64)}, LENGTHS),
    ({"lengths": empty(1, dtype=torch.int32)}, LENGTHS),
    ({"lengths": empty(2, 1, dtype=torch.int32)}, LENGTHS),
    ({"lengths": empty(4, dtype=torch.int32)[::2]}, LENGTHS),
    ({"block_table": empty(2, 2, dtype=torch.int64)}, TABLE),
    ({"block_table": empty(1, 2, dtype=torch.int32)}, TABLE),
    ({"block_table": empty(4, dtype=torch.int32)}, TABLE),
    ({"block_table": empty(2, 2, dtype=torch.int32).t()}, TABLE),
]
"""What csrc/binding.cpp refuses of a decode step, whatever its cache, and the sentence."""

BYTES = "the cache must be contiguous bytes"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *REFUSED_DECODES,
        ({"cache": empty(3, 2, 2, 4128, dtype=torch.uint8)[:, :, ::2]}, BYTES),
        ({"cache": empty(3, 2, 1, 4096, dtype=torch.uint8)}, BYTES),
        ({"cache": empty(3, 2, 1, 4128, dtype=torch.int8)}, BYTES),
        ({"cache": empty(3, 2, 4128, dtype=torch.uint8)}, BYTES),
        ({"cache": shifted(empty(3, 2, 1, 4128, dtype=torch.uint8))}, BYTES),
        ({"cache": empty(3, 2, 0, 4128, dtype=torch.uint8)}, "a dimension of 0 is not supported"),
        ({"cache": empty(3, 0, 1, 4128, dtype=torch.uint8)}, "4 query heads over 0 KV heads are not supported"),
        ({"cache": empty(3, 3, 1, 4128, dtype=torch.uint8)}, "4 query heads over 3 KV heads are not supported"),
    ],
)
def test_a_decode_step_that_no_kernel_may_see_is_refused(changes, sentence):
    """By the library, and by the backend in front of it."""
    call = decode_call(**changes)
    before = call["out"].clone()
    assert not native_supports_decode_attention(**call)
    with pytest.raises(ValueError, match="native does not support decode_attention .* use backend flash_attention_3"):
        native_decode_attention(**call)
    units = call["cache"].shape[2] if call["cache"].dim() == 4 else 1
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        torch.ops.jetrl_emulated.decode_attention(**call, units=units, cluster=1)
    assert torch.equal(call["out"].nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("plan", [None, *(native.Plan(cluster=c) for c in CLUSTERS)])
def test_a_decode_step_of_a_bf16_cache(plan):
    call = decode_call_bf16()
    native_decode_attention_bf16(**call, plan=plan)
    want = torch.empty(2, 4, 128, dtype=torch.bfloat16)
    dispatch.implementation("decode_attention_bf16", "reference")(**call | {"out": want})
    assert (call["out"].float() - want.float()).abs().max() < 2**-6 * want.float().abs().max()


PAGES, SAME = "keys and values must be BF16", "the same shape and strides, multiples of 16 bytes"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *REFUSED_DECODES,
        ({"keys": torch.zeros(3, 16, 2, 128)}, PAGES),
        (both(torch.zeros(3, 16, 2, 128)), PAGES),
        ({"values": torch.zeros(3, 16, 2, 128)}, PAGES),
        ({"values": empty(3, 16, 2, 64)}, PAGES),
        (both(empty(3, 16, 2, 64)), PAGES),
        (both(empty(3, 16, 256)), PAGES),
        (both(empty(3, 16, 2, 256)[..., ::2]), PAGES),
        (both(empty(3, 8, 2, 128)), "a multiple of 16 tokens"),
        ({"keys": shifted(empty(3, 16, 2, 128))}, PAGES),
        ({"values": shifted(empty(3, 16, 2, 128))}, PAGES),
        ({"values": empty(3, 16, 1, 128)}, SAME),
        ({"values": empty(2, 16, 2, 128)}, SAME),
        ({"values": empty(3, 2, 16, 128).transpose(1, 2)}, SAME),
        (both(empty(3, 16, 2, 132)[..., :128]), SAME),
        (both(empty(1, 16, 2, 128).as_strided((1, 16, 2, 128), (2**34, 256, 128, 1))), "over more than 32 GiB"),
        (both(empty(3, 0, 2, 128)), "a dimension of 0 is not supported"),
        (both(empty(3, 16, 0, 128)), "4 query heads over 0 KV heads are not supported"),
        (both(empty(3, 16, 3, 128)), "4 query heads over 3 KV heads are not supported"),
    ],
)
def test_a_decode_step_over_bf16_pages_that_no_kernel_may_see_is_refused(changes, sentence):
    """By the library, and by the backend in front of it, so that the next one computes the step."""
    call = decode_call_bf16(**changes)
    before = call["out"].clone()
    assert not native_supports_decode_attention_bf16(**call)
    with pytest.raises(ValueError, match="native does not support decode_attention_bf16 .* backend flash_attention_3"):
        native_decode_attention_bf16(**call)
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        torch.ops.jetrl_emulated.decode_attention_bf16(**call, cluster=1)
    assert torch.equal(call["out"].nan_to_num(7), before.nan_to_num(7))


FIRST_PAGE = {"lengths": torch.tensor([16, 3], dtype=torch.int32), "block_table": torch.zeros(2, 1, dtype=torch.int32)}


def of_both(change: Callable) -> Callable:
    return lambda call: {name: change(call[name]) for name in ("keys", "values")}


def one_page(stride: int) -> Callable:
    """The third page alone, as the first of pages that far apart."""
    pages = of_both(lambda x: x[2:].as_strided((1, *x.shape[1:]), (stride, *x.stride()[1:]), x[2:].storage_offset()))
    return lambda call: pages(call) | FIRST_PAGE


MAY_LIE_SO = {
    "as they are": lambda call: {},
    "queries in wider rows": lambda call: {"q": torch.cat([call["q"], call["q"]], 1)[:, :4]},
    "more lengths than requests": lambda call: {"lengths": call["lengths"].repeat(2)},
    "a longer table": lambda call: {"block_table": call["block_table"].repeat(2, 1)},
    "a wider table": lambda call: {"block_table": call["block_table"].repeat(1, 2)[:, :2]},
}
BF16_PAGES_MAY_LIE_SO = {
    "heads in front of tokens": of_both(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "some of the heads": of_both(lambda x: x.repeat(1, 1, 2, 1)[:, :, :2]),
    "one page, whose stride nobody uses": one_page(4),
    "a stride of just under 32 GiB": one_page(2**34 - 8),
}


@pytest.mark.parametrize(
    ("cache", "change"),
    [(cache, name) for cache in ("fp8", "bf16") for name in MAY_LIE_SO]
    + [("bf16", name) for name in BF16_PAGES_MAY_LIE_SO],
)
def test_a_decode_step_that_may_lie_so_is_computed(cache, change):
    operation, call = (
        ("decode_attention", decode_call()) if cache == "fp8" else ("decode_attention_bf16", decode_call_bf16())
    )
    call |= (MAY_LIE_SO | BF16_PAGES_MAY_LIE_SO)[change](call)
    assert dispatch.supports(operation, "native", *call.values())
    dispatch.implementation(operation, "native")(**call)
    want = torch.empty_like(call["out"])
    first = {name: call[name][: len(want)] for name in ("lengths", "block_table")}
    dispatch.implementation(operation, "reference")(**call | first | {"out": want})
    assert (call["out"].float() - want.float()).abs().max() < 2**-6 * want.float().abs().max()


def test_which_decode_steps_over_bf16_pages_are_the_native_kernels(monkeypatch):
    """By shapes, in a step that has no tensors yet, and by the call, which adds strides and addresses alone."""
    monkeypatch.setattr(dispatch, "column_of", lambda device: "sm90")

    def chosen(requests: int, heads: int, kv_heads: int, pages=None) -> bool:
        q = torch.empty(requests, heads, 128, dtype=torch.bfloat16)
        pages = torch.empty(1, 2, 16, kv_heads, 128, dtype=torch.bfloat16) if pages is None else pages
        lengths, table = (torch.empty(*shape, dtype=torch.int32) for shape in ((requests,), (requests, 1)))
        call = q, *pages.unbind(1), lengths, table, 1.0, q
        by_shape = decodes_natively(requests, heads, kv_heads, pages.shape[4], pages.shape[2], pages.dtype)
        backend, run = dispatch.choose("decode_attention_bf16", q.device, *call)
        assert by_shape is (backend == "native")
        if backend == "native":
            # It has been asked whether it supports the call.
            monkeypatch.setattr(native, "unavailable", lambda: pytest.fail("asked again"))
            lengths.zero_()
            run(*call)
            monkeypatch.setattr(native, "unavailable", lambda: None)
        return by_shape

    assert chosen(1, 32, 4) and chosen(256, 32, 8) and chosen(1, 8, 1)
    assert not chosen(257, 32, 8)
    assert not chosen(1, 18, 2) and not chosen(1, 4, 3) and not chosen(1, 2, 4)
    assert chosen(1, 8, 1, torch.empty(1, 2, 1, 16, 128, dtype=torch.bfloat16).transpose(2, 3))
    assert not chosen(1, 8, 1, torch.empty(1, 2, 8, 1, 128, dtype=torch.bfloat16))
    assert not chosen(1, 8, 1, torch.empty(1, 2, 16, 1, 128))
    assert not chosen(1, 8, 1, torch.empty(1, 2, 16, 1, 64, dtype=torch.bfloat16))
    monkeypatch.setattr(native, "unavailable", lambda: "it is not built")
    assert not chosen(1, 32, 4)


@pytest.mark.parametrize(("cache", "operation"), [("fp8", "decode_attention"), ("bf16", "decode_attention_bf16")])
def test_the_contract_checks_decode_steps(monkeypatch, cache, operation):
    """The calls that a rollout makes at every weight sync, on an H100 by clusters of every size: the bits of whole
    sequences in FlashAttention 3's order."""
    device, held, clusters = torch.device("cpu"), formats.kv_cache(cache), []

    def choose(pairs: int, multiprocessors: int) -> int:
        clusters.append(choose_cluster(pairs, multiprocessors))
        return clusters[-1]

    module = sys.modules[choose_cluster.__module__]
    monkeypatch.setattr(module, "choose_cluster", choose)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setitem(dispatch.BACKENDS[operation], "cpu", ("native", "reference"))
    got = operations_probe._token_by_token(device, held)
    assert clusters == [8, 4, 2, 1]

    inputs, want = operations_probe._inputs(device), torch.empty_like(got)
    k, v = (kernels.cache_form(x).double().numpy() for x in held.seen(inputs.k, inputs.v))
    group = want.shape[1] // k.shape[1]
    for first, end in itertools.pairwise(inputs.cu_seqlens.tolist()):
        for token, head in itertools.product(range(first, end), range(k.shape[1])):
            heads, tokens = slice(head * group, head * group + group), slice(first, token + 1)
            q = inputs.q[token, heads].double().numpy()
            found = flash_attention_order.attention(q, k[tokens, head], v[tokens, head], 128**-0.5)
            want[token, heads] = torch.from_numpy(found).bfloat16()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_steps_of_one_token_each_of_whatever_kind_go_through_vllms_interface(monkeypatch):
    """A prompt of one token, a prompt of 49 of which 48 were found in the cache, a decode step, and padding."""
    from vllm.v1.attention.backends import flash_attn as vllms

    from jetrl_verl.rollout import flash_attention

    monkeypatch.setattr(dispatch, "column_of", lambda device: "sm90")
    monkeypatch.setattr(vllms.FlashAttentionImpl, "forward", lambda *call: pytest.fail("vLLM's"))
    lengths, page_size, heads, kv_heads, scale = [1, 49, 20], 16, 4, 2, 128**-0.5
    k, v = (torch.randn(sum(lengths), kv_heads, 128).bfloat16() for _ in range(2))
    q = torch.randn(4, heads, 128).bfloat16()
    cache = torch.full((8, 2, page_size, kv_heads, 128), torch.nan, dtype=torch.bfloat16)
    table = torch.tensor([[5, 0, 0, 0], [2, 7, 1, 6], [4, 3, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    first, want = 0, []
    for request, length in enumerate(lengths):
        place = torch.arange(length)
        of_request = [x[first : first + length] for x in (k, v)]
        for part, x in zip(cache.unbind(1), of_request, strict=True):
            part[table[request, place // page_size].long(), place % page_size] = x
        of_keys, of_values = (x.double().repeat_interleave(heads // kv_heads, 1) for x in of_request)
        p = torch.einsum("hd,lhd->hl", q[request].double(), of_keys).mul(scale).softmax(1)
        want.append(torch.einsum("hl,lhd->hd", p, of_values))
        first += length

    starts = torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32)
    batch = flash_attention.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([*lengths, 0], dtype=torch.int32),
        num_reqs=4,
        num_actual_tokens=4,
        max_query_len=1,
        max_seq_len=49,
        block_table_tensor=table,
        slot_mapping=torch.tensor([80, 96, 51, -1]),
    )
    builder = flash_attention.SharedFlashAttentionMetadataBuilder.__new__(
        flash_attention.SharedFlashAttentionMetadataBuilder
    )
    vars(builder).update(aot_schedule=True, aot_sliding_window=None, dcp_world_size=1, max_num_splits=1)
    vars(builder).update(use_full_cuda_graph=False, max_cudagraph_size=None, block_size=page_size)
    vars(builder).update(cache_config=SimpleNamespace(cache_dtype="auto"))
    vars(builder).update(num_heads_q=heads, num_heads_kv=kv_heads, headdim=128, kv_cache_dtype=cache.dtype)
    impl = flash_attention.SharedFlashAttention.__new__(flash_attention.SharedFlashAttention)
    impl.scale = scale
    out = torch.full((6, heads, 128), torch.nan, dtype=torch.bfloat16)
    rows = torch.cat([q, torch.full((2, heads, 128), torch.nan, dtype=torch.bfloat16)])
    impl.forward(None, rows, None, None, cache, builder.build(0, batch), out)
    want = torch.stack(want)
    assert ((out[:3].double() - want).abs().amax((1, 2)) < 2**-6 * want.abs().amax((1, 2))).all()
    assert not out[3].any() and out[4:].isnan().all()
