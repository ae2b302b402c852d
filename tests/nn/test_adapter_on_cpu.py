# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An FP8 layer with a LoRA adapter: products of the merged weight, gradients of the factors from the weight's."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from jetrl_verl import formats, kernels
from jetrl_verl.nn.linear import JetLinear, linear_in, project, quantize_input
from jetrl_verl.train.adapters import MergedAdapter

N, K, R, SCALE = 256, 384, 8, 4.0


def layer(backward: str = "fp8") -> tuple[nn.Module, JetLinear]:
    """A module with one adapted layer ``o``, whose B is not zero, and that layer."""
    torch.manual_seed(0)
    model = get_peft_model(
        nn.ModuleDict(
            {"o": JetLinear.replace(nn.Linear(K, N), formats.get("fp8"), scale_rule="fp32", backward=backward)}
        ),
        LoraConfig(r=R, lora_alpha=R * SCALE, target_modules=["o"]),
    )
    adapted = model.base_model.model["o"]
    nn.init.normal_(adapted.lora_B["default"].weight, std=0.02)
    MergedAdapter.replace(adapted)
    return model.base_model.model, adapted.base_layer


def of_the_merged_weight(layer: JetLinear, adapted: MergedAdapter) -> JetLinear:
    """The layer without an adapter whose weight is the sum."""
    a, b = (getattr(adapted, factor)["default"].weight.detach().bfloat16() for factor in ("lora_A", "lora_B"))
    merged = nn.Linear(K, N)
    merged.weight = nn.Parameter(kernels.merge_adapter(layer.weight.detach().bfloat16(), a, b, SCALE).float())
    merged.bias = layer.bias
    backward = "fp8" if layer.quantized_backward else "bf16"
    return JetLinear.replace(merged, layer.format, scale_rule="fp32", backward=backward)


@pytest.mark.parametrize("backward", ["fp8", "bf16"])
def test_products_are_of_the_merged_weight_and_gradients_follow_from_its(backward):
    model, inside = layer(backward)
    adapted, x = model["o"], torch.randn(160, K).bfloat16()
    merged, dy = of_the_merged_weight(inside, adapted), torch.randn(160, N).bfloat16()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [adapted(inputs[0]), merged(inputs[1])]
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward(dy)
    assert torch.equal(inputs[0].grad, inputs[1].grad) and inside.weight.grad is None
    a, b, dw = (adapted.lora_A["default"].weight, adapted.lora_B["default"].weight, merged.weight.grad)
    for got, want in ((a.grad, SCALE * b.bfloat16().float().t() @ dw), (b.grad, SCALE * dw @ a.bfloat16().float().t())):
        assert (got - want).norm() < 0.01 * want.norm()


def test_an_update_of_a_factor_or_a_disabled_adapter_quantizes_again():
    model, inside = layer()
    adapted, x = model["o"], torch.randn(3, K).bfloat16()
    with torch.no_grad():
        first, _ = adapted(x), adapted(x)
        assert inside.quantizations == 1
        adapted.lora_B["default"].weight.mul_(2)
        assert torch.equal(adapted(x), of_the_merged_weight(inside, adapted)(x))
        assert inside.quantizations == 2 and not torch.equal(adapted(x), first)
        adapted.enable_adapters(False)
        inside.adapter, adapter = None, inside.adapter
        inside.drop_qdata()
        without = inside(x)
        inside.adapter = adapter
        assert torch.equal(adapted(x), without)
        adapted.enable_adapters(True)
        assert torch.equal(adapted(x), of_the_merged_weight(inside, adapted)(x))


def test_layers_with_and_without_an_adapter_share_a_quantized_input():
    model, inside = layer()
    plain = of_the_merged_weight(inside, model["o"])
    assert linear_in(model, "o") is inside
    x = torch.randn(5, K, requires_grad=True).bfloat16()
    first, second = project(quantize_input(x, inside.format, "fp32"), [linear_in(model, "o"), plain])
    assert torch.equal(first, second)
