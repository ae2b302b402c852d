# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stacks: several weights of one width in one tensor, or several vectors, which a sync handles by one call each.

A sync's stream has items (name, weight); if ``name`` is a :class:`Stack`, the weight holds several, one after the
other. train/gather.py makes stacks; a stream of plain pairs has the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Stack:
    """Names of the weights in one tensor, and the number of rows or elements of each.

    It also describes tensors derived from it, scales or sums, with rows in proportion.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Stack({self.names[0]} to {self.names[-1]}, {sum(self.rows)} rows)"

    def lengths(self, length: int) -> list[int]:
        """Rows of each name in a tensor whose first dimension is ``length``."""
        whole = sum(self.rows)
        return list(self.rows) if length == whole else [rows * length // whole for rows in self.rows]


Name = str | Stack
"""Name of an item of a sync's stream."""


def renamed(name: Name, suffix: str) -> Name:
    """A name, or each name of a stack, with a suffix."""
    return name + suffix if isinstance(name, str) else Stack(tuple(one + suffix for one in name.names), name.rows)


def names_of(name: Name) -> tuple[str, ...]:
    """The name, or the names of a stack."""
    return (name,) if isinstance(name, str) else name.names


def parts_of(name: Name, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, its rows of ``tensor``) of an item."""
    if isinstance(name, str):
        yield name, tensor
    else:
        yield from zip(name.names, tensor.split(name.lengths(len(tensor))), strict=True)


def to_json(name: Name) -> Any:
    """A name as JSON data."""
    return name if isinstance(name, str) else [name.names, name.rows]


def from_json(data: Any) -> Name:
    """Inverse of :func:`to_json`."""
    return data if isinstance(data, str) else Stack(*map(tuple, data))
