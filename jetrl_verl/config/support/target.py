# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows about ``_target_``: the class that the YAML of a precision names for a node of verl's configuration."""

from ..precision import target_of
from .row import Row, Scope, Wrong


def target_row(node: str, precision: str, scope: Scope) -> Row:
    """Row of a node whose class is that of a precision's YAML, and of no other."""
    return Row(
        f"target_of_{node}",
        "another class in the place of ours",
        scope,
        "the flag works through this key",
        f"Set {{key}}={target_of(node, precision)}",
        (f"{node}._target_",),
        Wrong("another class", lambda value, get: value != target_of(node, precision)),
        example="my.Config",
        listed=False,
    )
