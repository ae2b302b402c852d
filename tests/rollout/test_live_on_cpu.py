# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which part of the trainer's tensors each tensor-parallel rank has, and that the contract check finds it there. vLLM's
layers are built without constructors, so no process group is needed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jetrl_verl import formats
from jetrl_verl.formats.format import SCALE_SUFFIX, QuantizedWeight
from jetrl_verl.reference import BLOCK, quantize_128x128
from jetrl_verl.rollout.live import LiveMap, live_tensors, place_scales
from jetrl_verl.sync.contract import ContractReceiver, ContractViolation, with_contract
from jetrl_verl.sync.wire import packed

HIDDEN, HEAD, INNER, VOCABULARY, TP = 256, 128, 512, 96, 2
HEADS, KV_HEADS = 4, 1
FLOW = formats.get(formats.FLOW)


def whole_tensors() -> dict[str, torch.Tensor]:
    """The trainer's tensors of one layer, embedding and head."""
    torch.manual_seed(0)
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
    qdata, scales = quantize_128x128(weight, "fp32")
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


def verify(model: nn.Module, whole: dict[str, torch.Tensor], sent=quantized, ranks: int = TP) -> dict:
    def stream():
        for name, tensor in whole.items():
            if name.endswith("proj.weight") and sent is quantized:
                yield name, FLOW.quantize_weight(tensor, "fp32")
            else:
                yield name, tensor

    receiver = ContractReceiver()
    receiver.take(list(packed(with_contract(stream(), scale_rule="fp32", probe=1, ranks=ranks))))
    return receiver.verify(live_tensors(model), scale_rule="fp32", probe=1)


@pytest.mark.parametrize("rank", range(TP))
def test_each_rank_has_its_part_of_every_tensor(rank):
    whole = whole_tensors()
    counts = verify(rank_model(rank, whole), whole)
    assert (counts["quantized"], counts["plain"]) == (7, 6)
    counts = verify(rank_model(rank, whole, plain), whole, plain)
    assert (counts["quantized"], counts["plain"]) == (0, 13)


@pytest.mark.parametrize(
    ("module", "piece"),
    [
        ("self_attn.qkv_proj", "self_attn.q_proj"),
        ("self_attn.o_proj", "self_attn.o_proj"),
        ("mlp.gate_up_proj", "mlp.gate_proj"),
        ("mlp.down_proj", "mlp.down_proj"),
    ],
)
def test_the_other_ranks_shard_is_refused(module, piece):
    """Rank 0 with rank 1's slice: all bytes are the trainer's, in the wrong place."""
    whole = whole_tensors()
    model, other = rank_model(0, whole), rank_model(1, whole)
    prefix = f"model.layers.0.{module}"
    for leaf in ("weight", "weight" + SCALE_SUFFIX):
        model.get_parameter(f"{prefix}.{leaf}").data = other.get_parameter(f"{prefix}.{leaf}").data
    with pytest.raises(ContractViolation, match=rf"model\.layers\.0\.{piece}\.weight differs"):
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


def test_swapped_gate_and_up_are_detected():
    whole = whole_tensors()
    model = rank_model(0, whole)
    weight = model.get_parameter("model.layers.0.mlp.gate_up_proj.weight")
    half = weight.shape[0] // 2
    weight.data = torch.cat([weight.data[half:], weight.data[:half]])
    with pytest.raises(ContractViolation, match="gate_proj"):
        verify(model, whole)


def whole_scales(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = {name: tensor for name, tensor in whole.items() if name.endswith("proj.weight")}
    return {name + SCALE_SUFFIX: quantize_128x128(tensor, "fp32").scales for name, tensor in weights.items()}


@pytest.mark.parametrize("rank", range(TP))
def test_scales_are_placed_in_each_ranks_parameters(rank):
    whole = whole_tensors()
    model = rank_model(rank, whole)
    for name, parameter in model.named_parameters():
        if name.endswith(SCALE_SUFFIX):
            parameter.data.fill_(float("nan"))
    with pytest.raises(ContractViolation, match="q_proj.weight differs"):
        verify(model, whole)
    place_scales(live_tensors(model), whole_scales(whole))
    assert verify(model, whole)["quantized"] == 7


def test_scales_without_a_parameter_are_refused():
    whole = whole_tensors()
    scales = whole_scales(whole)
    with pytest.raises(ValueError, match="the trainer sends .*q_proj.weight_scale_inv, and the rollout has no"):
        place_scales(live_tensors(rank_model(0, whole, plain)), scales)
    name = "model.layers.0.mlp.down_proj.weight" + SCALE_SUFFIX
    with pytest.raises(ValueError, match=r"down_proj.weight_scale_inv is \[1, 4\] in the trainer"):
        place_scales(live_tensors(rank_model(0, whole)), {name: scales[name][:1]})


def test_a_parameter_that_moved_is_mapped_to_its_new_address():
    """The map is kept between syncs; storages of parameters may change."""
    whole = whole_tensors()
    model = rank_model(0, whole)
    live_map = LiveMap(model)
    assert live_map.tensors() is live_map.tensors()
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    weight.data = weight.data.clone()
    weight.data.view(torch.uint8)[3, 5] ^= 1
    live = live_map.tensors()["model.layers.0.mlp.down_proj.weight"].tensor
    assert live.data_ptr() == weight.data_ptr() and torch.equal(live.view(torch.uint8), weight.data.view(torch.uint8))


def test_block_sums_of_a_column_slice_are_those_of_the_whole():
    q = FLOW.quantize_weight(torch.randn(256, 512).bfloat16(), "pow2")
    part = QuantizedWeight(FLOW, q.qdata[:, 2 * BLOCK :], q.scales[:, 2:])
    assert torch.equal(FLOW.sums(part), FLOW.sums(q)[:, 2:])
