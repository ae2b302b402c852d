# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated MLP as one autograd node equals its modules called one by one, in every bit."""

import pytest
import torch
from tiny_models import tiny_model
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn import gated_mlp
from jetrl_verl.nn.linear import JetLinear, quantize_input
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.train import shared_operations

FAMILIES = ("llama", "qwen2", "qwen3")


def decoder(family: str, *, backward: str = "fp8"):
    model = tiny_model(family)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    replace_linears(model, plan_linears(model.config), scale_rule="fp32", backward=backward)
    shared_operations.share_operations(model)
    return model


def run(model, monkeypatch, *, as_one: bool) -> tuple[list[torch.Tensor], int]:
    """Logits and all gradients, and the number of fused calls."""
    calls = []
    stock = gated_mlp.gated_product
    with monkeypatch.context() as patch:
        if not as_one:
            patch.setattr(shared_operations, "covers", lambda *call: False)
        patch.setattr(shared_operations, "gated_product", lambda *call: calls.append(call) or stock(*call))
        logits = model(input_ids=torch.arange(11)[None], use_cache=False).logits
        logits.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [logits.detach(), *(torch.zeros(0) if gradient is None else gradient for gradient in gradients)], len(calls)


def check_same(model, monkeypatch, calls_per_layer: int = 1) -> None:
    one_by_one, none = run(model, monkeypatch, as_one=False)
    together, calls = run(model, monkeypatch, as_one=True)
    assert (none, calls) == (0, calls_per_layer * len(model.model.layers))
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, together, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_the_modules(monkeypatch, family):
    check_same(decoder(family), monkeypatch)


def test_fp32_weights_get_the_same_gradients(monkeypatch):
    model = decoder("llama")
    for module in model.modules():
        if isinstance(module, JetLinear):
            module.weight.data = module.weight.data.float()
    check_same(model, monkeypatch)


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "both"])
def test_frozen_weights_get_no_gradient_and_the_others_do(monkeypatch, frozen):
    model = decoder("llama")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.requires_grad_(frozen not in (name, "both"))
    check_same(model, monkeypatch)


def test_a_recomputed_forward_gives_the_same_gradients(monkeypatch):
    model = decoder("llama")
    for layer in model.model.layers:
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    check_same(model, monkeypatch, calls_per_layer=2)  # again in backward


def test_backward_frees_the_inputs_re_layout(monkeypatch):
    model, inputs = decoder("llama"), []
    stock = gated_mlp.gated_product
    monkeypatch.setattr(gated_mlp, "gated_product", lambda x, *layers: inputs.append(x) or stock(x, *layers))
    run(model, monkeypatch, as_one=True)
    assert inputs and all(x.colwise.readers == 0 and x.colwise._colwise is None for x in inputs)


def test_hooks_biases_and_other_precisions_are_not_covered():
    mlp = decoder("llama").model.layers[0].mlp
    x = torch.randn(3, mlp.gate_proj.in_features)
    in_bf16, in_fp32 = (quantize_input(source, mlp.gate_proj.format, "fp32") for source in (x.bfloat16(), x))
    layers = in_bf16, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    assert gated_mlp.covers(*layers)
    assert not gated_mlp.covers(in_fp32, *layers[1:])  # dX would be summed in FP32
    with torch.no_grad():
        assert not gated_mlp.covers(*layers)
    everywhere = register_module_forward_hook(lambda *_: None)
    assert not gated_mlp.covers(*layers)
    everywhere.remove()
    mlp.gate_proj.forward = mlp.gate_proj.forward
    assert not gated_mlp.covers(*layers)
    del mlp.gate_proj.forward
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        hook = getattr(mlp.up_proj, register)(lambda *_: None)
        assert not gated_mlp.covers(*layers)
        hook.remove()
    mlp.gate_proj.bias = torch.nn.Parameter(torch.zeros(mlp.gate_proj.out_features))
    assert not gated_mlp.covers(*layers)
    mlp.gate_proj.bias = None
    assert gated_mlp.covers(*layers)
    mlp = decoder("llama", backward="bf16").model.layers[0].mlp
    assert not gated_mlp.covers(in_bf16, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
