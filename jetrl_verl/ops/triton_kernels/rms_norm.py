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
"""RMSNorm, alone and behind the residual sum: one program per row, the row in registers, one read and one write.

``K`` and the tile are compile-time constants, so every row of a model's norm is summed in one order whatever the batch.
The two entry points are one kernel; what is summed is the BF16 value in both.

The gradient is one pass too: a program walks some rows, writes their dx and keeps their share of dw in registers. Its
sums depend on the number of rows, which no contract forbids.
"""

import torch
import triton
import triton.language as tl

_BACKWARD_PROGRAMS = 528
"""Programs that share the rows of a gradient: four a multiprocessor of an H200."""

_BACKWARD_ELEMENTS = 2048
"""Elements of the rows that a program of the gradient works on at a time, at least one row."""


@triton.jit
def normalised_row(
    x_ptr, residual_ptr, weight_ptr, total_ptr, rstd_ptr, row, column, mask, eps,
    K: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Row ``row`` [TILE] of the result in BF16; stores the residual sum, where there is one, and the row's rstd."""
    x = tl.load(x_ptr + row * K + column, mask=mask, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * K + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(tl.bfloat16)
        tl.store(total_ptr + row * K + column, x, mask=mask)
    values = x.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / K
    rstd = 1.0 / tl.sqrt_rn(mean + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return (values * rstd * weight).to(tl.bfloat16)


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, eps,
    K: tl.constexpr, TILE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < K
    y = normalised_row(
        x_ptr, residual_ptr, weight_ptr, total_ptr, rstd_ptr, row, column, mask, eps, K, RESIDUAL
    )  # fmt: skip
    tl.store(y_ptr + row * K + column, y, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr, count, rows_each,
    K: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, TILE)[None, :]
    inside = column < K
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, TILE), dtype=tl.float32)
    first = tl.program_id(0) * rows_each
    for start in range(first, tl.minimum(first + rows_each, count), ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = inside & (row < count)
        place = row.to(tl.int64) * K + column
        rstd = tl.load(rstd_ptr + row, mask=row < count, other=0.0)
        dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        normalised = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) * rstd
        scaled = dy * weight
        mean = tl.sum(scaled * normalised, axis=1)[:, None] / K
        dx = rstd * (scaled - normalised * mean)
        tl.store(dx_ptr + place, dx.to(tl.bfloat16), mask=mask)
        dw += dy * normalised
    total = tl.sum(dw, axis=0)[None, :]
    tl.store(dw_ptr + tl.program_id(0) * K + column, total, mask=inside)


def tile_and_warps(k: int) -> tuple[int, int]:
    """Of a program that sums a row of ``k``: the order of the sum follows from them."""
    tile = triton.next_power_of_2(k)
    return tile, min(max(tile // 512, 1), 16)


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as ``[rows, K]``, contiguous from a 16-byte boundary, copied only where it is not."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float):
    rows = aligned_rows(x)
    count, k = rows.shape
    y, total = torch.empty_like(rows), torch.empty_like(rows) if residual is not None else rows
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    tile, warps = tile_and_warps(k)
    if count:
        _rms_norm_kernel[(count,)](
            rows,
            aligned_rows(residual) if residual is not None else rows,
            weight.contiguous(),
            y,
            total,
            rstd,
            eps,
            K=k,
            TILE=tile,
            RESIDUAL=residual is not None,
            num_warps=warps,
        )
    return y.view(x.shape), total.view(x.shape), rstd.view(x.shape[:-1])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y ``[..., K]`` BF16 and rstd ``[...]`` FP32; see :func:`jetrl_verl.ops.rms_norm`."""
    y, _, rstd = _launch(x, None, weight, eps)
    return y, rstd


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`jetrl_verl.ops.add_rms_norm`; one pass over both."""
    y, total, _ = _launch(x, residual, weight, eps)
    return y, total


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx ``[..., K]`` BF16 and dw ``[K]`` FP32 from dy and x ``[..., K]`` BF16 and rstd ``[...]`` FP32."""
    rows, gradients = aligned_rows(x), aligned_rows(dy)
    count, k = rows.shape
    dx = torch.empty_like(rows)
    tile = triton.next_power_of_2(k)
    at_once = max(_BACKWARD_ELEMENTS // tile, 1)
    each = triton.cdiv(triton.cdiv(count, _BACKWARD_PROGRAMS), at_once) * at_once
    programs = triton.cdiv(count, each) if count else 0
    partial = torch.empty((programs, k), dtype=torch.float32, device=x.device)
    if count:
        _backward_kernel[(programs,)](
            gradients,
            rows,
            weight.contiguous(),
            rstd.contiguous(),
            dx,
            partial,
            count,
            each,
            K=k,
            TILE=tile,
            ROWS=at_once,
            num_warps=min(max(tile * at_once // 512, 1), 16),
        )
    return dx.view(x.shape), partial.sum(dim=0)
