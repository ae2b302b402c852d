# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Operations that quantize their result, on the CPU: the plain one, then the quantizer; and who reads the qdata."""

from collections import Counter

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.fprop import fprop_quantized
from jetrl_verl.kernels.rms_norm import add_rms_norm_quantize_1x128, rms_norm_quantize_1x128
from jetrl_verl.kernels.silu_mul import silu_mul_backward_quantize, silu_mul_quantize
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference import SCALE_RULES, QuantizedTensor
from jetrl_verl.train import shared_operations

EPS = 1e-6
SHAPE = (2, 65, 256)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def assert_qdata_of(q: QuantizedTensor, x: torch.Tensor, rule: str, quantize=reference.quantize_1x128) -> None:
    want = quantize(x.reshape(-1, x.shape[-1]), rule)
    assert torch.equal(q.qdata.view(torch.uint8), want.qdata.view(torch.uint8)) and torch.equal(q.scales, want.scales)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_norms(rule, unit_offset):
    x, residual, weight = normal(*SHAPE), normal(*SHAPE), normal(256)
    quantized = rms_norm_quantize_1x128(x, weight, EPS, rule, unit_offset)
    assert torch.equal(quantized.source, kernels.rms_norm(x, weight, EPS, unit_offset))
    assert_qdata_of(quantized, quantized.source, rule)
    expected, expected_total = kernels.add_rms_norm(x, residual, weight, EPS, unit_offset)
    assert torch.equal(expected, kernels.rms_norm(expected_total, weight, EPS, unit_offset))
    for with_normed in (True, False):
        named = dict(with_normed=with_normed, unit_offset=unit_offset)
        quantized, total = add_rms_norm_quantize_1x128(x, residual, weight, EPS, rule, **named)
        assert torch.equal(total, expected_total)
        assert torch.equal(quantized.source, expected) if with_normed else quantized.source is None
        assert_qdata_of(quantized, expected, rule)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_gated_norm(rule):
    o, z, weight = normal(65, 2, 128), normal(65, 320)[:, 64:].unflatten(1, (2, 128)), normal(128)
    expected = kernels.gated_rms_norm(o, z, weight, EPS)
    for with_normed in (True, False):
        with torch.set_grad_enabled(with_normed):
            quantized = kernels.gated_rms_norm_quantize(o, z, weight, EPS, rule, with_normed=with_normed)
        assert torch.equal(quantized.source, expected) if with_normed else quantized.source is None
        assert_qdata_of(quantized, expected, rule)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_combine_add_rms_norm(slots, rule, unit_offset):
    """Experts' rows in any order, of which some belong to no token."""
    y, residual, weight = normal(65 * slots + 9, 256), normal(65, 256), normal(256)
    row = torch.randperm(len(y))[: 65 * slots].view(65, slots).to(torch.int32)
    expected, expected_total = kernels.add_rms_norm(reference.combine(y, row), residual, weight, EPS, unit_offset)
    normed, total = kernels.combine_add_rms_norm(y, row, residual, weight, EPS, unit_offset)
    assert torch.equal(normed, expected) and torch.equal(total, expected_total)
    for with_normed in (True, False):
        named = dict(with_normed=with_normed, unit_offset=unit_offset)
        quantized, total = kernels.combine_add_rms_norm_quantize_1x128(y, row, residual, weight, EPS, rule, **named)
        assert torch.equal(total, expected_total)
        assert torch.equal(quantized.source, expected) if with_normed else quantized.source is None
        assert_qdata_of(quantized, expected, rule)


def test_combine_add_rms_norm_raises_for_mismatched_rows():
    row, weight = torch.zeros(5, 2, dtype=torch.int32), normal(256)
    with pytest.raises(ValueError, match=r"combine_add_rms_norm: residual has shape \(10, 256\), expected \(5, 256\)"):
        kernels.combine_add_rms_norm(normal(10, 256), row, normal(10, 256), weight, EPS)
    with pytest.raises(ValueError, match=r"combine_add_rms_norm: weight has shape \(128,\), expected \(256,\)"):
        kernels.combine_add_rms_norm(normal(10, 256), row, normal(5, 256), weight[:128], EPS)
    with pytest.raises(ValueError, match="rows of 200 elements are not whole groups of 128"):
        call = normal(10, 200), row, normal(5, 200), weight[:200], EPS, "fp32"
        kernels.combine_add_rms_norm_quantize_1x128(*call, with_normed=False)
    with pytest.raises(TypeError, match="combine_add_rms_norm: y is torch.float32"):
        kernels.combine_add_rms_norm(torch.zeros(10, 256), row, normal(5, 256), weight, EPS)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_activation_and_its_gradient(rule):
    gate, up = normal(2, 65, 512).chunk(2, dim=-1)
    expected = kernels.silu_mul(gate, up)
    for with_product in (True, False):
        with torch.no_grad():
            rowwise = silu_mul_quantize(gate, up, rule, with_product=with_product)
        assert torch.equal(rowwise.source, expected) if with_product else rowwise.source is None
        assert_qdata_of(rowwise, expected, rule)
    dy, operands = normal(*SHAPE), [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    kernels.silu_mul(*operands).backward(dy)
    quantized = silu_mul_backward_quantize(dy, gate, up, rule)
    for x, rowwise, colwise in zip(operands, quantized[::2], quantized[1::2], strict=True):
        assert_qdata_of(rowwise, x.grad, rule)
        assert_qdata_of(colwise, x.grad, rule, reference.quantize_128x1)


def test_gradients_are_those_of_the_plain_operations():
    inputs = {"norm": (normal(*SHAPE), normal(256)), "activation": (normal(*SHAPE), normal(*SHAPE))}
    inputs["gate"] = inputs["activation"]
    dy = normal(*SHAPE)
    for name, plain, quantizing in (
        (
            "norm",
            lambda x, w: kernels.rms_norm(x, w, EPS, True),
            lambda x, w: rms_norm_quantize_1x128(x, w, EPS, "fp32", True),
        ),
        ("activation", kernels.silu_mul, lambda gate, up: silu_mul_quantize(gate, up, "fp32")),
        ("gate", kernels.sigmoid_mul, lambda x, gate: kernels.sigmoid_mul_quantize(x, gate, "fp32")),
    ):
        gradients = []
        for operation in (plain, lambda *operands, quantizing=quantizing: quantizing(*operands).source):
            operands = [x.clone().requires_grad_() for x in inputs[name]]
            operation(*operands).view(SHAPE).backward(dy)
            gradients.append([x.grad for x in operands])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_qdata_carry_no_gradient():
    x, weight = normal(*SHAPE).requires_grad_(), normal(256)
    q = rms_norm_quantize_1x128(x, weight, EPS, "fp32")
    assert q.source.requires_grad and not q.qdata.requires_grad and not q.scales.requires_grad


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_fprop_of_qdata_equals_fprop_of_rows(rule):
    weight, bias = kernels.quantize_128x128(normal(384, 256), rule), normal(384)
    quantized = rms_norm_quantize_1x128(normal(65, 256), normal(256), EPS, rule)
    for b in (None, bias):
        assert torch.equal(fprop_quantized(quantized, *weight, b), kernels.fprop(quantized.source, *weight, b, rule))


def test_wrong_inputs_raise():
    x = normal(4, 200)
    with pytest.raises(ValueError, match=r"rows of 200 elements are not whole groups of 128"):
        rms_norm_quantize_1x128(x, normal(200), EPS, "fp32")
    with pytest.raises(ValueError, match="unknown scale rule"):
        silu_mul_quantize(normal(4, 128), normal(4, 128), "mx")
    with pytest.raises(TypeError, match="up is torch.float32, expected torch.bfloat16"):
        silu_mul_quantize(normal(4, 128), torch.zeros(4, 128), "fp32")


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_reuse_the_qdata_of_norms_and_activation(monkeypatch, family):
    """Of a decoder layer's four inputs three come with qdata; the bits are those of quantizing in the linear. Of a
    mixture's two halves that is the attention's."""

    def logits_and_gradients() -> tuple[list[torch.Tensor], Counter]:
        changes = {"sliding_window": None} if family == "mistral" else {}
        model = tiny_model(family, **changes)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        replace_linears(model, plan_linears(model.config), scale_rule="fp32")
        shared_operations.share_operations(model)
        calls = Counter()
        with monkeypatch.context() as patch:
            # Linears call the first, norms and activation on the CPU the second.
            for package in (kernels, reference):

                def counted(*args, stock=package.quantize_1x128):
                    calls["quantized"] += 1
                    return stock(*args)

                patch.setattr(package, "quantize_1x128", counted)
            logits = model(input_ids=torch.arange(9)[None], use_cache=False).logits
        logits.square().sum().backward()
        return [logits, *(p.grad for p in model.parameters())], calls

    handed_on, calls = logits_and_gradients()
    assert calls["quantized"] == 4 * 2
    # Every layer gets the tensor that was quantized, and quantizes it itself.
    own = JetLinear.forward
    monkeypatch.setattr(JetLinear, "forward", lambda self, x: own(self, getattr(x, "source", x)))
    quantized_again, calls = logits_and_gradients()
    assert calls["quantized"] > (4 if family == "qwen3_moe" else 3 + 4) * 2
    assert all(torch.equal(a, b) for a, b in zip(handed_on, quantized_again, strict=True))
