# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Operations that quantise their result, on the CPU: the plain one, then the quantiser; and who reads the codes."""

from collections import Counter

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from jetrl_verl import kernels, numerics, ops
from jetrl_verl.kernels.torch_ops import fprop_codes
from jetrl_verl.layers import plan_linears
from jetrl_verl.linear import replace_linears
from jetrl_verl.numerics import SCALE_RULES, BlockQuantized
from jetrl_verl.ops.rms_norm import add_rms_norm_quantize_1x128, rms_norm_quantize_1x128
from jetrl_verl.ops.silu_mul import silu_mul_backward_quantize, silu_mul_quantize, silu_mul_quantize_1x128
from jetrl_verl.train import shared_operations

EPS = 1e-6
SHAPE = (2, 65, 256)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def assert_codes_of(q: BlockQuantized, x: torch.Tensor, rule: str, quantise=numerics.quantize_1x128) -> None:
    want = quantise(x.reshape(-1, x.shape[-1]), rule)
    assert torch.equal(q.codes.view(torch.uint8), want.codes.view(torch.uint8)) and torch.equal(q.scales, want.scales)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_norms(rule):
    x, residual, weight = normal(*SHAPE), normal(*SHAPE), normal(256)
    y, codes = rms_norm_quantize_1x128(x, weight, EPS, rule)
    assert torch.equal(y, ops.rms_norm(x, weight, EPS))
    assert_codes_of(codes, y, rule)
    expected, expected_total = ops.add_rms_norm(x, residual, weight, EPS)
    for with_normed in (True, False):
        y, total, codes = add_rms_norm_quantize_1x128(x, residual, weight, EPS, rule, with_normed=with_normed)
        assert torch.equal(total, expected_total)
        assert torch.equal(y, expected) if with_normed else y is None
        assert_codes_of(codes, expected, rule)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_activation_and_its_gradient(rule):
    gate, up = normal(2, 65, 512).chunk(2, dim=-1)
    expected = ops.silu_mul(gate, up)
    for with_product in (True, False):
        for with_columns in (True, False):
            options = dict(with_product=with_product, with_columns=with_columns)
            product, rows, columns = silu_mul_quantize(gate, up, rule, **options)
            assert torch.equal(product, expected) if with_product else product is None
            assert_codes_of(rows, expected, rule)
            if with_columns:
                assert_codes_of(columns, expected, rule, numerics.quantize_128x1)
            else:
                assert columns is None
    dy, operands = normal(*SHAPE), [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    ops.silu_mul(*operands).backward(dy)
    found = silu_mul_backward_quantize(dy, gate, up, rule)
    for x, rows, columns in zip(operands, found[::2], found[1::2], strict=True):
        assert_codes_of(rows, x.grad, rule)
        assert_codes_of(columns, x.grad, rule, numerics.quantize_128x1)


def test_gradients_are_those_of_the_plain_operations():
    inputs = {"norm": (normal(*SHAPE), normal(256)), "activation": (normal(*SHAPE), normal(*SHAPE))}
    dy = normal(*SHAPE)
    for name, plain, quantising in (
        ("norm", lambda x, w: ops.rms_norm(x, w, EPS), lambda x, w: rms_norm_quantize_1x128(x, w, EPS, "fp32")[0]),
        ("activation", ops.silu_mul, lambda gate, up: silu_mul_quantize_1x128(gate, up, "fp32")[0]),
    ):
        gradients = []
        for operation in (plain, quantising):
            operands = [x.clone().requires_grad_() for x in inputs[name]]
            operation(*operands).backward(dy)
            gradients.append([x.grad for x in operands])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_codes_carry_no_gradient():
    x, weight = normal(*SHAPE).requires_grad_(), normal(256)
    y, codes = rms_norm_quantize_1x128(x, weight, EPS, "fp32")
    assert y.requires_grad and not codes.codes.requires_grad and not codes.scales.requires_grad


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul", "silu_mul_backward"])
def test_fake_results_agree_with_the_real_ones(name):
    x, weight = normal(130, 384), normal(384)
    operator, arguments = {
        "rms_norm": ("rms_norm_quantize_1x128", (x, weight, EPS, "fp32")),
        "add_rms_norm": ("add_rms_norm_quantize_1x128", (x, x, weight, EPS, "fp32", False)),
        "silu_mul": ("silu_mul_quantize", (x, x, "fp32", False, True)),
        "silu_mul_backward": ("silu_mul_backward_quantize", (x, x, x, "fp32")),
    }[name]
    torch.library.opcheck(getattr(torch.ops.jetrl, operator), arguments, test_utils=("test_faketensor",))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_a_linear_that_is_given_codes_computes_what_it_computes_from_rows(rule):
    weight, bias = kernels.quantize_128x128(normal(384, 256), rule), normal(384)
    rows, codes = rms_norm_quantize_1x128(normal(65, 256), normal(256), EPS, rule)
    for b in (None, bias):
        assert torch.equal(fprop_codes(codes, *weight, b), kernels.fprop(rows, *weight, b, rule))
    torch.library.opcheck(torch.ops.jetrl.fprop_codes, (*codes, *weight, bias), test_utils=("test_faketensor",))


def test_codes_that_are_none_or_do_not_fit_are_refused():
    weight = kernels.quantize_128x128(normal(384, 256), "fp32")
    codes, scales = kernels.quantize_1x128(normal(3, 128), "fp32")
    with pytest.raises(ValueError, match=r"jetrl::fprop_codes: x \(3, 128\) does not fit the weight \(384, 256\)"):
        fprop_codes(BlockQuantized(codes, scales), *weight, None)
    with pytest.raises(ValueError, match="input codes are torch.bfloat16, expected torch.float8_e4m3fn"):
        fprop_codes(BlockQuantized(normal(3, 256), scales), *weight, None)
    with pytest.raises(ValueError, match="weight codes are torch.bfloat16, expected torch.float8_e4m3fn"):
        fprop_codes(BlockQuantized(codes, scales), normal(384, 128), weight.scales, None)


def test_other_inputs_are_refused():
    x = normal(4, 200)
    with pytest.raises(ValueError, match=r"rows of 200 elements are not whole groups of 128"):
        rms_norm_quantize_1x128(x, normal(200), EPS, "fp32")
    with pytest.raises(ValueError, match="unknown scale rule"):
        silu_mul_quantize_1x128(normal(4, 128), normal(4, 128), "mx")
    with pytest.raises(TypeError, match="up is torch.float32, expected torch.bfloat16"):
        silu_mul_quantize_1x128(normal(4, 128), torch.zeros(4, 128), "fp32")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainers_linears_take_the_codes_that_norms_and_activation_made(monkeypatch, family):
    """Of a decoder layer's four inputs three come with codes; the bits are those of quantising in the linear."""

    def logits_and_gradients() -> tuple[list[torch.Tensor], Counter]:
        changes = {"sliding_window": None} if family == "mistral" else {}
        model = tiny_model(family, **changes)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        replace_linears(model, plan_linears(model.config), scale_rule="fp32")
        shared_operations.share_operations(model)
        calls = Counter()
        with monkeypatch.context() as patch:
            stock = kernels.quantize_1x128

            def counted(*args):
                calls["quantised"] += 1
                return stock(*args)

            patch.setattr(kernels, "quantize_1x128", counted)
            logits = model(input_ids=torch.arange(9)[None], use_cache=False).logits
        logits.square().sum().backward()
        return [logits, *(p.grad for p in model.parameters())], calls

    handed_on, calls = logits_and_gradients()
    assert calls["quantised"] == 4 * 2
    monkeypatch.setattr(shared_operations, "remember_codes", lambda *args: None)
    quantised_again, calls = logits_and_gradients()
    assert calls["quantised"] == (3 + 4) * 2
    assert all(torch.equal(a, b) for a, b in zip(handed_on, quantised_again, strict=True))
