# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences as a module of its own, whose inputs hooks can read."""

import torch
from torch import nn

from jetrl_verl.formats.caches import KVCache


class AttentionCore(nn.Module):
    """``kernels.attention`` with a run's settings.

    Attributes:
        scale: factor of the scores. kv_cache: the rollout's cache.
        gradient_checkpointing: whether the layer's forward runs again in backward; ``transformers`` sets it.
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
