# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Small tensors are packed for the wire and arrive unchanged; sums over several weights equal those of each alone."""

from dataclasses import replace

import pytest
import torch
from streams import Arrived, receiver_of, unstacked

from jetrl_verl import formats, kernels
from jetrl_verl.formats.format import QuantizedWeight
from jetrl_verl.formats.sums import element_sums, row_sums
from jetrl_verl.sync import contract, wire
from jetrl_verl.sync.contract import LiveTensor
from jetrl_verl.sync.stacks import Name, Stack, parts_of
from jetrl_verl.sync.statement import ContractViolation, Statement
from jetrl_verl.sync.wire import Kind, Part, entries_of, packed
from jetrl_verl.train.weight_stream import sync_parts

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


def part(name: Name, tensor: torch.Tensor, kind: Kind = Kind.WEIGHT) -> Part:
    return Part(kind, name, formats.UNQUANTIZED, tensor)


def parts(tensors) -> list[Part]:
    return [part(*item) for item in tensors]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def test_small_tensors_of_every_type_arrive_in_one_piece():
    pieces = list(packed(parts(ODD.items())))
    ((_, whole),) = pieces
    assert whole.dtype == torch.uint8 and whole.numel() % 16 == 0
    tensors = Arrived(pieces)
    assert tensors.keys() == ODD.keys()
    assert all(same(tensors[name], tensor) for name, tensor in ODD.items())


def test_a_piece_says_what_its_parts_are():
    stack = Stack(("q", "k"), (256, 128))
    sent = [
        Part(Kind.WEIGHT, stack, "fp8", torch.zeros(384, 128, dtype=torch.float8_e4m3fn)),
        Part(Kind.SCALES, stack, "fp8", torch.ones(3, 1)),
        part("norm", torch.ones(128)),
        part("", torch.arange(3), Kind.SUMS),
    ]
    ((name, _),) = packed(list(sent))
    entries = {(entry.kind, entry.name, entry.format, entry.shape) for entry in entries_of(name)}
    assert entries == {(kind, of, form, tuple(tensor.shape)) for kind, of, form, tensor in sent}
    with pytest.raises(ValueError, match="the trainer sends model.norm.weight without the plugin"):
        entries_of("model.norm.weight")


def test_large_tensors_keep_their_order_and_packs_are_bounded(monkeypatch):
    monkeypatch.setattr(wire, "_SMALL", 64)
    monkeypatch.setattr(wire, "_PACK_BYTES", 256)
    sent = [(f"t{i}", torch.full((100 if i % 5 == 0 else i % 7 + 1,), float(i))) for i in range(120)]
    pieces = list(packed(parts(sent)))
    contents = [[entry.name for entry in entries_of(name)] for name, _ in pieces]
    assert [names[0] for names in contents if len(names) == 1] == [f"t{i}" for i in range(0, 120, 5)]
    packs = [whole for names, (_, whole) in zip(contents, pieces, strict=True) if len(names) > 1]
    assert 3 < len(packs) < 10 and all(256 - 16 < len(whole) <= 256 + 64 for whole in packs[:-1])
    tensors = Arrived(pieces)
    assert all(same(tensors[name], tensor) for name, tensor in sent)


def test_pieces_after_a_large_tensor_of_odd_length_are_aligned():
    """As after a manifest of many names: pieces lie next to each other in a bucket."""
    odd = torch.arange(wire._SMALL + 3).to(torch.uint8)
    pieces = list(packed(parts([("odd", odd), ("numbers", torch.arange(5))])))
    assert [piece.nbytes % 16 for _, piece in pieces] == [0, 0]
    bucket, start, moved = torch.cat([piece for _, piece in pieces]), 0, []
    for name, piece in pieces:
        moved.append((name, bucket[start : start + piece.nbytes]))
        start += piece.nbytes
    tensors = Arrived(moved)
    assert torch.equal(tensors["odd"], odd) and torch.equal(tensors["numbers"], torch.arange(5))


def test_a_stack_is_cut_into_bounded_pieces_and_a_weight_never_is(monkeypatch):
    monkeypatch.setattr(wire, "_SMALL", 64)
    monkeypatch.setattr(wire, "_STACK_BYTES", 1024)
    rows = torch.arange(60 * 32, dtype=torch.float32).view(60, 32)  # 128 bytes each
    lengths = (3, 3, 2, 1, 20, 4, 4, 23)
    stack = Stack(tuple(f"t{i}" for i in range(len(lengths))), lengths)
    pieces = list(packed([part(stack, rows)]))
    assert [len(Arrived([piece])) for piece in pieces] == [3, 1, 1, 2, 1]
    tensors = Arrived(pieces)
    assert all(same(tensors[name], part) for name, part in zip(stack.names, rows.split(lengths), strict=True))
    monkeypatch.setattr(wire, "_STACK_BYTES", 2**20)
    in_a_bucket = packed([part(stack, rows)], bucket_bytes=1024)
    assert [name for name, _ in in_a_bucket] == [name for name, _ in pieces]
    ((name, whole),) = packed([part(stack, rows)])
    assert whole.data_ptr() == rows.data_ptr(), "a stack is not copied"
    (entry,) = entries_of(name)
    assert entry.name == stack


def test_a_pack_fits_the_smallest_bucket():
    """Without CUDA IPC verl's sender refuses a tensor that is larger than its bucket, of one megabyte at least."""
    sent = [(f"t{i}", torch.zeros(wire._SMALL, dtype=torch.uint8)) for i in range(7)]
    sent = parts([("s", torch.zeros(100, dtype=torch.uint8)), *sent])
    assert max(len(whole) for _, whole in packed(sent)) < 2**20


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
    """A trainer's stream of two stacked weights, two vectors and a matrix, and a worker's live tensors of them; one
    vector is FP32 there."""
    number_format = formats.get("fp8")
    weight = number_format.quantize_weight(torch.randn(384, 256).bfloat16(), "fp32")
    norm, decay, head = torch.randn(256).bfloat16(), torch.randn(16).bfloat16(), torch.randn(96, 256).bfloat16()
    live = QuantizedWeight(number_format, weight.qdata.clone(), weight.scales.clone())
    live_tensors = {
        "norm": LiveTensor(norm.clone(), (slice(0, 256),), slice(0, 1), (256, 1)),
        "decay": LiveTensor(decay.float(), (slice(0, 16),), slice(0, 1), (16, 1)),
        "head": LiveTensor(head.clone(), (slice(0, 96),), slice(0, 256), (96, 256)),
    }
    for name, start, rows in (("q", 0, 256), ("k", 256, 128)):
        blocks = slice(start // 128, (start + rows) // 128)
        value = QuantizedWeight(number_format, live.qdata[start : start + rows], live.scales[blocks])
        live_tensors[name] = LiveTensor(value, (slice(0, rows),), slice(0, 256), (rows, 256), live, start)
    sent = [(Stack(("q", "k"), (256, 128)), weight), ("norm", norm), ("decay", decay), ("head", head)]
    return sent, live_tensors


def without_stacks(sent) -> list:
    """The same weights, each alone."""
    (stack, weight), *others = sent
    both = zip(parts_of(stack, weight.qdata), parts_of(stack, weight.scales), strict=True)
    return [(name, QuantizedWeight(weight.format, qdata, scales)) for (name, qdata), (_, scales) in both] + others


FACTS = dict(scale_rule="fp32", probe=1)


def check(sent, live_tensors) -> dict:
    pieces = list(packed(sync_parts(sent, Statement(**FACTS))))
    assert Arrived(pieces).keys() == dict(unstacked(sent)).keys(), "the loaders get every weight"
    return receiver_of(sent, **FACTS).verify(live_tensors, **FACTS)


@pytest.mark.parametrize("first", ["meta", "cpu"])
def test_a_pack_is_on_the_device_of_its_first_tensor_off_the_host(first):
    """The contract's manifest is built on the host, everything else on the GPU, for which ``meta`` stands here."""
    second = {"meta": "cpu", "cpu": "meta"}[first]
    tensors = [("a", torch.zeros(3, dtype=torch.uint8, device=first)), ("b", torch.zeros(5, 2, device=second))]
    ((_, whole),) = packed(parts(tensors))
    assert whole.device.type == "meta"


def test_the_check_sums_a_stacked_parameter_of_a_packed_stream_once(stacked, monkeypatch):
    calls = []
    stock = kernels.block_sums
    counts = check(*stacked)

    def spied(matrices, constants):
        calls.append([tuple(matrix.shape) for matrix in matrices])
        return stock(matrices, constants)

    monkeypatch.setattr(kernels, "block_sums", spied)
    sent, live_tensors = stacked
    assert receiver_of(sent, **FACTS).verify(live_tensors, **FACTS) == counts
    assert (counts["quantized"], counts["plain"]) == (2, 3)
    assert calls == [[(384, 256)], [(384, 256)]], "once in the trainer, once in the rollout"
    calls.clear()
    assert receiver_of(without_stacks(sent), **FACTS).verify(live_tensors, **FACTS) == counts
    assert calls == [[(256, 256)], [(128, 256)], [(384, 256)]]
    separate = {name: replace(tensor, parameter=None, start=0) for name, tensor in live_tensors.items()}
    assert check(sent, separate) == counts


def test_the_comparison_is_built_once_and_again_for_other_tensors(stacked, monkeypatch):
    sent, live_tensors = stacked
    receiver, built = receiver_of(sent, **FACTS), []
    stock = contract._Comparison.__init__
    monkeypatch.setattr(contract._Comparison, "__init__", lambda self, *args: built.append(1) or stock(self, *args))

    def sync(sent, live_tensors) -> dict:
        receiver.start()
        receiver.take(packed(sync_parts(sent, Statement(**FACTS))))
        return receiver.verify(live_tensors, **FACTS)

    counts = sync(sent, live_tensors)
    assert sync(sent, live_tensors) == counts and len(built) == 1
    live_tensors["q"].parameter.qdata.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(ContractViolation, match="q differs between trainer and rollout in 1 of"):
        sync(sent, live_tensors)
    live_tensors["q"].parameter.qdata.view(torch.uint8)[3, 5] ^= 1
    assert sync(sent, dict(live_tensors)) == counts and len(built) == 2, "another map of the live tensors"
    assert sync(without_stacks(sent), live_tensors) == counts and len(built) == 3
    with pytest.raises(ContractViolation, match="norm is a parameter of the rollout that the trainer did not send"):
        sync([item for item in sent if item[0] != "norm"], live_tensors)
    assert sync(sent, live_tensors) == counts


def test_a_tied_tensor_is_sent_once_and_checked_under_both_names(stacked):
    sent, live_tensors = stacked
    receiver = receiver_of(sent, tied={"tied": "head"}, **FACTS)
    both = receiver.verify(live_tensors | {"tied": live_tensors["head"]}, **FACTS)
    head = int(row_sums(live_tensors["head"].data).sum())
    assert both["digest"] == (check(sent, live_tensors)["digest"] + head) % 2**64 and both["plain"] == 4
    other = replace(live_tensors["head"], value=live_tensors["head"].data.clone())
    other.data[5] += 1
    with pytest.raises(ContractViolation, match="tied differs between trainer and rollout in 1 of 96"):
        receiver.verify(live_tensors | {"tied": other}, **FACTS)


@pytest.mark.parametrize(
    ("name", "of", "at"),
    [
        ("q", "qdata", (130, 7)),
        ("k", "qdata", (383, 255)),
        ("k", "scales", (2, 1)),
        ("norm", "value", (9,)),
        ("decay", "value", (9,)),
    ],
)
def test_a_flipped_bit_in_a_live_parameter_names_its_tensor(stacked, name, of, at):
    sent, live_tensors = stacked
    bits = getattr(live_tensors[name].parameter or live_tensors[name], of)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[bits.element_size()]
    bits.view(width)[at] ^= 1
    with pytest.raises(ContractViolation, match=f"contract check: {name} differs between trainer and rollout in 1 of"):
        check(sent, live_tensors)
