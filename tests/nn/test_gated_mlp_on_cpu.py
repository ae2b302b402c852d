# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated MLP as one step of autograd: the bits of its modules called one by one."""

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


def run(model, monkeypatch, *, as_one: bool, passes: int = 1) -> tuple[list[torch.Tensor], int]:
    """Logits, every gradient in either place, after ``passes``; how often three modules were one step."""
    calls = []
    own = gated_mlp.gated_product
    with monkeypatch.context() as patch:
        if not as_one:
            patch.setattr(shared_operations, "covers", lambda *call: False)
        patch.setattr(shared_operations, "gated_product", lambda *call: calls.append(call) or own(*call))
        for _ in range(passes):
            logits = model(input_ids=torch.arange(11)[None], use_cache=False).logits
            logits.float().square().sum().backward()
    found = [logits.detach()]
    for parameter in model.parameters():
        gradient = parameter.grad
        found.append(torch.zeros(0) if gradient is None else gradient.clone())
        if gradient is not None:
            gradient.zero_()
    return found, len(calls)


def check_same(model, monkeypatch, **arguments) -> None:
    one_by_one, none = run(model, monkeypatch, as_one=False, **arguments)
    together, calls = run(model, monkeypatch, as_one=True, **arguments)
    assert (none, calls) == (0, len(model.model.layers) * arguments.get("passes", 1))
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, together, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_the_modules(monkeypatch, family):
    check_same(decoder(family), monkeypatch)


def test_fp32_weights_get_the_same_gradients(monkeypatch):
    model = decoder("llama")
    for module in model.modules():
        if isinstance(module, JetLinear):
            module.weight.data = module.weight.data.float()
    check_same(model, monkeypatch)
    assert model.model.layers[0].mlp.gate_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "both"])
def test_frozen_weights_get_no_gradient_and_the_others_theirs(monkeypatch, frozen):
    model = decoder("llama")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.requires_grad_(frozen not in (name, "both"))
    check_same(model, monkeypatch)


def test_a_recomputed_forward_gives_the_same_gradients(monkeypatch):
    model = decoder("llama")
    for layer in model.model.layers:
        own = layer.mlp.forward
        layer.mlp.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=False)
    one_by_one, _ = run(model, monkeypatch, as_one=False)
    together, calls = run(model, monkeypatch, as_one=True)
    assert calls == 2 * len(model.model.layers)  # once more in backward
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, together, strict=True))


def test_the_qdata_of_the_input_are_let_go_after_backward(monkeypatch):
    model = decoder("llama")
    shared = []
    own = gated_mlp.gated_product
    monkeypatch.setattr(gated_mlp, "gated_product", lambda x, *layers: shared.append(x) or own(x, *layers))
    run(model, monkeypatch, as_one=True)
    assert shared and all(each.colwise.readers == 0 and each.colwise._colwise is None for each in shared)


def test_modules_are_called_one_by_one_where_something_looks_between_them():
    mlp = decoder("llama").model.layers[0].mlp
    x = torch.randn(3, mlp.gate_proj.in_features)
    read, in_fp32 = (quantize_input(each, mlp.gate_proj.format, "fp32") for each in (x.bfloat16(), x))
    layers = read, mlp.gate_proj, mlp.up_proj, mlp.down_proj
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
    in_bf16 = decoder("llama", backward="bf16").model.layers[0].mlp
    assert not gated_mlp.covers(read, in_bf16.gate_proj, in_bf16.up_proj, in_bf16.down_proj)
