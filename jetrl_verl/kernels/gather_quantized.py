# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Copy tokens' quantized rows to the segments of their experts."""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.results import empty_rowwise, fake_rowwise, require_groups
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.reference import QuantizedTensor

__all__ = ["gather_quantized"]

_TILE = 2048
"""Bytes of a row that a program copies at a time, as 32-bit words."""

implements("gather_quantized", "reference")(reference.gather_quantized)


@jit
def _gather_kernel(
    source_ptr, scales_ptr, pair_ptr, out_ptr, out_scales_ptr, rows, words, groups, k, stride_scale_row,
    stride_scale_group, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_ptr + row)
    token = (pair // k).to(tl.int64)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = word < words
    x = tl.load(source_ptr + token * words + word, mask=valid & (pair >= 0), other=0)
    tl.store(out_ptr + row * words + word, x, mask=valid)
    # Only the program of a row's first tile copies scales.
    group = tl.arange(0, GROUPS)
    mask = (group < groups) & (tl.program_id(1) == 0)
    source = scales_ptr + token * stride_scale_row + group.to(tl.int64) * stride_scale_group
    scale = tl.load(source, mask=mask & (pair >= 0), other=1.0)
    tl.store(out_scales_ptr + group.to(tl.int64) * rows + row, scale, mask=mask)


@implements("gather_quantized", "triton")
def triton_gather_quantized(x: QuantizedTensor, pair: torch.Tensor, k: int) -> QuantizedTensor:
    """As :func:`jetrl_verl.reference.gather_quantized`."""
    out = empty_rowwise(len(pair), x.qdata.shape[1], x.qdata.device)
    source, target = x.qdata.contiguous().view(torch.int32), out.qdata.view(torch.int32)
    words, groups = source.shape[1], x.scales.shape[1]
    if target.numel():
        tile = min(_TILE // 4, next_power_of_2(words))
        _gather_kernel[(len(pair), ceil_div(words, tile))](
            source,
            x.scales,
            pair,
            target,
            out.scales,
            len(pair),
            words,
            groups,
            k,
            x.scales.stride(0),
            x.scales.stride(1),
            TILE=tile,
            GROUPS=next_power_of_2(groups),
            num_warps=4,
        )
    return out


@operator(
    "gather_quantized(Quantized x, Tensor pair, int k) -> Quantized",
    fake=lambda x, pair, *_: fake_rowwise(x.qdata.new_empty((pair.shape[0], x.qdata.shape[1]))),
)
def gather_quantized(x: QuantizedTensor, pair: torch.Tensor, k: int) -> QuantizedTensor:
    """Rows of segments from the qdata of tokens.

    Args:
        x: rowwise qdata ``[T, K]`` and scales ``[T, K/128]``, K a multiple of 128.
        pair: ``[R]`` int32 (:class:`jetrl_verl.reference.Segments`). k: experts of a token.

    Returns:
        qdata ``[R, K]`` and scales ``[R, K/128]``; rows without a pair are zero and have scale 1.

    Raises:
        ValueError: K is no multiple of 128.
    """
    require_groups("gather_quantized", x.qdata)
    return lookup("gather_quantized", x.qdata.device)(x, pair, k)
