# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""gate, up and the activation after them as one autograd node, so that their gradients need not exist in BF16.

Separate nodes write both gradients in BF16 and quantize them again, 18 bytes an element; the kernel of the gradients
writes their qdata itself, 10 bytes, which autograd cannot pass between nodes. Bits are those of separate nodes: dX's
two terms are added in BF16. Where something looks between the modules (:func:`covers`) they are called one by one.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.recomputation import computed_once
from jetrl_verl.kernels.views import as_rows, as_type
from jetrl_verl.nn.linear import JetLinear, is_plain
from jetrl_verl.reference import QuantizedTensor


def covers(x: QuantizedTensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> bool:
    """Whether :func:`gated_product` may replace ``gate``, ``up`` and the activation before ``down``.

    All three are FP8 under one scale rule; gate's and up's backward is FP8, without biases, whose gradients are sums of
    BF16 numbers, or hooks; the source of ``x`` is BF16, in which autograd then sums dX; gradients are on.
    """
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
        pairs = zip(layers, weights, strict=True)
        gate, up = (computed_once(layer.fprop, quantized, weight, None) for layer, weight in pairs)
        ctx.save_for_backward(quantized.qdata, quantized.scales, gate, up)
        keep(ctx, *weights)
        product = layers[0].format.silu_mul(gate, up, layers[0].scale_rule)
        ctx.mark_non_differentiable(product.qdata, product.scales)
        ctx.set_materialize_grads(False)  # no zeros for the qdata's gradients
        return product.source.reshape(*x.shape[:-1], product.source.shape[-1]), product.qdata, product.scales

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor, *_):
        x_qdata, x_scales, gate, up = ctx.saved_tensors
        needs_x, *needs_w = ctx.needs_input_grad[:3]
        number_format, rule = ctx.layers[0].format, ctx.layers[0].scale_rule
        dy = as_type(as_rows(dy), torch.bfloat16)
        gate_rowwise, gate_colwise, up_rowwise, up_colwise = number_format.silu_mul_backward(dy, gate, up, rule)
        del dy, gate, up  # before the products need memory; one layer's qdata is freed before the other's are read
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
    """``silu(gate(x)) * up(x)``, quantized; requires :func:`covers`.

    Args:
        x: rowwise, with its source ``[..., K]`` BF16. gate, up: layers of the same width I, a multiple of 128.

    Returns:
        Rowwise ``[M, I]``, M the number of rows; its source is the product ``[..., I]`` BF16.

    Raises:
        ValueError: I is not a multiple of 128.
    """
    product, qdata, scales = _GatedProduct.apply(x.source, gate.operand(), up.operand(), (gate, up), x)
    return QuantizedTensor(qdata, scales, product)
