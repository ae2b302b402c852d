# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture's fused experts ``[E, N, K]`` in FP8: forward, backward and saved activations.

Arithmetic: reference/experts.py, through the format, as in vLLM. The routing weight is applied before the down
projection, so a token's output gradient is dY of all its experts. FProp, DGrad and WGrad are one launch each for all
experts, without a copy of the routing to the host. Saved: X in FP8, one row a token; gate and up in BF16 and the down
projection's input in FP8, one row a pair; weights by reference.

Bytes, with q = 1 + 4/128 for an FP8 element and R rows of pairs and padding (T k up to T k + 127 E):

    saved                        T (q H + 8 k) + R (4 I + q I + 4)
    gradients of the output      R q (2 H + I)          both layouts, and the down projection's input colwise
    those of gate and up         R (2 I + 4 q I)        dH in BF16, both layouts of its gradients
    terms of dX                  R (2 H + 2 q I)        in BF16, rowwise gradients
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jetrl_verl import kernels
from jetrl_verl.formats.format import Format
from jetrl_verl.kernels.recomputation import computed_once
from jetrl_verl.models.families.base import Experts, leaf
from jetrl_verl.nn.linear import quantize_input
from jetrl_verl.nn.weight_cache import WeightCache
from jetrl_verl.reference import QuantizedTensor, ScaleRule, Segments


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weights: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        layer: "JetExperts",
        quantized: QuantizedTensor,
        segments: Segments,
    ):
        ctx.layer, ctx.x_shape = layer, x.shape
        operands = quantized, weights, segments, gate_up_weight, down_weight
        out, gate_up, product = computed_once(layer.forward_rows, *operands, layer.format.traits.block)
        ctx.save_for_backward(*quantized, weights, *segments, gate_up, *product, gate_up_weight, down_weight)
        return out.reshape(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor):
        layer: JetExperts = ctx.layer
        needs_x, needs_weights, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        x_qdata, x_scales, weights, row, pair, start, gate_up, h_qdata, h_scales, *experts = ctx.saved_tensors
        segments, (gate_up_weight, down_weight) = Segments(row, pair, start), experts
        number_format, rule = layer.format, layer.scale_rule
        dx = dgate_up_weight = ddown_weight = None
        dout = dout.reshape(-1, dout.shape[-1]).to(torch.bfloat16)
        rows, columns = number_format.experts_gradient(dout, segments, rule, colwise=needs_down)
        if needs_down:
            h = number_format.colwise(QuantizedTensor(h_qdata, h_scales), rule)
            ddown_weight = number_format.experts_wgrad(columns, h, start).to(down_weight.dtype)
            del h
        del columns
        dh = number_format.experts_dgrad(rows, layer.down_qdata(down_weight), start)
        del rows
        if layer.on_backward is not None:
            layer.on_backward(dh, gate_up, weights, segments)
        rows, columns, dweights = number_format.weighted_silu_mul_backward(dh, gate_up, weights, pair, rule)
        del dh, gate_up
        if needs_gate_up:
            x = number_format.experts_colwise(QuantizedTensor(x_qdata, x_scales), segments, rule)
            dgate_up_weight = number_format.experts_wgrad(columns, x, start).to(gate_up_weight.dtype)
            del x
        del columns  # before the terms of dX, the peak of backward
        if needs_x:
            terms = number_format.experts_dgrad(rows, layer.gate_up_qdata(gate_up_weight), start)
            dx = kernels.combine(terms, row).reshape(ctx.x_shape)
        return dx, dweights if needs_weights else None, dgate_up_weight, ddown_weight, None, None, None


class JetExperts(nn.Module):
    """transformers' fused experts in FP8, with the parameters and the ``forward`` of the module that it replaces.

    Attributes:
        scale_rule: ``"fp32"`` or ``"pow2"``.
        ranks: over which the rollout splits the down projection's K; the forward rounds where they do.
        format: of all products.
        gate_up_name, down_name: of the parameters ``[E, 2 I, H]``, gate first, and ``[E, H, I]``.
        stock_class: of the replaced module.
        on_backward: called in each backward with the gradient of the down projection's input ``[R, I]``, gate and up
            ``[R, 2 I]``, routing weights and segments. The gradient of gate and up exists only inside the kernel that
            quantizes it, so autograd hooks cannot see it.
    """

    scale_rule: ScaleRule
    ranks: int
    format: Format
    gate_up_name: str
    down_name: str
    stock_class: type[nn.Module]
    _caches: dict[str, WeightCache]
    on_backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments], None] | None = None

    @classmethod
    def replace(
        cls, experts: nn.Module, number_format: Format, mixture: Experts, *, scale_rule: ScaleRule, ranks: int = 1
    ) -> "JetExperts":
        """Turn ``experts``, with the names of ``mixture``, into this class in place.

        Raises:
            ValueError: a scale rule that the format does not have, or dimensions that are no multiples of its block.
        """
        number_format.check_rule(scale_rule)
        block = number_format.traits.block
        gate_up, down = leaf(mixture.gate_up), leaf(mixture.down)
        _, hidden, inner = shape = tuple(getattr(experts, down).shape)
        if inner % (block * ranks) or hidden % block:
            raise ValueError(
                f"experts of shape {shape} do not divide into blocks of {block} on {ranks} ranks of the rollout"
            )
        experts.stock_class = type(experts)
        experts.__class__ = cls
        experts.__dict__["_caches"] = {gate_up: WeightCache(), down: WeightCache()}
        experts.scale_rule = scale_rule
        experts.ranks = ranks
        experts.format = number_format
        experts.gate_up_name, experts.down_name = gate_up, down
        return experts

    def __setattr__(self, name: str, value) -> None:
        if name in self._caches:
            self._caches[name].drop()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._caches:
            self._caches[name].drop()
        super().__delattr__(name)

    @property
    def holds_qdata(self) -> bool:
        """Whether a weight's qdata is cached."""
        return any(cache.entry is not None for cache in self._caches.values())

    @property
    def quantizations(self) -> int:
        """Quantizations since construction of the weight that was quantized most often."""
        return max(cache.quantizations for cache in self._caches.values())

    def drop_qdata(self) -> None:
        """Drop the cached qdata; the next use quantizes again."""
        for cache in self._caches.values():
            cache.drop()

    def gate_up_qdata(self, weight: torch.Tensor) -> QuantizedTensor:
        """``[E, 2 I, H]`` quantized, at most once while the tensor stays unchanged."""
        return self._qdata(self.gate_up_name, weight)

    def down_qdata(self, weight: torch.Tensor) -> QuantizedTensor:
        """``[E, H, I]``, likewise."""
        return self._qdata(self.down_name, weight)

    def _qdata(self, name: str, weight: torch.Tensor) -> QuantizedTensor:
        return self._caches[name].get(weight, partial(self.format.quantize_weight, rule=self.scale_rule))

    def forward_rows(
        self,
        x: QuantizedTensor,
        weights: torch.Tensor,
        segments: Segments,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        align: int,
    ) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
        """Output ``[T, H]`` BF16, gate and up, the down projection's input; see ``BlockFP8.experts``."""
        y, gate_up, product = self.format.experts(
            kernels.gather_quantized(x, segments.pair, weights.shape[1]),
            weights,
            segments,
            self.gate_up_qdata(gate_up_weight),
            self.down_qdata(down_weight),
            self.scale_rule,
            self.ranks,
            align=align,
        )
        combine = kernels.combine if self.ranks == 1 else kernels.combine_of_ranks
        return combine(y, segments.row), gate_up, product

    def forward(
        self, hidden_states: torch.Tensor | QuantizedTensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum of each token's experts.

        Args:
            hidden_states: ``[..., H]``, or quantized by a norm. top_k_index: ``[T, k]`` integers.
            top_k_weights: ``[T, k]``, converted to FP32.

        Returns:
            ``[..., H]`` BF16.
        """
        x = quantize_input(hidden_states, self.format, self.scale_rule)
        training = torch.is_grad_enabled()
        gate_up_weight, down_weight = getattr(self, self.gate_up_name), getattr(self, self.down_name)
        align = self.format.traits.block if training else 1
        segments = kernels.segments(top_k_index.to(torch.int32), down_weight.shape[0], align)
        weights = top_k_weights.float()
        if not training:
            operands = x, weights, segments, gate_up_weight, down_weight
            return self.forward_rows(*operands, align=align)[0].reshape(x.shape)
        source = x.source.to(torch.bfloat16)
        return _ExpertsFunction.apply(source, weights, gate_up_weight, down_weight, self, x, segments)

    def extra_repr(self) -> str:
        experts, hidden, inner = getattr(self, self.down_name).shape
        ranks = f", ranks={self.ranks}" if self.ranks > 1 else ""
        return f"experts={experts}, hidden={hidden}, inner={inner}, {self.format}, scale={self.scale_rule}{ranks}"
