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
"""RMSNorm that also quantises what it writes, in 1x128 groups, for the FP8 linears that read it.

Bytes per element: norm and quantiser apart read and write 2 + 2 and 2 + 1 (after a residual sum of 4 + 2), here the row
stays in registers and they are 2 in, 1 out for the codes, 2 more where the normalised row is wanted in BF16, and 2 + 2
for the residual stream: 5.03 or 7.03 behind a residual sum, 3.03 or 5.03 alone. The weight comes from the L1 cache.

Bits: the row is rounded to BF16 before it is quantised and computed by the norm's own device function, with its tile
and warps. The maxima are taken from the row folded to ``[groups, 128]``, which moves nothing between threads and leaves
the layout that the sum of squares is formed in alone (tests/kernels/test_fused_for_hopper.py compares the two).
One row a program, two loads of 16 bytes a thread and operand at K = 4096: eight programs of eight warps a
multiprocessor keep over 100 KiB in flight.
"""

import torch
import triton
import triton.language as tl

from jetrl_verl.kernels.triton_kernels._codec import (
    GROUP,
    empty_rows,
    encode,
    is_pow2,
    magnitude_bits,
    reciprocal_of,
    scale_of,
)
from jetrl_verl.numerics import BlockQuantized
from jetrl_verl.ops.triton_kernels.rms_norm import aligned_rows, normalised_row, tile_and_warps


@triton.jit
def _rms_norm_quantize_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, codes_ptr, scales_ptr, eps, rows,
    K: tl.constexpr, TILE: tl.constexpr, RESIDUAL: tl.constexpr, WITH_Y: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < K
    y = normalised_row(
        x_ptr, residual_ptr, weight_ptr, total_ptr, rstd_ptr, row, column, mask, eps, K, RESIDUAL
    )  # fmt: skip
    if WITH_Y:
        tl.store(y_ptr + row * K + column, y, mask=mask)
    values = tl.reshape(y, (TILE // GROUP, GROUP)).to(tl.float32)
    bits = tl.max(magnitude_bits(values), axis=1)
    scale = scale_of(bits, POW2)
    codes = encode(values, scale[:, None], reciprocal_of(scale, bits, POW2)[:, None], POW2)
    group = tl.arange(0, TILE // GROUP)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes_ptr + row * K + offsets, codes, mask=offsets < K)
    tl.store(scales_ptr + group.to(tl.int64) * rows + row, scale, mask=group < K // GROUP)


def rms_norm_quantize_1x128(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rule: str, with_normed: bool
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, BlockQuantized]:
    """(y or None, ``x + residual`` or ``x``, rstd, codes of y); see :mod:`jetrl_verl.ops.rms_norm`."""
    pow2 = is_pow2(rule)
    rows = aligned_rows(x)
    count, k = rows.shape
    y = torch.empty_like(rows) if with_normed else None
    total = torch.empty_like(rows) if residual is not None else rows
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    quantised = empty_rows(count, k, x.device)
    tile, warps = tile_and_warps(k)
    if count:
        # Pointers of what is absent are never dereferenced.
        _rms_norm_quantize_kernel[(count,)](
            rows,
            aligned_rows(residual) if residual is not None else rows,
            weight.contiguous(),
            y if with_normed else rows,
            total,
            rstd,
            quantised.codes.view(torch.uint8),
            quantised.scales,
            eps,
            count,
            K=k,
            TILE=tile,
            RESIDUAL=residual is not None,
            WITH_Y=with_normed,
            POW2=pow2,
            num_warps=warps,
        )
    y = y.view(x.shape) if with_normed else None
    return y, total.view(x.shape), rstd.view(x.shape[:-1]), quantised
