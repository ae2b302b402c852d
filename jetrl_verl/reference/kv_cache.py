# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache: keys and values in E4M3 with a power-of-two scale per token and KV head, and its pages.

**Numbers.** A token's head is one 1x128 group under the rule ``pow2`` (quantize.py), quantized when the token is
written, from that head alone. An E4M3 number times a power of two fits into BF16 without rounding, so attention over
the cache is BF16 attention over the dequantized numbers. (A head whose maximum rounds up to 2^128 holds an infinity.)

**Pages.** A page holds ``block_size`` tokens of every KV head, head by head, in contiguous units of 16 tokens, which
the copy engine loads by one instruction:

    keys    [16, 8, 16]  E4M3 of tokens; the 16-byte chunk c of token r lies at place c ^ (r % 8) of the token
    key scales      [16] biased exponents, ``scale = 2^(byte - 127)``; 255 for a head with an Inf or NaN
    value scales    [16]
    values  [8, 16, 16]  E4M3 of chunks; token r of chunk c lies at place r ^ (c % 2) of the chunk

A unit has 4,128 bytes: 258 a token and head, 512 in BF16. Values are stored by chunks of features, because thread
blocks that share a request read all keys but only their own features of values
(csrc/sm90_decode_attention_cluster.cu). The permuted places avoid bank conflicts in shared memory.
"""

import torch

from jetrl_verl.reference.constants import BLOCK, E4M3_MAX, FP8_DTYPE
from jetrl_verl.reference.quantize import quantize_1x128
from jetrl_verl.reference.tensor import QuantizedTensor

HEAD_DIM = BLOCK
"""Features of a head, one group."""

UNIT_TOKENS = 16
"""Tokens of a unit; a page's block size is a multiple of it."""

TOKEN_BYTES = HEAD_DIM + 1
"""Bytes of one token's key or value of one head, its scale included."""

UNIT_BYTES = 2 * UNIT_TOKENS * TOKEN_BYTES

_LARGEST_BITS = torch.tensor(E4M3_MAX).to(FP8_DTYPE).view(torch.uint8).item()
_CHUNK = 16
_MATRIX = UNIT_TOKENS * HEAD_DIM


def _key_places() -> torch.Tensor:
    """``[16, 8]`` place of each token's chunks, in 16-byte steps from the first key."""
    tokens, chunks = torch.arange(UNIT_TOKENS)[:, None], torch.arange(HEAD_DIM // _CHUNK)
    return tokens * len(chunks) + (chunks ^ tokens % 8)


def _value_places() -> torch.Tensor:
    """``[16, 8]`` place of each token's chunks, in 16-byte steps from the first value."""
    tokens, chunks = torch.arange(UNIT_TOKENS)[:, None], torch.arange(HEAD_DIM // _CHUNK)
    return chunks * UNIT_TOKENS + (tokens ^ chunks % 2)


def quantize_heads(x: torch.Tensor) -> QuantizedTensor:
    """Quantize keys or values ``x [T, H, 128]`` BF16.

    Returns:
        qdata ``[T, H, 128]`` E4M3 and scales ``[T, H]`` uint8, biased exponents of the powers of two. A head with an
        Inf or NaN has NaN qdata and the scale 255.
    """
    qdata, scales = quantize_1x128(x, "pow2")
    exponents = (scales.squeeze(-1).contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return QuantizedTensor(qdata, exponents.masked_fill(~x.isfinite().all(dim=-1), 255))


def dequantize_heads(heads: QuantizedTensor) -> torch.Tensor:
    """``[..., 128]`` BF16 of qdata ``[..., 128]`` and biased exponents ``[...]``, exact."""
    scales = (heads.scales.to(torch.int32) << 23).view(torch.float32)
    return (heads.qdata.float() * scales.unsqueeze(-1)).to(torch.bfloat16)


def cache_shape(pages: int, block_size: int, kv_heads: int) -> tuple[int, int, int, int]:
    """Shape of a uint8 cache.

    Raises:
        ValueError: a block size that is no multiple of 16.
    """
    if block_size % UNIT_TOKENS:
        raise ValueError(f"an FP8 KV cache has pages of a multiple of {UNIT_TOKENS} tokens, not of {block_size}")
    return pages, kv_heads, block_size // UNIT_TOKENS, UNIT_BYTES


def cache_units(kv_cache: torch.Tensor) -> torch.Tensor:
    """A cache of :func:`cache_shape` as a view of ``[pages, kv_heads, block size, 258]``, or of what has that shape."""
    return kv_cache.view(*kv_cache.shape[:2], -1, UNIT_BYTES)


def _parts(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of units ``[..., 4128]``: keys and values by place ``[..., 128, 16]``, both scales ``[..., 16]``."""
    keys, *scales, values = cache.split([_MATRIX, UNIT_TOKENS, UNIT_TOKENS, _MATRIX], dim=-1)
    return *(data.unflatten(-1, (-1, _CHUNK)) for data in (keys, values)), *scales


def write_cache(cache: torch.Tensor, keys: QuantizedTensor, values: QuantizedTensor, slots: torch.Tensor) -> None:
    """Store tokens, in place.

    Args:
        cache: uint8 of :func:`cache_shape`.
        keys, values: of :func:`quantize_heads`, ``T`` tokens.
        slots: ``[T]``, page times block size plus the place in the page; negative for tokens that are not stored.
    """
    block_size = cache.shape[2] * UNIT_TOKENS
    tokens = (slots >= 0).nonzero().squeeze(1)
    slots = slots[tokens].long()
    page, unit, row = slots // block_size, slots % block_size // UNIT_TOKENS, slots % UNIT_TOKENS
    *data, key_scales, value_scales = _parts(cache)
    for part, heads, places in zip(data, (keys, values), (_key_places(), _value_places()), strict=True):
        at = places.to(cache.device)[row]  # [T, 8]
        chunks = heads.qdata[tokens].view(torch.uint8).unflatten(-1, (-1, _CHUNK))
        part[page[:, None], :, unit[:, None], at] = chunks.transpose(1, 2)
    key_scales[page, :, unit, row] = keys.scales[tokens]
    value_scales[page, :, unit, row] = values.scales[tokens]


def read_cache(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[..., H, block size, 128]`` BF16 of pages ``[..., H, units, 4128]``."""
    *data, key_scales, value_scales = _parts(pages)

    def read(part: torch.Tensor, scales: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        qdata = part[..., places.to(pages.device), :].flatten(-2).view(FP8_DTYPE)
        return dequantize_heads(QuantizedTensor(qdata, scales)).flatten(-3, -2)

    return read(data[0], key_scales, _key_places()), read(data[1], value_scales, _value_places())


def saturated(values: torch.Tensor, qdata: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """FP64 number of elements of ``values`` that saturated at the format's largest number.

    Args:
        values: input of the quantizer. qdata, restored: its output and that in BF16, same shape.
    """
    at_largest = (qdata.contiguous().view(torch.uint8) & 0x7F) == _LARGEST_BITS
    return (at_largest & (values.double().abs() > restored.double().abs())).double().sum()
