# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The contract check tells which of the shared operations differ between the two sides, by one bit in one result."""

import pytest
import torch

from jetrl_verl import ops
from jetrl_verl.observe.contract import ContractReceiver, ContractViolation, LiveTensor, Manifest, with_contract
from jetrl_verl.observe.operations_probe import operation_sums, stated_operations

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
    stock = getattr(ops, operation)

    def with_a_flipped_bit(found):
        if isinstance(found, tuple):
            *others, last = found
            if last is None:  # columns that nobody asked for
                return *others[:-1], with_a_flipped_bit(others[-1]), last
            changed = (*others, with_a_flipped_bit(last))
            return type(found)(*changed) if hasattr(found, "_fields") else changed
        found = found.clone()
        found.view(-1).view(torch.uint8)[-1] ^= 1
        return found

    monkeypatch.setattr(ops, operation, lambda *inputs, **options: with_a_flipped_bit(stock(*inputs, **options)))
    other = operation_sums(CPU)
    for trainer, rollout in ((sums, other), (other, sums)):
        with pytest.raises(ContractViolation, match=f"contract check: {operation} of the shared operations differ"):
            verify(trainer, rollout)


def test_a_side_that_does_not_share_is_told_by_every_operation(sums):
    for trainer, rollout in ((sums, {}), ({}, sums)):
        with pytest.raises(ContractViolation, match=", ".join(sorted(OPERATIONS))):
            verify(trainer, rollout)
