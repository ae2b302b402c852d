# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Calls ``attend`` as transformers does, on sequences packed into a row or padded on either side."""

import torch
from torch import nn

LENGTHS = (7, 1, 40, 23, 1, 66)
FORMS = ("packed", "padded", "padded on the left")


class Attention(nn.Module):
    """Stands for a layer's attention module."""

    is_causal = True


def operands(heads: int, kv_heads: int, head_dim: int, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys and values ``[tokens, heads, D]`` of all sequences, FP64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(LENGTHS), count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def real_tokens(form: str) -> torch.Tensor:
    """``[sequences, longest]``, True where a padded batch has a token."""
    columns, lengths = torch.arange(max(LENGTHS)), torch.tensor(LENGTHS)[:, None]
    return columns < lengths if form == "padded" else columns >= max(LENGTHS) - lengths


def attended(form: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
    """``[tokens, H, D]`` of operands ``[tokens, heads, D]`` that went through ``attend`` in a form."""
    from jetrl_verl.train.varlen_attention import attend

    device = q.device
    if form == "packed":
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
        heads_first = [x[None].transpose(1, 2) for x in (q, k, v)]
        out, weights = attend(Attention(), *heads_first, None, position_ids=positions, **options)
        assert weights is None
        return out[0]
    real = real_tokens(form).to(device)
    # The padding is not zero: it must not be read.
    rows = [x.new_full((*real.shape, *x.shape[1:]), 3.0).masked_scatter(real[..., None, None], x) for x in (q, k, v)]
    out, _ = attend(Attention(), *(x.transpose(1, 2) for x in rows), real, **options)
    assert not out[~real].any()
    return out[real]
