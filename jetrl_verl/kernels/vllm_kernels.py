# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels that backends call, CUTLASS and FlashAttention 3: the only file of kernels/ that imports vLLM, and
only on the first call."""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def no_block_fp8_gemm() -> str | None:
    """Why this process lacks vLLM's block-scaled FP8 CUTLASS GEMM, or None."""
    if find_spec("vllm") is not None and torch.cuda.is_available():
        from vllm import _custom_ops as ops

        major, minor = torch.cuda.get_device_capability()
        if ops.cutlass_scaled_mm_supports_block_fp8(10 * major + minor):
            return None
    return "no vLLM with block-FP8 CUTLASS for this GPU"


def cutlass_scaled_mm(*call, **options) -> torch.Tensor:
    """``vllm._custom_ops.cutlass_scaled_mm``."""
    from vllm import _custom_ops as ops

    return ops.cutlass_scaled_mm(*call, **options)


@cache
def no_flash_attention_3() -> str | None:
    """Why this process lacks vLLM's FlashAttention 3, or None."""
    if find_spec("vllm") is None or not torch.cuda.is_available():
        return "no vLLM, or no GPU"
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    return None if interface.is_fa_version_supported(3) else interface.fa_version_unsupported_reason(3)


LEAST_QUERIES = 65


def stated_queries(head_dim: int, most: int) -> int:
    """``max_seqlen_q`` for FlashAttention 3 of sequences with at most ``most`` queries.

    It chooses the keys of a block by the head and by this number. With heads of 64 a block has 192 keys if a sequence
    has one query, or at most 64 over the heads of a KV head, and 128 otherwise; with more than 64 it is always 128.
    Heads of 256 have blocks of 80, but one query would run another kernel. Over pages heads of 128 need no care.
    """
    return most if head_dim == 128 else max(most, LEAST_QUERIES)


def flash_attention_3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[N, H, D]`` BF16 and log-sum-exp ``[H, N]`` FP32; arguments as :func:`jetrl_verl.kernels.attention`.

    Raises:
        RuntimeError: the GPU or the wheel has no FlashAttention 3; so do the functions below.
    """
    return _flash_attention_3(
        q,
        k,
        v,
        max_seqlen_q=stated_queries(q.shape[-1], max_seqlen),
        cu_seqlens_q=cu_seqlens,
        max_seqlen_k=max_seqlen,
        cu_seqlens_k=cu_seqlens,
        softmax_scale=scale,
        return_softmax_lse=True,
    )


def flash_attention_3_chunks(
    q, k, v, cu_queries, cu_lengths, most_queries: int, longest: int, scale: float, out: torch.Tensor
) -> None:
    """:func:`flash_attention_3` of the last queries of sequences, into ``out`` ``[N, H, D]``.

    Args:
        q: ``[N, H, D]``, split at ``cu_queries``. k, v: ``[M, Hkv, D]``, split at ``cu_lengths``.
    """
    _flash_attention_3(
        q,
        k,
        v,
        # FlashAttention 3 treats one query without a page table as not causal, in blocks of 176 keys instead of 128.
        max_seqlen_q=max(most_queries, 2),
        cu_seqlens_q=cu_queries,
        max_seqlen_k=longest,
        cu_seqlens_k=cu_lengths,
        softmax_scale=scale,
        out=out,
    )


def flash_attention_3_pages(q, keys, values, lengths, block_table, scale: float, out: torch.Tensor) -> None:
    """:func:`flash_attention_3` for one token per request; arguments of ``kernels.decode_attention_bf16``."""
    _flash_attention_3(
        q,
        keys,
        values,
        max_seqlen_q=stated_queries(q.shape[-1], 1),
        cu_seqlens_q=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
        max_seqlen_k=block_table.shape[1] * keys.shape[1],
        seqused_k=lengths,
        block_table=block_table,
        softmax_scale=scale,
        out=out,
    )


def _flash_attention_3(*call, **options):
    if reason := no_flash_attention_3():
        raise RuntimeError(f"there is no FlashAttention 3: {reason}")
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    # num_splits=1: one thread block reads all keys of a query in ascending order, whatever the batch.
    return flash_attn_varlen_func(*call, **options, causal=True, num_splits=1, fa_version=3)
