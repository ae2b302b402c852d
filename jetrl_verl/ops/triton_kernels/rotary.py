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
"""Rotary embedding: one program per token, all its heads; nothing is summed over more than two terms."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotary_kernel(
    x_ptr, cos_sin_ptr, y_ptr, stride_token, stride_head,
    HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, HALF)[None, :]
    mask = head < HEADS
    source = x_ptr + token * stride_token + head * stride_head + column
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr + token * 2 * HALF + column).to(tl.float32)
    sin = tl.load(cos_sin_ptr + token * 2 * HALF + HALF + column).to(tl.float32)
    if INVERSE:
        sin = -sin
    target = y_ptr + (token * HEADS + head) * 2 * HALF + column
    tl.store(target, (first * cos - second * sin).to(tl.bfloat16), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(tl.bfloat16), mask=mask)


def rotary(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """See :func:`jetrl_verl.ops.rotary`; ``inverse`` rotates back, which is the gradient.

    Args:
        x: ``[N, H, D]`` BF16, contiguous in its last dimension, ``D / 2`` a power of two. cos_sin: ``[N, D]`` BF16.
    """
    tokens, heads, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    y = torch.empty((tokens, heads, width), dtype=torch.bfloat16, device=x.device)
    if tokens:
        _rotary_kernel[(tokens,)](
            x,
            cos_sin.contiguous(),
            y,
            x.stride(0),
            x.stride(1),
            HEADS=heads,
            HEADS_TILE=triton.next_power_of_2(heads),
            HALF=width // 2,
            INVERSE=inverse,
        )
    return y
