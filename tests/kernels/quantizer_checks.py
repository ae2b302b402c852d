# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of every fast quantizer against the bytes of ``reference``, on any device."""

import torch

from jetrl_verl import reference
from jetrl_verl.reference import QuantizedTensor


def assert_same_bytes(got: QuantizedTensor, want: QuantizedTensor) -> None:
    """FP8 data compared as bytes (NaN qdata are equal), scales as bits; layouts in memory may differ."""
    assert got.qdata.dtype == want.qdata.dtype
    assert got.qdata.shape == want.qdata.shape
    assert got.scales.shape == want.scales.shape
    assert torch.equal(got.qdata.view(torch.uint8).cpu(), want.qdata.view(torch.uint8).cpu())
    assert torch.equal(
        got.scales.cpu().contiguous().view(torch.int32), want.scales.cpu().contiguous().view(torch.int32)
    )


def check_all_quantizers(backend, x: torch.Tensor, rule: str, device: str) -> None:
    """Every quantizer of ``backend`` on ``x [M, K]`` (CPU) moved to ``device``, against ``reference`` on the CPU."""
    moved = x.to(device)
    row, transposed = reference.quantize_1x128_and_128x1(x, rule)
    weight, weight_t = reference.quantize_128x128_and_transpose(x, rule)
    on_device = [QuantizedTensor(q.qdata.to(device), q.scales.to(device)) for q in (row, weight)]
    assert_same_bytes(backend.quantize_1x128(moved, rule), row)
    assert_same_bytes(backend.quantize_128x1(moved, rule), transposed)
    for got, want in zip(backend.quantize_1x128_and_128x1(moved, rule), (row, transposed), strict=True):
        assert_same_bytes(got, want)
    assert_same_bytes(backend.quantize_128x128(moved, rule), weight)
    for got, want in zip(backend.quantize_128x128_and_transpose(moved, rule), (weight, weight_t), strict=True):
        assert_same_bytes(got, want)
    assert_same_bytes(backend.transpose_128x128(on_device[1]), weight_t)
    relaid = reference.relayout_128x1(row, rule)
    assert_same_bytes(backend.relayout_128x1(on_device[0], rule), relaid)
    # The backend's own row result has another layout in memory; the re-layout must read that one too.
    assert_same_bytes(backend.relayout_128x1(backend.quantize_1x128(moved, rule), rule), relaid)
