# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache (reference/kv_cache.py): the trainer quantizes and dequantizes keys and values after rotary, the
rollout writes the same data into its pages and reads chunks of them. Each head of each token is independent."""

from typing import NamedTuple

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.e4m3 import (
    GROUP,
    INF_BITS,
    decode,
    encode,
    encode_two,
    high_half,
    largest_halves,
    largest_of_halves,
    low_half,
    magnitude_bits,
    reciprocal_of,
    scale_of,
)
from jetrl_verl.kernels.device.halves import least_anchor, round_halves
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import dispatched, operator, require_bf16
from jetrl_verl.kernels.sizes import HEADS_OF_A_PROGRAM, ceil_div
from jetrl_verl.kernels.views import unit_stride
from jetrl_verl.reference import FP8_DTYPE, QuantizedTensor
from jetrl_verl.reference.kv_cache import HEAD_DIM, TOKEN_BYTES, UNIT_BYTES, UNIT_TOKENS

__all__ = ["QuantizedKV", "dequantize_kv", "quantize_dequantize_kv", "quantize_kv", "read_kv", "write_kv"]

_ROWS = 16
"""Heads that one program quantizes."""
_CHUNK = tl.constexpr(16)
_TOKENS = tl.constexpr(UNIT_TOKENS)
_KEY_SCALES = tl.constexpr(UNIT_TOKENS * HEAD_DIM)  # offset in a unit
_VALUE_SCALES = tl.constexpr(UNIT_TOKENS * TOKEN_BYTES)
_VALUES = tl.constexpr(UNIT_TOKENS * (TOKEN_BYTES + 1))
_UNIT_BYTES = tl.constexpr(UNIT_BYTES)


class QuantizedKV(NamedTuple):
    """Keys and values of some tokens: qdata ``[T, H, 128]`` E4M3, scales ``[T, H]`` uint8, biased exponents."""

    key: torch.Tensor
    key_scales: torch.Tensor
    value: torch.Tensor
    value_scales: torch.Tensor


# ---- the trainer's side ---------------------------------------------------------------------------------------------


@implements("quantize_kv", "reference")
def reference_quantize_kv(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A :class:`QuantizedKV` and the dequantized keys and values, BF16."""
    quantized = [reference.quantize_heads(x) for x in (k, v)]
    return *quantized[0], *quantized[1], *(reference.dequantize_heads(q) for q in quantized)


@implements("quantize_dequantize_kv", "reference")
def reference_quantize_dequantize_kv(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values BF16."""
    return tuple(reference.dequantize_heads(reference.quantize_heads(x)) for x in (k, v))


@implements("dequantize_kv", "reference")
def reference_dequantize_kv(key, key_scales, value, value_scales) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values BF16."""
    pairs = ((key, key_scales), (value, value_scales))
    return tuple(reference.dequantize_heads(QuantizedTensor(*pair)) for pair in pairs)


@jit
def _scale_of_head(bits):
    """Scales, 1 / scale and biased exponents (uint8) of heads with the maxima ``bits``."""
    scale = scale_of(bits, True)
    # A head with an Inf or NaN has NaN data and scale.
    exponent = tl.where(bits >= INF_BITS, 255, scale.to(tl.int32, bitcast=True) >> 23)
    return scale, reciprocal_of(scale, bits, True), exponent.to(tl.uint8)


@jit
def _scale(byte):
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@jit
def _quantize_rows(
    x_ptr, qdata_ptr, scales_ptr, out_ptr, token, head, stride_token, stride_head, row, valid, KEEP: tl.constexpr
):
    # Words of two neighbors, the left one in the lower half.
    word = tl.arange(0, GROUP // 2)[None, :]
    source = x_ptr.to(tl.pointer_type(tl.int32)) + (token * stride_token + head * stride_head)[:, None] + word
    valid_words = valid[:, None]
    # Read once, so that L2 keeps what attention reads next.
    words = tl.load(source, mask=valid_words, other=0, eviction_policy="evict_first")
    bits = largest_of_halves(largest_halves(words, 1)).to(tl.int32, bitcast=True)
    scale, reciprocal, exponent = _scale_of_head(bits)
    target = row.to(tl.int64)[:, None] * (GROUP // 2) + word
    if KEEP:
        pairs = encode_two(low_half(words), high_half(words), reciprocal[:, None], scale[:, None], True)
        tl.store(qdata_ptr.to(tl.pointer_type(tl.int16)) + target, pairs, mask=valid_words)
        tl.store(scales_ptr + row, exponent, mask=valid)
    dequantized = round_halves(words, least_anchor(scale, bits)[:, None])
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + target, dequantized, mask=valid_words)


@jit(do_not_specialize=["rows"])
def _quantize_kernel(
    k_ptr, v_ptr, key_ptr, key_scales_ptr, value_ptr, value_scales_ptr, k_out_ptr, v_out_ptr, rows,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    HEADS: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    # Numbers are read and written as words of two, and strides are in words.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    if tl.program_id(1) == 0:
        _quantize_rows(
            k_ptr, key_ptr, key_scales_ptr, k_out_ptr, token, head, stride_k_token, stride_k_head, row, valid, KEEP
        )
    else:
        _quantize_rows(
            v_ptr, value_ptr, value_scales_ptr, v_out_ptr, token, head, stride_v_token, stride_v_head, row, valid, KEEP
        )


def _is_word_aligned(x: torch.Tensor) -> bool:
    """Whether heads of ``[T, H, 128]`` are contiguous and start on 4 bytes, so that two numbers are read as a word."""
    token, head, feature = x.stride()
    return feature == 1 and token % 2 == 0 and head % 2 == 0 and x.data_ptr() % 4 == 0


def _quantize(k: torch.Tensor, v: torch.Tensor, keep: bool) -> tuple[torch.Tensor, ...]:
    """qdata and scales of keys and of values, empty without ``keep``, and dequantized keys and values."""
    tokens, heads, _ = k.shape
    k, v = (x if _is_word_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in (k, v))
    kept = tokens if keep else 0
    qdata = [torch.empty((kept, *k.shape[1:]), dtype=FP8_DTYPE, device=k.device) for _ in range(2)]
    scales = [torch.empty((kept, heads), dtype=torch.uint8, device=k.device) for _ in range(2)]
    out = [torch.empty(*k.shape, dtype=torch.bfloat16, device=k.device) for _ in range(2)]
    if k.numel():
        bytes_of = [q.view(torch.uint8) for q in qdata]
        _quantize_kernel[(ceil_div(tokens * heads, _ROWS), 2)](
            k,
            v,
            bytes_of[0],
            scales[0],
            bytes_of[1],
            scales[1],
            *out,
            tokens * heads,
            *(stride // 2 for x in (k, v) for stride in x.stride()[:2]),
            HEADS=heads,
            ROWS=_ROWS,
            KEEP=keep,
        )
    return qdata[0], scales[0], qdata[1], scales[1], *out


implements("quantize_kv", "triton")(lambda k, v: _quantize(k, v, True))
implements("quantize_dequantize_kv", "triton")(lambda k, v: _quantize(k, v, False)[4:])


@jit
def _dequantize_rows(qdata_ptr, scales_ptr, out_ptr, row, valid):
    place = row.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = decode(tl.load(qdata_ptr + place, mask=valid[:, None], other=0))
    value *= _scale(tl.load(scales_ptr + row, mask=valid, other=0))[:, None]
    tl.store(out_ptr + place, value.to(tl.bfloat16), mask=valid[:, None])


@jit(do_not_specialize=["rows"])
def _dequantize_kernel(
    key_ptr, key_scales_ptr, value_ptr, value_scales_ptr, k_out_ptr, v_out_ptr, rows, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) == 0:
        _dequantize_rows(key_ptr, key_scales_ptr, k_out_ptr, row, row < rows)
    else:
        _dequantize_rows(value_ptr, value_scales_ptr, v_out_ptr, row, row < rows)


@implements("dequantize_kv", "triton")
def triton_dequantize_kv(key, key_scales, value, value_scales) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_dequantize_kv`, in one launch."""
    out = [torch.empty(key.shape, dtype=torch.bfloat16, device=key.device) for _ in range(2)]
    if rows := key_scales.numel():
        _dequantize_kernel[(ceil_div(rows, _ROWS), 2)](
            key.view(torch.uint8), key_scales, value.view(torch.uint8), value_scales, *out, rows, ROWS=_ROWS
        )
    return out[0], out[1]


def _fake_quantize_kv(k, v):
    def shaped(dtype, shape):
        return k.new_empty(shape, dtype=dtype)

    quantized = (shaped(FP8_DTYPE, k.shape), shaped(torch.uint8, k.shape[:2]))
    return *quantized, *(torch.empty_like(x) for x in quantized), *(k.new_empty(k.shape) for _ in range(2))


_quantize_kv = dispatched(
    "quantize_kv(Tensor k, Tensor v) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", fake=_fake_quantize_kv
)
_dequantize_kv = dispatched(
    "dequantize_kv(Tensor key, Tensor key_scales, Tensor value, Tensor value_scales) -> (Tensor, Tensor)",
    fake=lambda key, key_scales, value, *_: tuple(key.new_empty(key.shape, dtype=torch.bfloat16) for _ in range(2)),
)


def quantize_kv(k: torch.Tensor, v: torch.Tensor) -> tuple[QuantizedKV, torch.Tensor, torch.Tensor]:
    """Keys and values as the cache stores them, and dequantized. No autograd: see attention.py.

    Args:
        k, v: ``[T, H, 128]`` BF16, any strides; heads that are not contiguous and on 4 bytes are copied first.

    Returns:
        The FP8 data, and dequantized keys and values ``[T, H, 128]`` BF16.

    Raises:
        TypeError: an operand is not BF16. ValueError: heads that are not of 128, or two shapes.
    """
    _check_heads("quantize_kv", k, v)
    *quantized, k_out, v_out = _quantize_kv(k, v)
    return QuantizedKV(*quantized), k_out, v_out


@operator(
    "quantize_dequantize_kv(Tensor k, Tensor v) -> (Tensor, Tensor)",
    fake=lambda k, *_: tuple(k.new_empty(k.shape) for _ in range(2)),
)
def quantize_dequantize_kv(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last two results of :func:`quantize_kv` without the FP8 data; same arguments and errors."""
    _check_heads("quantize_dequantize_kv", k, v)
    return lookup("quantize_dequantize_kv", k.device)(k, v)


def _check_heads(operation: str, k: torch.Tensor, v: torch.Tensor) -> None:
    require_bf16(operation, k=k, v=v)
    if k.shape != v.shape or k.ndim != 3 or k.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"{operation}: keys {tuple(k.shape)} and values {tuple(v.shape)} are not [T, H, {HEAD_DIM}] of one shape"
        )


def dequantize_kv(quantized: QuantizedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[T, H, 128]`` BF16, as :func:`quantize_kv` returned them."""
    return _dequantize_kv(*quantized)


# ---- the rollout's pages --------------------------------------------------------------------------------------------


@implements("write_kv", "reference")
def reference_write_kv(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As :func:`write_kv`."""
    reference.write_cache(cache, reference.quantize_heads(k), reference.quantize_heads(v), slots)


@jit
def _key_place(row, feature):
    return row * GROUP + ((feature // _CHUNK) ^ (row % 8)) * _CHUNK + feature % _CHUNK


@jit
def _value_place(row, feature):
    chunk = feature // _CHUNK
    return (chunk * _TOKENS + (row ^ (chunk % 2))) * _CHUNK + feature % _CHUNK


@jit
def unit_of_slot(cache_ptr, slot, head, HEADS: tl.constexpr, UNITS: tl.constexpr):
    """Address of the unit of a token (int64 ``slot``) and KV head, and the row of the token in it."""
    page, unit, row = slot // (UNITS * _TOKENS), slot // _TOKENS % UNITS, (slot % _TOKENS).to(tl.int32)
    return cache_ptr + ((page * HEADS + head) * UNITS + unit) * _UNIT_BYTES, row


@jit
def _write_halves(x, scale, reciprocal, unit_ptr, row, feature, stored, IS_KEY: tl.constexpr):
    place = _key_place(row, feature) if IS_KEY else _VALUES + _value_place(row, feature)
    tl.store(unit_ptr + place[None, :], encode(x, scale, reciprocal, True), mask=stored)


@jit
def write_heads(first, second, unit_ptr, row, stored, UNITS: tl.constexpr, IS_KEY: tl.constexpr):
    """Quantize heads of one token, halves ``[R, 64]`` BF16, into the unit of the first head and the following units,
    where ``stored [R]``."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    # Shapes are [R, ..], so that a head stays in its warp.
    bits = tl.maximum(magnitude_bits(first), magnitude_bits(second))
    scale, reciprocal, exponent = _scale_of_head(tl.max(bits, axis=1, keep_dims=True))
    feature = tl.arange(0, GROUP // 2)
    unit_ptr += (tl.arange(0, stored.shape[0]) * UNITS * _UNIT_BYTES)[:, None]
    stored = stored[:, None]
    _write_halves(first, scale, reciprocal, unit_ptr, row, feature, stored, IS_KEY)
    _write_halves(second, scale, reciprocal, unit_ptr, row, GROUP // 2 + feature, stored, IS_KEY)
    # Masked to the first lane: one warp would do a store of [R, 1].
    lane = tl.arange(0, 32)[None, :]
    scale_ptr = unit_ptr + (_KEY_SCALES if IS_KEY else _VALUE_SCALES) + row + lane
    tl.store(scale_ptr, tl.broadcast_to(exponent, scale_ptr.shape), mask=stored & (lane == 0))


@jit
def write_heads_from(x_ptr, stride, valid, unit_ptr, row, stored, UNITS: tl.constexpr, IS_KEY: tl.constexpr):
    """As :func:`write_heads`, of heads ``stride`` apart in memory, those in ``valid [R]``."""
    x_ptr += tl.arange(0, valid.shape[0])[:, None] * stride + tl.arange(0, GROUP // 2)[None, :]
    first, second = tl.load(x_ptr, mask=valid[:, None]), tl.load(x_ptr + GROUP // 2, mask=valid[:, None])
    write_heads(first, second, unit_ptr, row, stored, UNITS, IS_KEY)


@jit
def _write_kernel(
    k_ptr, v_ptr, cache_ptr, slots_ptr, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    KV_HEADS: tl.constexpr, UNITS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    slot = tl.load(slots_ptr + token).to(tl.int64)
    valid = head + tl.arange(0, HEADS) < KV_HEADS
    unit_ptr, row = unit_of_slot(cache_ptr, slot, head, KV_HEADS, UNITS)
    stored = valid & (slot >= 0)
    k_ptr += token * stride_k_token + head * stride_k_head
    v_ptr += token * stride_v_token + head * stride_v_head
    write_heads_from(k_ptr, stride_k_head, valid, unit_ptr, row, stored, UNITS, True)
    write_heads_from(v_ptr, stride_v_head, valid, unit_ptr, row, stored, UNITS, False)


@implements("write_kv", "triton")
def triton_write_kv(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As :func:`reference_write_kv`."""
    k, v = unit_stride(k), unit_stride(v)
    if len(slots):
        _write_kernel[(len(slots), ceil_div(k.shape[1], HEADS_OF_A_PROGRAM))](
            k,
            v,
            cache,
            slots,
            *k.stride()[:2],
            *v.stride()[:2],
            KV_HEADS=k.shape[1],
            UNITS=cache.shape[2],
            HEADS=HEADS_OF_A_PROGRAM,
            num_warps=HEADS_OF_A_PROGRAM,
        )


@operator("write_kv(Tensor k, Tensor v, Tensor(a!) cache, Tensor slots) -> ()", fake=lambda *_: None)
def write_kv(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantize tokens into a rollout's pages, in place.

    Args:
        k, v: ``[T, H, 128]`` BF16, at least as many tokens as slots; those beyond are padding.
        cache: uint8 ``[pages, H, units, 4128]``, contiguous (:func:`jetrl_verl.reference.cache_shape`).
        slots: int64 ``[T]``, page times block size plus place; negative: the token is not stored.
    """
    require_bf16("write_kv", k=k, v=v)
    check_cache("write_kv", cache)
    count = len(slots)
    lookup("write_kv", k.device)(k[:count], v[:count], cache, slots)


@implements("read_kv", "reference")
def reference_read_kv(cache, block_table, lengths, cu_lengths, total: int, longest: int):
    """As :func:`read_kv`."""
    units = cache.shape[2]
    pages = -(-longest // (units * UNIT_TOKENS))
    keys, values = reference.read_cache(cache[block_table[:, :pages].long()])
    valid = torch.arange(pages * units * UNIT_TOKENS, device=cache.device) < lengths[:, None]
    # [R, pages, H, block size, 128] as tokens of requests.
    return tuple(x.transpose(2, 3).flatten(1, 2)[valid] for x in (keys, values))


@jit
def _read_matrix(matrix_ptr, scales_ptr, out_ptr, token, valid, stride_token, IS_KEY: tl.constexpr):
    row, feature = tl.arange(0, _TOKENS)[:, None], tl.arange(0, GROUP)[None, :]
    place = _key_place(row, feature) if IS_KEY else _value_place(row, feature)
    value = decode(tl.load(matrix_ptr + place)) * _scale(tl.load(scales_ptr + tl.arange(0, _TOKENS)))[:, None]
    tl.store(out_ptr + token[:, None] * stride_token + feature, value.to(tl.bfloat16), mask=valid[:, None])


@jit(do_not_specialize=["stride_table"])
def _read_kernel(
    cache_ptr, table_ptr, lengths_ptr, cu_lengths_ptr, k_ptr, v_ptr, stride_table,
    HEADS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    unit, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + request)
    place = unit * _TOKENS + tl.arange(0, _TOKENS)
    if unit * _TOKENS < length:
        page = tl.load(table_ptr + request.to(tl.int64) * stride_table + unit // UNITS).to(tl.int64)
        source = cache_ptr + ((page * HEADS + head) * UNITS + unit % UNITS) * _UNIT_BYTES
        token = tl.load(cu_lengths_ptr + request).to(tl.int64) + place
        valid, stride = place < length, HEADS * GROUP
        _read_matrix(source, source + _KEY_SCALES, k_ptr + head * GROUP, token, valid, stride, True)
        _read_matrix(source + _VALUES, source + _VALUE_SCALES, v_ptr + head * GROUP, token, valid, stride, False)


@implements("read_kv", "triton")
def triton_read_kv(cache, block_table, lengths, cu_lengths, total: int, longest: int):
    """As :func:`read_kv`."""
    heads, units = cache.shape[1:3]
    out = [torch.empty((total, heads, HEAD_DIM), dtype=torch.bfloat16, device=cache.device) for _ in range(2)]
    if total:
        _read_kernel[(ceil_div(longest, UNIT_TOKENS), heads, len(lengths))](
            cache, block_table, lengths, cu_lengths, *out, block_table.stride(0), HEADS=heads, UNITS=units
        )
    return out[0], out[1]


def _fake_read_kv(cache, block_table, lengths, cu_lengths, total, longest):
    shape = total, cache.shape[1], HEAD_DIM
    return tuple(cache.new_empty(shape, dtype=torch.bfloat16) for _ in range(2))


@operator(
    "read_kv(Tensor cache, Tensor block_table, Tensor lengths, Tensor cu_lengths, int total, int longest)"
    " -> (Tensor, Tensor)",
    fake=_fake_read_kv,
)
def read_kv(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    cu_lengths: torch.Tensor,
    total: int,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cached tokens of requests, dequantized, one request after another.

    Args:
        cache: uint8 ``[pages, H, units, 4128]``. block_table: int32 ``[R, most pages]``, contiguous rows.
        lengths: int32 ``[R]`` tokens of each request. cu_lengths: int32 ``[R + 1]``, their sums from 0 on.
        total, longest: sum and maximum of the lengths, known on the host.

    Returns:
        Keys and values ``[total, H, 128]`` BF16.
    """
    check_cache("read_kv", cache)
    return lookup("read_kv", cache.device)(cache, block_table, lengths, cu_lengths, total, longest)


def check_cache(operation: str, cache: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a tensor is a rollout's FP8 cache."""
    if cache.dtype != torch.uint8 or cache.ndim != 4 or cache.shape[3] != UNIT_BYTES or not cache.is_contiguous():
        raise ValueError(
            f"{operation}: a cache {cache.dtype} {tuple(cache.shape)} is not contiguous uint8 [pages, KV heads, "
            f"units of {UNIT_TOKENS} tokens, {UNIT_BYTES}]"
        )
