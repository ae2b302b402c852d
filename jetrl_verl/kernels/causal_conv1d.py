# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The depthwise causal convolution of width 4 with SiLU of a gated delta net (reference/delta_net.py).

``causal_conv1d`` computes whole sequences, ``causal_conv1d_update`` continues those of a rollout's slots: the same
bits, wherever a sequence is cut.
"""

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.dispatch import CPU_ALONE, REFERENCE, implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.slots import read_slots, require_slots, write_slots, zero_padded
from jetrl_verl.kernels.views import as_type
from jetrl_verl.reference import delta_net
from jetrl_verl.reference.delta_net import TAPS

__all__ = ["causal_conv1d", "causal_conv1d_update"]

# --- reference --------------------------------------------------------------------------------------------------------


@implements("causal_conv1d", "reference")
def reference_causal_conv1d(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``[T, C]`` BF16."""
    return delta_net.causal_conv1d(x, weight, cu_seqlens, _nothing_before(x, cu_seqlens))[0]


@implements("causal_conv1d_update", "reference")
def reference_causal_conv1d_update(x, weight, states, slots, computed, cu_seqlens) -> torch.Tensor:
    """``[T, C]`` BF16; ``states`` are written in place."""
    past = read_slots(states, slots, computed)
    y, past = delta_net.causal_conv1d(x, weight, cu_seqlens, past)
    write_slots(states, slots, cu_seqlens, past)
    return zero_padded(y, slots, cu_seqlens)


@implements("causal_conv1d_backward", "reference")
def reference_causal_conv1d_backward(dy, x, weight, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """dx ``[T, C]`` BF16 and dw ``[C, 4]`` FP32; the convolution is computed again."""
    y = delta_net.convolve(x, weight, cu_seqlens, _nothing_before(x, cu_seqlens))
    probability = y.sigmoid()
    # silu'(y) = p (1 + y (1 - p))
    dconv = dy.float() * probability * (1 + y * (1 - probability))
    place = delta_net.places(cu_seqlens, len(x))[1][:, None]
    taps = weight.to(torch.bfloat16).float().unbind(1)
    dx, dw = dconv * taps[-1], [(dconv * x).sum(0)]
    for distance in range(1, TAPS):
        # Of a token with another one ``distance`` before it in its sequence.
        reaching = torch.where(place >= distance, dconv, 0)
        dw.append((reaching * x.roll(distance, 0)).sum(0))
        dx += reaching.roll(-distance, 0) * taps[-1 - distance]
    return dx.to(x.dtype), torch.stack(dw[::-1], dim=1)


def _nothing_before(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(len(cu_seqlens) - 1, TAPS - 1, x.shape[1])


# --- torch operators --------------------------------------------------------------------------------------------------


@operator(
    "causal_conv1d(Tensor x, Tensor weight, Tensor cu_seqlens) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    backends=CPU_ALONE,
)
def _causal_conv1d(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return lookup("causal_conv1d", x.device)(x, weight, cu_seqlens)


@operator(
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor cu_seqlens) -> (Tensor, Tensor)",
    fake=lambda dy, x, weight, _: (x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)),
    backends=REFERENCE,
)
def _causal_conv1d_backward(dy, x, weight, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    return lookup("causal_conv1d_backward", x.device)(dy, x, weight, cu_seqlens)


@operator(
    "causal_conv1d_update(Tensor x, Tensor weight, Tensor(a!) states, Tensor slots, Tensor computed,"
    " Tensor cu_seqlens) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    backends=CPU_ALONE,
)
def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    computed: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """:func:`causal_conv1d` of the next tokens of requests, for inference.

    Args:
        x: ``[T, C]`` BF16, the requests' new tokens one request after the other. weight: ``[C, 4]``.
        states: ``[slots, 3, C]`` BF16, any strides, written in place: each request's last three inputs, oldest first.
        slots: ``[R]`` int32, of the requests; a negative one is a padded request, whose tokens give zeros.
        computed: ``[R]`` int32, tokens of each request before these. With 0 the slot's content is not read.
        cu_seqlens: ``[R + 1]`` int32. A request without a token leaves its slot as it is.

    Returns:
        ``[T, C]`` BF16.

    Raises:
        TypeError: ``x`` or ``states`` is not BF16. ValueError: shapes that do not fit.
    """
    _check("causal_conv1d_update", x, weight)
    require_bf16("causal_conv1d_update", states=states)
    require_shape("causal_conv1d_update", "states", states, (states.shape[0], TAPS - 1, x.shape[1]))
    require_slots("causal_conv1d_update", slots, computed, cu_seqlens)
    return lookup("causal_conv1d_update", x.device)(x, weight, states, slots, computed, cu_seqlens)


def _check(operation: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    require_bf16(operation, x=x)
    require_shape(operation, "weight", weight, (x.shape[-1], TAPS))


# --- functions --------------------------------------------------------------------------------------------------------


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        keep(ctx, weight, cu_seqlens)
        return _causal_conv1d(x, weight, cu_seqlens)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        (x,), (weight, cu_seqlens) = ctx.saved_tensors, kept(ctx)
        dx, dw = _causal_conv1d_backward(dy, x, weight, cu_seqlens)
        return dx, as_type(dw, weight.dtype), None


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution of packed sequences, then SiLU; differentiable in ``x`` and ``weight``.

    Args:
        x: ``[T, C]`` BF16. weight: ``[C, 4]``, oldest tap first, taken at its BF16 value.
        cu_seqlens: ``[B + 1]`` int32, first tokens of the sequences and T.

    Returns:
        ``[T, C]`` BF16. Before a sequence's first token are zeros.

    Raises:
        TypeError: ``x`` is not BF16. ValueError: another shape of ``weight``.
    """
    _check("causal_conv1d", x, weight)
    if torch.is_grad_enabled():
        return _CausalConv1d.apply(x, weight, cu_seqlens)
    return _causal_conv1d(x, weight, cu_seqlens)
