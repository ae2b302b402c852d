# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a weight sync: tensors, not bytes, decide at the sizes that were timed (docs/log/several_gpus.md)."""

from jetrl_verl.formats.catalog import UNQUANTIZED
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.shapes import Model


def pieces(model: Model, kind: str) -> int:
    """Tensors on the wire: those of the model, and for a quantized rollout scales and a sum of each."""
    return model.tensors_of_verl if kind == UNQUANTIZED else 2 * model.tensors + model.scales


def sync_seconds(rates: Rates, model: Model, kind: str, gpus: int) -> float:
    """verl's ``update_weights`` with the contract check, after the first ones, which compile kernels."""
    per_piece = rates["sync.bf16.piece" if kind == UNQUANTIZED else "sync.quantized.piece"]
    return pieces(model, kind) * (per_piece + (rates["sync.gather"] if gpus > 1 else 0.0))
