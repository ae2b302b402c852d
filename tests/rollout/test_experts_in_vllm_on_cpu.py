# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Experts of a rollout over several ranks: loading, the contract check, and sums of ranks that equal the trainer's
bits. vLLM's layers are built without constructors, so no process group is needed."""

from types import SimpleNamespace

import pytest
import torch
from streams import receiver_of
from test_live_on_cpu import layer
from tiny_models import tiny_config
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts

from jetrl_verl import formats, kernels
from jetrl_verl.models.families.base import Experts
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.rollout.experts import is_of_experts, load_experts
from jetrl_verl.rollout.live import LiveMap, Placement, live_tensors
from jetrl_verl.sync.contract import ContractReceiver
from jetrl_verl.sync.quantize import as_tensors, quantize_stream
from jetrl_verl.sync.statement import ContractViolation
from jetrl_verl.sync.wire import packed, parts_of_weight

INNER = 512
PREFIX = "model.layers.0.mlp.experts"
FLOW = formats.get("fp8")


def config(ranks: int = 1):
    model_config = tiny_config("qwen3_moe", moe_intermediate_size=INNER, num_attention_heads=8, num_key_value_heads=8)
    assert plan_linears(model_config, ranks)
    return model_config


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"gate_up_proj": (8, 2 * INNER, 256), "down_proj": (8, 256, INNER)}
    return {f"{PREFIX}.{name}": torch.randn(shape) * 0.05 for name, shape in shapes.items()}


def stream(ranks: int):
    return quantize_stream(whole().items(), plan_linears(config(ranks), ranks), "fp32")


def rank_model(rank: int, ranks: int) -> nn.Module:
    """A worker's model before a sync: zeros in parameters of the rank's shapes."""
    width = INNER // ranks
    shapes = {"w13_weight": (8, 2 * width, 256), "w2_weight": (8, 256, width)}
    parameters = {}
    for name, (experts, n, k) in shapes.items():
        parameters[name] = torch.zeros(experts, n, k, dtype=FLOW.dtype)
        parameters[name + "_scale_inv"] = torch.ones(experts, n // 128, k // 128)
    routed = layer(
        RoutedExperts,
        **parameters,
        moe_config=SimpleNamespace(tp_rank=rank, intermediate_size=INNER),
        quant_method=SimpleNamespace(format=FLOW),
    )
    model = nn.Module()
    model.config = config(ranks)
    parent = model
    for part in (*PREFIX.split("."), "routed_experts"):
        parent.add_module(part, routed if part == "routed_experts" else nn.Module())
        parent = getattr(parent, part)
    return model


def synced(rank: int, ranks: int) -> tuple[nn.Module, ContractReceiver]:
    model = rank_model(rank, ranks)
    for name, tensor in as_tensors(stream(ranks)):
        assert is_of_experts(name, model.config)
        load_experts(model, name, tensor, rank)
    return model, receiver_of(stream(ranks), scale_rule="fp32", probe=1, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_loads_its_part_and_the_contract_holds(ranks):
    for rank in range(ranks):
        model, receiver = synced(rank, ranks)
        counts = receiver.verify(live_tensors(model), scale_rule="fp32", probe=1)
        assert counts["quantized"] == 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_map_places_every_ranks_part_where_the_loader_does(ranks):
    pieces = list(packed(part for item in stream(ranks) for part in parts_of_weight(*item)))
    for rank in range(ranks):
        model, (loaded, _) = rank_model(rank, ranks), synced(rank, ranks)
        placement = Placement(LiveMap(model))
        for _ in range(2):  # as if the first sync had been loaded
            placement.start()
            placement.place(pieces, lambda tensors: None)
            placement.commit()
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter.view(torch.uint8), model.get_parameter(name).view(torch.uint8)), (rank, name)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parameter", ["w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv"])
def test_an_expert_with_the_weights_of_another_is_detected(parameter, ranks):
    model, receiver = synced(ranks - 1, ranks)
    live = getattr(model.get_submodule(f"{PREFIX}.routed_experts"), parameter).data
    live[5] = live[4].clone()
    with pytest.raises(ContractViolation, match=r"layers\.0\.mlp\.experts\.\w+ differs between trainer and rollout"):
        receiver.verify(live_tensors(model), scale_rule="fp32", probe=1)


def test_the_part_of_another_rank_is_detected():
    model, receiver = synced(0, 2)
    for name, tensor in as_tensors(stream(2)):
        load_experts(model, name, tensor, 1)
    with pytest.raises(ContractViolation, match="differs"):
        receiver.verify(live_tensors(model), scale_rule="fp32", probe=1)


def test_experts_of_another_shape_are_refused():
    model = rank_model(0, 1)
    with pytest.raises(ValueError, match=r"is \[8, 256, 128\] .* and this rank holds \[8, 256, 512\]"):
        load_experts(model, f"{PREFIX}.down_proj", torch.zeros(8, 256, 128, dtype=FLOW.dtype), 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_sum_of_ranks_is_the_trainers_output_in_every_bit(ranks):
    torch.manual_seed(1)
    x, logits = torch.randn(70, 256).bfloat16(), torch.randn(70, 8)
    chosen, weights = kernels.route(logits, 2, True)
    trainer = nn.Module()
    for name, tensor in whole().items():
        trainer.register_parameter(name.rpartition(".")[2], nn.Parameter(tensor))
    JetExperts.replace(trainer, FLOW, Experts(), scale_rule="fp32", ranks=ranks)
    parts = []
    for rank in range(ranks):
        routed = synced(rank, ranks)[0].get_submodule(f"{PREFIX}.routed_experts")
        operands = (
            QuantizedTensor(routed.w13_weight.data, routed.w13_weight_scale_inv.data),
            QuantizedTensor(routed.w2_weight.data, routed.w2_weight_scale_inv.data),
        )
        segments = kernels.segments(chosen, 8, 1)
        rows = kernels.gather_quantized(FLOW.quantize_activation(x, "fp32"), segments.pair, 2)
        y, *_ = FLOW.experts(rows, weights, segments, *operands, "fp32")
        parts.append(kernels.combine(y, segments.row))
    with torch.no_grad():
        expected = trainer(x, chosen, weights)
    assert torch.equal(kernels.sum_of_ranks(parts), expected)
    assert ranks == 1 or not torch.equal(parts[0], expected)
