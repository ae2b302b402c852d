# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stacks: several weights of one width in one tensor, or several vectors, which a sync handles by one call each.

A sync's stream has items (name, tensor); if ``name`` is a :class:`Stack`, the tensor holds several weights, one after
the other. train/gather.py makes stacks; a stream of plain pairs has the same bits.
"""

from collections.abc import Iterator

import torch


class Stack:
    """Names of the weights in one tensor, and the number of rows or elements of each.

    It also names tensors derived from it, scales or sums, with rows in proportion. Stacks are compared by identity and
    kept from sync to sync.
    """

    def __init__(self, names: tuple[str, ...], rows: tuple[int, ...]) -> None:
        self.names, self.rows = names, rows
        self._renamed: dict[tuple[str, str], Stack] = {("", ""): self}

    def __repr__(self) -> str:
        return f"Stack({self.names[0]} to {self.names[-1]}, {sum(self.rows)} rows)"

    def lengths(self, length: int) -> list[int]:
        """Rows of each name in a tensor whose first dimension is ``length``."""
        whole = sum(self.rows)
        return list(self.rows) if length == whole else [rows * length // whole for rows in self.rows]

    def renamed(self, prefix: str, suffix: str) -> "Stack":
        """The stack with a prefix and a suffix on each name; cached."""
        stack = self._renamed.get((prefix, suffix))
        if stack is None:
            names = tuple(f"{prefix}{name}{suffix}" for name in self.names)
            stack = self._renamed[prefix, suffix] = Stack(names, self.rows)
        return stack


Name = str | Stack
"""Name of an item of a sync's stream."""


def renamed(name: Name, prefix: str = "", suffix: str = "") -> Name:
    """A name, or each name of a stack, with a prefix and a suffix."""
    return f"{prefix}{name}{suffix}" if isinstance(name, str) else name.renamed(prefix, suffix)


def names_of(name: Name) -> tuple[str, ...]:
    """The name, or the names of a stack."""
    return (name,) if isinstance(name, str) else name.names


def parts_of(name: Name, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, its rows of ``tensor``) of an item."""
    if isinstance(name, str):
        yield name, tensor
    else:
        yield from zip(name.names, tensor.split(name.lengths(len(tensor))), strict=True)
