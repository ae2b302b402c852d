# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Unstacks the stream of a weight sync."""

from collections.abc import Iterable, Iterator

import torch

from jetrl_verl.sync.stacks import Name, parts_of


def unstacked(stream: Iterable[tuple[Name, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight of a stream, or what was computed from it, under its own name."""
    for name, tensor in stream:
        yield from parts_of(name, tensor)
