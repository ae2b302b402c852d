# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of one input as one autograd node equal separate layers in every bit."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jetrl_verl import formats, kernels
from jetrl_verl.nn import linear as linear_module
from jetrl_verl.nn.linear import JetLinear, project, quantize_input

TOKENS, K = 37, 256
ROWS = (384, 128, 128)
FLOW = formats.get("fp8")


def layers(bias: bool, backward: str, seed: int = 0) -> list[JetLinear]:
    torch.manual_seed(seed)
    made = [nn.Linear(K, rows, bias=bias, dtype=torch.bfloat16) for rows in ROWS]
    return [JetLinear.replace(layer, FLOW, scale_rule="fp32", backward=backward) for layer in made]


def run(made: list[JetLinear], together: bool, again: bool = False, normed: bool = False) -> list[torch.Tensor]:
    """Outputs and gradients; with ``normed`` two outputs go through a norm, as heads do before attention."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, K).bfloat16().requires_grad_()
    scales = [torch.randn(rows).bfloat16() for rows in ROWS]
    gradient = torch.randn(TOKENS, sum(ROWS)).bfloat16()

    def forward(x: torch.Tensor) -> torch.Tensor:
        quantized = quantize_input(x * 2, made[0].format, made[0].scale_rule)
        outputs = project(quantized, made) if together else [layer(quantized) for layer in made]
        if normed:
            outputs = [kernels.rms_norm(y, s, 1e-6) if i < 2 else y for i, (y, s) in enumerate(zip(outputs, scales))]
        return torch.cat(list(outputs), dim=1)

    y = checkpoint(forward, x, use_reentrant=False) if again else forward(x)
    y.backward(gradient)
    gradients = [parameter.grad for layer in made for parameter in layer.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [y.detach(), x.grad, *gradients]


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("backward", ["fp8", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_every_bit_equals_separate_layers(bias, backward, normed, again):
    one, other = (run(layers(bias, backward), together, again, normed) for together in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_layers_are_one_autograd_node():
    made = layers(False, "fp8")
    x = quantize_input(torch.randn(TOKENS, K).bfloat16().requires_grad_(), made[0].format, "fp32")
    q, k, v = project(x, made)
    assert q.grad_fn is k.grad_fn is v.grad_fn
    assert [y.shape for y in (q, k, v)] == [(TOKENS, rows) for rows in ROWS]


def test_a_frozen_layer_gets_no_gradient():
    made = layers(False, "fp8")
    made[2].weight.requires_grad_(False)
    x = quantize_input(torch.randn(TOKENS, K).bfloat16().requires_grad_(), made[0].format, "fp32")
    torch.cat(list(project(x, made)), dim=1).sum().backward()
    assert made[2].weight.grad is None and made[1].weight.grad is not None


def hooked(made: list[nn.Module]) -> None:
    made[1].register_forward_hook(lambda *_: None)


def other_rule(made: list[nn.Module]) -> None:
    made[1].scale_rule = "pow2"


def other_backward(made: list[nn.Module]) -> None:
    made[0].quantized_backward = False


@pytest.mark.parametrize("change", [hooked, other_rule, other_backward])
def test_layers_with_hooks_or_other_options_are_called_separately(change, monkeypatch):
    made = layers(False, "fp8")
    change(made)
    calls = []
    stock = linear_module._LinearFunction.apply
    monkeypatch.setattr(linear_module._LinearFunction, "apply", lambda *call: calls.append(call[1]) or stock(*call))
    x = quantize_input(torch.randn(TOKENS, K).bfloat16().requires_grad_(), made[0].format, "fp32")
    assert len(project(x, made)) == 3
    assert calls == [(layer,) for layer in made]


def test_plain_tensors_and_passes_without_gradients_call_the_layers():
    made = layers(True, "fp8")
    x = torch.randn(2, TOKENS, K).bfloat16()
    with torch.no_grad():
        expected = [layer(x) for layer in made]
        outputs = project(quantize_input(x, made[0].format, "fp32"), made)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    made[2].__class__ = nn.Linear
    assert len(project(x, made)) == 3


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
def test_a_weight_gathered_for_backward_is_quantized_and_transposed_at_once(again, monkeypatch):
    """FSDP assigns a weight for forward and again for backward; the bits equal transposed qdata."""
    fp8 = formats.get("fp8")
    kept = run(layers(False, "fp8"), True, again)
    made = layers(False, "fp8")
    calls = []
    both, transpose = fp8.quantize_weight_and_transpose, fp8.transpose_weight
    monkeypatch.setattr(fp8, "quantize_weight_and_transpose", lambda *call: calls.append("both") or both(*call))
    monkeypatch.setattr(fp8, "transpose_weight", lambda q: calls.append("transpose") or transpose(q))
    torch.manual_seed(1)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y

        @staticmethod
        def backward(ctx, dy):
            for layer in made:
                layer.weight = layer.weight  # as FSDP does
            return dy

    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *call, **options: Gather.apply(cat(*call, **options)))
    gathered = run(made, True, again)
    assert calls == ["both"] * 3
    assert all(torch.equal(a, b) for a, b in zip(gathered, kept, strict=True))
    assert all(layer.quantizations == 2 for layer in made)


def test_a_transpose_is_cached_as_long_as_the_weight(monkeypatch):
    """Once for all micro-batches, and again after the weight changed or was assigned."""
    fp8 = formats.get("fp8")
    (layer, *_) = layers(False, "fp8")
    made, transpose = [], fp8.transpose_weight
    monkeypatch.setattr(fp8, "transpose_weight", lambda weight: made.append(1) or transpose(weight))

    def gradient() -> torch.Tensor:
        x = torch.ones(TOKENS, K, dtype=torch.bfloat16, requires_grad=True)
        layer(x).float().square().sum().backward()
        return x.grad

    first, second = gradient(), gradient()
    assert made == [1] and torch.equal(first, second)
    with torch.no_grad():
        layer.weight.mul_(-1)
    assert torch.equal(gradient(), first) and len(made) == 2, "both the weight and dY change sign"
    layer.weight = layer.weight
    assert torch.equal(gradient(), first) and len(made) == 3


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_heads_equal_the_layers_outputs(tokens, hooked):
    made = layers(True, "fp8")
    if hooked:
        made[0].register_forward_hook(lambda *_: None)
    results = []
    for head_dim in (None, 128):
        x = torch.randn(1, tokens, K, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        outputs = project(quantize_input(x, made[0].format, "fp32"), made, head_dim)
        heads = [y.reshape(tokens, rows // 128, 128) for y, rows in zip(outputs, ROWS, strict=True)]
        if head_dim is not None:
            assert [y.shape for y in outputs] == [y.shape for y in heads]
        torch.cat(heads, dim=1).sin().sum().backward()
        results.append([*heads, x.grad, *(parameter.grad for layer in made for parameter in layer.parameters())])
        for layer in made:
            layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
