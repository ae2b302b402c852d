# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Samples of tensors for the quantization metrics, and sums that describe their quantization."""

from collections.abc import Iterable, Mapping

import torch

from jetrl_verl.formats.caches import KVCache
from jetrl_verl.formats.format import Format

SAMPLED_LAYERS = 4
"""Most decoder layers measured, spread evenly from the first to the last."""


def sampled_layers(layers: Iterable[int]) -> list[int]:
    """At most ``SAMPLED_LAYERS`` of the layers' numbers, ascending."""
    places = sorted(layers)
    count = min(SAMPLED_LAYERS, len(places))
    return sorted({places[round(i * (len(places) - 1) / max(count - 1, 1))] for i in range(count)})


def sampled_rows(rows: torch.Tensor, step: int, group: int) -> torch.Tensor:
    """One group of the rows ``[M, ...]``, which depends on ``step`` and M alone."""
    # A prime step visits every group in turn for usual numbers of groups.
    start = step * 7919 % -(-len(rows) // group) * group
    return rows[start : start + group]


def tally(
    number_format: Format | KVCache,
    values: torch.Tensor,
    qdata: torch.Tensor,
    restored: torch.Tensor,
    dims: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Sums that describe one quantization and add over samples.

    Args:
        number_format: format of ``qdata``, or the KV cache.
        values: the tensor that was quantized. qdata: same shape. restored: ``qdata * scale``, FP32.
        dims: dimensions to sum over, all by default.

    Returns:
        ``[..., 5]`` FP64: non-zero elements, those that became zero, those that became subnormal, sum of squares of the
        values, sum of squares of the rounding errors; NaN or Inf make the last two NaN.
    """
    values = values.double()
    present = values != 0
    zero, subnormal = number_format.lost(qdata)
    noise = (values - restored.double()).square()
    terms = (present, present & zero, present & subnormal, values.square(), noise)
    return torch.stack([term.double().sum(dims) for term in terms], dim=-1)


def shares(tallies: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, float]:
    """Metrics of tallies by (kind, tensor): ``<kind>/<tensor>/{underflow,subnormal,snr_db}``.

    A tensor of zeros has no metric, an exact quantization no ``snr_db``. Waits for the device once.
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
    """Metrics of tallies ``[E, 5]`` by (kind, tensor): ``<kind>/<tensor>/{underflow_expert_max,snr_db_expert_min}``.

    Only experts with sampled rows count. Waits for the device once.
    """
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
