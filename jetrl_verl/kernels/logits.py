# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``lm_head`` and a mixture's router: FP32 logits ``hidden weight^T``, rounded once.

On a GPU one program adds all of K in ascending order, sixteen products per instruction, so the tile, which follows the
shape, changes no bit. With many rows TMA copies operands and a program computes several tiles in turn. A router has
tiles of 16 columns, so that eight multiprocessors read its weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl_verl.kernels.device.launch import INTERPRETED, jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.native import aligned
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.recomputation import computed_once
from jetrl_verl.kernels.sizes import ceil_div, multiprocessors
from jetrl_verl.reference.reproducible import grid_bits, on_grid

__all__ = ["gradient_dtype", "logits", "logits_backward"]


@implements("logits", "reference")
def reference_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[..., V]`` FP32 of BF16 operands: exact sums on the CPU."""
    bits = grid_bits(hidden.shape[-1])
    return (on_grid(hidden, bits).double() @ on_grid(weight, bits).double().t()).float()


class Tile(NamedTuple):
    """Rows, columns and K of a tile; warps and stages of its program; whether TMA copies."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    tma: bool = False


TILES = {64: Tile(64, 128, 64, 4, 4), 512: Tile(128, 128, 64, 8, 5, tma=True)}
"""Tiles by the most rows they are used for. Up to 64 rows the bytes of the weight are the time."""
MANY_ROWS = Tile(128, 256, 64, 8, 3, tma=True)
MOST_EXPERTS = 512
"""Up to this many columns the product is a router's."""
ROUTER_TILES = {16: Tile(16, 16, 256, 4, 8), 512: Tile(64, 16, 256, 4, 3), 8192: TILES[64]}
"""Tiles of a router. Up to 512 rows the bytes of one program are the time; above, programs fill the GPU."""
ROUTER_OF_MANY_ROWS = Tile(128, 128, 64, 8, 4)


def tile_of(rows: int, columns: int) -> Tile:
    """The tile for these numbers of rows and columns."""
    if columns <= MOST_EXPERTS:
        return next((tile for most, tile in ROUTER_TILES.items() if rows <= most), ROUTER_OF_MANY_ROWS)
    return next((tile for most, tile in TILES.items() if rows <= most), MANY_ROWS)


@jit
def _logits_kernel(
    hidden_ptr, weight_ptr, out_ptr, rows, columns,
    K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    # Programs of one column tile are neighbors, so the weight, the larger operand, is read from memory once.
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    hidden = hidden_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    weight = weight_ptr + column.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, K, TILE_K):
        valid = start + k < K
        a = tl.load(hidden + start, mask=(row < rows)[:, None] & valid[None, :], other=0.0)
        b = tl.load(weight + start, mask=(column < columns)[None, :] & valid[:, None], other=0.0)
        if INTERPRETED:  # it multiplies the bits of BF16 values as integers
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc)
    target = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, acc, mask=(row < rows)[:, None] & (column < columns)[None, :])


@jit
def _tma_logits_kernel(
    hidden, weight, out_ptr, rows, columns,
    K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, TILE_M)
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(columns, TILE_N), PROGRAMS, flatten=True):
        first_row, first_column = tile % row_tiles * TILE_M, tile // row_tiles * TILE_N
        acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for start in range(0, K, TILE_K):
            a, b = hidden.load([first_row, start]), weight.load([first_column, start])
            if INTERPRETED:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc)
        # In halves: converting a whole tile for coalesced stores would take the shared memory of the stages.
        left, right = tl.split(tl.permute(tl.reshape(acc, (TILE_M, 2, TILE_N // 2)), (0, 2, 1)))
        row, column = first_row + tl.arange(0, TILE_M), first_column + tl.arange(0, TILE_N // 2)
        target = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        valid = (row < rows)[:, None]
        tl.store(target, left, mask=valid & (column < columns)[None, :])
        tl.store(target + TILE_N // 2, right, mask=valid & (column + TILE_N // 2 < columns)[None, :])


@implements("logits", "triton")
def triton_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As :func:`reference_logits`."""
    return triton_logits_by(hidden, weight, tile_of(hidden.shape[:-1].numel(), weight.shape[0]))


def _programs(device: torch.device, tiles: int) -> int:
    """Programs that fit on the GPU at once; few under the interpreter, so that each has several tiles."""
    return min(tiles, multiprocessors(device) if device.type == "cuda" else 3)


def triton_logits_by(hidden: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """As :func:`reference_logits`, with a given tile. Threads copy operands that TMA cannot."""
    k = hidden.shape[-1]
    rows, weight = hidden.reshape(-1, k).contiguous(), weight.contiguous()
    columns = weight.shape[0]
    # In its final shape: a view returned by an autograd function cannot be masked in place.
    out = torch.empty((*hidden.shape[:-1], columns), dtype=torch.float32, device=hidden.device)
    if not out.numel():
        return out
    tiles = ceil_div(len(rows), tile.m), ceil_div(columns, tile.n)
    sizes = dict(K=k, TILE_M=tile.m, TILE_N=tile.n, TILE_K=tile.k, num_warps=tile.warps, num_stages=tile.stages)
    if tile.tma and aligned(rows) and aligned(weight):
        programs = _programs(rows.device, tiles[0] * tiles[1])
        a = TensorDescriptor.from_tensor(rows, [tile.m, tile.k])
        b = TensorDescriptor.from_tensor(weight, [tile.n, tile.k])
        _tma_logits_kernel[(programs,)](a, b, out, len(rows), columns, PROGRAMS=programs, **sizes)
    else:
        _logits_kernel[tiles](rows, weight, out, len(rows), columns, **sizes)
    return out


@operator(
    "logits(Tensor hidden, Tensor weight) -> Tensor",
    fake=lambda hidden, weight: hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=torch.float32),
    probe=lambda inputs: logits(inputs.x, inputs.head),
)
def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    require_shape("logits", "weight", weight, (weight.shape[0], hidden.shape[-1]))
    return lookup("logits", hidden.device)(hidden, weight)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return computed_once(_logits, hidden, weight.to(torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        return logits_backward(gradient.to(gradient_dtype(gradient.device)), *ctx.saved_tensors, ctx.needs_input_grad)


def gradient_dtype(device: torch.device) -> torch.dtype:
    """Type in which the gradient of logits is multiplied: BF16, FP32 on the CPU, which has no fast BF16 product."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def logits_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, needs: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of ``hidden`` and ``weight``, in their dtypes and shapes, each if its entry of ``needs`` is true.

    Args:
        gradient: of the logits ``[..., V]``, in :func:`gradient_dtype`. hidden: ``[..., K]``. weight: ``[V, K]``.
    """
    dhidden = dweight = None
    if needs[0]:
        dhidden = (gradient @ weight.to(gradient.dtype)).to(hidden.dtype)
    if needs[1]:
        rows = gradient.reshape(-1, gradient.shape[-1])
        dweight = (rows.t() @ hidden.reshape(-1, hidden.shape[-1]).to(gradient.dtype)).to(weight.dtype)
    return dhidden, dweight


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden weight^T``, rounded once; differentiable in both.

    Args:
        hidden: ``[..., K]`` BF16. weight: ``[V, K]``, taken at its BF16 value.

    Returns:
        ``[..., V]`` FP32.

    Raises:
        TypeError: ``hidden`` is not BF16.
    """
    require_bf16("logits", hidden=hidden)
    if torch.is_grad_enabled():
        return _Logits.apply(hidden, weight)
    return _logits(hidden, weight.to(torch.bfloat16))
