# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout's attention over its KV cache, with the bits of attention.py: one new token per request (decode) or more.

Decode of heads of 128 on Hopper runs csrc/sm90_decode_attention*.cu over FP8 or vLLM's BF16 pages. Other heads, which
have no FP8 cache, run FlashAttention 3. Without the library, and for chunks of an FP8 cache, FlashAttention 3 runs on
dequantized tokens, slower and in no CUDA graph.
"""

import torch

from jetrl_verl.kernels import native, vllm_kernels
from jetrl_verl.kernels.attention import FLASH_ATTENTION, check_head_dim, paged_attention, paged_attention_fp8
from jetrl_verl.kernels.dispatch import NATIVE, implements, lookup
from jetrl_verl.kernels.kv_cache import read_kv
from jetrl_verl.kernels.operator import dispatched, operator, require_bf16
from jetrl_verl.kernels.sizes import multiprocessors
from jetrl_verl.reference.kv_cache import HEAD_DIM, UNIT_BYTES, UNIT_TOKENS

__all__ = ["chunk_attention", "decode_attention", "decode_attention_bf16", "decodes_natively"]

MOST_QUERY_HEADS = 8
"""Most query heads per KV head of the native kernel: the width of a tensor core's operand."""

CLUSTERS = (1, 2, 4, 8)
"""Thread blocks that can share a request and KV head."""

MOST_PAIRS_OF_BF16 = 2048
"""Up to this many pairs of a request and a KV head decode steps over a BF16 cache run the native kernel, above it
FlashAttention 3: both are bound by memory there (docs/log.md). A CUDA graph cannot choose by lengths."""

_DECODE = NATIVE | {"sm90": ("native", "flash_attention_3")}

_EIGHT = native.ALIGNMENT // 2
"""BF16 elements of one 16-byte copy."""


def choose_cluster(pairs: int, multiprocessors: int) -> int:
    """Thread blocks per pair of a request and a KV head, independent of lengths for CUDA graphs.

    Two if at most two blocks share a multiprocessor, more only if each block has one: all blocks of a cluster repeat
    the softmax. The launch checks that clusters of four or eight fit at once.
    """
    fits = [c for c in CLUSTERS if pairs * c <= multiprocessors * (2 if c <= 2 else 1)]
    return max(fits, default=1)


@implements("decode_attention", "reference")
def reference_decode_attention(q, cache, lengths, block_table, scale: float, out) -> None:
    """As :func:`decode_attention`."""
    cu_queries = torch.arange(len(q) + 1, dtype=torch.int32)
    out.copy_(paged_attention_fp8(q, cache, cu_queries, lengths, block_table, scale))


@implements("decode_attention", "flash_attention_3")
def flash_decode_attention(q, cache, lengths, block_table, scale: float, out) -> None:
    """As :func:`decode_attention`; waits for the device to learn the lengths."""
    cu_queries = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    lengths_list = lengths.tolist()
    flash_chunk_attention(q, cache, cu_queries, 1, lengths, lengths_list, block_table, scale, out)


def _heads_suit(heads: int, kv_heads: int) -> bool:
    return 0 < kv_heads <= heads <= MOST_QUERY_HEADS * kv_heads and heads % kv_heads == 0


def _rows_suit(rows: torch.Tensor) -> bool:
    request, head, feature = rows.stride()
    strides = head == HEAD_DIM and feature == 1 and request % _EIGHT == 0
    return strides and rows.dtype == torch.bfloat16 and rows.data_ptr() % native.ALIGNMENT == 0


def _requests_suit(q, lengths, block_table, out) -> bool:
    """Whether csrc/binding.cpp accepts these (``check_decode_rows``, ``decode_call``)."""
    if q.dim() != 3 or q.shape != out.shape or q.shape[2] != HEAD_DIM or not 0 < q.shape[0] < native.MOST:
        return False
    of_requests = lengths.dim() == 1 and block_table.dim() == 2 and lengths.stride(0) == block_table.stride(1) == 1
    return (
        of_requests
        and _rows_suit(q)
        and _rows_suit(out)
        and min(lengths.shape[0], block_table.shape[0]) >= q.shape[0]
        and lengths.dtype == block_table.dtype == torch.int32
        and q.is_cuda == out.is_cuda == lengths.is_cuda == block_table.is_cuda
    )


def native_supports_decode_attention(q, cache, lengths, block_table, scale: float, out) -> bool:
    """Whether the native kernel computes this call; the library refuses every other one."""
    return (
        native.unavailable() is None
        and _requests_suit(q, lengths, block_table, out)
        and cache.dim() == 4
        and _heads_suit(q.shape[1], cache.shape[1])
        and cache.shape[2] > 0
        and cache.shape[3] == UNIT_BYTES
        and cache.dtype == torch.uint8
        and cache.is_contiguous()
        and cache.data_ptr() % native.ALIGNMENT == 0
        and cache.is_cuda == q.is_cuda
    )


@implements("decode_attention", "native", supports=native_supports_decode_attention)
def native_decode_attention(
    q, cache, lengths, block_table, scale: float, out, *, plan: native.Plan | None = None
) -> None:
    """As :func:`decode_attention`; ``plan``: its cluster instead of the choice by shape, for tests and benchmarks."""
    cluster = plan.cluster if plan else choose_cluster(len(q) * cache.shape[1], multiprocessors(q.device))
    native.operators().decode_attention(q, cache, lengths, block_table, scale, cache.shape[2], out, cluster)


@implements("decode_attention_bf16", "reference")
def reference_decode_attention_bf16(q, keys, values, lengths, block_table, scale: float, out) -> None:
    """As :func:`decode_attention_bf16`, of keys and values in ``cache_form``."""
    cu_queries = torch.arange(len(q) + 1, dtype=torch.int32)
    heads_first = (x.transpose(1, 2) for x in (keys, values))
    out.copy_(paged_attention(q, *heads_first, cu_queries, lengths, block_table, scale))


@implements("decode_attention_bf16", "flash_attention_3")
def flash_decode_attention_bf16(q, keys, values, lengths, block_table, scale: float, out) -> None:
    """As :func:`decode_attention_bf16`."""
    vllm_kernels.flash_attention_3_pages(q, keys, values, lengths, block_table, scale, out)


def _form_suits_bf16(heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> bool:
    """Whether the native kernel supports a BF16 cache of this form."""
    pages = dtype == torch.bfloat16 and head_dim == HEAD_DIM and page_size > 0 and page_size % UNIT_TOKENS == 0
    return native.unavailable() is None and pages and _heads_suit(heads, kv_heads)


def _pages_suit(keys, values) -> bool:
    """Whether csrc/binding.cpp accepts keys and values of these addresses, strides and sizes."""
    if keys.shape != values.shape or keys.dtype != values.dtype or keys.is_cuda != values.is_cuda:
        return False
    strides = keys.stride()
    if strides != values.stride() or strides[3] != 1:
        return False
    for size, stride in zip(keys.shape[:3], strides[:3], strict=True):
        if (stride % _EIGHT != 0 and size != 1) or size * stride // _EIGHT >= 2**31:
            return False
    return keys.data_ptr() % native.ALIGNMENT == 0 and values.data_ptr() % native.ALIGNMENT == 0


def native_supports_decode_attention_bf16(q, keys, values, lengths, block_table, scale: float, out) -> bool:
    """Whether the native kernel computes this call; the library refuses every other one."""
    return (
        keys.dim() == 4
        and _requests_suit(q, lengths, block_table, out)
        and _form_suits_bf16(q.shape[1], keys.shape[2], keys.shape[3], keys.shape[1], keys.dtype)
        and _pages_suit(keys, values)
        and keys.is_cuda == q.is_cuda
    )


def _are_few(requests: int, kv_heads: int) -> bool:
    return requests * kv_heads <= MOST_PAIRS_OF_BF16


@implements(
    "decode_attention_bf16",
    "native",
    supports=native_supports_decode_attention_bf16,
    # By shape alone, as a CUDA graph keeps the choice.
    prefers=lambda q, keys, *_: _are_few(len(q), keys.shape[2]),
)
def native_decode_attention_bf16(
    q, keys, values, lengths, block_table, scale: float, out, *, plan: native.Plan | None = None
) -> None:
    """As :func:`decode_attention_bf16`; ``plan`` as of :func:`native_decode_attention`."""
    cluster = plan.cluster if plan else choose_cluster(len(q) * keys.shape[2], multiprocessors(q.device))
    native.operators().decode_attention_bf16(q, keys, values, lengths, block_table, scale, out, cluster)


@implements("chunk_attention", "reference")
def reference_chunk_attention(q, cache, cu_queries, most_queries, lengths, _, block_table, scale, out) -> None:
    """As :func:`chunk_attention`."""
    out.copy_(paged_attention_fp8(q, cache, cu_queries, lengths, block_table, scale))


@implements("chunk_attention", "flash_attention_3")
def flash_chunk_attention(q, cache, cu_queries, most_queries, lengths, lengths_list, block_table, scale, out) -> None:
    """As :func:`chunk_attention`, over dequantized keys and values."""
    cu_lengths = torch.zeros(len(lengths_list) + 1, dtype=torch.int32, device=q.device)
    torch.cumsum(lengths, 0, out=cu_lengths[1:])
    longest = max(lengths_list)
    keys, values = read_kv(cache, block_table, lengths, cu_lengths, sum(lengths_list), longest)
    vllm_kernels.flash_attention_3_chunks(q, keys, values, cu_queries, cu_lengths, most_queries, longest, scale, out)


_decode_attention = dispatched(
    "decode_attention(Tensor q, Tensor cache, Tensor lengths, Tensor block_table, float scale, Tensor(a!) out) -> ()",
    fake=lambda *_: None,
    backends=_DECODE,
)
_decode_attention_bf16 = dispatched(
    "decode_attention_bf16(Tensor q, Tensor keys, Tensor values, Tensor lengths, Tensor block_table, float scale,"
    " Tensor(a!) out) -> ()",
    fake=lambda *_: None,
    backends=_DECODE,
)


def decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token of each request to its cache, the token's own key and value included; no gradient.

    Args:
        q: ``[R, H, 128]`` BF16. cache: uint8 ``[pages, Hkv, units, 4128]`` (reference/kv_cache.py).
        lengths: int32 ``[R]`` tokens of each request; the result of a request of 0 is undefined.
        block_table: int32 ``[R, most pages]``, rows contiguous. scale: factor of the scores.
        out: ``[R, H, 128]`` BF16 to write to.

    Returns:
        ``[R, H, 128]`` BF16: ``out``, where it was given.

    Raises:
        TypeError: ``q`` is not BF16. ValueError: heads that are not of 128.
    """
    require_bf16("decode_attention", q=q)
    check_head_dim(q.shape[-1], (HEAD_DIM,))
    out = torch.empty_like(q) if out is None else out
    if len(q):
        _decode_attention(q, cache, lengths, block_table, scale, out)
    return out


def decode_attention_bf16(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`decode_attention` over a BF16 cache.

    Args:
        q: ``[R, H, D]`` BF16. keys, values: BF16 ``[pages, page size, Hkv, D]``, after a request's tokens arbitrary for
            heads of 128, finite for others.

    Returns:
        ``[R, H, D]`` BF16: ``out``, where it was given.

    Raises:
        TypeError: ``q``, ``keys`` or ``values`` is not BF16. ValueError: heads of another dimension
            than ``HEAD_DIMS``.
    """
    require_bf16("decode_attention_bf16", q=q, keys=keys, values=values)
    check_head_dim(q.shape[-1])
    out = torch.empty_like(q) if out is None else out
    if len(q):
        _decode_attention_bf16(q, keys, values, lengths, block_table, scale, out)
    return out


def decodes_natively(requests: int, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype) -> bool:
    """Whether :func:`decode_attention_bf16` of this many requests runs the native kernel, for callers that choose
    before tensors exist. Tensors with addresses or strides that it cannot read still run FlashAttention 3.

    Args:
        heads, kv_heads, head_dim: of this rank. page_size: tokens of a page. dtype: of the cache.
    """
    return _are_few(requests, kv_heads) and _form_suits_bf16(heads, kv_heads, head_dim, page_size, dtype)


@operator(
    "chunk_attention(Tensor q, Tensor cache, Tensor cu_queries, int most_queries, Tensor lengths, int[] lengths_list,"
    " Tensor block_table, float scale, Tensor(a!) out) -> ()",
    fake=lambda *_: None,
    backends=FLASH_ATTENTION,
)
def chunk_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    cu_queries: torch.Tensor,
    most_queries: int,
    lengths: torch.Tensor,
    lengths_list: list[int],
    block_table: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of each request's newest tokens to its cache, its own keys and values included; no gradient.

    Args:
        q: ``[N, H, 128]`` BF16, the new tokens of one request after another. cu_queries: int32 ``[R + 1]``.
        cache, lengths, block_table, scale, out: as for :func:`decode_attention`, of ``R`` requests.
        most_queries, lengths_list: the most new tokens of one request, and ``lengths`` on the host.
    """
    lookup("chunk_attention", q.device)(
        q, cache, cu_queries, most_queries, lengths, lengths_list, block_table, scale, out
    )
