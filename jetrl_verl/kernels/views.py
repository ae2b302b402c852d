# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""No-op fast paths for casts, copies and views: torch's cost about 1 us each, and a layer makes about 100."""

import torch


def as_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.to(dtype)``."""
    return x if x.dtype == dtype else x.to(dtype)


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied only where elements of its last dimension are not next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., K] as [M, K]."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
