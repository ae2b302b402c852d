# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Small tensors are packed for the wire and arrive unchanged; sums over several weights equal those of each alone."""

from dataclasses import replace

import pytest
import torch
from streams import unstacked

from jetrl_verl import formats, kernels
from jetrl_verl.formats.format import SCALE_SUFFIX, QuantizedWeight
from jetrl_verl.formats.sums import element_sums, row_sums
from jetrl_verl.sync import contract, wire
from jetrl_verl.sync.contract import ContractReceiver, ContractViolation, LiveParameter, LiveTensor, with_contract
from jetrl_verl.sync.stacks import Stack, parts_of
from jetrl_verl.sync.wire import as_tensors, is_packed, packed, unpacked

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
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def test_small_tensors_of_every_type_arrive_in_one_piece():
    pieces = list(packed(ODD.items()))
    ((name, whole),) = pieces
    assert is_packed(name) and whole.dtype == torch.uint8 and whole.numel() % 16 == 0
    tensors = arrived(pieces)
    assert tensors.keys() == ODD.keys()
    assert all(same(tensors[name], tensor) for name, tensor in ODD.items())


def test_large_tensors_keep_their_order_and_packs_are_bounded(monkeypatch):
    monkeypatch.setattr(wire, "_SMALL", 64)
    monkeypatch.setattr(wire, "_PACK_BYTES", 256)
    sent = [(f"t{i}", torch.full((100 if i % 5 == 0 else i % 7 + 1,), float(i))) for i in range(120)]
    pieces = list(packed(sent))
    assert [name for name, _ in pieces if not is_packed(name)] == [f"t{i}" for i in range(0, 120, 5)]
    packs = [whole for name, whole in pieces if is_packed(name)]
    assert 3 < len(packs) < 10 and all(256 - 16 < len(whole) <= 256 + 64 for whole in packs[:-1])
    assert all(same(arrived(pieces)[name], tensor) for name, tensor in sent)


def test_pieces_after_a_large_tensor_of_odd_length_are_aligned():
    """As after a manifest of many names: pieces lie next to each other in a bucket."""
    odd = torch.arange(wire._SMALL + 3).to(torch.uint8)
    pieces = list(packed([("odd", odd), ("sums", torch.arange(5))]))
    assert [piece.nbytes % 16 for _, piece in pieces] == [0, 0]
    bucket, start, got = torch.cat([piece for _, piece in pieces]), 0, {}
    for name, piece in pieces:
        got |= dict(unpacked(name, bucket[start : start + piece.nbytes]))
        start += piece.nbytes
    assert torch.equal(got["odd"], odd) and torch.equal(got["sums"], torch.arange(5))


def test_a_stack_is_cut_into_bounded_pieces_and_a_weight_never_is(monkeypatch):
    monkeypatch.setattr(wire, "_SMALL", 64)
    monkeypatch.setattr(wire, "_STACK_BYTES", 1024)
    rows = torch.arange(60 * 32, dtype=torch.float32).view(60, 32)  # 128 bytes each
    lengths = (3, 3, 2, 1, 20, 4, 4, 23)
    stack = Stack(tuple(f"t{i}" for i in range(len(lengths))), lengths)
    pieces = list(packed([(stack, rows)]))
    assert [len(arrived([piece])) for piece in pieces] == [3, 1, 1, 2, 1]
    tensors = arrived(pieces)
    assert all(same(tensors[name], part) for name, part in zip(stack.names, rows.split(lengths), strict=True))
    monkeypatch.setattr(wire, "_STACK_BYTES", 2**20)
    ((name, whole),) = packed([(stack, rows)])
    assert whole.data_ptr() == rows.data_ptr(), "a stack is not copied"
    ((arrived_stack, _),) = unpacked(name, whole)
    assert (arrived_stack.names, arrived_stack.rows) == (stack.names, lengths)
    assert next(unpacked(name, whole))[0] is arrived_stack, "a received stack is the same object each time"


def test_small_stacks_and_their_scales_and_sums_keep_their_names():
    stack = Stack(("q", "k"), (256, 128))
    scales, sums = stack.renamed("", SCALE_SUFFIX), stack.renamed("sum of ", "")
    sent = [(scales, torch.arange(6.0).view(3, 2)), (sums, torch.arange(9).view(3, 3)), (stack, torch.arange(384.0))]
    ((name, whole),) = packed(sent)
    tensors = arrived([(name, whole)])
    assert torch.equal(tensors["q" + SCALE_SUFFIX], torch.arange(4.0).view(2, 2))
    assert torch.equal(tensors["sum of k"], torch.tensor([[6, 7, 8]]))
    assert torch.equal(tensors["k"], torch.arange(256.0, 384.0))
    assert stack.renamed("", SCALE_SUFFIX) is scales and stack.renamed("", "") is stack


def test_a_pack_fits_the_smallest_bucket():
    """Without CUDA IPC verl's sender refuses a tensor that is larger than its bucket, of one megabyte at least."""
    sent = [(f"t{i}", torch.zeros(wire._SMALL, dtype=torch.uint8)) for i in range(7)]
    assert max(len(whole) for _, whole in packed([("s", torch.zeros(100, dtype=torch.uint8)), *sent])) < 2**20


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_sums_of_many_weights_equal_those_of_each_alone(name):
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
    """A trainer's stream of two stacked weights, a norm and a matrix, and a worker's live tensors of them."""
    number_format = formats.get("fp8")
    weight = number_format.quantize_weight(torch.randn(384, 256).bfloat16(), "fp32")
    norm, head = torch.randn(256).bfloat16(), torch.randn(96, 256).bfloat16()
    live = LiveParameter(weight.qdata.clone(), weight.scales.clone())
    live_tensors = {
        "norm": LiveTensor(norm.clone(), None, slice(0, 256), slice(0, 1), (256, 1)),
        "head": LiveTensor(head.clone(), None, slice(0, 96), slice(0, 256), (96, 256)),
    }
    stack = Stack(("q", "k"), (256, 128))
    for name, start, rows in (("q", 0, 256), ("k", 256, 128)):
        part = (live.data[start : start + rows], live.scales[start // 128 : (start + rows) // 128])
        place = slice(0, rows), slice(0, 256), (rows, 256), live, start
        live_tensors[name] = LiveTensor(*part, *place, format=number_format)
    return [(stack, weight), ("norm", norm), ("head", head)], live_tensors


def without_stacks(sent) -> list:
    """The same weights, each under its own name."""
    (stack, weight), *rest = sent
    pairs = zip(parts_of(stack, weight.qdata), parts_of(stack, weight.scales), strict=True)
    return [(name, QuantizedWeight(weight.format, qdata, scales)) for (name, qdata), (_, scales) in pairs] + rest


def check(sent, live_tensors) -> dict:
    receiver = ContractReceiver()
    rest = receiver.take(list(packed(with_contract(sent, scale_rule="fp32", probe=1))))
    assert {name for name, _ in rest} == {name for name, _ in unstacked(as_tensors(sent))}, (
        "the loaders get every weight"
    )
    return receiver.verify(live_tensors, scale_rule="fp32", probe=1)


@pytest.mark.parametrize("first", ["meta", "cpu"])
def test_a_pack_is_on_the_device_of_its_first_tensor_off_the_host(first):
    """The contract's manifest is built on the host, everything else on the GPU, for which ``meta`` stands here."""
    second = {"meta": "cpu", "cpu": "meta"}[first]
    tensors = [("a", torch.zeros(3, dtype=torch.uint8, device=first)), ("b", torch.zeros(5, 2, device=second))]
    ((_, whole),) = packed(tensors)
    assert whole.device.type == "meta"


def test_the_check_sums_a_stacked_parameter_of_a_packed_stream_once(stacked, monkeypatch):
    calls = []
    stock = kernels.block_sums
    counts = check(*stacked)

    def spied(matrices, constants):
        calls.append([tuple(matrix.shape) for matrix in matrices])
        return stock(matrices, constants)

    monkeypatch.setattr(kernels, "block_sums", spied)
    assert check(*stacked) == counts
    assert (counts["quantized"], counts["plain"]) == (2, 2)
    assert calls == [[(384, 256)], [(384, 256)]], "once in the trainer, once in the rollout"
    calls.clear()
    assert check(without_stacks(stacked[0]), stacked[1]) == counts
    assert calls == [[(256, 256)], [(128, 256)], [(384, 256)]]
    separate = {name: replace(part, parameter=None, start=0) for name, part in stacked[1].items()}
    assert check(stacked[0], separate) == counts


def test_the_comparison_is_built_once_and_again_for_other_tensors(stacked, monkeypatch):
    sent, live_tensors = stacked
    receiver, built = ContractReceiver(), []
    stock = contract._Comparison.__init__
    monkeypatch.setattr(contract._Comparison, "__init__", lambda self, *args: built.append(1) or stock(self, *args))

    def sync(sent, live_tensors) -> dict:
        receiver.start()
        receiver.take(list(packed(with_contract(sent, scale_rule="fp32", probe=1))))
        return receiver.verify(live_tensors, scale_rule="fp32", probe=1)

    counts = sync(sent, live_tensors)
    assert sync(sent, live_tensors) == counts and len(built) == 1
    live_tensors["q"].parameter.data.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(ContractViolation, match="q differs between trainer and rollout in 1 of"):
        sync(sent, live_tensors)
    live_tensors["q"].parameter.data.view(torch.uint8)[3, 5] ^= 1
    assert sync(sent, dict(live_tensors)) == counts and len(built) == 2, "another map of the live tensors"
    assert sync(without_stacks(sent), live_tensors) == counts and len(built) == 3
    with pytest.raises(ContractViolation, match="norm is a parameter of the rollout that the trainer did not send"):
        sync([item for item in sent if item[0] != "norm"], live_tensors)
    assert sync(sent, live_tensors) == counts


def test_a_tied_tensor_is_sent_once_and_checked_under_both_names(stacked):
    sent, live_tensors = stacked
    items = list(with_contract(sent, scale_rule="fp32", probe=1, tied={"tied": "head"}))
    assert [name for name, _ in items].count("tied") == 0
    receiver = ContractReceiver()
    receiver.take(list(packed(items)))
    both = receiver.verify(live_tensors | {"tied": live_tensors["head"]}, scale_rule="fp32", probe=1)
    head = int(row_sums(live_tensors["head"].tensor).sum())
    assert both["digest"] == (check(sent, live_tensors)["digest"] + head) % 2**64 and both["plain"] == 3
    other = replace(live_tensors["head"], tensor=live_tensors["head"].tensor.clone())
    other.tensor[5] += 1
    with pytest.raises(ContractViolation, match="tied differs between trainer and rollout in 1 of 96"):
        receiver.verify(live_tensors | {"tied": other}, scale_rule="fp32", probe=1)


@pytest.mark.parametrize(
    ("name", "part", "at"),
    [("q", "data", (130, 7)), ("k", "data", (383, 255)), ("k", "scales", (2, 1)), ("norm", "tensor", (9,))],
)
def test_a_flipped_bit_in_a_live_parameter_names_its_tensor(stacked, name, part, at):
    sent, live_tensors = stacked
    holder = live_tensors[name].parameter if part != "tensor" else live_tensors[name]
    bits = getattr(holder, part)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[bits.element_size()]
    bits.view(width)[at] ^= 1
    with pytest.raises(ContractViolation, match=f"contract check: {name} differs between trainer and rollout in 1 of"):
        check(sent, live_tensors)
