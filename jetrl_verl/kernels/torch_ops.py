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
"""The forward of a quantised linear as one torch operator, ``torch.ops.jetrl.fprop``: trainer and vLLM call this one.

A policy that samples with the operator it is trained with needs one definition of "quantise, multiply, add bias,
round". It is an operator of the dispatcher, not a Python function, so that torch.compile keeps it whole (its fake
implementation gives the output's shape) and no compiler can fuse half of it into a neighbour on one side only. It
allocates by shape alone and never waits for the device, so CUDA graphs may capture it.

``torch.ops.jetrl.fprop_codes`` is its second half, for an input that was quantised where it was written.

No autograd formula is attached: the trainer calls it inside its own ``autograd.Function`` (jetrl_verl/linear.py), which
also decides what is saved.
"""

import torch

from jetrl_verl.kernels import dispatch
from jetrl_verl.numerics import FP8_DTYPE, BlockQuantized

_LIBRARY = torch.library.Library("jetrl", "DEF")
_LIBRARY.define(
    "fprop(Tensor x, Tensor w_codes, Tensor w_scales, Tensor? bias, str rule, bool static_weight=False) -> Tensor"
)
_LIBRARY.define(
    "fprop_codes(Tensor x_codes, Tensor x_scales, Tensor w_codes, Tensor w_scales, Tensor? bias,"
    " bool static_weight=False) -> Tensor"
)


def _check(x: torch.Tensor, w_codes: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"jetrl::fprop: x is {x.dtype}; activations are quantised from BF16 values, cast it first.")
    if w_codes.dtype != FP8_DTYPE:
        raise ValueError(f"jetrl::fprop: weight codes are {w_codes.dtype}, expected {FP8_DTYPE}.")
    if x.shape[-1] != w_codes.shape[1]:
        raise ValueError(f"jetrl::fprop: x {tuple(x.shape)} does not fit the weight {tuple(w_codes.shape)}.")


def _fprop(
    x: torch.Tensor,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    rule: str,
    static_weight: bool = False,
) -> torch.Tensor:
    _check(x, w_codes)
    a = dispatch.quantize_1x128(x.reshape(-1, x.shape[-1]), rule)
    b = BlockQuantized(w_codes, w_scales)
    y = dispatch.gemm_nt(a, b, b_block_scaled=True, bias=bias, static_weight=static_weight)
    return y.reshape(*x.shape[:-1], w_codes.shape[0])


def _fprop_fake(x: torch.Tensor, w_codes: torch.Tensor, *_) -> torch.Tensor:
    _check(x, w_codes)
    return x.new_empty((*x.shape[:-1], w_codes.shape[0]), dtype=torch.bfloat16)


def _check_codes(x_codes: torch.Tensor, w_codes: torch.Tensor) -> None:
    for name, codes in (("input", x_codes), ("weight", w_codes)):
        if codes.dtype != FP8_DTYPE:
            raise ValueError(f"jetrl::fprop_codes: {name} codes are {codes.dtype}, expected {FP8_DTYPE}.")
    if x_codes.shape[-1] != w_codes.shape[1]:
        raise ValueError(
            f"jetrl::fprop_codes: x {tuple(x_codes.shape)} does not fit the weight {tuple(w_codes.shape)}."
        )


def _fprop_codes(
    x_codes: torch.Tensor,
    x_scales: torch.Tensor,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    static_weight: bool = False,
) -> torch.Tensor:
    _check_codes(x_codes, w_codes)
    a, b = BlockQuantized(x_codes, x_scales), BlockQuantized(w_codes, w_scales)
    return dispatch.gemm_nt(a, b, b_block_scaled=True, bias=bias, static_weight=static_weight)


def _fprop_codes_fake(x_codes: torch.Tensor, _x_scales: torch.Tensor, w_codes: torch.Tensor, *_) -> torch.Tensor:
    _check_codes(x_codes, w_codes)
    return x_codes.new_empty((x_codes.shape[0], w_codes.shape[0]), dtype=torch.bfloat16)


for _name, _real, _fake in (
    ("fprop", _fprop, _fprop_fake),
    ("fprop_codes", _fprop_codes, _fprop_codes_fake),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _real, _key)
    torch.library.register_fake(f"jetrl::{_name}", _fake, lib=_LIBRARY)


def fprop(
    x: torch.Tensor,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    rule: str,
    static_weight: bool = False,
) -> torch.Tensor:
    """``Y = X W^T + bias`` with X quantised in 1x128 groups on the way in.

    Args:
        x: ``[..., K]`` BF16.
        w_codes: ``[N, K]`` E4M3.
        w_scales: ``[ceil(N/128), ceil(K/128)]`` FP32.
        bias: ``[N]`` or None, added in FP32 before the one rounding.
        rule: scale rule of X, ``"fp32"`` or ``"pow2"``; use the one W was quantised with.
        static_weight: weight and bias were there before the quantiser of X started, which is the kernel right before
            the multiplication; see :func:`jetrl_verl.kernels.native.gemm_nt`. Only the speed depends on it.

    Returns:
        ``[..., N]`` BF16.

    Raises:
        ValueError: another type of ``x`` or of the codes, shapes that do not fit, an unknown rule.
    """
    return torch.ops.jetrl.fprop(x, w_codes, w_scales, bias, rule, static_weight)


def fprop_codes(
    x: BlockQuantized,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    static_weight: bool = False,
) -> torch.Tensor:
    """:func:`fprop` of an input that is quantised already; the same bits for ``x = quantize_1x128(X, rule)``.

    Args:
        x: codes ``[M, K]`` E4M3 and scales ``[M, K/128]`` FP32. The others as in :func:`fprop`.
        static_weight: what :func:`jetrl_verl.kernels.native.gemm_nt` asks of the kernel right before this call, which
            holds for the one that makes ``x``. Only the speed depends on it.

    Returns:
        ``[M, N]`` BF16.

    Raises:
        ValueError: codes of another type, shapes that do not fit.
    """
    return torch.ops.jetrl.fprop_codes(x.codes, x.scales, w_codes, w_scales, bias, static_weight)
