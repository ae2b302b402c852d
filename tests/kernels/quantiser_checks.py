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
"""What every fast quantiser must satisfy, on any device: the bytes of ``numerics``."""

import torch

from jetrl_verl import numerics
from jetrl_verl.numerics import BlockQuantized


def assert_same_bytes(got: BlockQuantized, want: BlockQuantized) -> None:
    """Codes compared as bytes (NaN codes are equal), scales as bits; layouts in memory may differ."""
    assert got.codes.dtype == want.codes.dtype
    assert got.codes.shape == want.codes.shape
    assert got.scales.shape == want.scales.shape
    assert torch.equal(got.codes.view(torch.uint8).cpu(), want.codes.view(torch.uint8).cpu())
    assert torch.equal(
        got.scales.cpu().contiguous().view(torch.int32), want.scales.cpu().contiguous().view(torch.int32)
    )


def check_all_quantisers(backend, x: torch.Tensor, rule: str, device: str) -> None:
    """Every quantiser of ``backend`` on ``x [M, K]`` (CPU) moved to ``device``, against ``numerics`` on the CPU."""
    moved = x.to(device)
    row, transposed = numerics.quantize_1x128_and_128x1(x, rule)
    weight, weight_t = numerics.quantize_128x128_and_transpose(x, rule)
    on_device = [BlockQuantized(q.codes.to(device), q.scales.to(device)) for q in (row, weight)]
    assert_same_bytes(backend.quantize_1x128(moved, rule), row)
    assert_same_bytes(backend.quantize_128x1(moved, rule), transposed)
    for got, want in zip(backend.quantize_1x128_and_128x1(moved, rule), (row, transposed), strict=True):
        assert_same_bytes(got, want)
    assert_same_bytes(backend.quantize_128x128(moved, rule), weight)
    for got, want in zip(backend.quantize_128x128_and_transpose(moved, rule), (weight, weight_t), strict=True):
        assert_same_bytes(got, want)
    assert_same_bytes(backend.transpose_128x128(on_device[1]), weight_t)
    relaid = numerics.relayout_128x1(row, rule)
    assert_same_bytes(backend.relayout_128x1(on_device[0], rule), relaid)
    # The backend's own row result has another layout in memory; the re-layout must read that one too.
    assert_same_bytes(backend.relayout_128x1(backend.quantize_1x128(moved, rule), rule), relaid)
