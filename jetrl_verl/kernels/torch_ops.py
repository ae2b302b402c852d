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

No autograd formula is attached: the trainer calls it inside its own ``autograd.Function`` (jetrl_verl/linear.py), which
also decides what is saved.
"""

import torch

from jetrl_verl.kernels import dispatch
from jetrl_verl.numerics import FP8_DTYPE, BlockQuantized

_LIBRARY = torch.library.Library("jetrl", "DEF")
_LIBRARY.define("fprop(Tensor x, Tensor w_codes, Tensor w_scales, Tensor? bias, str rule) -> Tensor")


def _check(x: torch.Tensor, w_codes: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"jetrl::fprop: x is {x.dtype}; activations are quantised from BF16 values, cast it first.")
    if w_codes.dtype != FP8_DTYPE:
        raise ValueError(f"jetrl::fprop: weight codes are {w_codes.dtype}, expected {FP8_DTYPE}.")
    if x.shape[-1] != w_codes.shape[1]:
        raise ValueError(f"jetrl::fprop: x {tuple(x.shape)} does not fit the weight {tuple(w_codes.shape)}.")


def _fprop(
    x: torch.Tensor, w_codes: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None, rule: str
) -> torch.Tensor:
    _check(x, w_codes)
    a = dispatch.quantize_1x128(x.reshape(-1, x.shape[-1]), rule)
    y = dispatch.gemm_nt(a, BlockQuantized(w_codes, w_scales), b_block_scaled=True, bias=bias)
    return y.reshape(*x.shape[:-1], w_codes.shape[0])


def _fprop_fake(
    x: torch.Tensor, w_codes: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None, rule: str
) -> torch.Tensor:
    _check(x, w_codes)
    return x.new_empty((*x.shape[:-1], w_codes.shape[0]), dtype=torch.bfloat16)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("fprop", _fprop, _key)
torch.library.register_fake("jetrl::fprop", _fprop_fake, lib=_LIBRARY)


def fprop(
    x: torch.Tensor, w_codes: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None, rule: str
) -> torch.Tensor:
    """``Y = X W^T + bias`` with X quantised in 1x128 groups on the way in.

    Args:
        x: ``[..., K]`` BF16.
        w_codes: ``[N, K]`` E4M3.
        w_scales: ``[ceil(N/128), ceil(K/128)]`` FP32.
        bias: ``[N]`` or None, added in FP32 before the one rounding.
        rule: scale rule of X, ``"fp32"`` or ``"pow2"``; use the one W was quantised with.

    Returns:
        ``[..., N]`` BF16.

    Raises:
        ValueError: another type of ``x`` or of the codes, shapes that do not fit, an unknown rule.
    """
    return torch.ops.jetrl.fprop(x, w_codes, w_scales, bias, rule)
