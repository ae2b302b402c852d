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
"""RMSNorm over the last dimension, with and without the residual sum in front; the QK norm is the same function.

    y = (x * rstd) * w        rstd = 1 / sqrt(mean(x^2) + eps)

FP32 inside, one rounding to BF16 at the end. Stock modules differ: Hugging Face rounds ``x * rstd`` to BF16 before it
multiplies with the weight, and vLLM's fused kernel does not round the residual sum that it normalises. Here the
residual sum is rounded to BF16 first; that rounded sum is what is normalised and what the next layer adds to.

The linears behind a norm quantise what it writes. :func:`rms_norm_quantize_1x128` and
:func:`add_rms_norm_quantize_1x128` make those codes on the way, byte for byte what ``kernels.quantize_1x128`` makes of
the BF16 result, without reading it back.
"""

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl import kernels
from jetrl_verl.numerics import BlockQuantized
from jetrl_verl.ops._codes import Quantised, fake_rows, require_groups
from jetrl_verl.ops._operator import operator, require_bf16, require_shape, triton_kernels
from jetrl_verl.ops.reproducible import grid_bits, on_grid


def _fake(x, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", fake=_fake)
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y BF16 and rstd FP32 of x [..., K]."""
    require_shape("rms_norm", "weight", weight, x.shape[-1:])
    if x.is_cuda:
        return triton_kernels().rms_norm(x, weight, eps)
    k = x.shape[-1]
    squares = on_grid(x, grid_bits(k)).double().square_()
    rstd = (squares.sum(dim=-1, keepdim=True) / k).add_(eps).sqrt_().reciprocal_().float()
    y = x.to(torch.float32, memory_format=torch.contiguous_format).mul_(rstd).mul_(weight.float())
    return y.to(torch.bfloat16), rstd.squeeze(-1)


def _fake_add(x, residual, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operator("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)", fake=_fake_add)
def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    require_shape("add_rms_norm", "weight", weight, x.shape[-1:])
    require_shape("add_rms_norm", "residual", residual, x.shape)
    if x.is_cuda:
        return triton_kernels().add_rms_norm(x, residual, weight, eps)
    total = (x + residual).contiguous()
    return _rms_norm(total, weight, eps)[0], total


def _fake_quantize(x, weight, eps, rule):
    return *_fake(x, weight, eps), *fake_rows(x)


@operator(
    "rms_norm_quantize_1x128(Tensor x, Tensor weight, float eps, str rule) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_quantize,
)
def _rms_norm_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float, rule: str) -> tuple[torch.Tensor, ...]:
    """y, rstd, codes, scales."""
    require_shape("rms_norm_quantize_1x128", "weight", weight, x.shape[-1:])
    if x.is_cuda:
        y, _, rstd, quantised = triton_kernels().rms_norm_quantize_1x128(x, None, weight, eps, rule, True)
    else:
        y, rstd = _rms_norm(x, weight, eps)
        quantised = kernels.quantize_1x128(y.reshape(-1, y.shape[-1]), rule)
    return y, rstd, *quantised


def _fake_add_quantize(x, residual, weight, eps, rule, with_normed):
    return x.new_empty(x.shape if with_normed else 0), x.new_empty(x.shape), *fake_rows(x)


@operator(
    "add_rms_norm_quantize_1x128(Tensor x, Tensor residual, Tensor weight, float eps, str rule, bool with_normed)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_add_quantize,
)
def _add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rule: str, with_normed: bool
) -> tuple[torch.Tensor, ...]:
    """y, or an empty tensor unless asked for, the residual sum, codes, scales."""
    require_shape("add_rms_norm_quantize_1x128", "weight", weight, x.shape[-1:])
    require_shape("add_rms_norm_quantize_1x128", "residual", residual, x.shape)
    if x.is_cuda:
        y, total, _, quantised = triton_kernels().rms_norm_quantize_1x128(x, residual, weight, eps, rule, with_normed)
    else:
        y, total = _add_rms_norm(x, residual, weight, eps)
        quantised = kernels.quantize_1x128(y.reshape(-1, y.shape[-1]), rule)
    return y if with_normed else x.new_empty(0), total, *quantised


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float, rule: str | None):
        if rule is None:
            y, rstd = _rms_norm(x, weight, eps)
            results = y
        else:
            y, rstd, *codes = _rms_norm_quantize(x, weight, eps, rule)
            ctx.mark_non_differentiable(*codes)
            ctx.set_materialize_grads(False)  # no zeros in the place of the codes' gradients
            results = (y, *codes)
        ctx.save_for_backward(x, weight, rstd)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor, *_):
        x, weight, rstd = ctx.saved_tensors
        if x.is_cuda:
            dx, dw = triton_kernels().rms_norm_backward(dy.to(torch.bfloat16), x, weight, rstd)
            return dx, dw.to(weight.dtype), None, None
        rstd = rstd.unsqueeze(-1)
        normalised = x.float() * rstd
        dy = dy.float()
        scaled = dy * weight.float()
        dx = rstd * (scaled - normalised * (scaled * normalised).mean(dim=-1, keepdim=True))
        dw = (dy * normalised).reshape(-1, x.shape[-1]).sum(dim=0)
        return dx.to(x.dtype), dw.to(weight.dtype), None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the rows of ``x``; differentiable in ``x`` and ``weight``.

    Args:
        x: ``[..., K]`` BF16; heads ``[N, H, K]`` of a merged projection are read where they lie. weight: ``[K]``.
        eps: added to the mean of squares.

    Returns:
        ``[..., K]`` BF16, contiguous. A row with Inf or NaN has NaN in it.

    Raises:
        TypeError: ``x`` is not BF16.
    """
    require_bf16("rms_norm", x=x)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps, None)
    return _rms_norm(x, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm`` of ``x + residual``, for inference: what a trainer gets from BF16 addition and :func:`rms_norm`.

    Args:
        x, residual: ``[..., K]`` BF16. weight: ``[K]``.

    Returns:
        (normalised, ``x + residual`` rounded to BF16), each ``[..., K]`` BF16.

    Raises:
        TypeError: ``x`` or ``residual`` is not BF16.
    """
    require_bf16("add_rms_norm", x=x, residual=residual)
    return _add_rms_norm(x, residual, weight, eps)


def rms_norm_quantize_1x128(x: torch.Tensor, weight: torch.Tensor, eps: float, rule: str) -> Quantised:
    """:func:`rms_norm` and ``kernels.quantize_1x128`` of its result; differentiable in ``x`` and ``weight``.

    Args:
        x: ``[..., K]`` BF16, K a multiple of 128. weight: ``[K]``. eps: added to the mean of squares.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.

    Returns:
        (y ``[..., K]`` BF16, its codes ``[M, K]`` E4M3 and scales ``[M, K/128]`` FP32, M the number of rows).

    Raises:
        TypeError: ``x`` is not BF16. ValueError: K is not a multiple of 128, an unknown rule.
    """
    require_bf16("rms_norm_quantize_1x128", x=x)
    require_groups("rms_norm_quantize_1x128", x)
    if torch.is_grad_enabled():
        y, codes, scales = _RMSNorm.apply(x, weight, eps, rule)
    else:
        y, _, codes, scales = _rms_norm_quantize(x, weight, eps, rule)
    return Quantised(y, BlockQuantized(codes, scales))


def add_rms_norm_quantize_1x128(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rule: str, *, with_normed: bool
) -> tuple[torch.Tensor | None, torch.Tensor, BlockQuantized]:
    """:func:`add_rms_norm` and ``kernels.quantize_1x128`` of its first result, for inference.

    Args:
        x, residual: ``[..., K]`` BF16, K a multiple of 128. weight: ``[K]``.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.
        with_normed: whether the normalised rows are wanted in BF16 too.

    Returns:
        (normalised ``[..., K]`` BF16 or None, ``x + residual`` rounded to BF16, codes ``[M, K]`` and scales
        ``[M, K/128]`` of the normalised rows).

    Raises:
        TypeError: ``x`` or ``residual`` is not BF16. ValueError: K is not a multiple of 128, an unknown rule.
    """
    require_bf16("add_rms_norm_quantize_1x128", x=x, residual=residual)
    require_groups("add_rms_norm_quantize_1x128", x)
    y, total, codes, scales = _add_rms_norm_quantize(x, residual, weight, eps, rule, with_normed)
    return y if with_normed else None, total, BlockQuantized(codes, scales)
