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
"""Uninitialised results of the GPU's quantisers, in the memory layouts that its GEMMs read."""

import torch

from jetrl_verl.numerics import BLOCK, FP8_DTYPE, BlockQuantized


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def empty_rows(rows: int, k: int, device: torch.device) -> BlockQuantized:
    """Uninitialised 1x128 result: codes ``[rows, k]``, scales ``[rows, ceil(k/128)]`` stored column-major."""
    codes = torch.empty((rows, k), dtype=FP8_DTYPE, device=device)
    scales = torch.empty((_ceil_div(k, BLOCK), rows), dtype=torch.float32, device=device).t()
    return BlockQuantized(codes, scales)


def empty_columns(rows: int, k: int, device: torch.device) -> tuple[BlockQuantized, torch.Tensor]:
    """Uninitialised 128x1 result ``[k, rows]`` and the buffer that its codes are a view of, as words of four codes:
    ``[k, rows rounded up to 128, / 4]``. GEMMs load 16 bytes at a time along tokens, whose number is arbitrary: rows of
    a padded buffer start aligned, and zeros after their end add nothing to a sum."""
    words = torch.empty((k, _ceil_div(rows, BLOCK) * BLOCK // 4), dtype=torch.int32, device=device)
    scales = torch.empty((_ceil_div(rows, BLOCK), k), dtype=torch.float32, device=device).t()
    codes = words.view(FP8_DTYPE) if words.numel() else torch.empty((k, 0), dtype=FP8_DTYPE, device=device)
    return BlockQuantized(codes[:, :rows], scales), words
