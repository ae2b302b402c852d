# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3's arithmetic on Hopper for one query, operation by operation, from its machine code (docs/log.md).

Tensor cores round as in arXiv 2511.10909; ``2^x`` is correctly rounded here, where the GPU approximates.
"""

import numpy as np

KEYS = 128
_GROUP = 16
_PLACES = 25
_SMALLEST = np.float32(2.0**-126)
_LOG2_E = 1.4426950408889634


def _flushed(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32)
    return np.where(np.abs(x) < _SMALLEST, np.copysign(np.float32(0), x), x)


def _exponents(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, -1000, np.maximum(np.frexp(x)[1] - 1, -126))


def matrix_step(addend: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One instruction: ``addend + sum_k a b`` over 16 products, cut off 25 places below the largest exponent.

    Args:
        addend: ``[M, N]`` FP32. a: ``[M, 16]``, b: ``[N, 16]`` BF16 numbers in float64.
    """
    products = a[:, None, :] * b[None, :, :]
    exponents = _exponents(a)[:, None, :] + _exponents(b)[None, :, :]
    terms = np.concatenate([products, addend[..., None].astype(np.float64)], axis=-1)
    exponents = np.concatenate([np.where(products == 0, -1000, exponents), _exponents(addend)[..., None]], axis=-1)
    largest = exponents.max(axis=-1)
    scaled = np.trunc(np.ldexp(terms, (_PLACES - largest)[..., None])).sum(axis=-1)
    value = np.where(largest <= -1000, 0.0, np.ldexp(scaled, largest - _PLACES))
    rounded = value.astype(np.float32)
    return np.where(np.abs(rounded.astype(np.float64)) > np.abs(value), np.nextafter(rounded, np.float32(0)), rounded)


def _product(a: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    """``start + a b^T`` over K in groups of 16, ascending."""
    for k in range(0, a.shape[1], _GROUP):
        start = matrix_step(start, a[:, k : k + _GROUP], b[:, k : k + _GROUP])
    return start


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return _flushed(a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64))


def _power(x: np.ndarray) -> np.ndarray:
    return _flushed(np.exp2(x.astype(np.float64)))


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Queries ``[G, 128]`` of one token to the keys and values ``[T, 128]`` of one KV head, itself the last of them.

    Returns:
        ``[G, 128]`` BF16 numbers in FP32.
    """
    factor = np.float32(np.float64(np.float32(scale)) * _LOG2_E)
    queries, tokens = len(q), len(k)
    out = np.zeros((queries, 128), np.float32)
    row_max = np.full((queries, 1), -np.inf, np.float32)
    sums = np.zeros((queries, 4), np.float32)
    blocks = -(-tokens // KEYS)
    for block in reversed(range(blocks)):
        rows = slice(block * KEYS, block * KEYS + KEYS)
        keys, values = (np.zeros((KEYS, 128)) for _ in range(2))
        keys[: len(k[rows])], values[: len(v[rows])] = k[rows], v[rows]
        scores = _product(q.astype(np.float64), keys, np.zeros((queries, KEYS), np.float32))
        scores[:, len(k[rows]) :] = -np.inf
        first = block == blocks - 1
        highest = np.maximum(_flushed(scores).max(axis=1, keepdims=True), row_max)
        rescale = np.ones_like(highest) if first else _power(_flushed(_flushed(row_max - highest) * factor))
        row_max = highest
        p = _power(_fused(scores, factor[None, None], -_flushed(highest * factor)))
        # Lane t of a query adds columns 2 t and 2 t + 1 of each eight, ascending; the first with the rescaling fused.
        of_lanes = p.reshape(queries, KEYS // 8, 4, 2).transpose(0, 2, 1, 3).reshape(queries, 4, -1)
        sums = of_lanes[..., 0] if first else _fused(np.broadcast_to(rescale, sums.shape), sums, of_lanes[..., 0])
        for j in range(1, of_lanes.shape[-1]):
            sums = _flushed(sums + of_lanes[..., j])
        if not first:
            out = _flushed(out * rescale)
        out = _product(_bf16(p).astype(np.float64), values.T, out)
    pairs = _flushed(sums[:, :2] + sums[:, 2:])
    total = _flushed(pairs[:, :1] + pairs[:, 1:])
    return _bf16(_flushed(out * _flushed(np.float32(1) / total)))
