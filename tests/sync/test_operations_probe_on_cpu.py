# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check tells which of the shared operations differ between the two sides, by one bit in one result."""

import pytest
import torch

from jetrl_verl import kernels
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.sync.contract import ContractReceiver, ContractViolation, LiveTensor, Manifest, with_contract
from jetrl_verl.sync.operations_probe import OF_THE_CACHE, operation_sums, stated_operations, token_by_token

CPU = torch.device("cpu")
NORM = torch.ones(8, dtype=torch.bfloat16)
OPERATIONS = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_quantize_1x128",
    "add_rms_norm_quantize_1x128",
    "rotary",
    "silu_mul",
    "silu_mul_quantize",
    "attention",
    "logits",
    "log_probs",
)


@pytest.fixture(scope="module")
def sums() -> dict[str, int]:
    return operation_sums(CPU)


def verify(trainer: dict[str, int], rollout: dict[str, int]) -> dict:
    """The check on a model of one norm, between sides that state these sums."""
    live = {"norm": LiveTensor(NORM, None, slice(0, 8), slice(0, 1), (8, 1))}
    receiver = ContractReceiver()
    receiver.take(list(with_contract([("norm", NORM)], scale_rule="fp32", probe=1, operations=trainer)))
    return receiver.verify(live, scale_rule="fp32", probe=1, operations=rollout)


def test_every_operation_is_stated(sums):
    assert tuple(sums) == OPERATIONS
    assert stated_operations(CPU, "shared") == sums and stated_operations(CPU, "stock") == {}
    assert Manifest.from_tensor(Manifest("fp32", 1, sums).to_tensor()).operations == sums
    assert verify(sums, sums)["plain"] == 1
    assert verify({}, {})["plain"] == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_bit_in_one_operation_is_named_and_no_other(monkeypatch, sums, operation):
    stock = getattr(kernels, operation)

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

    monkeypatch.setattr(kernels, operation, lambda *inputs, **options: with_a_flipped_bit(stock(*inputs, **options)))
    other = operation_sums(CPU)
    for trainer, rollout in ((sums, other), (other, sums)):
        with pytest.raises(ContractViolation, match=f"contract check: {operation} of the shared operations differ"):
            verify(trainer, rollout)


def test_a_side_that_does_not_share_is_told_by_every_operation(sums):
    for trainer, rollout in ((sums, {}), ({}, sums)):
        with pytest.raises(ContractViolation, match=", ".join(sorted(OPERATIONS))):
            verify(trainer, rollout)


def test_decode_from_an_fp8_cache_is_stated_as_the_trainers_attention_to_whole_sequences(sums):
    trainer = stated_operations(CPU, "shared", "fp8")
    rollout = stated_operations(CPU, "shared", "fp8", token_by_token)
    assert trainer == rollout and set(trainer) - set(sums) == {OF_THE_CACHE}
    assert trainer[OF_THE_CACHE] != sums["attention"]
    assert stated_operations(CPU, "stock", "fp8") == {}
    with pytest.raises(ContractViolation, match=f"contract check: {OF_THE_CACHE} of the shared operations differ"):
        verify(trainer, sums)
