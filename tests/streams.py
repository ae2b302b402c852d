# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Streams of a weight sync as tests look at them."""

from collections.abc import Iterable, Iterator

import torch

from jetrl_verl.sync.stacks import Name, parts_of


def apart(stream: Iterable[tuple[Name, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight of a stream by itself, under its own name; of what is made of a stack, its part of that."""
    for name, tensor in stream:
        yield from parts_of(name, tensor)
