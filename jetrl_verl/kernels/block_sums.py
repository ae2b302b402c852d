# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""64-bit sums of the 128x128 blocks of one-byte matrices, for the contract check (formats/sums.py).

One launch for all live parameters: each program finds its block by bisection in a table of the matrices. Sums are
integers modulo 2^64, so the order does not matter.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton.language as tl

from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.reference import BLOCK

__all__ = ["block_sums"]

_WORDS = BLOCK // 8
_LAUNCH = {"num_warps": 4}


@jit
def _sum_of_block(words_ptr, constants_ptr, row_block, column_block, words_per_row, BLOCK: tl.constexpr):
    WORDS: tl.constexpr = BLOCK // 8
    row, word = tl.arange(0, BLOCK), tl.arange(0, WORDS)
    first = row_block.to(tl.int64) * BLOCK * words_per_row + column_block * WORDS
    words = tl.load(words_ptr + first + row[:, None] * words_per_row + word[None, :])
    constants = tl.load(constants_ptr + row[:, None] * WORDS + word[None, :])
    return tl.sum(tl.sum(words * constants, axis=1), axis=0)


@jit
def _one_kernel(words_ptr, constants_ptr, out_ptr, words_per_row, BLOCK: tl.constexpr):
    column, row = tl.program_id(0), tl.program_id(1)
    value = _sum_of_block(words_ptr, constants_ptr, row, column, words_per_row, BLOCK)
    tl.store(out_ptr + row * tl.num_programs(0) + column, value)


@jit
def _many_kernel(table_ptr, constants_ptr, out_ptr, matrices, HALVINGS: tl.constexpr, BLOCK: tl.constexpr):
    """``table_ptr``: int64 ``[matrices, 3]``, the blocks before a matrix, its address, its blocks in a row."""
    block = tl.program_id(0)
    low, high = 0, matrices
    for _ in tl.static_range(HALVINGS):
        middle = (low + high) // 2
        inside = tl.load(table_ptr + middle * 3) <= block
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    entry = table_ptr + low * 3
    at = block - tl.load(entry)
    words_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
    in_a_row = tl.load(entry + 2)
    value = _sum_of_block(words_ptr, constants_ptr, at // in_a_row, at % in_a_row, in_a_row * (BLOCK // 8), BLOCK)
    tl.store(out_ptr + block, value)


@implements("block_sums", "reference")
def reference_block_sums(matrices: Sequence[torch.Tensor], constants: torch.Tensor) -> torch.Tensor:
    """As :func:`block_sums`, one matrix at a time."""
    constants, sums = constants.view(1, BLOCK, 1, _WORDS), []
    for matrix in matrices:
        # contiguous(): a row-parallel shard's slice of columns cannot be viewed as 64-bit words.
        words = matrix.contiguous().view(torch.int64).view(-1, BLOCK, matrix.shape[1] // BLOCK, _WORDS)
        sums.append((words * constants).sum(dim=(1, 3)).view(-1))
    return torch.cat(sums)


@lru_cache(maxsize=8)
def _table(places: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """Cached: live parameters stay in place from sync to sync."""
    # From unpinned memory: the driver has read it when the call returns, without waiting for the stream.
    return torch.tensor(places, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


@implements("block_sums", "triton")
def triton_block_sums(matrices: Sequence[torch.Tensor], constants: torch.Tensor) -> torch.Tensor:
    """As :func:`block_sums`, by one launch."""
    matrices = [matrix.contiguous() for matrix in matrices if matrix.numel()]
    blocks = sum(matrix.numel() for matrix in matrices) // BLOCK**2
    out = torch.empty(blocks, dtype=torch.int64, device=constants.device)
    if len(matrices) == 1:
        (matrix,) = matrices
        n, k = matrix.shape
        words = matrix.view(torch.int64)
        _one_kernel[k // BLOCK, n // BLOCK](words, constants, out, k // 8, BLOCK=BLOCK, **_LAUNCH)
    elif matrices:
        places, start = [], 0
        for matrix in matrices:
            places.append((start, matrix.data_ptr(), matrix.shape[1] // BLOCK))
            start += matrix.numel() // BLOCK**2
        table, halvings = _table(tuple(places), out.device), len(places).bit_length()
        _many_kernel[blocks,](table, constants, out, len(places), HALVINGS=halvings, BLOCK=BLOCK, **_LAUNCH)
    return out


@operator(
    "block_sums(Tensor[] matrices, Tensor constants) -> Tensor",
    fake=lambda matrices, constants: constants.new_empty(sum(matrix.numel() for matrix in matrices) // BLOCK**2),
)
def block_sums(matrices: Sequence[torch.Tensor], constants: torch.Tensor) -> torch.Tensor:
    """Sums of the 128x128 blocks of matrices, their bytes as 64-bit words times ``constants``, modulo 2^64.

    Args:
        matrices: at least one, ``[N, K]`` of one byte per element, N and K multiples of 128, on one device.
        constants: ``[2048]`` int64, one for each word of a block, row by row.

    Returns:
        int64 ``[blocks]``: blocks of the first matrix, row by row, then of the next.

    Raises:
        ValueError: a matrix of another type or shape.
    """
    for matrix in matrices:
        if matrix.ndim != 2 or matrix.itemsize != 1 or matrix.shape[0] % BLOCK or matrix.shape[1] % BLOCK:
            raise ValueError(
                f"block_sums: a matrix is {list(matrix.shape)} {matrix.dtype}, expected one byte an element and two "
                f"multiples of {BLOCK}"
            )
    return lookup("block_sums", constants.device)(matrices, constants)
