# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""64-bit multilinear sums of tensors: what the contract check compares instead of the tensors.

A tensor's bytes as 64-bit words, each times an odd constant of its position, added modulo 2^64. Odd constants are
invertible, so a change within one word always changes the sum.
"""

from collections.abc import Sequence
from functools import cache

import torch

_SUM_WORDS = 2**23
"""64-bit words multiplied at a time by :func:`row_sums`, 64 MiB of products."""


@cache
def odd_constants(count: int, device: torch.device) -> torch.Tensor:
    """``count`` fixed odd int64 constants."""
    generator = torch.Generator().manual_seed(0x6A657472)
    words = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64, device="cpu")
    return (2 * words + 1).to(device)


def row_sums(tensor: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Sums of each row of a BF16 tensor ``[R, C]``, or of each element of ``[R]``.

    Args:
        parts: into how many equal parts each row is cut first, so that one who holds a part can compare it.

    Returns:
        int64 ``[R]``; ``[R, parts]`` where there are several.
    """
    if parts > 1:
        return row_sums(tensor.reshape(tensor.shape[0] * parts, -1)).view(-1, parts)
    rows = tensor.detach().contiguous().view(torch.int16)
    rows = rows.view(rows.shape[0], -1)
    if rows.shape[1] % 4 == 0:
        rows = rows.view(torch.int64)
    constants = odd_constants(rows.shape[1], rows.device)
    # In pieces: an embedding's products would otherwise take as much memory again as the embedding.
    pieces = rows.split(max(1, _SUM_WORDS // rows.shape[1]))
    return torch.cat([(piece.to(torch.int64) * constants).sum(dim=1) for piece in pieces])


def element_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """:func:`row_sums` of BF16 vectors ``[R]``, of all at once, one behind the other: norms and biases are small and
    many."""
    together = torch.cat(list(tensors)).view(torch.int16)
    return together.to(torch.int64) * odd_constants(1, together.device)
