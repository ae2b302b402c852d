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
"""Quantise along the last dimension in groups of 128: what every forward and every DGrad does to its activations.

Idea: 3 bytes move per element (2 in, 1 out) and nothing is reused, so the kernel is a copy that computes. When K is a
multiple of 128 the tensor is a flat list of groups and each program takes ``GROUPS`` consecutive ones, reading 8 KiB in
one piece whatever the shape; otherwise the same list of groups is addressed by row with a mask on its ragged end.
A group's 128 elements sit in one row of threads, so its maximum is a few shuffles and the values stay in registers
between the maximum and the division: one read.
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
from jetrl_verl.numerics import BLOCK, BlockQuantized

_GROUPS_PER_PROGRAM = 32
_WARPS = 4


@triton.jit
def _quantize_1x128_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    groups,
    groups_k,
    k,
    stride_scale_row,
    stride_scale_group,
    POW2: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUPS: tl.constexpr,
):
    launch_dependents()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, GROUP)
    row, group_k = group // groups_k, group % groups_k
    in_range = group < groups
    if EVEN_K:
        offsets = group.to(tl.int64)[:, None] * GROUP + lane[None, :]
        mask = in_range[:, None]
    else:
        column = group_k[:, None] * GROUP + lane[None, :]
        offsets = row.to(tl.int64)[:, None] * k + column
        mask = in_range[:, None] & (column < k)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    bits = tl.max(magnitude_bits(x), axis=1)
    scale = scale_of(bits, POW2)
    reciprocal = reciprocal_of(scale, bits, POW2)
    codes = encode(x, scale[:, None], reciprocal[:, None], POW2)
    tl.store(codes_ptr + offsets, codes, mask=mask)
    scale_offsets = row.to(tl.int64) * stride_scale_row + group_k.to(tl.int64) * stride_scale_group
    tl.store(scales_ptr + scale_offsets, scale, mask=in_range)


def quantize_1x128(x: torch.Tensor, rule: str) -> BlockQuantized:
    """As :func:`jetrl_verl.numerics.quantize_1x128`; scales are column-major, see ``kernels/dispatch.py``."""
    pow2 = is_pow2(rule)
    *lead, k = x.shape
    matrix = x.reshape(-1, k).contiguous() if k else x.reshape(x.numel(), 0)
    rows = matrix.shape[0]
    codes, scales = empty_rows(rows, k, x.device)
    groups_k = triton.cdiv(k, BLOCK)
    groups = rows * groups_k
    if groups:
        _quantize_1x128_kernel[(triton.cdiv(groups, _GROUPS_PER_PROGRAM),)](
            matrix,
            codes.view(torch.uint8),
            scales,
            groups,
            groups_k,
            k,
            scales.stride(0),
            scales.stride(1),
            POW2=pow2,
            EVEN_K=k % BLOCK == 0,
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=_WARPS,
        )
    if len(lead) == 1:
        return BlockQuantized(codes, scales)
    return BlockQuantized(codes.reshape(*lead, k), scales.reshape(*lead, groups_k))
