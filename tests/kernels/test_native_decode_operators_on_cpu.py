# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Decode attention's bindings and csrc/binding.cpp on a CPU, also through the contract check.

The kernels themselves: test_native_decode_attention_emulated_on_cpu.py.
"""

import itertools
import sys
from collections.abc import Callable

import flash_attention_order
import pytest
import torch
from native_calls import decode_call, decode_call_bf16, shifted

from jetrl_verl import formats, kernels
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
from jetrl_verl.kernels.probe_inputs import probe_inputs
from jetrl_verl.sync import operations_probe

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("on_a_cpu")]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    ("native_decode", "of_cache"),
    [(native_decode_attention, decode_call), (native_decode_attention_bf16, decode_call_bf16)],
)
def test_a_decode_step_by_every_cluster(native_decode, of_cache, cluster):
    call = of_cache()
    native_decode(**call, plan=native.Plan(cluster=cluster))
    want = torch.empty(2, 4, 128, dtype=torch.bfloat16)
    operation = native_decode.__name__.removeprefix("native_")
    dispatch.implementation(operation, "reference")(**call | {"out": want})
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
"""Changes for which csrc/binding.cpp raises with either cache, and the message."""

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
def test_unsupported_fp8_decode_steps_raise(changes, sentence):
    """By the library and by the backend."""
    call = decode_call(**changes)
    before = call["out"].clone()
    assert not native_supports_decode_attention(**call)
    with pytest.raises(ValueError, match="native does not support decode_attention .* use backend flash_attention_3"):
        dispatch.implementation("decode_attention", "native")(*call.values())
    units = call["cache"].shape[2] if call["cache"].dim() == 4 else 1
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        torch.ops.jetrl_emulated.decode_attention(**call, units=units, cluster=1)
    assert torch.equal(call["out"].nan_to_num(7), before.nan_to_num(7))


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
def test_unsupported_bf16_decode_steps_raise(changes, sentence):
    """By the library and by the backend, so that the next backend computes the step."""
    call = decode_call_bf16(**changes)
    before = call["out"].clone()
    assert not native_supports_decode_attention_bf16(**call)
    with pytest.raises(ValueError, match="native does not support decode_attention_bf16 .* backend flash_attention_3"):
        dispatch.implementation("decode_attention_bf16", "native")(*call.values())
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        torch.ops.jetrl_emulated.decode_attention_bf16(**call, cluster=1)
    assert torch.equal(call["out"].nan_to_num(7), before.nan_to_num(7))


FIRST_PAGE = {"lengths": torch.tensor([16, 3], dtype=torch.int32), "block_table": torch.zeros(2, 1, dtype=torch.int32)}


def of_both(change: Callable) -> Callable:
    return lambda call: {name: change(call[name]) for name in ("keys", "values")}


def one_page(stride: int) -> Callable:
    """The third page alone, as the first of pages with this stride."""
    pages = of_both(lambda x: x[2:].as_strided((1, *x.shape[1:]), (stride, *x.stride()[1:]), x[2:].storage_offset()))
    return lambda call: pages(call) | FIRST_PAGE


STRIDES = {
    "as they are": lambda call: {},
    "queries in wider rows": lambda call: {"q": torch.cat([call["q"], call["q"]], 1)[:, :4]},
    "more lengths than requests": lambda call: {"lengths": call["lengths"].repeat(2)},
    "a longer table": lambda call: {"block_table": call["block_table"].repeat(2, 1)},
    "a wider table": lambda call: {"block_table": call["block_table"].repeat(1, 2)[:, :2]},
}
BF16_STRIDES = {
    "heads before tokens": of_both(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "some of the heads": of_both(lambda x: x.repeat(1, 1, 2, 1)[:, :, :2]),
    "one page, whose stride nobody uses": one_page(4),
    "a stride of just under 32 GiB": one_page(2**34 - 8),
}


@pytest.mark.parametrize(
    ("cache", "change"),
    [(cache, name) for cache in ("fp8", "bf16") for name in STRIDES] + [("bf16", name) for name in BF16_STRIDES],
)
def test_decode_steps_with_other_strides_are_computed(cache, change):
    operation, call = (
        ("decode_attention", decode_call()) if cache == "fp8" else ("decode_attention_bf16", decode_call_bf16())
    )
    call |= (STRIDES | BF16_STRIDES)[change](call)
    assert dispatch.supports(operation, "native", *call.values())
    dispatch.implementation(operation, "native")(*call.values())
    want = torch.empty_like(call["out"])
    first = {name: call[name][: len(want)] for name in ("lengths", "block_table")}
    dispatch.implementation(operation, "reference")(**call | first | {"out": want})
    assert (call["out"].float() - want.float()).abs().max() < 2**-6 * want.float().abs().max()


def test_which_bf16_decode_steps_use_the_native_kernel(monkeypatch):
    """By shapes, before a step has tensors, and by the call, which adds strides and addresses."""
    monkeypatch.setattr(dispatch, "platform_of", lambda device: "sm90")

    def chosen(requests: int, heads: int, kv_heads: int, pages=None) -> bool:
        q = torch.empty(requests, heads, 128, dtype=torch.bfloat16)
        pages = torch.empty(1, 2, 16, kv_heads, 128, dtype=torch.bfloat16) if pages is None else pages
        lengths, table = (torch.empty(*shape, dtype=torch.int32) for shape in ((requests,), (requests, 1)))
        call = q, *pages.unbind(1), lengths, table, 1.0, q
        by_shape = decodes_natively(requests, heads, kv_heads, pages.shape[4], pages.shape[2], pages.dtype)
        run = dispatch.lookup("decode_attention_bf16", q.device, *call)
        assert by_shape is (run is native_decode_attention_bf16)
        if by_shape:
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


CONTRACT_STEPS = [("fp8", "decode_attention"), pytest.param("bf16", "decode_attention_bf16", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("cache", "operation"), CONTRACT_STEPS)
def test_decode_steps_of_the_contract_check_equal_whole_sequences(monkeypatch, cache, operation):
    """The probe of every weight sync, by clusters of every size on an H100, matches FlashAttention 3's order."""
    device, kv_format, clusters = torch.device("cpu"), formats.kv_cache(cache), []

    def choose(pairs: int, multiprocessors: int) -> int:
        clusters.append(choose_cluster(pairs, multiprocessors))
        return clusters[-1]

    module = sys.modules[choose_cluster.__module__]
    monkeypatch.setattr(module, "choose_cluster", choose)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setitem(dispatch.OPERATIONS[operation].backends, "cpu", ("native", "reference"))
    got = operations_probe._token_by_token(probe_inputs(device), kv_format)
    assert clusters == [8, 4, 2, 1]

    inputs, want = probe_inputs(device), torch.empty_like(got)
    k, v = (kernels.cache_form(x).double().numpy() for x in kv_format.seen(inputs.k, inputs.v))
    group = want.shape[1] // k.shape[1]
    for first, end in itertools.pairwise(inputs.cu_seqlens.tolist()):
        for token, head in itertools.product(range(first, end), range(k.shape[1])):
            heads, tokens = slice(head * group, head * group + group), slice(first, token + 1)
            q = inputs.q[token, heads].double().numpy()
            output = flash_attention_order.attention(q, k[tokens, head], v[tokens, head], 128**-0.5)
            want[token, heads] = torch.from_numpy(output).bfloat16()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
