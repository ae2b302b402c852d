# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Small tensors travel together and arrive as they were sent; sums taken together are those of each by itself."""

from dataclasses import replace

import pytest
import torch
from streams import apart

from jetrl_verl import formats, kernels
from jetrl_verl.formats.format import SCALE_SUFFIX
from jetrl_verl.formats.sums import element_sums, row_sums
from jetrl_verl.sync import contract, wire
from jetrl_verl.sync.contract import ContractReceiver, ContractViolation, LiveParameter, LiveTensor, with_contract
from jetrl_verl.sync.stacks import Stack, parts_of
from jetrl_verl.sync.wire import is_packed, packed, unpacked

ODD = {
    "a/bytes": torch.arange(13, dtype=torch.uint8),
    "model.norm.weight": torch.randn(7).bfloat16(),
    "scales": torch.randn(3, 5),
    "qdata": torch.randn(3, 5).to(torch.float8_e4m3fn),
    "sums": torch.tensor([[-(2**62)], [3]]),
    "a number": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
    "int8": torch.tensor([[-128, 127]], dtype=torch.int8),
    "every other": torch.arange(6).float()[::2],
}


def arrived(pieces) -> dict[str, torch.Tensor]:
    return dict(pair for name, whole in pieces for item in unpacked(name, whole) for pair in parts_of(*item))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def test_small_tensors_of_every_type_arrive_in_one_piece():
    pieces = list(packed(ODD.items()))
    ((name, whole),) = pieces
    assert is_packed(name) and whole.dtype == torch.uint8 and whole.numel() % 16 == 0
    found = arrived(pieces)
    assert found.keys() == ODD.keys()
    assert all(same(found[name], tensor) for name, tensor in ODD.items())


def test_large_tensors_pass_in_their_order_and_packs_are_bounded(monkeypatch):
    monkeypatch.setattr(wire, "_SMALL", 64)
    monkeypatch.setattr(wire, "_PACK_BYTES", 256)
    sent = [(f"t{i}", torch.full((100 if i % 5 == 0 else i % 7 + 1,), float(i))) for i in range(120)]
    pieces = list(packed(sent))
    assert [name for name, _ in pieces if not is_packed(name)] == [f"t{i}" for i in range(0, 120, 5)]
    packs = [whole for name, whole in pieces if is_packed(name)]
    assert 3 < len(packs) < 10 and all(256 - 16 < len(whole) <= 256 + 64 for whole in packs[:-1])
    assert all(same(arrived(pieces)[name], tensor) for name, tensor in sent)


def test_what_follows_a_large_tensor_of_any_length_begins_on_a_word():
    """As behind a manifest of many names, where bytes of a bucket follow each other."""
    odd = torch.arange(wire._SMALL + 3).to(torch.uint8)
    pieces = list(packed([("odd", odd), ("sums", torch.arange(5))]))
    assert [piece.nbytes % 16 for _, piece in pieces] == [0, 0]
    bucket, start, got = torch.cat([piece for _, piece in pieces]), 0, {}
    for name, piece in pieces:
        got |= dict(unpacked(name, bucket[start : start + piece.nbytes]))
        start += piece.nbytes
    assert torch.equal(got["odd"], odd) and torch.equal(got["sums"], torch.arange(5))


def test_a_stack_is_one_piece_in_bounds_and_one_weight_alone_has_none(monkeypatch):
    monkeypatch.setattr(wire, "_SMALL", 64)
    monkeypatch.setattr(wire, "_STACK_BYTES", 1024)
    rows = torch.arange(60 * 32, dtype=torch.float32).view(60, 32)  # 128 bytes each
    lengths = (3, 3, 2, 1, 20, 4, 4, 23)
    stack = Stack(tuple(f"t{i}" for i in range(len(lengths))), lengths)
    pieces = list(packed([(stack, rows)]))
    assert [len(arrived([piece])) for piece in pieces] == [3, 1, 1, 2, 1]
    found = arrived(pieces)
    assert all(same(found[name], part) for name, part in zip(stack.names, rows.split(lengths), strict=True))
    monkeypatch.setattr(wire, "_STACK_BYTES", 2**20)
    ((name, whole),) = packed([(stack, rows)])
    assert whole.data_ptr() == rows.data_ptr(), "a stack leaves as it lies"
    ((arrived_stack, _),) = unpacked(name, whole)
    assert (arrived_stack.names, arrived_stack.rows) == (stack.names, lengths)
    assert next(unpacked(name, whole))[0] is arrived_stack, "what is kept of a stack is found by the stack itself"


def test_small_stacks_and_what_is_made_of_them_keep_their_names():
    stack = Stack(("q", "k"), (256, 128))
    scales, sums = stack.renamed("", SCALE_SUFFIX), stack.renamed("sum of ", "")
    sent = [(scales, torch.arange(6.0).view(3, 2)), (sums, torch.arange(9).view(3, 3)), (stack, torch.arange(384.0))]
    ((name, whole),) = packed(sent)
    found = arrived([(name, whole)])
    assert torch.equal(found["q" + SCALE_SUFFIX], torch.arange(4.0).view(2, 2))
    assert torch.equal(found["sum of k"], torch.tensor([[6, 7, 8]]))
    assert torch.equal(found["k"], torch.arange(256.0, 384.0))
    assert stack.renamed("", SCALE_SUFFIX) is scales and stack.renamed("", "") is stack


def test_a_pack_fits_the_smallest_bucket():
    """Without CUDA IPC verl's sender refuses a tensor that is larger than its bucket, of one megabyte at least."""
    sent = [(f"t{i}", torch.zeros(wire._SMALL, dtype=torch.uint8)) for i in range(7)]
    assert max(len(whole) for _, whole in packed([("s", torch.zeros(100, dtype=torch.uint8)), *sent])) < 2**20


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_sums_of_many_weights_are_those_of_each(name):
    number_format = formats.get(name)
    weights = [number_format.quantize_weight(torch.randn(n, k).bfloat16(), "fp32") for n, k in ((256, 384), (128, 128))]
    together = number_format.with_scales(
        [number_format.sums_of_qdata(weight.qdata) for weight in weights], [weight.scales for weight in weights]
    )
    assert all(torch.equal(sums, number_format.sums(weight)) for sums, weight in zip(together, weights, strict=True))
    assert torch.equal(number_format.sums_of_all(weights), torch.cat([sums.flatten() for sums in together]))
    vectors = [torch.randn(n).bfloat16() for n in (5, 1, 64)]
    assert torch.equal(element_sums(vectors), torch.cat([row_sums(vector) for vector in vectors]))


@pytest.fixture
def stacked():
    """What a trainer sends of two stacked weights, a norm and a matrix, and a worker's live tensors of them."""
    number_format = formats.get("fp8")
    weight = number_format.quantize_weight(torch.randn(384, 256).bfloat16(), "fp32")
    norm, head = torch.randn(256).bfloat16(), torch.randn(96, 256).bfloat16()
    live = LiveParameter(weight.qdata.clone(), weight.scales.clone())
    held = {
        "norm": LiveTensor(norm.clone(), None, slice(0, 256), slice(0, 1), (256, 1)),
        "head": LiveTensor(head.clone(), None, slice(0, 96), slice(0, 256), (96, 256)),
    }
    stack = Stack(("q", "k"), (256, 128))
    sent = [(stack, weight.qdata), (stack.renamed("", SCALE_SUFFIX), weight.scales)]
    for name, start, rows in (("q", 0, 256), ("k", 256, 128)):
        mine = (live.data[start : start + rows], live.scales[start // 128 : (start + rows) // 128])
        held[name] = LiveTensor(*mine, slice(0, rows), slice(0, 256), (rows, 256), live, start)
    return [*sent, ("norm", norm), ("head", head)], held


def by_themselves(sent) -> list:
    """The same weights without stacks, each one's qdata in front of its scales."""
    single = dict(apart(sent))
    order = [(name + suffix) for name in ("q", "k") for suffix in ("", SCALE_SUFFIX)] + ["norm", "head"]
    return [(name, single[name]) for name in order]


def check(sent, held) -> dict:
    receiver = ContractReceiver()
    rest = receiver.take(list(packed(with_contract(sent, scale_rule="fp32", probe=1))))
    assert {name for name, _ in rest} == {name for name, _ in apart(sent)}, "weights are left for the loaders"
    return receiver.verify(held, scale_rule="fp32", probe=1)


@pytest.mark.parametrize("first", ["meta", "cpu"])
def test_a_pack_lies_where_the_first_tensor_does_that_is_not_on_the_host(first):
    """The manifest of the contract is made on the host, everything else on the GPU; ``meta`` stands for it here."""
    second = {"meta": "cpu", "cpu": "meta"}[first]
    tensors = [("a", torch.zeros(3, dtype=torch.uint8, device=first)), ("b", torch.zeros(5, 2, device=second))]
    ((_, whole),) = packed(tensors)
    assert whole.device.type == "meta"


def test_the_check_reads_a_packed_stream_and_sums_a_stacked_parameter_once(stacked, monkeypatch):
    calls = []
    stock = kernels.block_sums
    counts = check(*stacked)

    def spied(matrices, constants):
        calls.append([tuple(matrix.shape) for matrix in matrices])
        return stock(matrices, constants)

    monkeypatch.setattr(kernels, "block_sums", spied)
    assert check(*stacked) == counts
    assert (counts["quantized"], counts["plain"]) == (2, 2)
    assert calls == [[(384, 256)], [(384, 256)]], "once where it is sent, once where it is held"
    calls.clear()
    assert check(by_themselves(stacked[0]), stacked[1]) == counts
    assert calls == [[(256, 256)], [(128, 256)], [(384, 256)]]
    separate = {name: LiveTensor(*(getattr(t, f) for f in ("tensor", "scales", "rows", "columns", "whole")))
                for name, t in stacked[1].items()}  # fmt: skip
    assert check(stacked[0], separate) == counts


def test_what_is_compared_is_found_once_and_again_for_other_tensors(stacked, monkeypatch):
    sent, held = stacked
    receiver, made = ContractReceiver(), []
    stock = contract._Comparison.__init__
    monkeypatch.setattr(contract._Comparison, "__init__", lambda self, *args: made.append(1) or stock(self, *args))

    def sync(sent, held) -> dict:
        receiver.start()
        receiver.take(list(packed(with_contract(sent, scale_rule="fp32", probe=1))))
        return receiver.verify(held, scale_rule="fp32", probe=1)

    counts = sync(sent, held)
    assert sync(sent, held) == counts and len(made) == 1
    held["q"].parameter.data.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(ContractViolation, match="q differs between trainer and rollout in 1 of"):
        sync(sent, held)
    held["q"].parameter.data.view(torch.uint8)[3, 5] ^= 1
    assert sync(sent, dict(held)) == counts and len(made) == 2, "another map of the live tensors"
    assert sync(by_themselves(sent), held) == counts and len(made) == 3, "the same weights by themselves"
    with pytest.raises(ContractViolation, match="norm is a parameter of the rollout that the trainer did not send"):
        sync([item for item in sent if item[0] != "norm"], held)
    assert sync(sent, held) == counts


def test_a_tied_tensor_is_stated_under_both_names_and_sent_once(stacked):
    sent, held = stacked
    items = list(with_contract(sent, scale_rule="fp32", probe=1, tied={"tied": "head"}))
    assert [name for name, _ in items].count("tied") == 0
    receiver = ContractReceiver()
    receiver.take(list(packed(items)))
    both = receiver.verify(held | {"tied": held["head"]}, scale_rule="fp32", probe=1)
    head = int(row_sums(held["head"].tensor).sum())
    assert both["digest"] == (check(sent, held)["digest"] + head) % 2**64 and both["plain"] == 3
    other = replace(held["head"], tensor=held["head"].tensor.clone())
    other.tensor[5] += 1
    with pytest.raises(ContractViolation, match="tied differs between trainer and rollout in 1 of 96"):
        receiver.verify(held | {"tied": other}, scale_rule="fp32", probe=1)


@pytest.mark.parametrize(
    ("name", "part", "at"),
    [("q", "data", (130, 7)), ("k", "data", (383, 255)), ("k", "scales", (2, 1)), ("norm", "tensor", (9,))],
)
def test_a_bit_of_a_live_parameter_is_found_and_its_tensor_named(stacked, name, part, at):
    sent, held = stacked
    holder = held[name].parameter if part != "tensor" else held[name]
    bits = getattr(holder, part)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[bits.element_size()]
    bits.view(width)[at] ^= 1
    with pytest.raises(ContractViolation, match=f"contract check: {name} differs between trainer and rollout in 1 of"):
        check(sent, held)
