# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check tells which of the shared operations differ between the two sides, by one bit in one result,
whether a rollout writes and reads its KV cache as the trainer does, and whether both choose a token's experts alike."""

import math
from dataclasses import replace

import pytest
import torch

from jetrl_verl import formats, kernels
from jetrl_verl.formats.caches import _unwritten
from jetrl_verl.kernels import native
from jetrl_verl.kernels.decode_attention import choose_cluster, native_is_best_for_decode_attention_bf16
from jetrl_verl.models.families.base import Routing
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.sync.contract import ContractReceiver, ContractViolation, LiveTensor, Manifest, with_contract
from jetrl_verl.sync.operations_probe import _mixture_inputs, _places, stated_operations

CPU = torch.device("cpu")
NORM = torch.ones(8, dtype=torch.bfloat16)
OPERATIONS = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_quantize_1x128",
    "add_rms_norm_quantize_1x128",
    "rotary",
    "norm_rotary",
    "silu_mul",
    "silu_mul_quantize",
    "attention",
    "logits",
    "log_probs",
)


DECODES = {"bf16": "attention over a BF16 KV cache", "fp8": "attention over an FP8 KV cache"}
"""Cache -> what decode steps over it are called."""


@pytest.fixture(scope="module")
def sums() -> dict[str, int]:
    return stated_operations(CPU, "shared")


def verify(trainer: dict[str, int], rollout: dict[str, int], routings=(None, None)) -> dict:
    """The check on a model of one norm, between sides that state these sums and these choices of experts."""
    live = {"norm": LiveTensor(NORM, None, slice(0, 8), slice(0, 1), (8, 1))}
    receiver = ContractReceiver()
    stated = dict(scale_rule="fp32", probe=1, operations=trainer, routing=routings[0])
    receiver.take(list(with_contract([("norm", NORM)], **stated)))
    return receiver.verify(live, scale_rule="fp32", probe=1, operations=rollout, routing=routings[1])


def test_every_operation_is_stated(sums):
    assert tuple(sums) == (*OPERATIONS, DECODES["bf16"])
    assert stated_operations(CPU, "shared") == sums and stated_operations(CPU, "stock") == {}
    assert sums[DECODES["bf16"]] == sums["attention"]
    assert Manifest.from_tensor(Manifest("fp32", 1, sums).to_tensor()).operations == sums
    assert verify(sums, sums)["plain"] == 1
    assert verify({}, {})["plain"] == 1


def with_a_flipped_bit(found):
    if isinstance(found, QuantizedTensor):
        return QuantizedTensor(found.qdata, with_a_flipped_bit(found.scales), found.source, found.colwise)
    if isinstance(found, tuple):
        *others, last = found
        if isinstance(found[0], QuantizedTensor):  # beside it the residual sum, or colwise data nobody asked for
            return with_a_flipped_bit(found[0]), *found[1:]
        return *others, with_a_flipped_bit(last)
    found = found.clone()
    found.view(-1).view(torch.uint8)[-1] ^= 1
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_bit_in_one_operation_is_named_and_no_other(monkeypatch, sums, operation):
    stock = getattr(kernels, operation)

    monkeypatch.setattr(kernels, operation, lambda *inputs, **options: with_a_flipped_bit(stock(*inputs, **options)))
    other = stated_operations(CPU, "shared")
    # Over a BF16 cache the trainer's is the same attention.
    names = f"attention, {DECODES['bf16']}" if operation == "attention" else operation
    for trainer, rollout in ((sums, other), (other, sums)):
        with pytest.raises(ContractViolation, match=f"contract check: {names} of the shared operations differ"):
            verify(trainer, rollout)


def test_a_side_that_does_not_share_is_told_by_every_operation(sums):
    for trainer, rollout in ((sums, {}), ({}, sums)):
        with pytest.raises(ContractViolation, match=", ".join(sorted(sums))):
            verify(trainer, rollout)


# --- a rollout's KV cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", formats.CACHES)
def test_a_rollout_states_what_its_cache_gives_as_the_trainer_does(sums, cache):
    trainer, rollout = (stated_operations(CPU, "shared", cache, rollout=side) for side in (False, True))
    assert trainer == rollout and tuple(trainer) == (*OPERATIONS, DECODES[cache])
    assert verify(trainer, rollout)["plain"] == 1
    assert stated_operations(CPU, "stock", cache, rollout=True) == {}
    # Rounding keys and values is seen, and nothing else is another number.
    differ = {name for name in OPERATIONS if trainer[name] != sums[name]}
    assert differ == (set() if cache == "bf16" else {"norm_rotary"})
    assert cache == "bf16" or trainer[DECODES[cache]] != sums["attention"]


def test_another_cache_on_one_side_is_told(sums):
    found = stated_operations(CPU, "shared", "fp8", rollout=True)
    with pytest.raises(ContractViolation, match=", ".join((*DECODES.values(), "norm_rotary of the shared"))):
        verify(sums, found)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """Two tokens have each other's."""
    return x[[1, 0, *range(2, len(x))]]


def faulty_write(fault: str, run):
    """A launch of queries, keys, values, parameters, pages and slots."""

    def write(q, k, v, *others):
        pages, slots = others[5:-1], others[-1]
        others = (*others[:5], *pages)
        if fault == "values of two tokens are exchanged":
            return run(q, k, exchanged(v), *others, slots)
        if fault == "keys are not normed":
            written = run(q, k, v, *others, slots)
            run(q, k, v, others[0], 2 * others[1], *others[2:], slots)
            return written
        if fault == "a token is not stored":
            return run(q, k, v, *others, slots.clone().index_fill_(0, torch.tensor([7]), -1))
        if fault == "a token is in its neighbour's slot":
            return run(q, k, v, *others, exchanged(slots))
        written = run(q, k, v, *others, slots)
        if fault == "queries are off by a bit":
            return with_a_flipped_bit(written)
        assert fault == "a scale is off by a power of two"
        # Of token 0's first head; what is no scale of keys is one of values.
        page, unit_row = slots[0] // 16, slots[0] % 16
        pages[0][page, 0, 0, 16 * 128 + unit_row] += 1
        return written

    return write


FAULTS_OF_WRITE = (
    "values of two tokens are exchanged",
    "keys are not normed",
    "a token is not stored",
    "a token is in its neighbour's slot",
    "queries are off by a bit",
)


@pytest.mark.parametrize(
    ("cache", "fault"),
    [(cache, fault) for cache in formats.CACHES for fault in FAULTS_OF_WRITE]
    + [("fp8", "a scale is off by a power of two")],
)
def test_a_fault_in_the_write_behind_the_norm_is_named(monkeypatch, cache, fault):
    trainer = stated_operations(CPU, "shared", cache)
    name = {"bf16": "norm_rotary_write", "fp8": "norm_rotary_write_fp8"}[cache]
    monkeypatch.setattr(kernels, name, faulty_write(fault, getattr(kernels, name)))
    with pytest.raises(ContractViolation, match="contract check: norm_rotary of the shared operations differ"):
        verify(trainer, stated_operations(CPU, "shared", cache, rollout=True))


@pytest.mark.parametrize("cache", formats.CACHES)
@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_fault_in_the_write_of_another_family_is_named(monkeypatch, cache, which):
    """Which has no norm in front of it."""
    trainer, name = stated_operations(CPU, "shared", cache), {"bf16": "write_pages", "fp8": "write_kv"}[cache]
    stock = getattr(kernels, name)

    def write(k, v, *others):
        stock(*((exchanged(k), v) if which == "keys" else (k, exchanged(v))), *others)

    monkeypatch.setattr(kernels, name, write)
    with pytest.raises(ContractViolation, match=f"contract check: {DECODES[cache]} of the shared operations differ"):
        verify(trainer, stated_operations(CPU, "shared", cache, rollout=True))


def faulty_decode(fault: str, run):
    """A decode step of queries, pages, lengths, a table and a scale."""

    def decode(q, *others):
        *pages, lengths, table, scale = others
        if fault == "the scale is off":
            return run(q, *pages, lengths, table, 1.01 * scale)
        if fault == "the last token is ignored":
            return run(q, *pages, (lengths - 1).clamp(min=1), table, scale)
        if fault == "a token behind the last is not":
            return run(q, *pages, lengths + 1, table, scale)
        if fault == "a page is another":
            return run(q, *pages, lengths, table.roll(1, dims=1), scale)
        if fault == "results of two requests are exchanged":
            found = run(q, *pages, lengths, table, scale)
            return exchanged(found) if len(q) > 1 else found
        few = {"one request alone is wrong": len(q) == 1, "many requests are wrong": len(q) > 64}[fault]
        found = run(q, *pages, lengths, table, scale)
        return with_a_flipped_bit(found) if few else found

    return decode


@pytest.mark.parametrize("cache", formats.CACHES)
@pytest.mark.parametrize(
    "fault",
    [
        "the scale is off",
        "the last token is ignored",
        "a token behind the last is not",
        "a page is another",
        "results of two requests are exchanged",
        "one request alone is wrong",
        "many requests are wrong",
    ],
)
def test_a_fault_in_decode_is_named(monkeypatch, cache, fault):
    trainer = stated_operations(CPU, "shared", cache)
    name = {"bf16": "decode_attention_bf16", "fp8": "decode_attention"}[cache]
    monkeypatch.setattr(kernels, name, faulty_decode(fault, getattr(kernels, name)))
    with pytest.raises(ContractViolation, match=f"contract check: {DECODES[cache]} of the shared operations differ"):
        verify(trainer, stated_operations(CPU, "shared", cache, rollout=True))


def test_decode_steps_have_every_token_once_and_by_every_number_of_thread_blocks():
    steps = _places(CPU).steps
    assert torch.equal(torch.cat([step.tokens for step in steps]).sort().values, torch.arange(155))
    for multiprocessors in (114, 132):  # of an H100 on PCIe, and of the others
        assert [choose_cluster(2 * len(step.tokens), multiprocessors) for step in steps] == [8, 4, 2, 1]
    # In each step there are requests of more than one block of keys.
    assert all((step.lengths > 128).any() for step in steps)
    assert all(step.table.is_contiguous() and step.table.dtype == step.lengths.dtype == torch.int32 for step in steps)


def test_pages_are_those_that_the_native_kernel_computes(monkeypatch):
    """Where there is one; elsewhere FlashAttention 3 decodes, in front of which what nobody has written is a number."""
    monkeypatch.setattr(native, "unavailable", lambda: None)
    calls, stock = [], kernels.decode_attention_bf16

    def decode(q, *call):
        calls.append(native_is_best_for_decode_attention_bf16(q, *call, torch.empty_like(q)))
        return stock(q, *call)

    monkeypatch.setattr(kernels, "decode_attention_bf16", decode)
    stated_operations(CPU, "shared", rollout=True)
    assert calls == [True] * 4
    assert math.isnan(_unwritten(CPU)) and math.isnan(_unwritten(torch.device("cuda")))
    monkeypatch.setattr(native, "unavailable", lambda: "it is not built")
    assert math.isnan(_unwritten(CPU)) and math.isfinite(_unwritten(torch.device("cuda")))


# --- mixtures of experts ---------------------------------------------------------------------------------------------

ROUTING = Routing(8, 2, "softmax", True)
OF_MIXTURES = ("route", "experts", "combine", "combine_add_rms_norm", "combine_add_rms_norm_quantize_1x128")


def mixture_sums() -> dict[str, int]:
    stated = stated_operations(CPU, "shared", mixture=True)
    return {name: stated[name] for name in OF_MIXTURES}


def test_a_mixtures_operations_are_stated_beside_the_others(sums):
    stated = stated_operations(CPU, "shared", mixture=True)
    assert {name: stated[name] for name in sums} == sums and tuple(stated) == (*sums, *OF_MIXTURES)
    assert stated_operations(CPU, "stock", mixture=True) == {}
    assert verify(stated, stated, (ROUTING, ROUTING))["plain"] == 1


@pytest.mark.parametrize("operation", OF_MIXTURES)
def test_a_bit_in_one_operation_of_a_mixture_is_named(monkeypatch, operation):
    ours = mixture_sums()
    owner = formats.get("fp8") if operation == "experts" else kernels
    stock = getattr(owner, operation)

    def flipped(*inputs, **options):
        found = stock(*inputs, **options)
        return (with_a_flipped_bit(found[0]), *found[1:]) if operation == "experts" else with_a_flipped_bit(found)

    monkeypatch.setattr(owner, operation, flipped)
    other = mixture_sums()
    # The experts begin with the choice and end with the combination.
    names = {"combine": "combine, experts", "route": "experts, route"}.get(operation, operation)
    with pytest.raises(ContractViolation, match=f"contract check: {names} of the shared operations differ"):
        verify(ours, other)


def test_what_a_mixture_is_asked_with_tells_orders_apart(monkeypatch):
    """Equal logits go to the lowest number, an expert has no token, counts are ragged, the sum depends on its order."""
    inputs = _mixture_inputs(CPU)
    counts = kernels.route(inputs.logits, 3, True)[0].flatten().long().bincount(minlength=6)
    assert counts[2] == 0 and len(set(counts.tolist())) > 3 and (counts[[0, 1, 3, 4, 5]] % 128 != 0).all()
    ours = mixture_sums()

    def highest_number_first(logits, k, renormalize):
        experts, weights = route(logits.flip(1), k, renormalize)
        return logits.shape[1] - 1 - experts, weights

    route, combine = kernels.route, kernels.combine
    monkeypatch.setattr(kernels, "route", highest_number_first)
    assert mixture_sums()["route"] != ours["route"]
    monkeypatch.setattr(kernels, "route", route)
    monkeypatch.setattr(kernels, "combine", lambda y, row: combine(y, row[:, [0, 2, 1]].contiguous()))
    assert mixture_sums()["combine"] != ours["combine"]


@pytest.mark.parametrize(
    "change", [dict(experts=16), dict(per_token=4), dict(scoring="sigmoid"), dict(renormalize=False)]
)
def test_another_choice_of_experts_is_found(change):
    other = replace(ROUTING, **change)
    for routings in ((ROUTING, other), (other, ROUTING)):
        with pytest.raises(ContractViolation) as raised:
            verify({}, {}, routings)
        assert f"the trainer has {routings[0]}, the rollout {routings[1]}. " in str(raised.value)


def test_a_mixture_beside_a_dense_model_is_found():
    with pytest.raises(ContractViolation, match="the trainer has no mixture of experts, the rollout 2 of 8 experts"):
        verify({}, {}, (None, ROUTING))
