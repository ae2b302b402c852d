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
"""The forward of an INT8 linear as one torch operator, ``torch.ops.jetrl.fprop_int8``: what the INT8 rollout calls.

The twin of ``jetrl::fprop`` for the rollout-only baselines, an operator for the same reasons: torch.compile keeps it
whole, and it allocates by shape alone, so CUDA graphs may capture it. The trainer has no use for it but to probe that
the rollout runs the same kernels.
"""

import torch

from jetrl_verl.kernels import dispatch
from jetrl_verl.numerics import BlockQuantized

_LIBRARY = torch.library.Library("jetrl", "FRAGMENT")
_LIBRARY.define("fprop_int8(Tensor x, Tensor w_codes, Tensor w_scales, Tensor? bias) -> Tensor")


def _check(x: torch.Tensor, w_codes: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(
            f"jetrl::fprop_int8: x is {x.dtype}; activations are quantised from BF16 values, cast it first."
        )
    if w_codes.dtype != torch.int8:
        raise ValueError(f"jetrl::fprop_int8: weight codes are {w_codes.dtype}, expected torch.int8.")
    if x.shape[-1] != w_codes.shape[1]:
        raise ValueError(f"jetrl::fprop_int8: x {tuple(x.shape)} does not fit the weight {tuple(w_codes.shape)}.")


def _fprop_int8(
    x: torch.Tensor, w_codes: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    _check(x, w_codes)
    a = dispatch.quantize_int8(x.reshape(-1, x.shape[-1]))
    y = dispatch.gemm_int8(a, BlockQuantized(w_codes, w_scales), bias=bias)
    return y.reshape(*x.shape[:-1], w_codes.shape[0])


def _fprop_int8_fake(
    x: torch.Tensor, w_codes: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    _check(x, w_codes)
    return x.new_empty((*x.shape[:-1], w_codes.shape[0]), dtype=torch.bfloat16)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("fprop_int8", _fprop_int8, _key)
torch.library.register_fake("jetrl::fprop_int8", _fprop_int8_fake, lib=_LIBRARY)


def fprop_int8(
    x: torch.Tensor, w_codes: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``Y = X W^T + bias`` with X quantised per token on the way in.

    Args:
        x: ``[..., K]`` BF16. w_codes: ``[N, K]`` INT8. w_scales: ``[N, 1]`` FP32.
        bias: ``[N]`` or None, added in FP32 before the one rounding.

    Returns:
        ``[..., N]`` BF16.

    Raises:
        ValueError: another type of ``x`` or of the codes, shapes that do not fit.
    """
    return torch.ops.jetrl.fprop_int8(x, w_codes, w_scales, bias)
