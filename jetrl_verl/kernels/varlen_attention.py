# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Causal attention over packed sequences for stock modules, any head dimension: for the trainer alone, so without a
promise of bits. FlashAttention on a GPU, torch's ``scaled_dot_product_attention`` on the CPU."""

from collections.abc import Iterator

import torch

from jetrl_verl.kernels import vllm_kernels
from jetrl_verl.kernels.attention import (
    PackedAttention,
    fake_attention,
    fake_attention_backward,
    flash_attention_3,
    flash_attention_backward,
)
from jetrl_verl.kernels.dispatch import implements
from jetrl_verl.kernels.operator import dispatched

__all__ = ["has_varlen_kernel", "varlen_attention"]

LARGEST_HEAD = 256
"""FlashAttention's largest head dimension; head dimensions are multiples of 8."""


def _supports_flash_attention_3(*_) -> bool:
    return vllm_kernels.no_flash_attention_3() is None


implements("varlen_attention", "flash_attention_3", supports=_supports_flash_attention_3)(flash_attention_3)
implements("varlen_attention_backward", "flash_attention_2")(flash_attention_backward)


@implements("varlen_attention", "flash_attention_2")
def torch_flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`jetrl_verl.kernels.attention.flash_attention_3`, with torch's FlashAttention 2."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False, scale=scale
    )
    return out, lse


def _sequences(cu_seqlens: torch.Tensor, *packed: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """For each sequence, ``[1, H, T, D]`` of every packed ``[N, H, D]``."""
    lengths = cu_seqlens.diff().tolist()
    for sequence in zip(*(x.split(lengths) for x in packed), strict=True):
        yield [x.transpose(0, 1)[None] for x in sequence]


@implements("varlen_attention", "sdpa")
def sdpa(q, k, v, cu_seqlens, max_seqlen: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`torch_flash_attention`, with torch's ``scaled_dot_product_attention`` on a CPU."""
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), []
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for *operands, target in _sequences(cu_seqlens, q, k, v, out):
        output, sequence_lse = forward(*operands, 0.0, True, scale=scale)
        target.copy_(output)
        lse.append(sequence_lse[0])
    return out, torch.cat(lse, dim=1)


@implements("varlen_attention_backward", "sdpa")
def sdpa_backward(grad_out, q, k, v, cu_seqlens, out, lse, max_seqlen: int, scale: float) -> tuple[torch.Tensor, ...]:
    """As :func:`flash_attention_backward`, with torch's ``scaled_dot_product_attention`` on a CPU."""
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    parts = lse.split(cu_seqlens.diff().tolist(), dim=1)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    packed = _sequences(cu_seqlens, grad_out, q, k, v, out, *gradients)
    for (*operands, dq, dk, dv), sequence_lse in zip(packed, parts, strict=True):
        results = backward(*operands, sequence_lse[None], 0.0, True, scale=scale)
        for target, gradient in zip((dq, dk, dv), results, strict=True):
            target.copy_(gradient)
    return tuple(gradients)


def _fake(q, k, v, cu_seqlens, max_seqlen, scale):
    out, lse = fake_attention(q, k, v, cu_seqlens, max_seqlen, scale)
    return out, lse.double() if q.dtype == torch.float64 else lse


_varlen_attention = dispatched(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int max_seqlen, float scale)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    backends={"cpu": ("sdpa",), "sm90": ("flash_attention_3", "flash_attention_2")},
    equal_bits=False,
    needs_fp8=False,
)
_varlen_attention_backward = dispatched(
    "varlen_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor out,"
    " Tensor lse, int max_seqlen, float scale) -> (Tensor, Tensor, Tensor)",
    fake=fake_attention_backward,
    backends={"cpu": ("sdpa",), "sm90": ("flash_attention_2",)},
    needs_fp8=False,
)


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """Attention within each of several packed sequences; differentiable in ``q``, ``k`` and ``v``.

    Args:
        q: ``[N, H, D]``, BF16 or FP16 on a GPU, any floating-point type on the CPU. k, v: ``[N, Hkv, D]``, same type.
        cu_seqlens: ``[B + 1]`` int32, first token of each sequence and, last, ``N``; no sequence is empty.
        max_seqlen: length of the longest. scale: factor of the scores, usually ``D ** -0.5``.

    Returns:
        ``[N, H, D]`` of the operands' type.

    Raises:
        ValueError: heads or a type that FlashAttention does not support.
    """
    if operands := without_kernel(q, k, v):
        raise ValueError(f"varlen_attention: there is no kernel for {operands}")
    return PackedAttention.apply(q, k, v, cu_seqlens, max_seqlen, scale, _varlen_attention, _varlen_attention_backward)


def has_varlen_kernel(head_dim: int) -> bool:
    """Whether FlashAttention has kernels for heads of ``head_dim``."""
    return head_dim % 8 == 0 and head_dim <= LARGEST_HEAD


def without_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """The operands of :func:`varlen_attention` that no kernel supports, in words; empty where one does."""
    head_dim = q.shape[-1]
    if k.shape[-1] != head_dim or v.shape[-1] != head_dim:
        return f"queries, keys and values of {head_dim}, {k.shape[-1]} and {v.shape[-1]} features per head"
    if q.device.type == "cpu":
        return ""
    if not has_varlen_kernel(head_dim):
        return f"heads of {head_dim}"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        return f"operands in {q.dtype}, {k.dtype} and {v.dtype}"
    return ""
