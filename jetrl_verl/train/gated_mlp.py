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
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from jetrl_verl import ops
from jetrl_verl.linear import JetLinear, QuantisedInput, quantised_input
from jetrl_verl.numerics import BlockQuantized
from jetrl_verl.ops import Quantised, silu_mul_backward_quantize


def _is_plain(layer: nn.Module) -> bool:
    """Whether calling ``layer`` is ``JetLinear.forward`` and nothing else: no hook, no other ``forward``."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    replaced = "forward" in vars(layer) or type(layer).forward is not JetLinear.forward
    return not (replaced or any(hooks) or _has_any_global_hook())


def spans(x: torch.Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> bool:
    """Whether :func:`gated_product` may stand for the calls of ``gate`` and ``up`` on ``x`` and the activation before
    ``down``: all three in FP8 under one scale rule; gate's and up's backward in FP8, too, neither with a bias, whose
    gradient is a sum of BF16 numbers, nor with a hook, which might want to see them; ``x`` in BF16, in which autograd
    then sums dX; and a gradient to compute."""
    layers = gate, up, down
    return (
        torch.is_grad_enabled()
        and x.dtype == torch.bfloat16
        and all(isinstance(layer, JetLinear) and layer.scale_rule == gate.scale_rule for layer in layers)
        and all(layer.backward_precision == "fp8" and layer.bias is None and _is_plain(layer) for layer in (gate, up))
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
    @once_differentiable
    def backward(ctx, dy: torch.Tensor, *_):
        x_codes, x_scales, gate, up, *weights = ctx.saved_tensors
        needs_x, *needs_w = ctx.needs_input_grad[:3]
        rule = ctx.layers[0].scale_rule
        dy = dy.reshape(gate.shape).to(torch.bfloat16)
        gate_rows, gate_columns, up_rows, up_columns = silu_mul_backward_quantize(dy, gate, up, rule)
        del dy, gate, up  # their memory is what the products take, and the codes of gate go before those of up are read
        codes = [(up_rows, up_columns), (gate_rows, gate_columns)]
        del gate_rows, gate_columns, up_rows, up_columns
        dx, dw = None, []
        for layer, weight, main_grad, needs in zip(ctx.layers, weights, ctx.main_grads, needs_w, strict=True):
            rows, columns = codes.pop()
            if needs_x:
                term = layer.dgrad(rows, weight)
                dx = term if dx is None else dx.add_(term)
                del term
            dw.append(None)
            if needs:
                x_columns = ctx.columns.take(BlockQuantized(x_codes, x_scales), rule)
                dw[-1] = layer.wgrad(columns, x_columns, weight, main_grad)
                del x_columns
            del rows, columns
        return dx.reshape(ctx.x_shape) if needs_x else None, *dw, None, None


def gated_product(x: torch.Tensor, gate: JetLinear, up: JetLinear) -> Quantised:
    """``silu(gate(x)) * up(x)`` and its codes, where :func:`spans`.

    Args:
        x: ``[..., K]`` BF16. gate, up: layers of the same width I, a multiple of 128.

    Returns:
        (product ``[..., I]`` BF16, its codes ``[M, I]`` E4M3 and scales ``[M, I/128]`` FP32, M the number of rows).

    Raises:
        ValueError: I is not a multiple of 128.
    """
    quantised = quantised_input(x, gate.scale_rule)
    product, codes, scales = _GatedProduct.apply(x, gate.weight, up.weight, (gate, up), quantised)
    return Quantised(product, BlockQuantized(codes, scales))
