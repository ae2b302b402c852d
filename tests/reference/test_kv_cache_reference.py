# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache: scales and data by hand, edge cases, exactness in BF16, every byte of the layout."""

import pytest
import torch

from jetrl_verl import reference
from jetrl_verl.reference import QuantizedTensor, kv_cache


def heads(*rows: list[float]) -> torch.Tensor:
    """``[1, len(rows), 128]`` BF16; the rest of a row is zero."""
    return torch.tensor([row + [0.0] * (128 - len(row)) for row in rows]).bfloat16()[None]


@pytest.mark.parametrize(
    ("largest", "exponent", "code"),
    [
        (448.0, 0, 448.0),  # 1.75 * 2^8: the last with scale 1
        (450.0, 1, 224.0),  # 1.7578125 * 2^8: the next number of BF16
        (1.0, -8, 256.0),
        (0.875, -9, 448.0),
        (-3.0, -7, -384.0),
        (2.0**-55, -63, 256.0),  # the smallest scale
        (2.0**-60, -63, 8.0),  # a group that would need a smaller one
        (3.0e38, 120, 224.0),
    ],
)
def test_a_head_is_scaled_by_the_power_of_two_of_its_maximum(largest, exponent, code):
    qdata, scales = reference.quantize_heads(heads([0.0, largest]))
    assert scales.dtype == torch.uint8 and scales.tolist() == [[127 + exponent]]
    assert qdata[0, 0, 1].float() == code and qdata[0, 0, 0].float() == 0


def test_each_head_of_each_token_has_its_scale():
    x = heads([1.0], [64.0]).repeat(2, 1, 1)
    x[1] *= 4
    assert (reference.quantize_heads(x).scales.int() - 127).tolist() == [[-8, -2], [-6, 0]]


def test_zero_inf_and_nan_heads():
    x = heads([], [1.0, float("inf")], [float("nan"), 2.0], [1.0])
    q = reference.quantize_heads(x)
    assert q.scales[0, :3].tolist() == [127, 255, 255]
    back = reference.dequantize_heads(q)
    assert (back[0, 0] == 0).all() and back[0, 1:3].isnan().all() and back[0, 3, 0] == 1


def test_dequantized_numbers_are_exact_in_bf16_for_every_code_and_scale():
    qdata = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for byte in (64, 100, 127, 150, 246):
        q = QuantizedTensor(qdata.view(2, 128), torch.full((2,), byte, dtype=torch.uint8))
        back, exact = reference.dequantize_heads(q).double(), qdata.double().view(2, 128) * 2.0 ** (byte - 127)
        assert torch.equal(back.nan_to_num(7), exact.nan_to_num(7))


def test_quantizing_twice_equals_quantizing_once():
    """So a prefix that a preempted request writes again has the same bytes."""
    x = (torch.randn(64, 3, 128, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    once = reference.dequantize_heads(reference.quantize_heads(x))
    assert torch.equal(reference.dequantize_heads(reference.quantize_heads(once)), once)
    assert ((once.float() - x.float()).abs() <= x.float().abs() / 16 + 2.0**-9 * x.float().abs().amax()).all()


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_a_page_holds_each_token_at_its_slot(block_size):
    generator = torch.Generator().manual_seed(block_size)
    pages, kv_heads, tokens = 5, 3, 2 * block_size + 5
    k, v = (torch.randn(tokens, kv_heads, 128, generator=generator).bfloat16() for _ in range(2))
    slots = torch.randperm(pages * block_size, generator=generator)[:tokens]
    slots[3] = -1
    cache = torch.zeros(reference.cache_shape(pages, block_size, kv_heads), dtype=torch.uint8)
    quantized = [reference.quantize_heads(x) for x in (k, v)]
    reference.write_cache(cache, *quantized, slots)
    stored = slots >= 0
    for values, q in zip(reference.read_cache(cache), quantized, strict=True):
        assert values.shape == (pages, kv_heads, block_size, 128)
        rows = values.transpose(1, 2).flatten(0, 1)
        assert torch.equal(rows[slots[stored]], reference.dequantize_heads(q)[stored])
        untouched = torch.ones(len(rows), dtype=torch.bool)
        untouched[slots[stored]] = False
        assert not rows[untouched].any()


def test_the_layout_of_a_page_byte_by_byte():
    """Token 21 of a page of 32 is row 5 of unit 1. Chunk c of its key is at c ^ 5 of the token's 8 chunks, chunk c of
    its value at 5 ^ (c % 2) of the chunk's 16, after keys and scales."""
    qdata = torch.arange(256).to(torch.uint8).view(1, 2, 128).view(torch.float8_e4m3fn)
    k = QuantizedTensor(qdata, torch.tensor([[130, 131]]).to(torch.uint8))
    v = QuantizedTensor(k.qdata.flip(1), torch.tensor([[140, 141]]).to(torch.uint8))
    cache = torch.full(reference.cache_shape(3, 32, 2), 255, dtype=torch.uint8)
    reference.write_cache(cache, k, v, torch.tensor([2 * 32 + 21]))
    unit = cache[2, 1, 1]
    for c in range(8):
        key, value = 5 * 128 + 16 * (c ^ 5), 2080 + 256 * c + 16 * (5 ^ c % 2)
        assert unit[key : key + 16].tolist() == list(range(128 + 16 * c, 128 + 16 * c + 16))
        assert unit[value : value + 16].tolist() == list(range(16 * c, 16 * c + 16))
    assert (unit[2048 + 5], unit[2048 + 16 + 5]) == (131, 141)
    assert int((cache != 255).sum()) == 2 * (2 * 128 + 2) - 2, "two of the written bytes are 255"


def test_a_page_has_one_byte_per_number_and_scale():
    assert kv_cache.UNIT_BYTES == 4128 == 16 * 2 * (128 + 1)
    with pytest.raises(ValueError, match="pages of a multiple of 16 tokens, not of 24"):
        reference.cache_shape(1, 24, 1)
