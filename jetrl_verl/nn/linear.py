# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The linear layer of the flow: ``nn.Linear`` whose three products and saved activation are in the format of the flow.

The formulas of FProp, DGrad and WGrad are the format's (formats/format.py). FProp is the two steps of the operator
that vLLM calls, quantize and multiply, which is what makes the sampled policy the trained one. Saved for backward are
X as qdata and scales, 1.03 bytes an element instead of 2, and the weight by reference (kernels/by_reference.py); the
weight's qdata are not saved, or a whole model's worth would stay alive through a step.

**When X is quantized.** By what writes it, where layers are its only readers: the norm in front of q, k, v or of gate
and up hands them one :class:`QuantizedTensor` in the tensor's place (nn/handoff.py), as vLLM's does. They save one copy
of the qdata between them and share its re-layout in backward. A plain tensor is quantized by the layer that reads it.

**When a weight is quantized.** Once while it is in place (nn/weight_cache.py); in a backward pass, for whose FProp and
DGrad FSDP gathers it once more, together with the transpose that DGrad reads. Where it stays in place from forward to
backward, the first DGrad transposes its qdata, and the transpose stays as long as they do.

``backward="bf16"`` is QaRL's choice (arXiv 2604.07853): FProp as above, straight-through BF16 gradients from a saved
BF16 X and the BF16 weight.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _global_parameter_registration_hooks, _has_any_global_hook

from jetrl_verl import formats
from jetrl_verl.formats.format import TrainedFormat
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.views import as_rows, as_type
from jetrl_verl.nn.weight_cache import WeightCache
from jetrl_verl.reference import QuantizedTensor, ScaleRule, check_rule

BACKWARDS = (formats.FLOW, formats.UNQUANTIZED)
"""What DGrad and WGrad may run in: the format of the flow, or BF16."""


class SharedColwise:
    """X re-laid out for WGrad: made by the first layer that needs it, dropped with the last one that was promised it.

    Attributes:
        readers: backward nodes that still have to read it.
    """

    def __init__(self) -> None:
        self.readers = 0
        self._colwise: QuantizedTensor | None = None

    def take(self, rowwise: QuantizedTensor, number_format: TrainedFormat, rule: ScaleRule) -> QuantizedTensor:
        """Colwise data [K, M] from the saved rowwise data [M, K], for one reader."""
        colwise = self._colwise if self._colwise is not None else number_format.colwise(rowwise, rule)
        self.readers -= 1
        # A graph that is kept for a second backward has no promised readers left; each of its nodes makes its own.
        self._colwise = colwise if self.readers > 0 else None
        return colwise


def quantize_input(x: torch.Tensor | QuantizedTensor, number_format: TrainedFormat, rule: ScaleRule) -> QuantizedTensor:
    """What a layer reads: the BF16 value of ``x`` [..., K] quantized rowwise [M, K], with ``x`` as its source.

    A :class:`QuantizedTensor` is returned as it is, with :class:`SharedColwise` if it has none.

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
    """FProp, DGrad and WGrad of one layer, or of several that read the same X; see the module's docstring for the
    formulas. Several differ from one after the other by nothing but the host's work: terms of dX are added in the order
    in which autograd adds those of separate nodes, the last layer's first."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        layers: Sequence["JetLinear"],
        quantized: QuantizedTensor,
        head_dim: int | None,
        *parameters: torch.Tensor | None,
    ):
        # All weights, then all biases, which give autograd its edges; what is added is a bias' BF16 value, as the
        # rollout holds it.
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
        found = []
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            y = layer.fprop(quantized, weight, bias)
            if head_dim is not None:
                y = y.view(y.shape[0], layer.out_features // head_dim, head_dim)
            elif x.ndim != 2:
                y = y.view(*x.shape[:-1], layer.out_features)
            found.append(y)
        return found[0] if len(found) == 1 else tuple(found)

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
                    term = dy @ as_type(weight, torch.bfloat16)
                if needs_w[i]:
                    dw[i] = as_type(dy.t() @ x, weight.dtype)
            if term is not None:
                dx = term if dx is None else dx.add_(term)
        if dx is not None and len(ctx.x_shape) != 2:
            dx = dx.view(ctx.x_shape)
        return dx, None, None, None, *dw, *dbias


class JetLinear(nn.Linear):
    """``nn.Linear`` in the FP8 flow; parameters, their names and their dtypes are those of the layer it replaces.

    Input ``[..., K]`` of any floating type, output ``[..., N]`` BF16. The input is cast to BF16 first and the weight's
    BF16 value is what is quantized, so the layer behaves the same under autocast, FSDP mixed precision, or neither.

    Attributes:
        scale_rule: ``"fp32"`` or ``"pow2"``.
        ranks: over which the rollout splits K; FProp rounds where they do. The gradients are those of the whole
            product, straight through the roundings.
        quantized_backward: whether DGrad and WGrad run in the format, too; else in BF16.
        format: of the three products.
        stock_class: of the layer that it replaces.
    """

    scale_rule: ScaleRule
    ranks: int
    quantized_backward: bool
    format: TrainedFormat
    _cache: WeightCache
    stock_class = nn.Linear

    @classmethod
    def replace(cls, linear: nn.Linear, *, scale_rule: ScaleRule, backward: str, ranks: int = 1) -> "JetLinear":
        """Turn ``linear`` into this class in place: same module object, same parameter objects.

        Raises:
            ValueError: an unknown scale rule or backward precision.
        """
        check_rule(scale_rule)
        if backward not in BACKWARDS:
            raise ValueError(f"{backward!r} is not a backward precision. Set one of {', '.join(BACKWARDS)}.")
        linear.__class__ = cls
        linear.scale_rule = scale_rule
        linear.ranks = ranks
        linear.quantized_backward = backward != formats.UNQUANTIZED
        linear.format = formats.get(formats.FLOW)
        linear._cache = WeightCache()
        return linear

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            self.drop_qdata()
            parameters = self._parameters
            alone = name in parameters and name not in self.__dict__  # FSDP1 has a tensor beside the parameter
            if alone and isinstance(value, nn.Parameter) and not _global_parameter_registration_hooks:
                # What nn.Module does with a parameter in a parameter's place, in a tenth of the time. FSDP2 assigns
                # four a step, and a class with a __setattr__ of its own does not get FSDP2's short cut.
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
        """Whether qdata of the weight are kept now."""
        return self._cache.entry is not None

    def drop_qdata(self) -> None:
        """Forget the weight's qdata; the next use quantizes it again."""
        self._cache.drop()

    def weight_qdata(self, weight: torch.Tensor) -> QuantizedTensor:
        """``weight`` [N, K] quantized, made at most once while the tensor stays in place unchanged."""
        return self._cache.get(weight, self._quantized)[0]

    def _quantized(self, weight: torch.Tensor) -> tuple[QuantizedTensor, QuantizedTensor | None]:
        """``weight`` quantized, and transposed where that is known to be needed: in a backward pass."""
        # Also of a forward that is run again within it, whose weight FSDP has gathered for both.
        if torch._C._current_graph_task_id() == -1:
            return self.format.quantize_weight(weight, self.scale_rule), None
        return self.format.quantize_weight_and_transpose(weight, self.scale_rule)

    def fprop(self, x: QuantizedTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``Y`` [M, N] BF16 of rowwise X [M, K], ``weight`` [N, K] and the BF16 value of ``bias`` [N], which is what
        the rollout holds of an FP32 master."""
        if bias is not None:
            bias = as_type(bias.detach(), torch.bfloat16)
        return self.format.fprop(x, self.weight_qdata(weight), bias, self.ranks)

    def dgrad(self, dy: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
        """``dX`` [M, K] BF16 of rowwise dY [M, N] and ``weight`` [N, K]."""
        qdata, transposed = held = self._cache.get(weight, self._quantized)
        if transposed is None:
            # Of a forward outside of this pass, whose weight has stayed in place since.
            transposed = self.format.transpose_weight(qdata)
            self._cache.amend(held, (qdata, transposed))
        return self.format.dgrad(dy, transposed)

    def wgrad(self, dy: QuantizedTensor, x: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
        """``dW`` [N, K] of colwise dY [N, M] and X [K, M], a BF16 product in the type of ``weight``."""
        return as_type(self.format.wgrad(dy, x), weight.dtype)

    def forward(self, input: torch.Tensor | QuantizedTensor) -> torch.Tensor:
        x = quantize_input(input, self.format, self.scale_rule)
        if not torch.is_grad_enabled():
            return self.fprop(x, self.weight, self.bias).view(*x.shape[:-1], self.out_features)
        return _LinearFunction.apply(as_type(x.source, torch.bfloat16), (self,), x, None, self.weight, self.bias)

    def extra_repr(self) -> str:
        backward = BACKWARDS[not self.quantized_backward]
        ranks = f", ranks={self.ranks}" if self.ranks > 1 else ""
        return f"{super().extra_repr()}, {self.format}, scale={self.scale_rule}, backward={backward}{ranks}"


_FORWARD = JetLinear.forward


def is_plain(layer: nn.Module) -> bool:
    """Whether calling ``layer`` is ``JetLinear.forward`` and nothing else: no hook, no other ``forward``."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    replaced = "forward" in vars(layer) or type(layer).forward is not _FORWARD
    return not (replaced or any(hooks) or _has_any_global_hook())


def project(
    x: torch.Tensor | QuantizedTensor, layers: Sequence[nn.Module], head_dim: int | None = None
) -> Sequence[torch.Tensor]:
    """``[layer(x) for layer in layers]``, as one step of autograd where nothing looks between them; with ``head_dim``
    each ``[..., N]`` as heads ``[M, N / head_dim, head_dim]``.

    Where they are plain layers of one precision and rule, and ``x`` a quantized BF16 tensor, that saves a node, its
    saved tensors, and a call of each, which is what a small micro-batch waits for. Every bit is that of the calls.
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
        found = [layer(x) for layer in layers]
        if head_dim is None:
            return found
        return [y.reshape(-1, y.shape[-1] // head_dim, head_dim) for y in found]
    x = quantize_input(x, first.format, first.scale_rule)
    parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers]
    return _LinearFunction.apply(x.source, tuple(layers), x, head_dim, *parameters)
