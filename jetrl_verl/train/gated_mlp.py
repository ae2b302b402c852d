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
"""gate, up and the activation between them and down as one step of autograd, so that the gradients of gate and up need
not exist in BF16.

Layer by layer, backward writes both gradients (10 bytes an element), then each linear reads its own and quantises it in
both layouts (8 more). The kernel that computes the gradients can write those codes itself, 10 bytes in all
(``ops.silu_mul_backward_quantize``), but autograd has no place for codes between two functions: what one hands to the
next is a tensor that hooks may read. Hence one function spans all three. Every bit is that of the three: FProp, DGrad
and WGrad are the layers' own (``JetLinear.fprop``, ``dgrad``, ``wgrad``), the codes are byte for byte those of the BF16
gradients, and the two terms of dX are added in BF16, as autograd adds them.

Taken where nothing looks between the three (:func:`spans`); elsewhere the modules are called one by one.
"""

import torch
from torch import nn

from jetrl_verl import ops
from jetrl_verl.linear import JetLinear, QuantisedInput, quantised_input
from jetrl_verl.numerics import BlockQuantized
from jetrl_verl.ops import Quantised, silu_mul_backward_quantize


def _watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def spans(gate: nn.Module, up: nn.Module, down: nn.Module) -> bool:
    """Whether :func:`gated_product` may stand for the calls of ``gate`` and ``up`` and the activation before ``down``:
    all three in FP8 with an FP8 backward and one scale rule, no bias, whose gradient is a sum of BF16 numbers, no hook,
    which might want to see them, and a gradient to compute."""
    layers = (gate, up, down)
    return (
        torch.is_grad_enabled()
        and all(isinstance(layer, JetLinear) and layer.scale_rule == gate.scale_rule for layer in layers)
        and all(
            layer.backward_precision == "fp8" and layer.bias is None and not _watched(layer) for layer in (gate, up)
        )
    )


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        layers: tuple[JetLinear, JetLinear],
        quantised: QuantisedInput,
    ):
        ctx.layers, ctx.x_shape, ctx.columns = layers, x.shape, quantised.columns
        weights = gate_weight, up_weight
        # Looked up here: activation checkpointing hands backward an alias of the weight that has no attributes.
        ctx.main_grads = [getattr(weight, "main_grad", None) for weight in weights]
        ctx.columns.readers += sum(ctx.needs_input_grad[1:3])
        gate, up = (layer.fprop(quantised.rows, weight) for layer, weight in zip(layers, weights, strict=True))
        ctx.save_for_backward(*quantised.rows, gate, up, *weights)
        product, (codes, scales) = ops.silu_mul_quantize_1x128(gate, up, layers[0].scale_rule)
        ctx.mark_non_differentiable(codes, scales)
        ctx.set_materialize_grads(False)  # no zeros in the place of the codes' gradients
        return product.reshape(*x.shape[:-1], product.shape[-1]), codes, scales

    @staticmethod
    def backward(ctx, dy: torch.Tensor, *_):
        x_codes, x_scales, gate, up, *weights = ctx.saved_tensors
        needs_x, *needs_w = ctx.needs_input_grad[:3]
        rule = ctx.layers[0].scale_rule
        dy = dy.reshape(gate.shape).to(torch.bfloat16)
        gate_rows, gate_columns, up_rows, up_columns = silu_mul_backward_quantize(dy, gate, up, rule)
        dx, dw = [], [None, None]
        for i, (rows, columns) in enumerate(((gate_rows, gate_columns), (up_rows, up_columns))):
            layer, weight = ctx.layers[i], weights[i]
            if needs_x:
                dx.append(layer.dgrad(rows, weight))
            if needs_w[i]:
                x_columns = ctx.columns.take(BlockQuantized(x_codes, x_scales), rule)
                dw[i] = layer.wgrad(columns, x_columns, weight, ctx.main_grads[i])
        return (dx[0] + dx[1]).reshape(ctx.x_shape) if needs_x else None, *dw, None, None


def gated_product(x: torch.Tensor, gate: JetLinear, up: JetLinear) -> Quantised:
    """``silu(gate(x)) * up(x)`` and its codes, where :func:`spans`.

    Args:
        x: ``[..., K]``, cast to BF16 first. gate, up: layers of the same width I, a multiple of 128.

    Returns:
        (product ``[..., I]`` BF16, its codes ``[M, I]`` E4M3 and scales ``[M, I/128]`` FP32, M the number of rows).

    Raises:
        ValueError: I is not a multiple of 128.
    """
    quantised = quantised_input(x, gate.scale_rule)
    product, codes, scales = _GatedProduct.apply(x.to(torch.bfloat16), gate.weight, up.weight, (gate, up), quantised)
    return Quantised(product, BlockQuantized(codes, scales))
