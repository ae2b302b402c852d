# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which part of the trainer's tensors each tensor-parallel rank has, that a sync copies it there and that the contract
check finds it there. vLLM's layers are built without constructors, so no process group is needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from streams import receiver_of
from torch import nn

from jetrl_verl import formats
from jetrl_verl.formats.format import SCALE_SUFFIX, QuantizedWeight
from jetrl_verl.reference import BLOCK
from jetrl_verl.rollout.live import LiveMap, Placement, live_tensors
from jetrl_verl.sync.stacks import Name, Stack
from jetrl_verl.sync.statement import ContractViolation
from jetrl_verl.sync.wire import packed, parts_of_weight

HIDDEN, HEAD, INNER, VOCABULARY, TP = 256, 128, 512, 96, 2
HEADS, KV_HEADS = 4, 1
FLOW = formats.get("fp8")


def whole_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The trainer's tensors of one layer, embedding and head."""
    torch.manual_seed(seed)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {f"model.layers.0.{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    for name in ("q", "k", "v"):
        rows = shapes[f"self_attn.{name}_proj"][0]
        tensors[f"model.layers.0.self_attn.{name}_proj.bias"] = torch.randn(rows).bfloat16()
    tensors["model.norm.weight"] = torch.randn(HIDDEN).bfloat16()
    tensors["model.embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN).bfloat16()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def layer(cls, **attributes) -> nn.Module:
    """A vLLM layer without its constructor."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
        else:
            setattr(module, name, value)
    return module


def quantized(weight: torch.Tensor) -> dict[str, torch.Tensor | SimpleNamespace]:
    qdata, scales = FLOW.quantize_weight(weight, "fp32")
    return {"weight": qdata, "weight" + SCALE_SUFFIX: scales, "quant_method": SimpleNamespace(format=FLOW)}


def plain(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": weight}


def rank_model(rank: int, whole: dict[str, torch.Tensor], form=quantized) -> nn.Module:
    """One of two ranks: heads, inner features and vocabulary split, the key/value head replicated; ``form`` of the
    linear layers is ``quantized`` or ``plain``."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def get(name: str) -> torch.Tensor:
        return whole[f"model.layers.0.{name}"]

    q_rows = slice(rank * HEADS // TP * HEAD, (rank + 1) * HEADS // TP * HEAD)
    inner = slice(rank * INNER // TP, (rank + 1) * INNER // TP)
    qkv = torch.cat([get("self_attn.q_proj.weight")[q_rows]] + [get(f"self_attn.{n}_proj.weight") for n in "kv"])
    bias = torch.cat([get("self_attn.q_proj.bias")[q_rows]] + [get(f"self_attn.{n}_proj.bias") for n in "kv"])
    vocabulary = slice(rank * VOCABULARY // TP, (rank + 1) * VOCABULARY // TP)
    # vLLM pads each shard of the vocabulary.
    rows = torch.cat([whole["model.embed_tokens.weight"][vocabulary], torch.zeros(16, HIDDEN).bfloat16()])

    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = layer(
        VocabParallelEmbedding,
        weight=rows,
        org_vocab_size=VOCABULARY,
        shard_indices=SimpleNamespace(org_vocab_start_index=vocabulary.start, org_vocab_end_index=vocabulary.stop),
    )
    model.lm_head = model.model.embed_tokens  # tied as in vLLM's Qwen models
    model.model.norm = nn.Module()
    model.model.norm.weight = nn.Parameter(whole["model.norm.weight"], requires_grad=False)
    block = nn.Module()
    block.self_attn, block.mlp = nn.Module(), nn.Module()
    block.self_attn.qkv_proj = layer(
        QKVParallelLinear,
        num_heads=HEADS // TP,
        num_kv_heads=1,
        total_num_heads=HEADS,
        total_num_kv_heads=KV_HEADS,
        num_kv_head_replicas=TP,
        head_size=HEAD,
        tp_rank=rank,
        tp_size=TP,
        bias=bias,
        **form(qkv),
    )
    o_columns = slice(rank * HEADS * HEAD // TP, (rank + 1) * HEADS * HEAD // TP)
    row = dict(tp_rank=rank, tp_size=TP)
    block.self_attn.o_proj = layer(
        RowParallelLinear, input_size=HEADS * HEAD, **row, **form(get("self_attn.o_proj.weight")[:, o_columns])
    )
    gate_up = torch.cat([get("mlp.gate_proj.weight")[inner], get("mlp.up_proj.weight")[inner]])
    block.mlp.gate_up_proj = layer(MergedColumnParallelLinear, output_sizes=[INNER, INNER], **row, **form(gate_up))
    block.mlp.down_proj = layer(
        RowParallelLinear, input_size=INNER, **row, **form(get("mlp.down_proj.weight")[:, inner])
    )
    model.model.layers = nn.ModuleList([block])
    model.config = SimpleNamespace(model_type="qwen2")
    return model


DELTA = "model.language_model.layers.0.linear_attn"
KEYS, VALUES, VALUE_HEADS = 2 * HEAD, 4 * HEAD, 4
QKV, BF16_ROWS = (KEYS, KEYS, VALUES), (VALUE_HEADS, VALUE_HEADS)


def delta_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The trainer's tensors of a delta net, whose q, k and v are one, as are the channels of its convolution."""
    torch.manual_seed(seed)
    shapes = {
        "in_proj_qkv.weight": (sum(QKV), HIDDEN),
        "in_proj_z.weight": (VALUES, HIDDEN),
        "in_proj_b.weight": (VALUE_HEADS, HIDDEN),
        "in_proj_a.weight": (VALUE_HEADS, HIDDEN),
        "out_proj.weight": (HIDDEN, VALUES),
        "conv1d.weight": (sum(QKV), 1, 4),
        "A_log": (VALUE_HEADS,),
        "dt_bias": (VALUE_HEADS,),
    }
    return {f"{DELTA}.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def delta_model(rank: int, whole: dict[str, torch.Tensor], form=quantized) -> nn.Module:
    """One of two ranks: every kind of heads is divided."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear

    def part(name: str, *sizes: int) -> torch.Tensor:
        runs = whole[f"{DELTA}.{name}"].split(sizes or VALUE_HEADS)
        return torch.cat([run.chunk(TP)[rank] for run in runs])

    row = dict(tp_rank=rank, tp_size=TP)
    net = layer(nn.Module, A_log=part("A_log").float(), dt_bias=part("dt_bias"), num_v_heads=VALUE_HEADS, **row)
    net.conv1d = layer(ColumnParallelLinear, weight=part("conv1d.weight", *QKV), **row)
    qkvz = torch.cat([part("in_proj_qkv.weight", *QKV), part("in_proj_z.weight", VALUES)])
    net.in_proj_qkvz = layer(MergedColumnParallelLinear, output_sizes=[*QKV, VALUES], **row, **form(qkvz))
    ba = torch.cat([part("in_proj_b.weight"), part("in_proj_a.weight")])
    net.in_proj_ba = layer(MergedColumnParallelLinear, output_sizes=[*BF16_ROWS], **row, weight=ba)
    out = whole[f"{DELTA}.out_proj.weight"].chunk(TP, dim=1)[rank]
    net.out_proj = layer(RowParallelLinear, input_size=VALUES, **row, **form(out))
    model = nn.Module()
    model.language_model = nn.Module()
    model.language_model.model = nn.Module()
    model.language_model.model.layers = nn.ModuleList([nn.Module()])
    model.language_model.model.layers[0].linear_attn = net
    model.config = SimpleNamespace(model_type="qwen3_5")
    return model


class Decoder(NamedTuple):
    """The trainer's tensors of a seed, and the model of a rank that has its parts of them."""

    tensors: Callable[..., dict[str, torch.Tensor]]
    model: Callable[..., nn.Module]


ATTENTION, DELTA_NET = Decoder(whole_tensors, rank_model), Decoder(delta_tensors, delta_model)
QUANTIZED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight")
QUANTIZED += ("down_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight")


def weights(whole: dict[str, torch.Tensor], sent=quantized) -> list[tuple[Name, torch.Tensor | QuantizedWeight]]:
    """The trainer's stream: projections of equal width stacked, and quantized if ``sent`` is."""
    groups: dict[object, list[str]] = {}
    for name, tensor in whole.items():
        is_quantized = sent is quantized and name.endswith(QUANTIZED)
        groups.setdefault((tensor.shape[1:], is_quantized) if "layers." in name else name, []).append(name)
    stream = []
    for names in groups.values():
        stack = Stack(tuple(names), tuple(len(whole[name]) for name in names)) if len(names) > 1 else names[0]
        tensor = torch.cat([whole[name] for name in names])
        is_quantized = sent is quantized and names[0].endswith(QUANTIZED)
        stream.append((stack, FLOW.quantize_weight(tensor, "fp32") if is_quantized else tensor))
    return stream


def verify(model: nn.Module, whole: dict[str, torch.Tensor], sent=quantized, ranks: int = TP) -> dict:
    receiver = receiver_of(weights(whole, sent), scale_rule="fp32", probe=1, ranks=ranks)
    return receiver.verify(live_tensors(model), scale_rule="fp32", probe=1)


@pytest.mark.parametrize("rank", range(TP))
@pytest.mark.parametrize(("decoder", "projections", "others"), [(ATTENTION, 7, 6), (DELTA_NET, 3, 5)])
def test_each_rank_has_its_part_of_every_tensor(rank, decoder, projections, others):
    whole = decoder.tensors()
    counts = verify(decoder.model(rank, whole), whole)
    assert (counts["quantized"], counts["plain"]) == (projections, others)
    counts = verify(decoder.model(rank, whole, plain), whole, plain)
    assert (counts["quantized"], counts["plain"]) == (0, projections + others)


@pytest.mark.parametrize(
    ("decoder", "parameter", "named"),
    [
        (ATTENTION, "model.layers.0.self_attn.qkv_proj.weight", "self_attn.q_proj.weight"),
        (ATTENTION, "model.layers.0.self_attn.o_proj.weight", "self_attn.o_proj.weight"),
        (ATTENTION, "model.layers.0.mlp.gate_up_proj.weight", "mlp.gate_proj.weight"),
        (ATTENTION, "model.layers.0.mlp.down_proj.weight", "mlp.down_proj.weight"),
        (DELTA_NET, "in_proj_qkvz.weight", "in_proj_qkv.weight"),
        (DELTA_NET, "in_proj_ba.weight", "in_proj_b.weight"),
        (DELTA_NET, "out_proj.weight", "out_proj.weight"),
        (DELTA_NET, "conv1d.weight", "conv1d.weight"),
        (DELTA_NET, "A_log", "A_log"),
        (DELTA_NET, "dt_bias", "dt_bias"),
    ],
)
def test_the_other_ranks_shard_is_refused(decoder, parameter, named):
    """Rank 0 with rank 1's slice: all bytes are the trainer's, in the wrong place."""
    whole = decoder.tensors()
    model, other = (decoder.model(rank, whole) for rank in range(TP))
    for name, value in model.named_parameters():
        if name.removesuffix(SCALE_SUFFIX).endswith(parameter):
            value.data = other.get_parameter(name).data
    with pytest.raises(ContractViolation, match=rf"layers\.0\.\S*{named} differs"):
        verify(model, whole)


@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.down_proj"])
def test_the_other_ranks_columns_of_a_bf16_layer_are_refused(module):
    whole = whole_tensors()
    model, other = rank_model(0, whole, plain), rank_model(1, whole, plain)
    name = f"model.layers.0.{module}.weight"
    model.get_parameter(name).data = other.get_parameter(name).data
    with pytest.raises(ContractViolation, match=f"{module}.weight differs between trainer and rollout in 256 of 256"):
        verify(model, whole, plain)
    with pytest.raises(ContractViolation, match="sums 512 columns of .* and the rollout has columns 0 to 256"):
        verify(model, whole, plain, ranks=1)


@pytest.mark.parametrize(
    ("decoder", "parameter", "rows", "named"),
    [
        (ATTENTION, "model.layers.0.mlp.gate_up_proj.weight", INNER // TP, "gate_proj"),
        (DELTA_NET, "language_model.model.layers.0.linear_attn.in_proj_qkvz.weight", KEYS // TP, "in_proj_qkv"),
        (DELTA_NET, "language_model.model.layers.0.linear_attn.conv1d.weight", KEYS // TP, "conv1d"),
    ],
    ids=["gate-up", "q-k", "channels"],
)
def test_swapped_runs_of_rows_are_detected(decoder, parameter, rows, named):
    whole = decoder.tensors()
    model = decoder.model(0, whole)
    weight = model.get_parameter(parameter)
    weight.data = torch.cat([weight.data[rows : 2 * rows], weight.data[:rows], weight.data[2 * rows :]])
    with pytest.raises(ContractViolation, match=f"{named}.weight differs"):
        verify(model, whole)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


def pieces(seed: int, sent=quantized, tensors=whole_tensors) -> list[tuple[str, torch.Tensor]]:
    """Of a sync, in one buffer as in verl's receiver."""
    stream = packed([part for item in weights(tensors(seed), sent) for part in parts_of_weight(*item)])
    names, tensors = zip(*stream, strict=True)
    return list(zip(names, torch.cat(tensors).split([len(tensor) for tensor in tensors]), strict=True))


class Rank:
    """A worker with loaders that place a tensor where the model of its rank has it."""

    def __init__(self, rank: int, form=quantized, decoder: Decoder = ATTENTION) -> None:
        self.rank, self.form, self.decoder, self.loaded = rank, form, decoder, []
        self.model = self.of(9)
        self.placement = Placement(LiveMap(self.model))

    def of(self, seed: int) -> nn.Module:
        """The rank's model with the weights of a seed."""
        return self.decoder.model(self.rank, self.decoder.tensors(seed), self.form)

    def sync(self, seed: int, verified: bool = True) -> int:
        """Returns how many tensors were loaded."""
        self.loaded.clear()
        self.placement.start()
        sent = pieces(seed, self.form, self.decoder.tensors)
        self.placement.place(sent, lambda tensors: self.load(seed, tensors))
        if verified:
            self.placement.commit()
        return len(self.loaded)

    def load(self, seed: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded += tensors
        for name, parameter in self.of(seed).named_parameters():
            if not name.endswith(SCALE_SUFFIX):
                self.model.get_parameter(name).data.copy_(parameter)

    def has(self, seed: int) -> bool:
        expected = self.of(seed).named_parameters()
        return all(torch.equal(bits(parameter), bits(self.model.get_parameter(name))) for name, parameter in expected)

    def forget(self) -> None:
        """As a sleep that discards the weights."""
        for parameter in self.model.parameters():
            bits(parameter).fill_(0x55)


@pytest.mark.parametrize("form", [quantized, plain])
@pytest.mark.parametrize("rank", range(TP))
@pytest.mark.parametrize("decoder", [ATTENTION, DELTA_NET])
def test_later_syncs_copy_every_tensor_by_the_map_with_the_loaders_bits(rank, form, decoder):
    worker = Rank(rank, form, decoder)
    assert worker.sync(0) == len(decoder.tensors()) and worker.has(0)
    worker.forget()
    assert worker.sync(1) == 0 and worker.has(1), "padded rows are zeros again"


def test_rows_that_are_adjacent_on_both_sides_are_one_copy():
    """Rank 0 of one: gate and up follow each other in the stack and in the parameter."""
    whole = {f"model.layers.0.mlp.{name}_proj.weight": torch.randn(INNER, HIDDEN).bfloat16() for name in ("gate", "up")}
    worker = Rank(0)
    layer_of_one_rank = worker.model.model.layers[0].mlp.gate_up_proj
    layer_of_one_rank.tp_size = 1
    for name, value in quantized(torch.cat(list(whole.values()))).items():
        setattr(layer_of_one_rank, name, nn.Parameter(value, False) if isinstance(value, torch.Tensor) else value)
    worker.placement = Placement(LiveMap(worker.model))
    stream = list(packed([part for item in weights(whole) for part in parts_of_weight(*item)]))
    worker.placement.start()
    worker.placement.place(stream, lambda tensors: None)
    worker.placement.commit()
    copies = [copy for places in worker.placement._places.values() for copy in places.copies]
    sizes = {2 * INNER * HIDDEN, 2 * INNER * HIDDEN // BLOCK**2 * 4}
    assert {(copy.dtype, copy.target.nbytes) for copy in copies} == {(torch.int64, size) for size in sizes}
    assert len(copies) == 2


def test_adjacent_parameters_of_two_storages_are_two_copies():
    memory = bytearray(2 * 2**12)
    skipped = -(torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 16
    halves = [torch.frombuffer(memory, dtype=torch.bfloat16, count=1024, offset=skipped + at) for at in (0, 2048)]
    assert halves[0].data_ptr() + halves[0].nbytes == halves[1].data_ptr()
    model = nn.Module()
    model.one, model.other = (layer(nn.Module, weight=half) for half in halves)
    model.config = SimpleNamespace(model_type="qwen2")
    placement, stack = Placement(LiveMap(model)), Stack(("one.weight", "other.weight"), (1024, 1024))
    for value in (1.0, 2.0):
        placement.start()
        sent = packed(parts_of_weight(stack, torch.full((2048,), value).bfloat16()))
        placement.place(list(sent), lambda tensors: None)
        placement.commit()
    assert len(placement._places) == 1 and all((half == 2.0).all() for half in halves)


def test_the_loaders_run_after_a_moved_parameter_another_piece_or_a_sync_that_was_not_verified():
    worker = Rank(0)
    of_all = worker.sync(0)
    assert worker.sync(1, verified=False) == 0
    assert worker.sync(2) == of_all and worker.has(2)
    weight = worker.model.get_parameter("model.layers.0.mlp.down_proj.weight")
    weight.data = weight.data.clone()
    assert worker.sync(3) == of_all and worker.has(3) and worker.sync(0) == 0
    other = [part for part in parts_of_weight("model.norm.weight", torch.ones(HIDDEN).bfloat16())]
    worker.loaded.clear()
    worker.placement.start()
    worker.placement.place(list(packed(other)), worker.loaded.extend)
    assert [name for name, _ in worker.loaded] == ["model.norm.weight"]


def test_scales_without_a_place_are_refused():
    placement = Placement(LiveMap(rank_model(0, whole_tensors(), plain)))
    placement.start()
    with pytest.raises(ValueError, match="the trainer sends scales of .*q_proj.weight, and the rollout has none"):
        placement.place(pieces(0), lambda tensors: None)
    name = "model.layers.0.mlp.down_proj.weight"
    placement = Placement(LiveMap(rank_model(0, whole_tensors())))
    placement.start()
    half = FLOW.quantize_weight(whole_tensors()[name][:BLOCK], "fp32")
    with pytest.raises(ValueError, match=rf"scales of {name} are \[1, 4\] in the trainer, and of \[256, 512\]"):
        placement.place(list(packed(parts_of_weight(name, half))), lambda tensors: None)


def test_a_parameter_that_moved_is_mapped_to_its_new_address():
    """The map is kept between syncs; storages of parameters may change."""
    whole = whole_tensors()
    model = rank_model(0, whole)
    live_map = LiveMap(model)
    assert live_map.tensors() is live_map.tensors()
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    weight.data = weight.data.clone()
    weight.data.view(torch.uint8)[3, 5] ^= 1
    live = live_map.tensors()["model.layers.0.mlp.down_proj.weight"].data
    assert live.data_ptr() == weight.data_ptr() and torch.equal(live.view(torch.uint8), weight.data.view(torch.uint8))


def test_block_sums_of_a_column_slice_are_those_of_the_whole():
    q = FLOW.quantize_weight(torch.randn(256, 512).bfloat16(), "pow2")
    part = QuantizedWeight(FLOW, q.qdata[:, 2 * BLOCK :], q.scales[:, 2:])
    assert torch.equal(FLOW.sums(part), FLOW.sums(q)[:, 2:])
