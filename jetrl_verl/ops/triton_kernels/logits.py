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

A library's GEMM picks whether it splits K, and in what pieces it adds, by the number of rows; here one program adds all
of K in ascending order, sixteen products an instruction, and the tile, which follows the number of rows, decides only
which elements a program holds: it does not reach a bit (a GPU test goes across every tile's edge). At decode the weight
is read once whatever the tile, which is what it costs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """Rows, columns and K of a tile; warps and stages of its program."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


TILES = {64: Tile(64, 128, 64, 4, 4), 128: Tile(128, 128, 64, 8, 4)}
"""By the most rows that they are for."""
MANY_ROWS = Tile(128, 256, 64, 8, 3)


def tile_of(rows: int) -> Tile:
    """The tile for so many rows."""
    return next((tile for most, tile in TILES.items() if rows <= most), MANY_ROWS)


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
    # Made in its final shape: a view that leaves an autograd function could not be masked in place.
    out = torch.empty((*hidden.shape[:-1], columns), dtype=torch.float32, device=hidden.device)
    if out.numel():
        tile = tile_of(len(rows))
        _logits_kernel[(triton.cdiv(len(rows), tile.m), triton.cdiv(columns, tile.n))](
            rows,
            weight.contiguous(),
            out,
            len(rows),
            columns,
            K=k,
            TILE_M=tile.m,
            TILE_N=tile.n,
            TILE_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out
