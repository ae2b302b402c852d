# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which part of the trainer's tensors each tensor-parallel rank has, that a sync copies it there and that the contract
check finds it there. vLLM's layers are built without constructors, so no process group is needed."""

from types import SimpleNamespace

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
KEYS, VALUES, VALUE_HEADS = 2 * HEAD, 4 * HEAD, 4
FLOW = formats.get("fp8")

TRAINER, ROLLOUT = "model.language_model", "language_model.model"
COLUMNS, WHOLE = "columns", "whole"
SHAPES = {
    "layers.0.self_attn.q_proj": ((HEADS * HEAD, HIDDEN), (HEADS * HEAD,)),
    "layers.0.self_attn.k_proj": ((KV_HEADS * HEAD, HIDDEN), WHOLE),
    "layers.0.self_attn.v_proj": ((KV_HEADS * HEAD, HIDDEN), WHOLE),
    "layers.0.self_attn.o_proj": ((HIDDEN, HEADS * HEAD), COLUMNS),
    "layers.0.mlp.gate_proj": ((INNER, HIDDEN), (INNER,)),
    "layers.0.mlp.up_proj": ((INNER, HIDDEN), (INNER,)),
    "layers.0.mlp.down_proj": ((HIDDEN, INNER), COLUMNS),
    "layers.1.linear_attn.in_proj_qkv": ((2 * KEYS + VALUES, HIDDEN), (KEYS, KEYS, VALUES)),
    "layers.1.linear_attn.in_proj_z": ((VALUES, HIDDEN), (VALUES,)),
    "layers.1.linear_attn.out_proj": ((HIDDEN, VALUES), COLUMNS),
}
"""Quantized projections, and the runs of their rows that ranks divide. A delta net's q, k and v are one tensor, as are
the channels of its convolution."""
OTHERS = {
    **{f"layers.0.self_attn.{name}_proj.bias": SHAPES[f"layers.0.self_attn.{name}_proj"] for name in "qkv"},
    "layers.1.linear_attn.in_proj_b.weight": ((VALUE_HEADS, HIDDEN), (VALUE_HEADS,)),
    "layers.1.linear_attn.in_proj_a.weight": ((VALUE_HEADS, HIDDEN), (VALUE_HEADS,)),
    "layers.1.linear_attn.conv1d.weight": ((2 * KEYS + VALUES, 1, 4), (KEYS, KEYS, VALUES)),
    "layers.1.linear_attn.A_log": ((VALUE_HEADS,), (VALUE_HEADS,)),
    "layers.1.linear_attn.dt_bias": ((VALUE_HEADS,), (VALUE_HEADS,)),
    "norm.weight": ((HIDDEN,), WHOLE),
    "embed_tokens.weight": ((VOCABULARY, HIDDEN), (VOCABULARY,)),
}
DIVIDED = {f"{name}.weight": division for name, (_, division) in SHAPES.items()}
DIVIDED |= {name: division for name, (_, division) in OTHERS.items()}
QUANTIZED = tuple(f"{name}.weight" for name in SHAPES)


def whole_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The trainer's tensors of a layer with attention and MLP, one with a delta net, last norm, embedding and head."""
    torch.manual_seed(seed)
    shapes = {f"{name}.weight": shape for name, (shape, _) in SHAPES.items()}
    shapes |= {name: shape[:1] if name.endswith("proj.bias") else shape for name, (shape, _) in OTHERS.items()}
    tensors = {f"{TRAINER}.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    return tensors | {"lm_head.weight": tensors[f"{TRAINER}.embed_tokens.weight"]}


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
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def part(prefix: str, *names: str) -> torch.Tensor:
        parts = []
        for name in (f"{prefix}.{name}" for name in names):
            tensor, division = whole[f"{TRAINER}.{name}"], DIVIDED[name]
            if division == COLUMNS:
                parts.append(tensor.chunk(TP, dim=1)[rank])
            else:
                parts += [tensor] if division == WHOLE else [run.chunk(TP)[rank] for run in tensor.split(division)]
        return torch.cat(parts)

    attention, mlp, net = "layers.0.self_attn", "layers.0.mlp", "layers.1.linear_attn"
    heads = dict(num_heads=HEADS // TP, num_kv_heads=1, total_num_heads=HEADS, total_num_kv_heads=KV_HEADS)
    qkv, qkvz = [f"{name}_proj.weight" for name in "qkv"], ["in_proj_qkv.weight", "in_proj_z.weight"]
    biases = part(attention, *(f"{name}_proj.bias" for name in "qkv"))
    vocabulary = SimpleNamespace(
        org_vocab_start_index=rank * VOCABULARY // TP, org_vocab_end_index=(rank + 1) * VOCABULARY // TP
    )
    rows = whole[f"{TRAINER}.embed_tokens.weight"].chunk(TP)[rank]
    modules = {
        # vLLM pads each shard of the vocabulary.
        "embed_tokens": (
            VocabParallelEmbedding,
            dict(weight=torch.cat([rows, torch.zeros(16, HIDDEN).bfloat16()]))
            | dict(org_vocab_size=VOCABULARY, shard_indices=vocabulary),
        ),
        "norm": (nn.Module, dict(weight=whole[f"{TRAINER}.norm.weight"])),
        f"{attention}.qkv_proj": (
            QKVParallelLinear,
            heads | dict(num_kv_head_replicas=TP, head_size=HEAD, bias=biases) | form(part(attention, *qkv)),
        ),
        f"{attention}.o_proj": (
            RowParallelLinear,
            dict(input_size=HEADS * HEAD) | form(part(attention, "o_proj.weight")),
        ),
        f"{mlp}.gate_up_proj": (
            MergedColumnParallelLinear,
            dict(output_sizes=[INNER, INNER]) | form(part(mlp, "gate_proj.weight", "up_proj.weight")),
        ),
        f"{mlp}.down_proj": (RowParallelLinear, dict(input_size=INNER) | form(part(mlp, "down_proj.weight"))),
        net: (nn.Module, dict(A_log=part(net, "A_log").float(), dt_bias=part(net, "dt_bias"), num_v_heads=VALUE_HEADS)),
        f"{net}.conv1d": (ColumnParallelLinear, dict(weight=part(net, "conv1d.weight"))),
        f"{net}.in_proj_qkvz": (
            MergedColumnParallelLinear,
            dict(output_sizes=[KEYS, KEYS, VALUES, VALUES]) | form(part(net, *qkvz)),
        ),
        f"{net}.in_proj_ba": (
            MergedColumnParallelLinear,
            dict(output_sizes=[VALUE_HEADS] * 2, weight=part(net, "in_proj_b.weight", "in_proj_a.weight")),
        ),
        f"{net}.out_proj": (RowParallelLinear, dict(input_size=VALUES) | form(part(net, "out_proj.weight"))),
    }
    model = nn.Module()
    for name, (cls, attributes) in modules.items():
        *parents, leaf = f"{ROLLOUT}.{name}".split(".")
        module = model
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        module.add_module(leaf, layer(cls, tp_rank=rank, tp_size=TP, **attributes))
    model.language_model.lm_head = model.language_model.model.embed_tokens  # tied as in vLLM's Qwen models
    model.config = SimpleNamespace(model_type="qwen3_5")
    return model


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
def test_each_rank_has_its_part_of_every_tensor(rank):
    whole = whole_tensors()
    counts = verify(rank_model(rank, whole), whole)
    assert (counts["quantized"], counts["plain"]) == (10, 11)
    counts = verify(rank_model(rank, whole, plain), whole, plain)
    assert (counts["quantized"], counts["plain"]) == (0, 21)


@pytest.mark.parametrize(
    ("parameter", "named"),
    [
        ("self_attn.qkv_proj.weight", "self_attn.q_proj.weight"),
        ("self_attn.o_proj.weight", "self_attn.o_proj.weight"),
        ("mlp.gate_up_proj.weight", "mlp.gate_proj.weight"),
        ("mlp.down_proj.weight", "mlp.down_proj.weight"),
        ("in_proj_qkvz.weight", "in_proj_qkv.weight"),
        ("in_proj_ba.weight", "in_proj_b.weight"),
        ("conv1d.weight", "conv1d.weight"),
        ("A_log", "A_log"),
        ("dt_bias", "dt_bias"),
    ],
)
def test_the_other_ranks_shard_is_refused(parameter, named):
    """Rank 0 with rank 1's slice: all bytes are the trainer's, in the wrong place."""
    whole = whole_tensors()
    model, other = (rank_model(rank, whole) for rank in range(TP))
    for name, value in model.named_parameters():
        if name.removesuffix(SCALE_SUFFIX).endswith(parameter):
            value.data = other.get_parameter(name).data
    with pytest.raises(ContractViolation, match=rf"{TRAINER}\.layers\.\d\.\S*{named} differs"):
        verify(model, whole)


@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.down_proj"])
def test_the_other_ranks_columns_of_a_bf16_layer_are_refused(module):
    whole = whole_tensors()
    model, other = rank_model(0, whole, plain), rank_model(1, whole, plain)
    name = f"{ROLLOUT}.layers.0.{module}.weight"
    model.get_parameter(name).data = other.get_parameter(name).data
    with pytest.raises(ContractViolation, match=f"{module}.weight differs between trainer and rollout in 256 of 256"):
        verify(model, whole, plain)
    with pytest.raises(ContractViolation, match="sums 512 columns of .* and the rollout has columns 0 to 256"):
        verify(model, whole, plain, ranks=1)


@pytest.mark.parametrize(
    ("parameter", "rows", "named"),
    [
        ("layers.0.mlp.gate_up_proj.weight", INNER // TP, "gate_proj"),
        ("layers.1.linear_attn.in_proj_qkvz.weight", KEYS // TP, "in_proj_qkv"),
        ("layers.1.linear_attn.conv1d.weight", KEYS // TP, "conv1d"),
    ],
    ids=["gate-up", "q-k", "channels"],
)
def test_swapped_runs_of_rows_are_detected(parameter, rows, named):
    whole = whole_tensors()
    model = rank_model(0, whole)
    weight = model.get_parameter(f"{ROLLOUT}.{parameter}")
    weight.data = torch.cat([weight.data[rows : 2 * rows], weight.data[:rows], weight.data[2 * rows :]])
    with pytest.raises(ContractViolation, match=f"{named}.weight differs"):
        verify(model, whole)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


def pieces(seed: int, sent=quantized) -> list[tuple[str, torch.Tensor]]:
    """Of a sync, in one buffer as in verl's receiver."""
    stream = packed([part for item in weights(whole_tensors(seed), sent) for part in parts_of_weight(*item)])
    names, tensors = zip(*stream, strict=True)
    return list(zip(names, torch.cat(tensors).split([len(tensor) for tensor in tensors]), strict=True))


class Rank:
    """A worker with loaders that place a tensor where the model of its rank has it."""

    def __init__(self, rank: int, form=quantized) -> None:
        self.rank, self.form, self.loaded = rank, form, []
        self.model = self.of(9)
        self.placement = Placement(LiveMap(self.model))

    def of(self, seed: int) -> nn.Module:
        """The rank's model with the weights of a seed."""
        return rank_model(self.rank, whole_tensors(seed), self.form)

    def sync(self, seed: int, verified: bool = True) -> int:
        """Returns how many tensors were loaded."""
        self.loaded.clear()
        self.placement.start()
        self.placement.place(pieces(seed, self.form), lambda tensors: self.load(seed, tensors))
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
def test_later_syncs_copy_every_tensor_by_the_map_with_the_loaders_bits(rank, form):
    worker = Rank(rank, form)
    assert worker.sync(0) == len(whole_tensors()) and worker.has(0)
    worker.forget()
    assert worker.sync(1) == 0 and worker.has(1), "padded rows are zeros again"


def test_rows_that_are_adjacent_on_both_sides_are_one_copy():
    """Rank 0 of one: gate and up follow each other in the stack and in the parameter."""
    names = [f"{TRAINER}.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    whole = {name: torch.randn(INNER, HIDDEN).bfloat16() for name in names}
    worker = Rank(0)
    layer_of_one_rank = worker.model.get_submodule(f"{ROLLOUT}.layers.0.mlp.gate_up_proj")
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
    weight = worker.model.get_parameter(f"{ROLLOUT}.layers.0.mlp.down_proj.weight")
    weight.data = weight.data.clone()
    assert worker.sync(3) == of_all and worker.has(3) and worker.sync(0) == 0
    norm = f"{TRAINER}.norm.weight"
    other = [part for part in parts_of_weight(norm, torch.ones(HIDDEN).bfloat16())]
    worker.loaded.clear()
    worker.placement.start()
    worker.placement.place(list(packed(other)), worker.loaded.extend)
    assert [name for name, _ in worker.loaded] == [norm]


def test_scales_without_a_place_are_refused():
    placement = Placement(LiveMap(rank_model(0, whole_tensors(), plain)))
    placement.start()
    with pytest.raises(ValueError, match="the trainer sends scales of .*q_proj.weight, and the rollout has none"):
        placement.place(pieces(0), lambda tensors: None)
    name = f"{TRAINER}.layers.0.mlp.down_proj.weight"
    placement = Placement(LiveMap(rank_model(0, whole_tensors())))
    placement.start()
    half = FLOW.quantize_weight(whole_tensors()[name][:BLOCK], "fp32")
    with pytest.raises(ValueError, match=rf"scales of {name} are \[1, 4\] in the trainer, and of \[256, 512\]"):
        placement.place(list(packed(parts_of_weight(name, half))), lambda tensors: None)
