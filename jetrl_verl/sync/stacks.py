# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices that lie below each other in one storage are one matrix: quantized, summed and copied by one call.

What feeds a weight sync keeps q, k and v of a layer, and gate and up, next to each other (train/gather.py), and so are
the qdata that are made of them at once. Nothing else is told: a reader asks whether a matrix begins where the one
before it ends. Where none does, as behind verl's own gather, each is taken by itself, with the same bits.
"""

from collections.abc import Sequence

import torch


def continues(above: torch.Tensor, below: torch.Tensor) -> bool:
    """Whether the rows of ``below [M, K]`` lie in memory right behind those of ``above [N, K]``."""
    return (
        above.ndim == below.ndim == 2
        and above.dtype == below.dtype
        and above.shape[1] == below.shape[1]
        and below.data_ptr() == above.data_ptr() + above.nbytes
        and above.is_contiguous()
        and below.is_contiguous()
        and above.untyped_storage().data_ptr() == below.untyped_storage().data_ptr()
    )


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[N, K]`` view of matrices each of which :func:`continues` the one before it; a single one itself."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return first.as_strided((sum(len(part) for part in parts), first.shape[1]), first.stride())
