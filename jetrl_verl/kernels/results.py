# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantized results in the memory layouts that a GPU's GEMMs read: uninitialized for kernels, fake for tracing.

On a GPU 1x128 scales ``[M, ceil(K/128)]`` are column-major, stride ``(1, M)``; colwise (128x1) qdata ``[K, M]`` is a
view of rows padded with zeros to a multiple of 128, so that rows start aligned.
"""

import torch

from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.reference import BLOCK, FP8_DTYPE, QuantizedTensor


def empty_rowwise(rows: int, k: int, device: torch.device) -> QuantizedTensor:
    """Uninitialized 1x128 result: qdata ``[rows, k]``, scales ``[rows, ceil(k/128)]`` stored column-major."""
    qdata = torch.empty(rows, k, dtype=FP8_DTYPE, device=device)
    return QuantizedTensor(qdata, _column_major(rows, ceil_div(k, BLOCK), device))


def _column_major(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised FP32 ``[rows, columns]``; on the host a third of a transpose's time."""
    return torch.empty_strided((rows, columns), (1, rows or 1), dtype=torch.float32, device=device)


def empty_colwise(rows: int, k: int, device: torch.device) -> tuple[QuantizedTensor, torch.Tensor]:
    """Uninitialized 128x1 result ``[k, rows]`` and its int32 buffer ``[k, ceil(rows/128) * 32]``, four qdata a word."""
    groups = ceil_div(rows, BLOCK)
    words = torch.empty(k, groups * BLOCK // 4, dtype=torch.int32, device=device)
    qdata = words.view(FP8_DTYPE) if words.numel() else torch.empty(k, 0, dtype=FP8_DTYPE, device=device)
    if rows != groups * BLOCK:
        qdata = qdata.as_strided((k, rows), (groups * BLOCK, 1))  # [:, :rows] in half the host time
    return QuantizedTensor(qdata, _column_major(k, groups, device)), words


def fake_rowwise(x: torch.Tensor) -> QuantizedTensor:
    """1x128 qdata and scales of ``x`` [..., K] for tracing; on a GPU the scales are column-major."""
    k = x.shape[-1]
    rows, groups = x.reshape(-1, k).shape[0], ceil_div(k, BLOCK)
    scales = x.new_empty((groups, rows) if x.is_cuda else (rows, groups), dtype=torch.float32)
    return QuantizedTensor(x.new_empty((rows, k), dtype=FP8_DTYPE), scales.t() if x.is_cuda else scales)


def fake_colwise(x: torch.Tensor) -> QuantizedTensor:
    """128x1 qdata and scales of ``x`` [..., K] for tracing; on a GPU qdata is a view of padded rows."""
    k = x.shape[-1]
    rows = x.reshape(-1, k).shape[0]
    groups = ceil_div(rows, BLOCK)
    shape = (groups, k) if x.is_cuda else (k, groups)
    scales = x.new_empty(shape, dtype=torch.float32)
    qdata = x.new_empty((k, groups * BLOCK if x.is_cuda else rows), dtype=FP8_DTYPE)
    return QuantizedTensor(qdata[:, :rows] if x.is_cuda else qdata, scales.t() if x.is_cuda else scales)


def require_groups(operation: str, x: torch.Tensor) -> None:
    """Raise ``ValueError`` unless the last dimension of ``x`` is a multiple of 128."""
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"{operation}: rows of {x.shape[-1]} elements are not whole groups of {BLOCK}; quantize the result of the "
            "plain operation instead"
        )


def require_groups_of_rows(operation: str, pair: torch.Tensor) -> None:
    """Raise ``ValueError`` unless the number of rows of segments is a multiple of 128."""
    if pair.shape[0] % BLOCK:
        raise ValueError(
            f"{operation}: {pair.shape[0]} rows are not whole groups of {BLOCK}; align segments to {BLOCK}"
        )
