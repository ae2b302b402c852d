# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""gate, up and the activation between them and down as one step of autograd, so that the gradients of gate and up need
not exist in BF16.

Layer by layer, backward writes both gradients (10 bytes an element), then each linear reads its own and quantizes it in
both layouts (8 more). The kernel that computes the gradients can write those qdata itself, 10 bytes in all
(``kernels.silu_mul_backward_quantize``), but autograd has no place for qdata between two functions: what one hands to
the next is a tensor that hooks may read. Hence one function covers all three. Every bit is that of the three: FProp,
DGrad and WGrad are the layers' own (``JetLinear.fprop``, ``dgrad``, ``wgrad``), the qdata are byte for byte those of
the BF16 gradients, and the two terms of dX are added in BF16, as autograd adds them.

Used where nothing looks between the three (:func:`covers`); elsewhere the modules are called one by one.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jetrl_verl import kernels
from jetrl_verl.kernels import silu_mul_backward_quantize
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.views import as_rows, as_type
from jetrl_verl.nn.linear import JetLinear, is_plain
from jetrl_verl.reference import QuantizedTensor


def covers(x: QuantizedTensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> bool:
    """Whether :func:`gated_product` may stand for the calls of ``gate`` and ``up`` on ``x`` and the activation before
    ``down``: all three in FP8 under one scale rule; gate's and up's backward in FP8, too, neither with a bias, whose
    gradient is a sum of BF16 numbers, nor with a hook, which might want to see them; the source of ``x`` in BF16, in
    which autograd then sums dX; and a gradient to compute."""
    layers = gate, up, down
    return (
        torch.is_grad_enabled()
        and x.source.dtype == torch.bfloat16
        and all(isinstance(layer, JetLinear) and layer.scale_rule == gate.scale_rule for layer in layers)
        and all(layer.quantized_backward and layer.bias is None and is_plain(layer) for layer in (gate, up))
    )


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        layers: tuple[JetLinear, JetLinear],
        quantized: QuantizedTensor,
    ):
        ctx.layers, ctx.x_shape, ctx.colwise = layers, x.shape, quantized.colwise
        weights = gate_weight, up_weight
        ctx.colwise.readers += sum(ctx.needs_input_grad[1:3])
        gate, up = (layer.fprop(quantized, weight, None) for layer, weight in zip(layers, weights, strict=True))
        ctx.save_for_backward(quantized.qdata, quantized.scales, gate, up)
        keep(ctx, *weights)
        product = kernels.silu_mul_quantize_1x128(gate, up, layers[0].scale_rule)
        ctx.mark_non_differentiable(product.qdata, product.scales)
        ctx.set_materialize_grads(False)  # no zeros in the place of the qdata's gradients
        return product.source.reshape(*x.shape[:-1], product.source.shape[-1]), product.qdata, product.scales

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor, *_):
        x_qdata, x_scales, gate, up = ctx.saved_tensors
        needs_x, *needs_w = ctx.needs_input_grad[:3]
        rule = ctx.layers[0].scale_rule
        dy = as_type(as_rows(dy), torch.bfloat16)
        gate_rowwise, gate_colwise, up_rowwise, up_colwise = silu_mul_backward_quantize(dy, gate, up, rule)
        del dy, gate, up  # their memory is what the products take, and the qdata of gate go before those of up are read
        qdata = [(up_rowwise, up_colwise), (gate_rowwise, gate_colwise)]
        del gate_rowwise, gate_colwise, up_rowwise, up_colwise
        dx, dw = None, []
        for layer, weight, needs in zip(ctx.layers, kept(ctx), needs_w, strict=True):
            rowwise, colwise = qdata.pop()
            if needs_x:
                term = layer.dgrad(rowwise, weight)
                dx = term if dx is None else dx.add_(term)
                del term
            dw.append(None)
            if needs:
                x_colwise = ctx.colwise.take(QuantizedTensor(x_qdata, x_scales), layer.format, rule)
                dw[-1] = layer.wgrad(colwise, x_colwise, weight)
                del x_colwise
            del rowwise, colwise
        return dx.reshape(ctx.x_shape) if needs_x else None, *dw, None, None


def gated_product(x: QuantizedTensor, gate: JetLinear, up: JetLinear) -> QuantizedTensor:
    """``silu(gate(x)) * up(x)``, quantized, where :func:`covers`.

    Args:
        x: rowwise, with its source ``[..., K]`` BF16. gate, up: layers of the same width I, a multiple of 128.

    Returns:
        Rowwise ``[M, I]``, M the number of rows; its source is the product ``[..., I]`` BF16.

    Raises:
        ValueError: I is not a multiple of 128.
    """
    product, qdata, scales = _GatedProduct.apply(x.source, gate.weight, up.weight, (gate, up), x)
    return QuantizedTensor(qdata, scales, product)
