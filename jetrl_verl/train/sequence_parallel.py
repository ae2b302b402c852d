# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ulysses sequence parallelism (arXiv 2309.14509) around the attention, over verl's process group.

A rank has a slice of the tokens for operations on rows, and a slice of the heads in attention: two exchanges a layer.
Neither a row nor a head reads another, so every value has the bits that it has on one rank.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, get_ulysses_sequence_parallel_world_size


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


def by_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A slice of the heads of all tokens, from all heads of a slice of the tokens; one exchange.

    Args:
        q: ``[T / ranks, H, D]``. k, v: ``[T / ranks, Hkv, D]``. ``ranks`` divides ``H``, and divides ``Hkv`` or is a
            multiple of it; then ranks share key heads.

    Returns:
        ``[T, H / ranks, D]`` and two of ``[T, max(1, Hkv / ranks), D]``, each query head with its key head.
    """
    split = ranks()
    if split == 1:
        return q, k, v
    copies = max(1, split // k.shape[1])
    k, v = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (k, v))
    # [tokens, ranks, heads of the rank, D], contiguous per rank.
    parts = [x.unflatten(1, (split, -1)) for x in (q, k, v)]
    heads = [part.shape[2] for part in parts]
    sent = torch.cat(parts, dim=2).transpose(0, 1)
    # Slices of tokens arrive in the order of ranks.
    return _Exchange.apply(sent, get_ulysses_sequence_parallel_group()).flatten(0, 1).split(heads, dim=1)


def by_tokens(out: torch.Tensor) -> torch.Tensor:
    """All heads of a slice of the tokens ``[T / ranks, H, D]``, from a slice of the heads ``[T, H / ranks, D]``."""
    if ranks() == 1:
        return out
    sent = out.unflatten(0, (ranks(), -1))
    return _Exchange.apply(sent, get_ulysses_sequence_parallel_group()).transpose(0, 1).flatten(1, 2)
