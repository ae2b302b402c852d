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
"""Rotary embedding of queries and keys: one program per token, all its heads, the angles looked up by its position.

Elementwise, so any tile and any strides give the same bits: a product of two BF16 values is exact in FP32, and only the
sum of two of them is rounded, whether the compiler contracts it or not.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(
    x_ptr, y_ptr, token, cos, sin, stride_token, stride_head,
    HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head, column = tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, HALF)[None, :]
    mask = head < HEADS
    source = x_ptr + token * stride_token + head * stride_head + column
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = y_ptr + (token * HEADS + head) * 2 * HALF + column
    tl.store(target, (first * cos - second * sin).to(tl.bfloat16), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["table_rows"])
def _rotary_kernel(
    q_ptr, k_ptr, table_ptr, positions_ptr, q_out_ptr, k_out_ptr, table_rows,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head,
    Q_HEADS: tl.constexpr, Q_TILE: tl.constexpr, K_HEADS: tl.constexpr, K_TILE: tl.constexpr,
    HALF: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    # NaN for a position without angles: memory beside the table is never read, and the token cannot go unnoticed.
    known = (column >= 0) & (position >= 0) & (position < table_rows)
    angles = table_ptr + position * 2 * HALF + column
    cos = tl.load(angles, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(angles + HALF, mask=known, other=float("nan")).to(tl.float32)
    if INVERSE:
        sin = -sin
    _rotate(q_ptr, q_out_ptr, token, cos, sin, stride_q_token, stride_q_head, Q_HEADS, Q_TILE, HALF)
    _rotate(k_ptr, k_out_ptr, token, cos, sin, stride_k_token, stride_k_head, K_HEADS, K_TILE, HALF)


def rotary(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`jetrl_verl.ops.rotary`; ``D / 2`` is a power of two, ``inverse`` rotates back, as a gradient is."""
    tokens, _, width = q.shape
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    rotated = tuple(torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for x in (q, k))
    if tokens:
        _rotary_kernel[(tokens,)](
            q,
            k,
            table.contiguous(),
            positions.contiguous(),
            *rotated,
            len(table),
            *q.stride()[:2],
            *k.stride()[:2],
            Q_HEADS=q.shape[1],
            Q_TILE=triton.next_power_of_2(q.shape[1]),
            K_HEADS=k.shape[1],
            K_TILE=triton.next_power_of_2(k.shape[1]),
            HALF=width // 2,
            INVERSE=inverse,
        )
    return rotated
