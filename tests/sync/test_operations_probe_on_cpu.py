# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check tells which of the shared operations differ between the two sides, by one bit in one result, and
whether both choose a token's experts alike."""

from dataclasses import replace

import pytest
import torch

from jetrl_verl import formats, kernels
from jetrl_verl.models.families.base import Routing
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.sync.contract import ContractReceiver, ContractViolation, LiveTensor, Manifest, with_contract
from jetrl_verl.sync.operations_probe import (
    _mixture_inputs,
    heads_written,
    mixture_sums,
    operation_sums,
    stated_operations,
    token_by_token,
)

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


@pytest.fixture(scope="module")
def sums() -> dict[str, int]:
    return operation_sums(CPU)


def verify(trainer: dict[str, int], rollout: dict[str, int], routings=(None, None)) -> dict:
    """The check on a model of one norm, between sides that state these sums and these choices of experts."""
    live = {"norm": LiveTensor(NORM, None, slice(0, 8), slice(0, 1), (8, 1))}
    receiver = ContractReceiver()
    stated = dict(scale_rule="fp32", probe=1, operations=trainer, routing=routings[0])
    receiver.take(list(with_contract([("norm", NORM)], **stated)))
    return receiver.verify(live, scale_rule="fp32", probe=1, operations=rollout, routing=routings[1])


def test_every_operation_is_stated(sums):
    assert tuple(sums) == OPERATIONS
    assert stated_operations(CPU, "shared") == sums and stated_operations(CPU, "stock") == {}
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
    other = operation_sums(CPU)
    for trainer, rollout in ((sums, other), (other, sums)):
        with pytest.raises(ContractViolation, match=f"contract check: {operation} of the shared operations differ"):
            verify(trainer, rollout)


def test_a_side_that_does_not_share_is_told_by_every_operation(sums):
    for trainer, rollout in ((sums, {}), ({}, sums)):
        with pytest.raises(ContractViolation, match=", ".join(sorted(OPERATIONS))):
            verify(trainer, rollout)


@pytest.mark.parametrize("part", ["queries", "keys"])
def test_a_rollout_states_the_heads_that_it_writes_into_its_cache(monkeypatch, sums, part):
    assert stated_operations(CPU, "shared", rotate=heads_written) == sums
    stock = kernels.norm_rotary_write

    def changed(*operands):
        *others, keys, values, slots = operands
        q = stock(*others, keys, values, slots)
        if part == "keys":
            keys.view(torch.uint8)[0, 5] ^= 1
        return with_a_flipped_bit(q) if part == "queries" else q

    monkeypatch.setattr(kernels, "norm_rotary_write", changed)
    with pytest.raises(ContractViolation, match="contract check: norm_rotary of the shared operations differ"):
        verify(sums, stated_operations(CPU, "shared", rotate=heads_written))


def test_decode_from_an_fp8_cache_is_stated_as_the_trainers_attention_to_whole_sequences(sums):
    trainer = stated_operations(CPU, "shared", "fp8")
    rollout, held = stated_operations(CPU, "shared", "fp8", token_by_token), formats.kv_cache("fp8").contract
    assert trainer == rollout and set(trainer) - set(sums) == {held}
    assert trainer[held] != sums["attention"]
    assert stated_operations(CPU, "stock", "fp8") == {}
    with pytest.raises(ContractViolation, match=f"contract check: {held} of the shared operations differ"):
        verify(trainer, sums)


# --- mixtures of experts ---------------------------------------------------------------------------------------------

ROUTING = Routing(8, 2, "softmax", True)
OF_MIXTURES = ("route", "experts", "combine", "combine_add_rms_norm", "combine_add_rms_norm_quantize_1x128")


def test_a_mixtures_operations_are_stated_beside_the_others(sums):
    stated = stated_operations(CPU, "shared", mixture=True)
    assert stated == sums | mixture_sums(CPU) and tuple(mixture_sums(CPU)) == OF_MIXTURES
    assert stated_operations(CPU, "stock", mixture=True) == {}
    assert verify(stated, stated, (ROUTING, ROUTING))["plain"] == 1


@pytest.mark.parametrize("operation", OF_MIXTURES)
def test_a_bit_in_one_operation_of_a_mixture_is_named(monkeypatch, operation):
    ours = mixture_sums(CPU)
    owner = formats.get("fp8") if operation == "experts" else kernels
    stock = getattr(owner, operation)

    def flipped(*inputs, **options):
        found = stock(*inputs, **options)
        return (with_a_flipped_bit(found[0]), *found[1:]) if operation == "experts" else with_a_flipped_bit(found)

    monkeypatch.setattr(owner, operation, flipped)
    other = mixture_sums(CPU)
    # The experts begin with the choice and end with the combination.
    names = {"combine": "combine, experts", "route": "experts, route"}.get(operation, operation)
    with pytest.raises(ContractViolation, match=f"contract check: {names} of the shared operations differ"):
        verify(ours, other)


def test_what_a_mixture_is_asked_with_tells_orders_apart(monkeypatch):
    """Equal logits go to the lowest number, an expert has no token, counts are ragged, the sum depends on its order."""
    inputs = _mixture_inputs(CPU)
    counts = kernels.route(inputs.logits, 3, True)[0].flatten().long().bincount(minlength=6)
    assert counts[2] == 0 and len(set(counts.tolist())) > 3 and (counts[[0, 1, 3, 4, 5]] % 128 != 0).all()
    ours = mixture_sums(CPU)

    def highest_number_first(logits, k, renormalize):
        experts, weights = route(logits.flip(1), k, renormalize)
        return logits.shape[1] - 1 - experts, weights

    route, combine = kernels.route, kernels.combine
    monkeypatch.setattr(kernels, "route", highest_number_first)
    assert mixture_sums(CPU)["route"] != ours["route"]
    monkeypatch.setattr(kernels, "route", route)
    monkeypatch.setattr(kernels, "combine", lambda y, row: combine(y, row[:, [0, 2, 1]].contiguous()))
    assert mixture_sums(CPU)["combine"] != ours["combine"]


@pytest.mark.parametrize(
    "change", [dict(experts=16), dict(per_token=4), dict(scoring="sigmoid"), dict(renormalize=False)]
)
def test_another_choice_of_experts_is_found(change):
    other = replace(ROUTING, **change)
    for routings in ((ROUTING, other), (other, ROUTING)):
        with pytest.raises(ContractViolation) as raised:
            verify({}, {}, routings)
        assert f"the trainer has {routings[0]}, the rollout {routings[1]}; " in str(raised.value)


def test_a_mixture_beside_a_dense_model_is_found():
    with pytest.raises(ContractViolation, match="the trainer has no mixture of experts, the rollout 2 of 8 experts"):
        verify({}, {}, (None, ROUTING))
