# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of a gated delta net's heads times SiLU of a gate (reference/delta_net.py): FP32 inside, one rounding.

``gated_rms_norm_quantize`` also quantizes the result for the output projection; a head is one group of 128.
"""

import torch
import triton.language as tl

from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.e4m3 import GROUP, is_pow2, quantize_groups
from jetrl_verl.kernels.device.elementary import sigmoid
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements
from jetrl_verl.kernels.operator import dispatched, require_bf16, require_shape
from jetrl_verl.kernels.probe_inputs import ProbeInputs
from jetrl_verl.kernels.quantizing import Quantizing
from jetrl_verl.kernels.results import empty_rowwise
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.kernels.views import as_type, unit_stride
from jetrl_verl.reference import QuantizedTensor, delta_net

__all__ = ["gated_rms_norm", "gated_rms_norm_quantize"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# --- reference --------------------------------------------------------------------------------------------------------

implements("gated_rms_norm", "reference")(delta_net.gated_rms_norm)


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


# --- Triton -----------------------------------------------------------------------------------------------------------

_HEADS, _WARPS = 8, 4
"""Heads and warps of a program."""
_BACKWARD_PROGRAMS, _BACKWARD_HEADS = 528, 16
"""Programs of the gradient, four per multiprocessor of an H200, and the heads that one loads at a time."""


@jit(do_not_specialize=["tokens", "heads"])
def _gated_norm_kernel(
    o_ptr, z_ptr, weight_ptr, y_ptr, qdata_ptr, scales_ptr, eps, tokens, heads, stride_token, stride_head,
    HEADS: tl.constexpr, WITH_Y: tl.constexpr, QUANTIZE: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    if QUANTIZE:  # a linear reads it next
        launch_dependents()
    number = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    token, head, column = (number // heads).to(tl.int64), number % heads, tl.arange(0, GROUP)[None, :]
    known = number < tokens * heads
    place = number.to(tl.int64)[:, None] * GROUP + column
    weight = tl.load(weight_ptr + column).to(tl.float32)
    gate = token[:, None] * stride_token + head[:, None] * stride_head + column
    z = tl.load(z_ptr + gate, mask=known[:, None], other=0.0).to(tl.float32)
    o = tl.load(o_ptr + place, mask=known[:, None], other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(o * o, axis=1) / GROUP + eps)
    y = (o * rstd[:, None] * weight * (z * sigmoid(z))).to(tl.bfloat16)
    if WITH_Y:
        tl.store(y_ptr + place, y, mask=known[:, None])
    if QUANTIZE:
        qdata, scale = quantize_groups(y.to(tl.float32), POW2)
        tl.store(qdata_ptr + place, qdata, mask=known[:, None])
        tl.store(scales_ptr + head.to(tl.int64) * tokens + token, scale, mask=known)


@jit
def _gradient_rows(dy_ptr, o_ptr, z_ptr, number, stop, heads, stride_token, stride_head):
    number, column = number[:, None], tl.arange(0, GROUP)[None, :]
    place = number.to(tl.int64) * GROUP + column
    gate = (number // heads).to(tl.int64) * stride_token + number % heads * stride_head + column
    z = tl.load(z_ptr + gate, mask=number < stop, other=0.0)
    dy = tl.load(dy_ptr + place, mask=number < stop, other=0.0)
    o = tl.load(o_ptr + place, mask=number < stop, other=0.0)
    return dy, o, z


@jit(do_not_specialize=["count", "heads", "heads_each"])
def _gated_norm_backward_kernel(
    dy_ptr, o_ptr, z_ptr, weight_ptr, do_ptr, dz_ptr, dw_ptr, eps, count, heads, heads_each, stride_token, stride_head,
    HEADS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, GROUP)[None, :]
    weight = tl.load(weight_ptr + column).to(tl.float32)
    dw = tl.zeros((HEADS, GROUP), tl.float32)
    first = tl.program_id(0) * heads_each
    stop = tl.minimum(first + heads_each, count)
    number = first + tl.arange(0, HEADS)
    next_dy, next_o, next_z = _gradient_rows(dy_ptr, o_ptr, z_ptr, number, stop, heads, stride_token, stride_head)
    for _ in range(first, stop, HEADS):
        dy, o, z = next_dy.to(tl.float32), next_o.to(tl.float32), next_z.to(tl.float32)
        known, place = number[:, None] < stop, number.to(tl.int64)[:, None] * GROUP + column
        # The next rows are on their way while these are computed.
        number += HEADS
        next_dy, next_o, next_z = _gradient_rows(dy_ptr, o_ptr, z_ptr, number, stop, heads, stride_token, stride_head)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(o * o, axis=1) / GROUP + eps)[:, None]
        normalized, probability = o * rstd, sigmoid(z)
        gated = dy * (z * probability)  # of the normalized rows times the weight
        dw += gated * normalized
        dz = dy * normalized * weight * probability * (1.0 + z * (1.0 - probability))
        tl.store(dz_ptr + place, dz.to(tl.bfloat16), mask=known)
        scaled = gated * weight
        mean = tl.sum(scaled * normalized, axis=1)[:, None] / GROUP
        tl.store(do_ptr + place, (rstd * (scaled - normalized * mean)).to(tl.bfloat16), mask=known)
    tl.store(dw_ptr + tl.program_id(0) * GROUP + column, tl.sum(dw, axis=0)[None, :])


@implements("gated_rms_norm_quantize", "triton")
def triton_gated_rms_norm_quantize(
    o, z, weight, eps: float, rule: str | None, with_normed: bool
) -> tuple[torch.Tensor | None, QuantizedTensor | None]:
    """(normed rows or None, their 1x128 qdata or, without a rule, None)."""
    o, z, (tokens, heads, width) = o.contiguous(), unit_stride(z), o.shape
    y = torch.empty(tokens, heads * width, dtype=torch.bfloat16, device=o.device) if with_normed else None
    quantized = empty_rowwise(tokens, heads * width, o.device) if rule is not None else None
    pow2 = rule is not None and is_pow2(rule)
    if tokens:
        # Pointers of what is absent are never dereferenced.
        _gated_norm_kernel[(ceil_div(tokens * heads, _HEADS),)](
            *(o, z, weight.contiguous(), y if with_normed else o),
            *((quantized.qdata.view(torch.uint8), quantized.scales) if rule is not None else (o, o)),
            eps,
            tokens,
            heads,
            *z.stride()[:2],
            HEADS=_HEADS,
            WITH_Y=with_normed,
            QUANTIZE=rule is not None,
            POW2=pow2,
            num_warps=_WARPS,
        )
    return y, quantized


implements("gated_rms_norm", "triton")(lambda *operands: triton_gated_rms_norm_quantize(*operands, None, True)[0])


@implements("gated_rms_norm_backward", "triton")
def triton_gated_rms_norm_backward(dy, o, z, weight, eps: float) -> Gradients:
    """As :func:`reference_gated_rms_norm_backward`; the order of the sum dw follows the number of tokens."""
    o, z, (tokens, heads, width) = o.contiguous(), unit_stride(z), o.shape
    do, dz = (torch.empty(o.shape, dtype=torch.bfloat16, device=o.device) for _ in range(2))
    heads_each = ceil_div(ceil_div(tokens * heads, _BACKWARD_PROGRAMS), _BACKWARD_HEADS) * _BACKWARD_HEADS
    programs = ceil_div(tokens * heads, heads_each) if tokens else 0
    dw = torch.empty(programs, width, dtype=torch.float32, device=o.device)
    if tokens:
        _gated_norm_backward_kernel[(programs,)](
            as_type(dy, torch.bfloat16).contiguous(),
            o,
            z,
            weight.contiguous(),
            do,
            dz,
            dw,
            eps,
            tokens * heads,
            heads,
            heads_each,
            *z.stride()[:2],
            HEADS=_BACKWARD_HEADS,
            num_warps=_WARPS,
        )
    return do, dz, dw.sum(dim=0)


# --- torch operators --------------------------------------------------------------------------------------------------


def _check(operation: str, o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    require_bf16(operation, o=o, z=z)
    require_shape(operation, "o", o, (*o.shape[:2], delta_net.HEAD))
    require_shape(operation, "z", z, o.shape)
    require_shape(operation, "weight", weight, o.shape[2:])


def _probe_inputs(inputs: ProbeInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Two heads of the probe's rows."""
    o, z = (rows[:, -2 * delta_net.HEAD :].unflatten(1, (2, -1)) for rows in (inputs.x, inputs.residual))
    return o.contiguous(), z, inputs.weight[: delta_net.HEAD], 1e-6


_GATED_RMS_NORM = Quantizing(
    "gated_rms_norm",
    "gated_rms_norm_quantize",
    "Tensor o, Tensor z, Tensor weight, float eps",
    fake=lambda o, *_: o.new_empty(o.shape[0], o.shape[1] * o.shape[2]),
    check=_check,
    backward=dispatched(
        "gated_rms_norm_backward(Tensor dy, Tensor o, Tensor z, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
        fake=lambda dy, o, z, weight, _: (
            *(x.new_empty(x.shape) for x in (o, z)),
            weight.new_empty(weight.shape, dtype=torch.float32),
        ),
    ),
    probe=_probe_inputs,
)


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
    return _GATED_RMS_NORM(o, z, weight, eps)


def gated_rms_norm_quantize(
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
    return _GATED_RMS_NORM.quantized(o, z, weight, eps, rule=rule, requested=with_normed)
