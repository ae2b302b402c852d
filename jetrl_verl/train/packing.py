# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a batch begin, computed once per forward pass, since it waits for the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """The sequences of a batch.

    Attributes:
        tokens: indices of the real tokens among ``B * T``; None if all are real.
        cu_seqlens: ``[sequences + 1]`` int32, first real token of each sequence, then the number of real tokens.
        max_seqlen: length of the longest.
    """

    tokens: torch.Tensor | None
    cu_seqlens: torch.Tensor
    max_seqlen: int

    @classmethod
    def of(cls, positions: torch.Tensor | None, attention_mask: torch.Tensor | None) -> "Packing":
        """From a padded batch's mask ``[B, T]`` of real tokens, or else from position ids ``[B, T]``."""
        if attention_mask is None:
            # A row's first token always starts a sequence, whatever its position.
            starts = positions == 0
            starts[:, 0] = True
            total, tokens = positions.numel(), None
            first = starts.flatten().nonzero().squeeze(1)
        else:
            lengths = attention_mask.to(torch.int64).sum(dim=1)
            tokens = attention_mask.to(torch.bool).flatten().nonzero().squeeze(1)
            total = len(tokens)
            lengths = lengths[lengths > 0]
            first = lengths.cumsum(0) - lengths
        cu_seqlens = torch.cat([first, first.new_tensor([total])]).to(torch.int32)
        return cls(tokens, cu_seqlens, int(cu_seqlens.diff().max()))

    def of_real(self, function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        """``function`` of the real tokens' rows, ``[B * T, ...]`` each; its result is zero at padding."""
        if self.tokens is None:
            return function(*rows)
        real = function(*(x.index_select(0, self.tokens) for x in rows))
        return real.new_zeros(len(rows[0]), *real.shape[1:]).index_copy(0, self.tokens, real)
