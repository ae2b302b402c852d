# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""64-bit multilinear sums, which the contract check compares instead of tensors.

64-bit words, each times an odd constant of its position, added modulo 2^64. Odd constants are invertible, so a change
within one word always changes the sum.
"""

from collections.abc import Sequence
from functools import cache

import torch

_SUM_WORDS = 2**23
"""64-bit words that :func:`row_sums` multiplies at a time, 64 MiB of products."""


@cache
def odd_constants(count: int, device: torch.device) -> torch.Tensor:
    """``count`` fixed odd int64 constants."""
    generator = torch.Generator().manual_seed(0x6A657472)
    words = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64, device="cpu")
    return (2 * words + 1).to(device)


def row_sums(tensor: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Sums of each row of a BF16 tensor ``[R, C]``, or of each element of ``[R]``.

    Args:
        parts: equal parts of each row with a sum of their own, for ranks that hold one of them.

    Returns:
        int64 ``[R]``, or ``[R, parts]``.
    """
    if parts > 1:
        return row_sums(tensor.reshape(tensor.shape[0] * parts, -1)).view(-1, parts)
    rows = tensor.detach().contiguous().view(torch.int16)
    rows = rows.view(rows.shape[0], -1)
    if rows.shape[1] % 4 == 0:
        rows = rows.view(torch.int64)
    constants = odd_constants(rows.shape[1], rows.device)
    # In pieces, or an embedding's products would take more memory than the embedding.
    pieces = rows.split(max(1, _SUM_WORDS // rows.shape[1]))
    return torch.cat([(piece.to(torch.int64) * constants).sum(dim=1) for piece in pieces])


def element_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """:func:`row_sums` of vectors ``[R]`` of one dtype, concatenated: norms and biases are small and many.

    FP32 vectors have the sums of the BF16 vectors that they equal, and others if they equal none.
    """
    vector = torch.cat(list(tensors))
    if vector.dtype == torch.float32:
        words = vector.view(torch.int32).to(torch.int64)
        # The upper half is the BF16 number; the lower one is zero, or it changes the sum.
        words = (words >> 16) + ((words & 0xFFFF) << 32)
    else:
        words = vector.view(torch.int16).to(torch.int64)
    return words * odd_constants(1, words.device)
