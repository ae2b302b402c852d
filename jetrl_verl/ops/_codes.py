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
"""What the operations that quantise their result have in common: what they hand to a linear, which shapes they take,
and their fake results."""

from typing import NamedTuple

import torch

from jetrl_verl.numerics import BLOCK, FP8_DTYPE, BlockQuantized


class Quantised(NamedTuple):
    """What flows from such an operation to the linear that reads it.

    Attributes:
        rows: the result ``[..., K]`` BF16, None where nobody but the linear reads it.
        codes: its 1x128 codes ``[M, K]`` E4M3 and scales ``[M, K/128]`` FP32, M the number of rows.
    """

    rows: torch.Tensor | None
    codes: BlockQuantized


def require_groups(operation: str, x: torch.Tensor) -> None:
    """Raise ``ValueError`` unless the rows of ``x`` are whole groups of 128, as those of every quantised layer are."""
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"{operation}: rows of {x.shape[-1]} elements are not whole groups of {BLOCK}; quantise the result of the "
            "plain operation instead"
        )


def fake_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1x128 codes and scales of ``x`` [..., K], for tracing: shapes, types and, on a GPU, column-major scales."""
    k = x.shape[-1]
    rows = x.reshape(-1, k).shape[0]
    shape = (k // BLOCK, rows) if x.is_cuda else (rows, k // BLOCK)
    scales = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty((rows, k), dtype=FP8_DTYPE), scales.t() if x.is_cuda else scales


def fake_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """128x1 codes and scales of ``x`` [..., K], for tracing; on a GPU the codes are a view with padded rows."""
    k = x.shape[-1]
    rows = x.reshape(-1, k).shape[0]
    groups = -(-rows // BLOCK)
    shape = (groups, k) if x.is_cuda else (k, groups)
    scales = x.new_empty(shape, dtype=torch.float32)
    codes = x.new_empty((k, groups * BLOCK if x.is_cuda else rows), dtype=FP8_DTYPE)
    return codes[:, :rows] if x.is_cuda else codes, scales.t() if x.is_cuda else scales
