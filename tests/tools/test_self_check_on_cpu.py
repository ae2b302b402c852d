# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor's self-check reports wrong results, and GPU kernels support its calls.

tests/kernels runs it with the native kernels on the emulator and with Triton's interpreter."""

from copy import deepcopy
from functools import partial

import pytest
import torch

from jetrl_verl.kernels import dispatch, native
from jetrl_verl.kernels.dispatch import Implementation
from jetrl_verl.tools.doctor import self_check

CPU = torch.device("cpu")
CALLS = self_check.calls()
of_every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)


def plant(monkeypatch, call: self_check.Call, run, supports=None) -> None:
    """Add a CPU backend for the call's operation, next to the reference."""
    monkeypatch.setitem(dispatch.OPERATIONS[call.operation].backends, "cpu", ("planted", "reference"))
    monkeypatch.setitem(dispatch._implementations, (call.operation, "planted"), Implementation(run, supports))


def of(call: self_check.Call) -> str:
    """The self-check's error for the planted backend's result of ``call``."""
    (outcome,) = self_check._of_call(call, CPU)
    assert outcome[:3] == (call.subject, call.name, "planted")
    return outcome.error


def test_the_reference_alone_has_no_outcome():
    assert self_check.outcomes(CPU) == []


@of_every_call
def test_one_wrong_number_in_any_tensor_is_reported(call, monkeypatch):
    right = dispatch.implementation(call.operation, "reference")
    tensors = len(self_check._tensors(right(*call.arguments)))
    plant(monkeypatch, call, right)
    assert of(call) == ""

    def run(wrong: int, *arguments, **options):
        result = right(*deepcopy(arguments), **options)  # the result may be a view of an argument
        tensor = self_check._tensors(result)[wrong]
        last = tuple(size - 1 for size in tensor.shape)
        tensor[last] = 1 if tensor[last] == 0 else 0
        return result

    for wrong in range(tensors):
        plant(monkeypatch, call, partial(run, wrong))
        assert of(call).startswith("1 of ") and of(call).endswith("numbers are not the reference's")


def test_a_wrong_shape_and_an_error_are_reported(monkeypatch):
    call = CALLS[0]
    plant(monkeypatch, call, lambda *_, **__: torch.zeros(3))
    assert of(call) == "shapes [(3,)] where the reference has [(200, 256)]"

    def fail(*_, **__):
        raise RuntimeError("no kernel image\nand a long trace")

    plant(monkeypatch, call, fail)
    assert of(call) == "RuntimeError: no kernel image"


def test_an_unavailable_or_unsupporting_backend_is_not_called(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("called")

    plant(monkeypatch, CALLS[0], fail, supports=lambda *_, **__: False)
    assert self_check.outcomes(CPU) == []
    plant(monkeypatch, CALLS[0], fail)
    for reason in (lambda: "no such GPU", fail):
        monkeypatch.setitem(dispatch._unavailable, "planted", reason)
        assert self_check.outcomes(CPU) == []


@of_every_call
def test_every_native_kernel_supports_its_call(call, monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: None)
    if "native" in dispatch.OPERATIONS[call.operation].backends["sm90"]:
        assert dispatch.supports(call.operation, "native", *call.arguments)


def test_every_exact_operation_of_a_mixture_is_checked():
    mixture = {
        name for name in dispatch.OPERATIONS if name.startswith(("route", "segments", "gather_", "grouped_", "combine"))
    }
    exact = {name for name in mixture if "norm" not in name}
    assert {call.operation for call in CALLS if call.subject == self_check.MIXTURES} == exact
    many, few = (call.arguments[0].qdata.shape[0] for call in CALLS if call.operation == "grouped_gemm_nt")
    assert few <= 3 * native.FEW_ROWS_OF_EXPERT < many
