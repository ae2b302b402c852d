# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of a gated delta net's heads times SiLU of a gate (reference/delta_net.py): FP32 inside, one rounding.

``gated_rms_norm_quantize_1x128`` also quantizes the result for the output projection; a head is one group of 128.
"""

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl import reference
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.dispatch import CPU_ALONE, REFERENCE, implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.results import fake_rowwise
from jetrl_verl.kernels.views import as_type
from jetrl_verl.reference import QuantizedTensor, delta_net

__all__ = ["gated_rms_norm", "gated_rms_norm_quantize_1x128"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# --- reference --------------------------------------------------------------------------------------------------------

implements("gated_rms_norm", "reference")(delta_net.gated_rms_norm)


@implements("gated_rms_norm_quantize_1x128", "reference")
def reference_gated_rms_norm_quantize_1x128(
    o, z, weight, eps: float, rule: str, with_normed: bool
) -> tuple[torch.Tensor | None, QuantizedTensor]:
    """(normed rows or None, their 1x128 qdata)."""
    normed = delta_net.gated_rms_norm(o, z, weight, eps)
    return normed if with_normed else None, reference.quantize_1x128(normed, rule)


@implements("gated_rms_norm_backward", "reference")
def reference_gated_rms_norm_backward(dy, o, z, weight, eps: float) -> Gradients:
    """do and dz ``[T, HV, 128]`` BF16, dw ``[128]`` FP32; the norm is computed again."""
    dy, values, gate = dy.view(o.shape).float(), o.float(), z.float()
    rstd = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalized, probability = values * rstd, gate.sigmoid()
    silu = gate * probability
    dgated = dy * silu  # of the normalized rows times the weight
    dw = (dgated * normalized).flatten(0, 1).sum(0)
    # silu'(z) = p (1 + z (1 - p))
    dz = dy * normalized * weight.float() * probability * (1 + gate * (1 - probability))
    scaled = dgated * weight.float()
    do = rstd * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
    return do.to(o.dtype), dz.to(z.dtype), dw


# --- torch operators --------------------------------------------------------------------------------------------------


def _check(operation: str, o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> None:
    require_bf16(operation, o=o, z=z)
    require_shape(operation, "o", o, (*o.shape[:2], delta_net.HEAD))
    require_shape(operation, "z", z, o.shape)
    require_shape(operation, "weight", weight, o.shape[2:])


def _fake(o, *_):
    return o.new_empty(o.shape[0], o.shape[1] * o.shape[2])


@operator("gated_rms_norm(Tensor o, Tensor z, Tensor weight, float eps) -> Tensor", fake=_fake, backends=CPU_ALONE)
def _gated_rms_norm(o, z, weight, eps: float) -> torch.Tensor:
    return lookup("gated_rms_norm", o.device)(o, z, weight, eps)


@operator(
    "gated_rms_norm_quantize_1x128(Tensor o, Tensor z, Tensor weight, float eps, str rule, bool with_normed)"
    " -> (Tensor, Quantized)",
    fake=lambda o, z, weight, eps, rule, with_normed: (
        _fake(o) if with_normed else o.new_empty(0),
        fake_rowwise(_fake(o)),
    ),
    backends=CPU_ALONE,
)
def _gated_rms_norm_quantize(
    o, z, weight, eps: float, rule: str, with_normed: bool
) -> tuple[torch.Tensor, QuantizedTensor]:
    """normed rows, empty if they are not requested, and their 1x128 qdata."""
    run = lookup("gated_rms_norm_quantize_1x128", o.device)
    normed, rowwise = run(o, z, weight, eps, rule, with_normed)
    return normed if with_normed else o.new_empty(0), rowwise


@operator(
    "gated_rms_norm_backward(Tensor dy, Tensor o, Tensor z, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    fake=lambda dy, o, z, weight, _: (
        *(x.new_empty(x.shape) for x in (o, z)),
        weight.new_empty(weight.shape, dtype=torch.float32),
    ),
    backends=REFERENCE,
)
def _gated_rms_norm_backward(dy, o, z, weight, eps: float) -> Gradients:
    return lookup("gated_rms_norm_backward", o.device)(dy, o, z, weight, eps)


# --- functions --------------------------------------------------------------------------------------------------------


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, rule: str | None):
        ctx.save_for_backward(o, z)
        keep(ctx, weight)
        ctx.eps = eps
        if rule is None:
            return _gated_rms_norm(o, z, weight, eps)
        normed, (qdata, scales) = _gated_rms_norm_quantize(o, z, weight, eps, rule, True)
        ctx.mark_non_differentiable(qdata, scales)
        ctx.set_materialize_grads(False)  # no zeros for the gradients of qdata
        return normed, qdata, scales

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor, *_):
        (o, z), (weight,) = ctx.saved_tensors, kept(ctx)
        do, dz, dw = _gated_rms_norm_backward(dy, o, z, weight, ctx.eps)
        return do, dz, as_type(dw, weight.dtype), None, None


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``o / rms(o) * weight * silu(z)`` of each head; differentiable in the first three.

    Args:
        o: ``[T, HV, 128]`` BF16. z: of the same shape, possibly a part of a merged projection.
        weight: ``[128]``. eps: added to the mean of squares.

    Returns:
        ``[T, HV * 128]`` BF16.

    Raises:
        TypeError: ``o`` or ``z`` is not BF16. ValueError: shapes that do not fit.
    """
    _check("gated_rms_norm", o, z, weight)
    if torch.is_grad_enabled():
        return _GatedRMSNorm.apply(o, z, weight, eps, None)
    return _gated_rms_norm(o, z, weight, eps)


def gated_rms_norm_quantize_1x128(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, rule: str, *, with_normed: bool = True
) -> QuantizedTensor:
    """:func:`gated_rms_norm` and ``kernels.quantize_1x128`` of its result; differentiable as the first.

    Args:
        o, z, weight, eps: as of :func:`gated_rms_norm`. rule: scale rule, ``"fp32"`` or ``"pow2"``.
        with_normed: whether to return the normed rows in BF16 too; with gradients they are.

    Returns:
        FP8 data ``[T, HV * 128]`` E4M3 and scales ``[T, HV]`` FP32; ``source`` is the normed rows BF16 or None.

    Raises:
        TypeError: ``o`` or ``z`` is not BF16. ValueError: shapes that do not fit, an unknown rule.
    """
    _check("gated_rms_norm_quantize_1x128", o, z, weight)
    if torch.is_grad_enabled():
        normed, qdata, scales = _GatedRMSNorm.apply(o, z, weight, eps, rule)
        return QuantizedTensor(qdata, scales, normed)
    normed, (qdata, scales) = _gated_rms_norm_quantize(o, z, weight, eps, rule, with_normed)
    return QuantizedTensor(qdata, scales, normed if with_normed else None)
