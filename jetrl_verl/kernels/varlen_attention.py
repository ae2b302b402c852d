# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Causal attention over packed sequences for modules that are stock otherwise; no two implementations of it agree.

The attention that trainer and rollout share is attention.py's. This one is the trainer's alone, for baselines and for
``jetrl.operations=stock``: any head dimension that the kernels support, and no promise about the last bit.

**On a GPU** the forward is FlashAttention 3 of the vLLM wheel on Hopper, where that exists, and torch's FlashAttention
2 on other GPUs; both leave the output and the log-sum-exp to torch's FlashAttention backward (attention.py). **On the
CPU** each sequence goes through torch's ``scaled_dot_product_attention``, as stock modules do with it alone.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from jetrl_verl.kernels import vllm_kernels
from jetrl_verl.kernels.attention import PackedAttention, flash_attention_3, flash_attention_backward

LARGEST_HEAD = 256
"""Of FlashAttention; heads are multiples of 8."""


def torch_flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """As :func:`jetrl_verl.kernels.attention.flash_attention_3`, by the FlashAttention 2 that torch brings."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False, scale=scale
    )
    return out, (out, lse)


def gpu_forward() -> Callable:
    """The forward that a GPU of this process runs."""
    return flash_attention_3 if vllm_kernels.no_flash_attention_3() is None else torch_flash_attention


def _by_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float):
    """On the CPU; autograd's own gradients."""
    lengths = cu_seqlens.diff().tolist()
    sequences = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    results = [
        functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in sequence), is_causal=True, scale=scale, enable_gqa=True
        )
        for sequence in sequences
    ]
    return torch.cat([result[0].transpose(0, 1) for result in results])


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """Attention within each of several packed sequences; differentiable in ``q``, ``k`` and ``v``.

    Args:
        q: ``[N, H, D]``, BF16 or FP16 on a GPU, any floating-point type on the CPU. k, v: ``[N, Hkv, D]`` of that type,
            ``Hkv`` dividing ``H``.
        cu_seqlens: ``[B + 1]`` int32, first token of each sequence and, last, ``N``; no sequence is empty.
        max_seqlen: length of the longest. scale: factor of the scores, usually ``D ** -0.5``.

    Returns:
        ``[N, H, D]`` of the operands' type.

    Raises:
        ValueError: heads or a type that FlashAttention does not support.
    """
    if what := without_kernel(q, k, v):
        raise ValueError(f"varlen_attention: there is no kernel for {what}")
    if q.device.type == "cpu":
        return _by_sequence(q, k, v, cu_seqlens, scale)
    return PackedAttention.apply(q, k, v, cu_seqlens, max_seqlen, scale, gpu_forward(), flash_attention_backward)


def without_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """What of the operands of :func:`varlen_attention` no kernel is for; empty where one is."""
    head_dim = q.shape[-1]
    if k.shape[-1] != head_dim or v.shape[-1] != head_dim:
        return f"queries, keys and values of {head_dim}, {k.shape[-1]} and {v.shape[-1]} features a head"
    if q.device.type == "cpu":
        return ""
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        return f"heads of {head_dim}"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        return f"operands in {q.dtype}, {k.dtype} and {v.dtype}"
    return ""
