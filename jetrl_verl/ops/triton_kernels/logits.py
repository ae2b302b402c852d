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
"""``hidden weight^T`` from BF16 to FP32 logits: a GEMM whose tile and order over K never change.

A library's GEMM picks its tile, and whether it splits K, by the number of rows; this one has a single tile, and one
program adds all of K in ascending order. At decode the weight is read once whatever the tile, which is what it costs.
"""

import torch
import triton
import triton.language as tl

TILE_M, TILE_N, TILE_K = 64, 128, 64
WARPS, STAGES = 4, 4

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies the bits of BF16 values as if they were integers."""


@triton.jit
def _logits_kernel(
    hidden_ptr, weight_ptr, out_ptr, rows, columns,
    K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    # Programs of one column tile are neighbours: the weight, the larger operand, is read from memory once.
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    hidden = hidden_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    weight = weight_ptr + column.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, K, TILE_K):
        held = start + k < K
        a = tl.load(hidden + start, mask=(row < rows)[:, None] & held[None, :], other=0.0)
        b = tl.load(weight + start, mask=(column < columns)[None, :] & held[:, None], other=0.0)
        if _INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc)
    target = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, acc, mask=(row < rows)[:, None] & (column < columns)[None, :])


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See :func:`jetrl_verl.ops.logits`; both operands BF16."""
    k = hidden.shape[-1]
    rows = hidden.reshape(-1, k).contiguous()
    columns = weight.shape[0]
    out = torch.empty((len(rows), columns), dtype=torch.float32, device=hidden.device)
    if out.numel():
        _logits_kernel[(triton.cdiv(len(rows), TILE_M), triton.cdiv(columns, TILE_N))](
            rows,
            weight.contiguous(),
            out,
            len(rows),
            columns,
            K=k,
            TILE_M=TILE_M,
            TILE_N=TILE_N,
            TILE_K=TILE_K,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out.view(*hidden.shape[:-1], columns)
