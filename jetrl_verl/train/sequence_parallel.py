# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ulysses sequence parallelism (arXiv 2309.14509) around attention and the delta rule, over verl's process group.

A rank has a slice of the tokens for operations on rows, and a slice of the heads where tokens meet: two exchanges for
attention, three for a delta net. Neither a row nor a head reads another, so every value has the bits of one rank.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from verl.utils.ulysses import (
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
)


class _Exchange(torch.autograd.Function):
    """All-to-all of ``x [ranks, ...]``: part ``r`` goes to rank ``r``, and part ``r`` of the result comes from it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        return _Exchange.apply(gradient, ctx.group), None


def ranks() -> int:
    """Ulysses size of the running engine; 1 without Ulysses."""
    return get_ulysses_sequence_parallel_world_size()


def whole(positions: torch.Tensor) -> torch.Tensor:
    """Position ids ``[B, T]`` of all ranks, from this rank's ``[B, T / ranks]``."""
    if ranks() == 1:
        return positions
    slices = [torch.empty_like(positions) for _ in range(ranks())]
    dist.all_gather(slices, positions.contiguous(), group=get_ulysses_sequence_parallel_group())
    return torch.cat(slices, dim=1)


def _divided(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Heads ``[..., H, ...]`` at ``dim`` as ``[..., ranks, max(1, H / ranks), ...]``; ranks share them if H is less."""
    copies = max(1, ranks() // x.shape[dim])
    return (x.repeat_interleave(copies, dim) if copies > 1 else x).unflatten(dim, (ranks(), -1))


def join_heads(*heads: torch.Tensor) -> torch.Tensor:
    """A slice of the heads of all tokens, from all heads of a slice of the tokens; one exchange.

    Args:
        heads: ``[T / ranks, H, D]`` each, of one D and dtype. ``ranks`` divides ``H`` or is a multiple of it; then
            ranks share heads.

    Returns:
        ``[T, h, D]``, the rank's ``max(1, H / ranks)`` heads of each, one after the other. A rank has the key heads of
        its query or value heads.
    """
    # [tokens, ranks, heads of the rank, D], contiguous per rank.
    sent = torch.cat([_divided(x, 1) for x in heads], dim=2).transpose(0, 1)
    # Slices of tokens arrive in the order of ranks.
    return _Exchange.apply(sent, get_ulysses_sequence_parallel_group()).flatten(0, 1)


def by_heads(*heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The heads of :func:`join_heads` apart: ``[T, max(1, H / ranks), D]`` from ``[T / ranks, H, D]`` each."""
    if ranks() == 1:
        return heads
    return join_heads(*heads).split([max(1, x.shape[1] // ranks()) for x in heads], dim=1)


def of_rank(heads: torch.Tensor) -> torch.Tensor:
    """This rank's ``[max(1, H / ranks), ...]`` of a parameter ``[H, ...]``, the heads of :func:`join_heads`."""
    return heads if ranks() == 1 else _divided(heads, 0)[get_ulysses_sequence_parallel_rank()]


def by_tokens(out: torch.Tensor) -> torch.Tensor:
    """All heads of a slice of the tokens ``[T / ranks, H, D]``, from a slice of the heads ``[T, H / ranks, D]``."""
    if ranks() == 1:
        return out
    sent = out.unflatten(0, (ranks(), -1))
    return _Exchange.apply(sent, get_ulysses_sequence_parallel_group()).transpose(0, 1).flatten(1, 2)
