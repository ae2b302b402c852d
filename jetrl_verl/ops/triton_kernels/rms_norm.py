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
"""RMSNorm, alone and behind the residual sum, and what the FP8 linears read of it: one program per row, the row in
registers, one read and one write.

``K``, the tile and the strides are compile-time constants, so every row of a model's norm is summed in one order
whatever the batch. All entry points are one kernel; what is summed is the BF16 value in each. Heads of a merged
projection are read where they lie, in the layout that rows of their own have.

*Codes.* The row is rounded to BF16 before it is quantised in 1x128 groups. The maxima are taken from the row folded to
``[groups, 128]``, which moves nothing between threads and leaves the layout that the sum of squares is formed in alone
(tests/kernels/test_fused_for_hopper.py compares them). Bytes per element: norm and quantiser apart read and write 2 + 2
and 2 + 1 (after a residual sum of 4 + 2); here they are 2 in, 1 out for the codes, 2 more where the normalised row is
wanted in BF16, and 2 + 2 for the residual stream: 5.03 or 7.03 behind a residual sum, 3.03 or 5.03 alone. The weight
comes from the L1 cache. Two loads of 16 bytes a thread and operand at K = 4096: eight programs of eight warps a
multiprocessor keep over 100 KiB in flight.

The gradient is one pass too: a program walks some rows, writes their dx and keeps their share of dw in registers. Its
sums depend on the number of rows, which no contract forbids.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.results import empty_rows
from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    encode,
    is_pow2,
    magnitude_bits,
    reciprocal_of,
    scale_of,
)
from jetrl_verl.kernels.triton_kernels._dependents import launch_dependents
from jetrl_verl.numerics import BlockQuantized

_BACKWARD_PROGRAMS = 528
"""Programs that share the rows of a gradient: four a multiprocessor of an H200."""

_BACKWARD_ELEMENTS = 2048
"""Elements of the rows that a program of the gradient works on at a time, at least one row."""

_VECTOR = 8
"""Elements of a 16-byte load."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, codes_ptr, scales_ptr, eps, rows,
    K: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    RESIDUAL: tl.constexpr, WITH_Y: tl.constexpr, QUANTISE: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    if QUANTISE:  # a linear reads it next
        launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < K
    x = tl.load(x_ptr + row // HEADS * STRIDE_TOKEN + row % HEADS * STRIDE_HEAD + column, mask=mask, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * K + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(tl.bfloat16)
        tl.store(total_ptr + row * K + column, x, mask=mask)
    values = x.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / K
    rstd = 1.0 / tl.sqrt_rn(mean + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = (values * rstd * weight).to(tl.bfloat16)
    if WITH_Y:
        tl.store(y_ptr + row * K + column, y, mask=mask)
    if QUANTISE:
        groups = tl.reshape(y, (TILE // GROUP, GROUP)).to(tl.float32)
        bits = tl.max(magnitude_bits(groups), axis=1)
        scale = scale_of(bits, POW2)
        codes = encode(groups, scale[:, None], reciprocal_of(scale, bits, POW2)[:, None], POW2)
        group = tl.arange(0, TILE // GROUP)
        offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(codes_ptr + row * K + offsets, codes, mask=offsets < K)
        tl.store(scales_ptr + group.to(tl.int64) * rows + row, scale, mask=group < K // GROUP)


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


def _aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as ``[rows, K]``, contiguous from a 16-byte boundary, copied only where it is not."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _heads_in_place(x: torch.Tensor) -> bool:
    """Whether ``x`` is heads ``[N, H, K]`` of a wider tensor, each loaded by the instructions of a row of its own."""
    if x.ndim != 3 or x.is_contiguous() or x.stride(2) != 1:
        return False
    return x.data_ptr() % 16 == 0 and all(step % _VECTOR == 0 for step in (*x.shape[2:], *x.stride()[:2]))


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rule: str | None, with_y: bool
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, BlockQuantized | None]:
    """(y or None, ``x + residual`` or ``x``, rstd, codes of y under ``rule`` or None)."""
    k = x.shape[-1]
    if _heads_in_place(x):
        source, layout = x, {"HEADS": x.shape[1], "STRIDE_TOKEN": x.stride(0), "STRIDE_HEAD": x.stride(1)}
    else:
        source, layout = _aligned_rows(x), {"HEADS": 1, "STRIDE_TOKEN": k, "STRIDE_HEAD": k}
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) if with_y else None
    total = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) if residual is not None else x
    count = rstd.numel()
    quantised = empty_rows(count, k, x.device) if rule is not None else None
    pow2 = rule is not None and is_pow2(rule)
    tile, warps = tile_and_warps(k)
    if count:
        # Pointers of what is absent are never dereferenced.
        _rms_norm_kernel[(count,)](
            source,
            _aligned_rows(residual) if residual is not None else source,
            weight.contiguous(),
            y if with_y else source,
            total,
            rstd,
            quantised.codes.view(torch.uint8) if rule is not None else source,
            quantised.scales if rule is not None else rstd,
            eps,
            count,
            K=k,
            TILE=tile,
            **layout,
            RESIDUAL=residual is not None,
            WITH_Y=with_y,
            QUANTISE=rule is not None,
            POW2=pow2,
            num_warps=warps,
        )
    return y, total, rstd, quantised


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y ``[..., K]`` BF16 and rstd ``[...]`` FP32; see :func:`jetrl_verl.ops.rms_norm`."""
    y, _, rstd, _ = _launch(x, None, weight, eps, None, True)
    return y, rstd


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`jetrl_verl.ops.add_rms_norm`; one pass over both."""
    y, total, _, _ = _launch(x, residual, weight, eps, None, True)
    return y, total


def rms_norm_quantize_1x128(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rule: str, with_normed: bool
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, BlockQuantized]:
    """(y or None, ``x + residual`` or ``x``, rstd, codes of y); see :mod:`jetrl_verl.ops.rms_norm`."""
    return _launch(x, residual, weight, eps, rule, with_normed)


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx ``[..., K]`` BF16 and dw ``[K]`` FP32 from dy and x ``[..., K]`` BF16 and rstd ``[...]`` FP32."""
    rows, gradients = _aligned_rows(x), _aligned_rows(dy)
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
