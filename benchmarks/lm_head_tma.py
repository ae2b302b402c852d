# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A candidate for ``lm_head``: kernels/logits.py's product with operands copied by the tensor memory accelerator, and
programs that stay and go from tile to tile.

One chain of wgmma over all of K in ascending order, so the bits are those of any tile. What may make it faster: a copy
is one instruction and not twelve a thread with their addresses and guards, and with ``stays`` the next tile's operands
are on their way while a tile is stored, which takes 4 us where its arithmetic takes 36.
``behind_last_layer_on_gpu.py`` times it and compares bits; where it wins by 5%, it becomes the kernel.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl_verl.kernels.logits import Tile
from jetrl_verl.kernels.sizes import ceil_div

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies the bits of BF16 values as if they were integers."""


@triton.jit
def _tma_logits_kernel(
    hidden, weight, out_ptr, rows, columns,
    K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    PROGRAMS: tl.constexpr, STAYS: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, TILE_M)
    # A row tile's neighbour reads the same weight; they run at the same time.
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(columns, TILE_N), PROGRAMS, flatten=STAYS):
        first_row, first_column = tile % row_tiles * TILE_M, tile // row_tiles * TILE_N
        acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for start in range(0, K, TILE_K):
            a, b = hidden.load([first_row, start]), weight.load([first_column, start])
            if _INTERPRETED:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc)
        # In halves: a whole tile would take the shared memory of the stages on its way to coalesced stores.
        left, right = tl.split(tl.permute(tl.reshape(acc, (TILE_M, 2, TILE_N // 2)), (0, 2, 1)))
        row, column = first_row + tl.arange(0, TILE_M), first_column + tl.arange(0, TILE_N // 2)
        target = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        held = (row < rows)[:, None]
        tl.store(target, left, mask=held & (column < columns)[None, :])
        tl.store(target + TILE_N // 2, right, mask=held & (column + TILE_N // 2 < columns)[None, :])


def logits_by_tma(hidden: torch.Tensor, weight: torch.Tensor, tile: Tile, stays: bool) -> torch.Tensor:
    """As ``triton_logits_by``, of contiguous ``hidden [N, K]`` whose rows are multiples of 16 bytes.

    Args:
        stays: whether there is a program for each multiprocessor, which goes from tile to tile, or one for each tile.
    """
    (rows, k), columns = hidden.shape, weight.shape[0]
    out = torch.empty((rows, columns), dtype=torch.float32, device=hidden.device)
    tiles = ceil_div(rows, tile.m) * ceil_div(columns, tile.n)
    programs = tiles
    if stays and hidden.is_cuda:
        programs = min(tiles, torch.cuda.get_device_properties(hidden.device).multi_processor_count)
    elif stays:
        programs = min(tiles, 3)
    _tma_logits_kernel[(programs,)](
        TensorDescriptor.from_tensor(hidden, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(weight, [tile.n, tile.k]),
        out,
        rows,
        columns,
        K=k,
        TILE_M=tile.m,
        TILE_N=tile.n,
        TILE_K=tile.k,
        PROGRAMS=programs,
        STAYS=stays,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
