# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``nn.Linear`` with FP8 products and saved activations, by the operator that vLLM's layers call.

Saved for backward are X in FP8, 1.03 bytes an element instead of 2, and the weight by reference
(kernels/by_reference.py). A norm quantizes X once for all layers that read it (nn/handoff.py); they share the saved
qdata and their re-layout. A weight is quantized once while it is in place (nn/weight_cache.py), within a backward pass
together with the transpose for DGrad. With a LoRA adapter the weight of the products is their sum (nn/adapter.py).

A BF16 backward is QaRL's choice (arXiv 2604.07853): the same FProp, straight-through BF16 gradients from a saved
BF16 X and the BF16 weight.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _global_parameter_registration_hooks, _has_any_global_hook

from jetrl_verl.formats.catalog import UNQUANTIZED
from jetrl_verl.formats.format import Format
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.recomputation import computed_once
from jetrl_verl.kernels.views import as_rows, as_type
from jetrl_verl.nn.adapter import Adapter
from jetrl_verl.nn.weight_cache import WeightCache
from jetrl_verl.reference import QuantizedTensor, ScaleRule


class SharedColwise:
    """X re-laid out for WGrad, created for the first layer that needs it and freed by the last one.

    Attributes:
        readers: backward nodes that have not read it yet.
    """

    def __init__(self) -> None:
        self.readers = 0
        self._colwise: QuantizedTensor | None = None

    def take(self, rowwise: QuantizedTensor, number_format: Format, rule: ScaleRule) -> QuantizedTensor:
        """Colwise data ``[K, M]`` from the saved rowwise ``[M, K]``, for one reader."""
        colwise = self._colwise if self._colwise is not None else number_format.colwise(rowwise, rule)
        self.readers -= 1
        # In a second backward of a retained graph no readers are left, and each node makes its own.
        self._colwise = colwise if self.readers > 0 else None
        return colwise


def quantize_input(x: torch.Tensor | QuantizedTensor, number_format: Format, rule: ScaleRule) -> QuantizedTensor:
    """The BF16 value of ``x [..., K]`` quantized rowwise ``[M, K]``, with ``x`` as its source.

    A :class:`QuantizedTensor` is returned unchanged, with a :class:`SharedColwise` if it has none.

    Raises:
        ValueError: a quantized ``x`` without its source.
    """
    if not isinstance(x, QuantizedTensor):
        with torch.no_grad():
            rowwise = number_format.quantize_activation(as_rows(as_type(x, torch.bfloat16)), rule)
        return QuantizedTensor(rowwise.qdata, rowwise.scales, x, SharedColwise())
    if x.source is None:
        raise ValueError("The trainer needs the source of a quantized input. Pass source as well.")
    if x.colwise is None:
        x.colwise = SharedColwise()
    return x


class _LinearFunction(torch.autograd.Function):
    """FProp, DGrad and WGrad of layers that read the same X. Terms of dX are added in the order in which autograd adds
    those of separate nodes, the last layer's first, so bits do not depend on how many layers a node has."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        layers: Sequence["JetLinear"],
        quantized: QuantizedTensor,
        head_dim: int | None,
        *parameters: torch.Tensor | None,
    ):
        # All weights, then all biases.
        weights, biases = parameters[: len(layers)], parameters[len(layers) :]
        ctx.layers = layers
        ctx.x_shape = x.shape
        if layers[0].quantized_backward:
            ctx.save_for_backward(quantized.qdata, quantized.scales)
            ctx.colwise = quantized.colwise
            ctx.colwise.readers += sum(ctx.needs_input_grad[4 : 4 + len(layers)])
        else:
            ctx.save_for_backward(as_rows(x))
        keep(ctx, *weights)
        outputs = []
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            y = computed_once(layer.fprop, quantized, weight, bias)
            if head_dim is not None:
                y = y.view(y.shape[0], layer.out_features // head_dim, head_dim)
            elif x.ndim != 2:
                y = y.view(*x.shape[:-1], layer.out_features)
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor):
        layers: Sequence[JetLinear] = ctx.layers
        count, needs_x = len(layers), ctx.needs_input_grad[0]
        needs_w, needs_bias = ctx.needs_input_grad[4 : 4 + count], ctx.needs_input_grad[4 + count :]
        weights = kept(ctx)
        if layers[0].quantized_backward:
            x_qdata, x_scales = ctx.saved_tensors
        else:
            (x,) = ctx.saved_tensors
        dx, dw, dbias = None, [None] * count, [None] * count
        for i in reversed(range(count)):
            layer, weight = layers[i], weights[i]
            dy = gradients[i] if gradients[i].ndim == 2 else gradients[i].reshape(-1, layer.out_features)
            dy = as_type(dy, torch.bfloat16).contiguous()
            term = None
            if needs_bias[i]:
                # From the unquantized gradient, summed in FP32 (contract, "Bias").
                dbias[i] = dy.sum(dim=0, dtype=torch.float32).to(layer.bias.dtype)
            if layer.quantized_backward:
                rowwise, colwise = layer.format.quantize_gradient(
                    dy, layer.scale_rule, rowwise=needs_x, colwise=needs_w[i]
                )
                del dy
                if needs_x:
                    term = layer.dgrad(rowwise, weight)
                if needs_w[i]:
                    x = ctx.colwise.take(QuantizedTensor(x_qdata, x_scales), layer.format, layer.scale_rule)
                    dw[i] = layer.wgrad(colwise, x, weight)
            else:
                if needs_x:
                    term = dy @ layer.merged(weight)
                if needs_w[i]:
                    dw[i] = as_type(dy.t() @ x, weight.dtype)
            if term is not None:
                dx = term if dx is None else dx.add_(term)
        if dx is not None and len(ctx.x_shape) != 2:
            dx = dx.view(ctx.x_shape)
        return dx, None, None, None, *dw, *dbias


class JetLinear(nn.Linear):
    """``nn.Linear`` in FP8, with the parameters of the layer that it replaces.

    Input ``[..., K]`` of any floating type, output ``[..., N]`` BF16. The BF16 values of input and weight are
    quantized, so results do not depend on autocast or FSDP's mixed precision.

    Attributes:
        scale_rule: ``"fp32"`` or ``"pow2"``.
        ranks: over which the rollout splits K; FProp rounds where they do, gradients ignore these roundings.
        quantized_backward: whether DGrad and WGrad run in the format instead of BF16.
        format: of the three products.
        adapter: LoRA's, or None.
        stock_class: of the replaced layer.
    """

    scale_rule: ScaleRule
    ranks: int
    quantized_backward: bool
    format: Format
    adapter: Adapter | None = None
    _cache: WeightCache
    stock_class = nn.Linear

    @classmethod
    def replace(
        cls, linear: nn.Linear, number_format: Format, *, scale_rule: ScaleRule, backward: str, ranks: int = 1
    ) -> "JetLinear":
        """Turn ``linear`` into this class in place. ``backward``: of DGrad and WGrad, the format's name or ``"bf16"``.

        Raises:
            ValueError: a scale rule that the format does not have, an unknown backward precision.
        """
        number_format.check_rule(scale_rule)
        backwards = number_format.traits.name, UNQUANTIZED
        if backward not in backwards:
            raise ValueError(f"{backward!r} is not a backward precision. Set one of {', '.join(backwards)}.")
        linear.__class__ = cls
        linear.scale_rule = scale_rule
        linear.ranks = ranks
        linear.quantized_backward = backward != UNQUANTIZED
        linear.format = number_format
        linear._cache = WeightCache()
        return linear

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            self.drop_qdata()
            parameters = self._parameters
            registered = name in parameters and name not in self.__dict__  # FSDP1 sets a tensor as well
            if registered and isinstance(value, nn.Parameter) and not _global_parameter_registration_hooks:
                # nn.Module's result in a tenth of the time: a class with its own __setattr__ misses FSDP2's short cut.
                parameters[name] = value
                return
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            self.drop_qdata()
        super().__delattr__(name)

    @property
    def quantizations(self) -> int:
        """How often the weight has been quantized since construction."""
        return self._cache.quantizations

    @property
    def holds_qdata(self) -> bool:
        """Whether the weight's qdata is cached."""
        return self._cache.entry is not None

    def drop_qdata(self) -> None:
        """Drop the cached qdata; the next use quantizes again."""
        self._cache.drop()

    def operand(self) -> torch.Tensor:
        """The weight to pass to a product: of a layer with an adapter, the gradient goes to the adapter's factors."""
        if self.adapter is None:
            return self.weight
        if self.adapter.read():
            self.drop_qdata()
        return self.adapter.attached(self.weight)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """The BF16 value of ``weight``, with the adapter's term."""
        weight = as_type(weight, torch.bfloat16)
        return weight if self.adapter is None else self.adapter.added(weight)

    def weight_qdata(self, weight: torch.Tensor) -> QuantizedTensor:
        """``weight [N, K]`` quantized, at most once while the tensor stays unchanged."""
        return self._cache.get(weight, self._quantized)[0]

    def _quantized(self, weight: torch.Tensor) -> tuple[QuantizedTensor, QuantizedTensor | None]:
        """``weight`` quantized; within a backward pass, recomputed forwards included, also transposed."""
        weight = self.merged(weight)
        if torch._C._current_graph_task_id() == -1:
            return self.format.quantize_weight(weight, self.scale_rule), None
        return self.format.quantize_weight_and_transpose(weight, self.scale_rule)

    def fprop(self, x: QuantizedTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``Y [M, N]`` BF16 of rowwise X ``[M, K]``, ``weight [N, K]`` and the BF16 value of ``bias [N]``."""
        if bias is not None:
            bias = as_type(bias.detach(), torch.bfloat16)
        return self.format.fprop(x, self.weight_qdata(weight), bias, self.ranks)

    def dgrad(self, dy: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
        """``dX [M, K]`` BF16 of rowwise dY ``[M, N]`` and ``weight [N, K]``."""
        qdata, transposed = cached = self._cache.get(weight, self._quantized)
        if transposed is None:  # quantized by a forward before this pass
            transposed = self.format.transpose_weight(qdata)
            self._cache.amend(cached, (qdata, transposed))
        return self.format.dgrad(dy, transposed)

    def wgrad(self, dy: QuantizedTensor, x: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
        """``dW [N, K]`` of colwise dY ``[N, M]`` and X ``[K, M]``, a BF16 product in the type of ``weight``."""
        return as_type(self.format.wgrad(dy, x), weight.dtype)

    def forward(self, input: torch.Tensor | QuantizedTensor) -> torch.Tensor:
        x = quantize_input(input, self.format, self.scale_rule)
        if not torch.is_grad_enabled():
            return self.fprop(x, self.operand(), self.bias).view(*x.shape[:-1], self.out_features)
        return _LinearFunction.apply(as_type(x.source, torch.bfloat16), (self,), x, None, self.operand(), self.bias)

    def extra_repr(self) -> str:
        backward = self.format.traits.name if self.quantized_backward else UNQUANTIZED
        ranks = f", ranks={self.ranks}" if self.ranks > 1 else ""
        return f"{super().extra_repr()}, {self.format}, scale={self.scale_rule}, backward={backward}{ranks}"


def linear_in(module: nn.Module, name: str) -> nn.Module:
    """The child ``name`` of ``module``; instead of peft's layer around a :class:`JetLinear`, the layer in it."""
    child = getattr(module, name)
    if isinstance(child, JetLinear):
        return child
    base = getattr(child, "base_layer", None)
    return base if isinstance(base, JetLinear) else child


_FORWARD = JetLinear.forward


def is_plain(layer: nn.Module) -> bool:
    """Whether calling ``layer`` runs ``JetLinear.forward`` alone: no hooks, no other ``forward``."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    replaced = "forward" in vars(layer) or type(layer).forward is not _FORWARD
    return not (replaced or any(hooks) or _has_any_global_hook())


def project(
    x: torch.Tensor | QuantizedTensor, layers: Sequence[nn.Module], head_dim: int | None = None
) -> Sequence[torch.Tensor]:
    """``[layer(x) for layer in layers]``; with ``head_dim`` as heads ``[M, N / head_dim, head_dim]``.

    Plain layers of one precision and rule with a quantized BF16 ``x`` are one autograd node, which saves host time in
    small micro-batches; bits are the same.
    """
    first = layers[0]
    together = (
        isinstance(x, QuantizedTensor)
        and torch.is_grad_enabled()
        and x.source is not None
        and x.source.dtype == torch.bfloat16
        and all(
            isinstance(layer, JetLinear)
            and layer.scale_rule == first.scale_rule
            and layer.quantized_backward == first.quantized_backward
            and is_plain(layer)
            for layer in layers
        )
    )
    if not together:
        outputs = [layer(x) for layer in layers]
        if head_dim is None:
            return outputs
        return [y.reshape(-1, y.shape[-1] // head_dim, head_dim) for y in outputs]
    x = quantize_input(x, first.format, first.scale_rule)
    parameters = [layer.operand() for layer in layers] + [layer.bias for layer in layers]
    return _LinearFunction.apply(x.source, tuple(layers), x, head_dim, *parameters)
