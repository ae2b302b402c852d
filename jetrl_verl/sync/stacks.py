# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights that lie below each other in one tensor go through a weight sync as one: quantized, judged, summed, sent and
copied by one call.

A stream of a sync has items (name, tensor). Where ``name`` is a :class:`Stack`, the tensor is several weights of one
width, or vectors one behind the other. What feeds a sync makes stacks (train/gather.py); a stream without any, of plain
(name, tensor) pairs, comes to the same bits.
"""

from collections.abc import Iterator

import torch


class Stack:
    """Names of what lies below each other in one tensor, and how many rows or elements each has.

    The same object names what is made of the tensor, scales or sums, whose rows are in proportion. It is compared by
    identity: who makes stacks keeps them from sync to sync, so what is derived of one is derived once.
    """

    def __init__(self, names: tuple[str, ...], rows: tuple[int, ...]) -> None:
        self.names, self.rows = names, rows
        self._renamed: dict[tuple[str, str], Stack] = {("", ""): self}

    def __repr__(self) -> str:
        return f"Stack({self.names[0]} to {self.names[-1]}, {sum(self.rows)} rows)"

    def lengths(self, length: int) -> list[int]:
        """How much of something with a first dimension of ``length`` belongs to each name."""
        whole = sum(self.rows)
        return list(self.rows) if length == whole else [rows * length // whole for rows in self.rows]

    def renamed(self, prefix: str, suffix: str) -> "Stack":
        """The same with a prefix and a suffix on each name; one object for the same words."""
        found = self._renamed.get((prefix, suffix))
        if found is None:
            names = tuple(f"{prefix}{name}{suffix}" for name in self.names)
            found = self._renamed[prefix, suffix] = Stack(names, self.rows)
        return found


Name = str | Stack
"""Of an item of a sync's stream."""


def renamed(name: Name, prefix: str = "", suffix: str = "") -> Name:
    """A name, or each of a stack's, between a prefix and a suffix."""
    return f"{prefix}{name}{suffix}" if isinstance(name, str) else name.renamed(prefix, suffix)


def names_of(name: Name) -> tuple[str, ...]:
    """One name or several."""
    return (name,) if isinstance(name, str) else name.names


def parts_of(name: Name, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, its rows of ``tensor``) of an item."""
    if isinstance(name, str):
        yield name, tensor
    else:
        yield from zip(name.names, tensor.split(name.lengths(len(tensor))), strict=True)
