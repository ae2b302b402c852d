# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is sampled of a tensor for the quantization metrics, and what a quantization of it did, in sums that add up."""

from collections.abc import Iterable, Mapping

import torch

from jetrl_verl.formats.caches import KVCache
from jetrl_verl.formats.format import Format
from jetrl_verl.reference import BLOCK

SAMPLED_LAYERS = 4
"""Most decoder layers that are measured, spread evenly from the first to the last."""


def sampled_layers(layers: Iterable[int]) -> list[int]:
    """At most ``SAMPLED_LAYERS`` of the layers' numbers, ascending."""
    places = sorted(layers)
    count = min(SAMPLED_LAYERS, len(places))
    return sorted({places[round(i * (len(places) - 1) / max(count - 1, 1))] for i in range(count)})


def sampled_rows(rows: torch.Tensor, step: int) -> torch.Tensor:
    """One group of 128 of the rows ``[M, ...]``, another at each ``step``, the same for all tensors of as many rows."""
    # A stride that shares no factor with usual numbers of groups visits each of them in turn.
    start = step * 7919 % -(-len(rows) // BLOCK) * BLOCK
    return rows[start : start + BLOCK]


def tally(
    number_format: Format | KVCache,
    values: torch.Tensor,
    qdata: torch.Tensor,
    restored: torch.Tensor,
    dims: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """What one quantization did, in sums that can be added over samples.

    Args:
        number_format: of ``qdata``, one that is measured, or the cache that holds them.
        values: the tensor that was quantized. qdata: same shape. restored: ``qdata * scale``, FP32.
        dims: over which to add, all by default.

    Returns:
        ``[..., 5]`` FP64: non-zero elements; of them those that became zero; of them those that became subnormal; sum
        of squares of the values; sum of squares of what rounding changed. A NaN or Inf makes the last two NaN.
    """
    values = values.double()
    present = values != 0
    zero, subnormal = number_format.lost(qdata)
    noise = (values - restored.double()).square()
    each = (present, present & zero, present & subnormal, values.square(), noise)
    return torch.stack([part.double().sum(dims) for part in each], dim=-1)


def shares(tallies: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, float]:
    """Metrics of tallies by (kind, tensor): ``<kind>/<tensor>/{underflow,subnormal,snr_db}``.

    A tensor of zeros has no metric, a tensor that rounding left unchanged no ``snr_db``. Waits for the device once.
    """
    if not tallies:
        return {}
    metrics = {}
    for (kind, tensor), sums in zip(tallies, torch.stack(list(tallies.values())).tolist(), strict=True):
        present, zero, subnormal, signal, noise = sums
        if present == 0:
            continue
        metrics[f"{kind}/{tensor}/underflow"] = zero / present
        metrics[f"{kind}/{tensor}/subnormal"] = subnormal / present
        if noise != 0:
            metrics[f"{kind}/{tensor}/snr_db"] = 10.0 * float(torch.tensor(signal / noise).log10())
    return metrics


def shares_of_experts(tallies: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, float]:
    """Metrics of tallies ``[E, 5]`` by (kind, tensor): ``<kind>/<tensor>/{underflow_expert_max,snr_db_expert_min}``, of
    the experts that the sample has something of. Waits for the device once."""
    if not tallies:
        return {}
    metrics = {}
    for (kind, tensor), by_expert in zip(tallies, torch.stack(list(tallies.values())).cpu(), strict=True):
        present, zero, _, signal, noise = by_expert[by_expert[:, 0] > 0].unbind(dim=1)
        if len(present):
            metrics[f"{kind}/{tensor}/underflow_expert_max"] = (zero / present).max().item()
        if len(ratios := (signal / noise)[noise != 0]):
            metrics[f"{kind}/{tensor}/snr_db_expert_min"] = (10.0 * ratios.log10()).min().item()
    return metrics
