# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 model under FSDP2 on two gloo processes, compared with one process: gradients, quantizations, state dict."""

import pytest
import torch
from engines import gathers_counted, quantized
from tiny_models import tiny_model
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from two_processes import WORLD, run_in_two_processes

from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears

FAMILIES = ("qwen3", "qwen3_moe")


def build(family: str, checkpointing: bool = False) -> PreTrainedModel:
    model = tiny_model(family, attention_bias=True)
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def shard(model: PreTrainedModel, reshard_after_forward: bool = True) -> PreTrainedModel:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mp_policy=policy, reshard_after_forward=reshard_after_forward)


def batch(rank: int) -> torch.Tensor:
    return torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(100 + rank))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) for name, p in model.named_parameters()
    }


def gradients_match_single_process(rank: int, family: str) -> None:
    """Averaged over ranks and accumulated over two micro-batches without reduction in between, as in verl."""
    model = shard(build(family))
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(rank)).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, batch(rank + 10)).backward()
    gradients = full_gradients(model)

    # As FSDP: BF16 weights, micro-batches added and reduced in FP32.
    expected: dict[str, torch.Tensor] = {}
    for other in range(WORLD):
        for seed in (other, other + 10):
            reference = build(family)
            for parameter in reference.parameters():  # not .to(): the rotary table is a buffer and stays FP32
                parameter.data = parameter.data.to(torch.bfloat16)
            loss_of(reference, batch(seed)).backward()
            for name, parameter in reference.named_parameters():
                expected[name] = expected.get(name, 0) + parameter.grad.float() / WORLD
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        error = (gradient - expected[name]).norm() / expected[name].norm()
        # BF16 accumulation of two micro-batches inside FSDP rounds once more than the reference.
        assert error < 4e-3, (name, error)


def quantizations_follow_gathers(rank: int, family: str, checkpointing: bool, reshard: bool) -> None:
    model = shard(build(family, checkpointing), reshard)
    with gathers_counted() as counts:
        for step in range(3):
            loss_of(model, batch(rank + step)).backward()
            with torch.no_grad():
                loss_of(model, batch(rank + step))
    layers = quantized(model)
    assert len(layers) == (10 if family == "qwen3_moe" else 14)
    gathers = sorted(counts.values())
    # The root group has embeddings and head, the others one decoder layer.
    per_layer = gathers[-2:]
    most = max(layer.quantizations for layer in layers)
    print(f"rank {rank} checkpointing={checkpointing} reshard={reshard}: gathers {gathers}, quantizations {most}")
    assert most <= per_layer[0], (most, gathers)
    # Qdata is freed with the gathered weight.
    model.reshard()
    for layer in model.model.layers:
        layer.reshard()
    assert all(not layer.holds_qdata for layer in layers)


def state_dict_is_the_stock_one(rank: int, family: str) -> None:
    before = {name: tensor.clone() for name, tensor in build(family).state_dict().items()}
    model = shard(build(family))
    loss_of(model, batch(rank)).backward()
    after = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    assert before.keys() == after.keys()
    assert all(after[name].dtype == torch.float32 and torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_one_process_with_accumulation(family):
    run_in_two_processes(gradients_match_single_process, family)


@pytest.mark.parametrize(
    ("family", "checkpointing", "reshard"),
    [("qwen3", False, True), ("qwen3", True, True), ("qwen3", False, False), ("qwen3_moe", True, True)],
    ids=["plain", "checkpointed", "no-reshard", "mixture"],
)
def test_a_weight_is_quantized_at_most_once_a_gather(family, checkpointing, reshard):
    run_in_two_processes(quantizations_follow_gathers, family, checkpointing, reshard)


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dict_keeps_names_shapes_and_master_weights(family):
    run_in_two_processes(state_dict_is_the_stock_one, family)
