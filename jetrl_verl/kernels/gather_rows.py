# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Copies of tokens' rows in their experts' segments: BF16 rows, or what they were quantized to.

A token is quantized once, however many experts it goes to: a row's qdata do not depend on where the row lies.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.launch import jit
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.results import empty_rowwise, fake_rowwise
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.reference import BLOCK, QuantizedTensor

_TILE = 2048
"""Bytes of a row that a program copies at a time, as 32-bit words."""

implements("gather_rows", "reference")(reference.gather_rows)
implements("gather_quantized", "reference")(reference.gather_quantized)


@jit
def _gather_kernel(
    source_ptr, scales_ptr, pair_ptr, out_ptr, out_scales_ptr, rows, words, groups, k, stride_scale_row,
    stride_scale_group, SCALED: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_ptr + row)
    token = (pair // k).to(tl.int64)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = word < words
    x = tl.load(source_ptr + token * words + word, mask=held & (pair >= 0), other=0)
    tl.store(out_ptr + row * words + word, x, mask=held)
    if SCALED:
        # By the programs of a row's first tile alone.
        group = tl.arange(0, GROUPS)
        mask = (group < groups) & (tl.program_id(1) == 0)
        source = scales_ptr + token * stride_scale_row + group.to(tl.int64) * stride_scale_group
        scale = tl.load(source, mask=mask & (pair >= 0), other=1.0)
        tl.store(out_scales_ptr + group.to(tl.int64) * rows + row, scale, mask=mask)


def _launch(x: torch.Tensor, scales: torch.Tensor | None, pair: torch.Tensor, k: int, out, out_scales) -> None:
    source, target = x.contiguous().view(torch.int32), out.view(torch.int32)
    words = source.shape[1]
    groups = 0 if scales is None else scales.shape[1]
    tile = min(_TILE // 4, next_power_of_2(max(words, 1)))
    if target.numel():
        _gather_kernel[(len(pair), ceil_div(words, tile))](
            source,
            source if scales is None else scales,
            pair,
            target,
            target if scales is None else out_scales,
            len(pair),
            words,
            groups,
            k,
            0 if scales is None else scales.stride(0),
            0 if scales is None else scales.stride(1),
            SCALED=scales is not None,
            TILE=tile,
            GROUPS=next_power_of_2(max(groups, 1)),
            num_warps=4,
        )


@implements("gather_rows", "triton")
def triton_gather_rows(x: torch.Tensor, pair: torch.Tensor, k: int) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gather_rows`."""
    out = torch.empty((len(pair), x.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x, None, pair, k, out, None)
    return out


@implements("gather_quantized", "triton")
def triton_gather_quantized(x: QuantizedTensor, pair: torch.Tensor, k: int) -> QuantizedTensor:
    """As :func:`jetrl_verl.reference.gather_quantized`."""
    out = empty_rowwise(len(pair), x.qdata.shape[1], x.qdata.device)
    _launch(x.qdata.view(torch.uint8), x.scales, pair, k, out.qdata.view(torch.uint8), out.scales)
    return out


@operator(
    "gather_rows(Tensor x, Tensor pair, int k) -> Tensor",
    fake=lambda x, pair, k: x.new_empty(pair.shape[0], x.shape[1]),
)
def _gather_rows(x: torch.Tensor, pair: torch.Tensor, k: int) -> torch.Tensor:
    return lookup("gather_rows", x.device)(x, pair, k)


def _fake_quantized(qdata, scales, pair, k):
    return fake_rowwise(qdata.new_empty((pair.shape[0], qdata.shape[1])))


@operator("gather_quantized(Tensor qdata, Tensor scales, Tensor pair, int k) -> (Tensor, Tensor)", fake=_fake_quantized)
def _gather_quantized(qdata: torch.Tensor, scales: torch.Tensor, pair: torch.Tensor, k: int):
    gathered = lookup("gather_quantized", qdata.device)(QuantizedTensor(qdata, scales), pair, k)
    return gathered.qdata, gathered.scales


def gather_rows(x: torch.Tensor, pair: torch.Tensor, k: int) -> torch.Tensor:
    """Rows of segments from rows of tokens.

    Args:
        x: ``[T, C]`` BF16, C even. pair: ``[R]`` int32 (:class:`jetrl_verl.reference.Segments`). k: experts of a token.

    Returns:
        ``[R, C]`` BF16; zeros where there is no pair.
    """
    return _gather_rows(x, pair, k)


def gather_quantized(x: QuantizedTensor, pair: torch.Tensor, k: int) -> QuantizedTensor:
    """:func:`gather_rows` of rowwise qdata.

    Args:
        x: qdata ``[T, K]`` and scales ``[T, K/128]``, K a multiple of 128.

    Returns:
        qdata ``[R, K]`` and scales ``[R, K/128]``; rows without a pair are zero and have scale 1.

    Raises:
        ValueError: K is no multiple of 128.
    """
    if x.qdata.shape[1] % BLOCK:
        raise ValueError(f"gather_quantized: rows of {x.qdata.shape[1]} elements are not whole groups of {BLOCK}")
    return QuantizedTensor(*_gather_quantized(x.qdata, x.scales, pair, k))
