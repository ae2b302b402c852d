# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Keep parameters and positions for a backward by reference, since they outlive the graph: ``save_for_backward`` costs
the host about 10 us per tensor under activation checkpointing."""

from typing import Any

import torch


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


def keep(ctx: Any, *tensors: torch.Tensor) -> None:
    """Keep tensors that outlive the graph for :func:`kept`; once per node."""
    ctx.kept = tensors, [_version(tensor) for tensor in tensors]


def kept(ctx: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of :func:`keep`. RuntimeError: one has been changed in place since."""
    tensors, versions = ctx.kept
    for tensor, version in zip(tensors, versions, strict=True):
        if _version(tensor) != version:
            raise RuntimeError(
                f"a parameter or index {tuple(tensor.shape)} that is needed for gradient computation has been modified "
                f"by an inplace operation: it is at version {_version(tensor)}; expected version {version} instead"
            )
    return tensors
