# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences as a module of its own, between rotary and the output projection: what a hook has to
see of keys and values is what goes into it."""

import torch
from torch import nn

from jetrl_verl.formats.caches import KVCache


class AttentionCore(nn.Module):
    """``kernels.attention`` with what a run fixes; without parameters.

    Attributes:
        scale: factor of the scores. kv_cache: what the rollout's cache holds.
        gradient_checkpointing: whether the layer around it runs its forward again in backward, while it trains;
            ``transformers`` sets it where it sets the layer's.
    """

    def __init__(self, scale: float, kv_cache: KVCache, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.scale, self.kv_cache = scale, kv_cache
        self.gradient_checkpointing = gradient_checkpointing

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        """``[N, H, D]`` of q ``[N, H, D]``, k and v ``[N, Hkv, D]``; see ``kernels.attention``."""
        recomputed = self.gradient_checkpointing and self.training
        return self.kv_cache.attend(q, k, v, cu_seqlens, max_seqlen, self.scale, recomputed=recomputed)

    def extra_repr(self) -> str:
        return f"kv_cache={self.kv_cache.traits.name}"
