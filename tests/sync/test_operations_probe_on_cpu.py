# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract check names each shared operation that differs by one bit between trainer and rollout, and
faults in writes and reads of the KV cache."""

import math
from functools import partial

import pytest
import torch
from streams import receiver_of

from jetrl_verl import formats, kernels
from jetrl_verl.formats.caches import _unwritten
from jetrl_verl.kernels import dispatch, native
from jetrl_verl.kernels.decode_attention import choose_cluster, native_decode_attention_bf16
from jetrl_verl.kernels.probe_inputs import Variant, mixture_inputs
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.sync.contract import LiveTensor
from jetrl_verl.sync.operations_probe import _places, stated_operations
from jetrl_verl.sync.statement import ContractViolation, Manifest

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
    "sigmoid_mul",
    "sigmoid_mul_quantize",
    "gated_rms_norm",
    "gated_rms_norm_quantize",
    "attention",
    "logits",
    "log_probs",
)
DECODES = {"bf16": "attention over a BF16 KV cache", "fp8": "attention over an FP8 KV cache"}
"""Cache -> name of the decode steps over it."""


@pytest.fixture(scope="module")
def sums() -> dict[str, int]:
    return stated_operations(CPU, "shared")


def verify(trainer: dict[str, int], rollout: dict[str, int]) -> dict:
    """The check on a model of one norm, between sides that state these sums."""
    live = {"norm": LiveTensor(NORM, (slice(0, 8),), slice(0, 1), (8, 1))}
    receiver = receiver_of([("norm", NORM)], scale_rule="fp32", probe=1, operations=trainer)
    return receiver.verify(live, scale_rule="fp32", probe=1, operations=rollout)


def test_every_shared_operation_is_stated(sums):
    assert set(sums) == {*OPERATIONS, DECODES["bf16"]}
    assert stated_operations(CPU, "shared") == sums and stated_operations(CPU, "stock") == {}
    assert sums[DECODES["bf16"]] == sums["attention"]
    assert Manifest.from_tensor(Manifest("fp32", 1, sums).to_tensor()).operations == sums
    assert verify(sums, sums)["plain"] == 1
    assert verify({}, {})["plain"] == 1


def with_a_flipped_bit(output):
    """In each floating-point tensor of an output, of quantized ones in the scales."""
    if isinstance(output, QuantizedTensor):
        return QuantizedTensor(output.qdata, with_a_flipped_bit(output.scales))
    if isinstance(output, tuple):
        return tuple(map(with_a_flipped_bit, output))
    if output is None or not output.is_floating_point() or not output.numel():
        return output
    output = output.clone()
    output.view(-1).view(torch.uint8)[-1] ^= 1
    return output


def replace_backend(monkeypatch, operation: str, change) -> None:
    """Compute ``operation`` on the CPU by ``change`` of its function."""
    stock = dispatch.implementation(operation, "reference")
    changed = dispatch.Implementation(change(stock))
    monkeypatch.setitem(dispatch._implementations, (operation, "reference"), changed)


def flip_a_bit(stock):
    return lambda *inputs: with_a_flipped_bit(stock(*inputs))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_flipped_bit_names_its_operation_alone(monkeypatch, sums, operation):
    replace_backend(monkeypatch, operation, flip_a_bit)
    other = stated_operations(CPU, "shared")
    # A BF16 cache is stated by the trainer's attention.
    names = f"attention, {DECODES['bf16']}" if operation == "attention" else operation
    for trainer, rollout in ((sums, other), (other, sums)):
        with pytest.raises(ContractViolation, match=f"contract check: {names} of the shared operations differ"):
            verify(trainer, rollout)


def test_a_side_with_stock_operations_differs_in_every_operation(sums):
    for trainer, rollout in ((sums, {}), ({}, sums)):
        with pytest.raises(ContractViolation, match=", ".join(sorted(sums))):
            verify(trainer, rollout)


# --- a rollout's KV cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [Variant(64, 64), Variant(256, 64), Variant(unit_offset=True)])
def test_heads_and_norms_of_the_model_are_probed(sums, variant):
    trainer, rollout = (stated_operations(CPU, "shared", rollout=side, variant=variant) for side in (False, True))
    of_heads = {"attention", DECODES["bf16"], "rotary"}
    norms = {name for name in OPERATIONS if "rms_norm" in name and "gated" not in name}
    differ = norms if variant.unit_offset else of_heads
    assert trainer == rollout and {name for name in sums if sums[name] != trainer[name]} == differ | {"norm_rotary"}


@pytest.mark.parametrize("cache", formats.CACHES)
def test_trainer_and_rollout_state_the_same_sums_for_a_cache(sums, cache):
    trainer, rollout = (stated_operations(CPU, "shared", cache, rollout=side) for side in (False, True))
    assert trainer == rollout and set(trainer) == {*OPERATIONS, DECODES[cache]}
    assert verify(trainer, rollout)["plain"] == 1
    assert stated_operations(CPU, "stock", cache, rollout=True) == {}
    # Rounding keys and values changes these sums alone.
    differ = {name for name in OPERATIONS if trainer[name] != sums[name]}
    assert differ == (set() if cache == "bf16" else {"norm_rotary"})
    assert cache == "bf16" or trainer[DECODES[cache]] != sums["attention"]


def test_another_cache_on_one_side_is_named(sums):
    with pytest.raises(ContractViolation, match=", ".join((*DECODES.values(), "norm_rotary of the shared"))):
        verify(sums, stated_operations(CPU, "shared", "fp8", rollout=True))


def swapped(x: torch.Tensor) -> torch.Tensor:
    """Rows of the first two tokens swapped."""
    return x[[1, 0, *range(2, len(x))]]


def write_of_other_keys(run, q, k, v, *others):
    written = run(q, k, v, *others)
    run(q, k, v, others[0], 2 * others[1], *others[2:])
    return written


def write_of_another_scale(run, q, k, v, *others):
    written = run(q, k, v, *others)
    pages, slots = others[6], others[-1]
    pages[slots[0] // 16, 0, 0, 16 * 128 + slots[0] % 16] += 1  # of token 0's first head
    return written


FAULTS_OF_WRITE = {
    "values of two tokens are swapped": lambda run, q, k, v, *others: run(q, k, swapped(v), *others),
    "keys are not normed": write_of_other_keys,
    "a token is not stored": lambda run, *call: run(*call[:-1], call[-1].clone().index_fill_(0, torch.tensor([7]), -1)),
    "a token is in its neighbour's slot": lambda run, *call: run(*call[:-1], swapped(call[-1])),
    "queries are off by a bit": lambda run, *call: with_a_flipped_bit(run(*call)),
    "a scale is off by a power of two": write_of_another_scale,
}
"""Write with a fault, by the right ``run`` of queries, keys, values, six parameters, pages and slots."""


@pytest.mark.parametrize(
    ("cache", "fault"), [(c, f) for c in formats.CACHES for f in FAULTS_OF_WRITE if c == "fp8" or "scale" not in f]
)
def test_a_fault_in_the_cache_write_after_the_norm_is_named(monkeypatch, cache, fault):
    trainer = stated_operations(CPU, "shared", cache)
    name = {"bf16": "norm_rotary_write", "fp8": "norm_rotary_write_fp8"}[cache]
    monkeypatch.setattr(kernels, name, partial(FAULTS_OF_WRITE[fault], getattr(kernels, name)))
    with pytest.raises(ContractViolation, match="contract check: norm_rotary of the shared operations differ"):
        verify(trainer, stated_operations(CPU, "shared", cache, rollout=True))


@pytest.mark.parametrize("cache", formats.CACHES)
@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_fault_in_the_cache_write_without_a_norm_is_named(monkeypatch, cache, which):
    trainer, name = stated_operations(CPU, "shared", cache), {"bf16": "write_pages", "fp8": "write_kv"}[cache]
    stock = getattr(kernels, name)

    def write(k, v, *others):
        stock(*((swapped(k), v) if which == "keys" else (k, swapped(v))), *others)

    monkeypatch.setattr(kernels, name, write)
    with pytest.raises(ContractViolation, match=f"contract check: {DECODES[cache]} of the shared operations differ"):
        verify(trainer, stated_operations(CPU, "shared", cache, rollout=True))


FAULTS_OF_DECODE = {
    "the scale is off": lambda run, *call: run(*call[:-1], 1.01 * call[-1]),
    "the last token is ignored": lambda run, *call: run(*call[:-3], (call[-3] - 1).clamp(min=1), *call[-2:]),
    "a token after the last is read": lambda run, *call: run(*call[:-3], call[-3] + 1, *call[-2:]),
    "pages are rotated": lambda run, *call: run(*call[:-2], call[-2].roll(1, dims=1), call[-1]),
    "results of two requests are swapped": lambda run, q, *o: swapped(run(q, *o)) if len(q) > 1 else run(q, *o),
    "one request alone is wrong": lambda run, q, *o: with_a_flipped_bit(run(q, *o)) if len(q) == 1 else run(q, *o),
    "many requests are wrong": lambda run, q, *o: with_a_flipped_bit(run(q, *o)) if len(q) > 64 else run(q, *o),
}
"""Decode with a fault, by the right ``run`` of queries, pages, lengths, a table and a scale."""


@pytest.mark.parametrize("cache", formats.CACHES)
@pytest.mark.parametrize("fault", FAULTS_OF_DECODE)
def test_a_fault_in_decode_is_named(monkeypatch, cache, fault):
    trainer = stated_operations(CPU, "shared", cache)
    name = {"bf16": "decode_attention_bf16", "fp8": "decode_attention"}[cache]
    monkeypatch.setattr(kernels, name, partial(FAULTS_OF_DECODE[fault], getattr(kernels, name)))
    with pytest.raises(ContractViolation, match=f"contract check: {DECODES[cache]} of the shared operations differ"):
        verify(trainer, stated_operations(CPU, "shared", cache, rollout=True))


def test_decode_steps_cover_every_token_once_and_every_cluster_size():
    steps = _places(CPU).steps
    assert torch.equal(torch.cat([step.tokens for step in steps]).sort().values, torch.arange(155))
    for multiprocessors in (114, 132):  # H100 PCIe, other H100s
        assert [choose_cluster(2 * len(step.tokens), multiprocessors) for step in steps] == [8, 4, 2, 1]
    # Each step has requests of more than one block of keys.
    assert all((step.lengths > 128).any() for step in steps)
    assert all(step.table.is_contiguous() and step.table.dtype == step.lengths.dtype == torch.int32 for step in steps)


def test_the_native_kernel_computes_the_probes_pages_where_it_is_built(monkeypatch):
    """Elsewhere FlashAttention 3 decodes, which needs finite numbers in slots that are not written."""
    monkeypatch.setattr(native, "unavailable", lambda: None)
    calls, stock = [], kernels.decode_attention_bf16

    def decode(q, *call):
        with monkeypatch.context() as on_hopper:
            on_hopper.setattr(dispatch, "platform_of", lambda device: "sm90")
            run = dispatch.lookup("decode_attention_bf16", CPU, q, *call, torch.empty_like(q))
        calls.append(run is native_decode_attention_bf16)
        return stock(q, *call)

    monkeypatch.setattr(kernels, "decode_attention_bf16", decode)
    stated_operations(CPU, "shared", rollout=True)
    assert calls == [True] * 4
    gpu = torch.device("cuda")
    assert math.isnan(_unwritten(CPU, 64)) and math.isnan(_unwritten(gpu, 128)) and math.isfinite(_unwritten(gpu, 64))
    monkeypatch.setattr(native, "unavailable", lambda: "it is not built")
    assert math.isnan(_unwritten(CPU, 128)) and math.isfinite(_unwritten(gpu, 128))


# --- gated delta nets -------------------------------------------------------------------------------------------------

DELTA_NET = Variant(delta_net=True)
OF_DELTA_NETS = ("causal_conv1d", "gated_delta_rule")


def with_both_ends_flipped(stock):
    """The last row of an update is a padded request's, which is not compared."""

    def both_ends(rows):
        return with_a_flipped_bit(with_a_flipped_bit(rows).flip(0)).flip(0)

    def run(*call):
        output = stock(*call)
        if output is None:  # the last argument is written in place
            call[-1].copy_(both_ends(call[-1]))
            return None
        return both_ends(output) if isinstance(output, torch.Tensor) else with_a_flipped_bit(output)

    return run


def test_both_sides_of_a_gated_delta_net_state_the_same_sums(sums):
    trainer, rollout = (stated_operations(CPU, "shared", rollout=side, variant=DELTA_NET) for side in (False, True))
    assert trainer == rollout and set(trainer) == {*sums, *OF_DELTA_NETS}


@pytest.mark.parametrize("operation", [*OF_DELTA_NETS, "causal_conv1d_update", "gated_delta_rule_update"])
def test_a_flipped_bit_in_an_operation_of_a_gated_delta_net_is_named(monkeypatch, operation):
    sums = stated_operations(CPU, "shared", variant=DELTA_NET)
    replace_backend(monkeypatch, operation, with_both_ends_flipped)
    other = stated_operations(CPU, "shared", variant=DELTA_NET, rollout=operation.endswith("_update"))
    with pytest.raises(ContractViolation, match=f"contract check: {operation.removesuffix('_update')} of the shared"):
        verify(sums, other)


# --- mixtures of experts ---------------------------------------------------------------------------------------------

OF_NORMED_SUMS = ("combine_add_rms_norm", "combine_add_rms_norm_quantize_1x128")
OF_MIXTURES = ("route", "experts", "combine", "add_shared_expert", *OF_NORMED_SUMS)


def mixture_sums() -> dict[str, int]:
    stated = stated_operations(CPU, "shared", mixture="fp8")
    return {name: stated[name] for name in OF_MIXTURES}


def test_operations_of_a_mixture_are_added_to_the_others(sums):
    stated = stated_operations(CPU, "shared", mixture="fp8")
    assert {name: stated[name] for name in sums} == sums and set(stated) == {*sums, *OF_MIXTURES}
    assert stated_operations(CPU, "stock", mixture="fp8") == {}
    assert verify(stated, stated)["plain"] == 1


@pytest.mark.parametrize("operation", OF_MIXTURES)
def test_a_flipped_bit_in_an_operation_of_a_mixture_is_named(monkeypatch, operation):
    sums = mixture_sums()
    if operation == "experts":
        flow = formats.get("fp8")
        stock = flow.experts
        monkeypatch.setattr(flow, operation, lambda *call: (with_a_flipped_bit(stock(*call)[0]),))
    else:
        replace_backend(monkeypatch, operation, flip_a_bit)
    other = mixture_sums()
    # ``experts`` calls ``route`` and ``combine``.
    names = {"combine": "combine, experts", "route": "experts, route"}.get(operation, operation)
    with pytest.raises(ContractViolation, match=f"contract check: {names} of the shared operations differ"):
        verify(sums, other)


def test_inputs_of_the_mixture_probe_distinguish_orders(monkeypatch):
    """Ties go to the lowest index, one expert has no token, counts are ragged, the sum depends on its order."""
    inputs = mixture_inputs(CPU)
    counts = kernels.route(inputs.logits, 3, True)[0].flatten().long().bincount(minlength=6)
    assert counts[2] == 0 and len(set(counts.tolist())) > 3 and (counts[[0, 1, 3, 4, 5]] % 128 != 0).all()
    sums = mixture_sums()

    def highest_number_first(stock):
        def route(logits, k, renormalize):
            experts, weights = stock(logits.flip(1), k, renormalize)
            return logits.shape[1] - 1 - experts, weights

        return route

    with monkeypatch.context() as changed:
        replace_backend(changed, "route", highest_number_first)
        assert mixture_sums()["route"] != sums["route"]
    replace_backend(monkeypatch, "combine", lambda stock: lambda y, row: stock(y, row[:, [0, 2, 1]].contiguous()))
    assert mixture_sums()["combine"] != sums["combine"]
