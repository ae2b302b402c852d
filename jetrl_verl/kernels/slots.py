# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout's states of a gated delta net, one slot a request, on the CPU. Tensors: see ``causal_conv1d_update``."""

import torch

from jetrl_verl.kernels.operator import require_shape
from jetrl_verl.reference.delta_net import places


def read_slots(states: torch.Tensor, slots: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """Copies ``[R, ...]`` of the requests' states: zeros without computed tokens, anything in a negative slot."""
    read = states.index_select(0, slots.clamp(min=0))
    return read.index_fill_(0, (computed == 0).nonzero()[:, 0], 0)


def write_slots(states: torch.Tensor, slots: torch.Tensor, cu_seqlens: torch.Tensor, new: torch.Tensor) -> None:
    """Write the states ``new [R, ...]`` of requests that have a slot and tokens."""
    live = ((slots >= 0) & (cu_seqlens.diff() > 0)).nonzero()[:, 0]
    states.index_copy_(0, slots[live].long(), new[live])


def zero_padded(y: torch.Tensor, slots: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``y [T, ...]`` with zeros, in place, in tokens of padded requests and after the last request."""
    if len(y):
        padded = (slots < 0)[places(cu_seqlens, len(y))[0]]
        padded[int(cu_seqlens[-1]) :] = True
        y[padded] = 0
    return y


def require_slots(operation: str, slots: torch.Tensor, computed: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Raise ``ValueError`` unless there is one entry of ``slots``, ``computed`` and ``cu_seqlens`` per request."""
    require_shape(operation, "computed", computed, slots.shape)
    require_shape(operation, "cu_seqlens", cu_seqlens, (len(slots) + 1,))
