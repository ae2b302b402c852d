# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The weight sync of an actor, from gathered FP32 weights to what goes over the wire: sync/wire.py and
sync/contract.py in the order in which they follow each other.

``train/engine.py`` feeds it with verl's stream, ``benchmarks/weight_sync.py`` measures it.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from jetrl_verl.config.options import JetConfig
from jetrl_verl.metrics.quantization import QuantizationMetrics, refuse_non_finite
from jetrl_verl.models.plan import LinearPlan
from jetrl_verl.sync.contract import with_contract
from jetrl_verl.sync.operations_probe import stated_operations, stated_probe, stated_reduction
from jetrl_verl.sync.wire import SyncStatistics, measured, packed, quantize_stream


def weight_stream(
    weights: Iterable[tuple[str, torch.Tensor]],
    options: JetConfig,
    plans: Mapping[str, LinearPlan],
    device: torch.device,
    statistics: SyncStatistics,
    kept_scales: dict[str, torch.Tensor] | None = None,
    metrics: QuantizationMetrics | None = None,
    ranks: int = 1,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What an actor sends at a weight sync, small tensors :func:`~jetrl_verl.sync.wire.packed`.

    Args:
        weights: (Hugging Face name, gathered tensor), whose bytes on verl's own wire ``statistics`` has already been
            told. options: of the run.
        plans: from :func:`jetrl_verl.models.plan.plan_linears`. device: on which the probes run.
        statistics: gets sizes and duration. kept_scales: see :func:`~jetrl_verl.sync.wire.quantize_stream`.
        metrics: looks at the qdata, if it is given. ranks: tensor-parallel ones of the rollout.

    Raises:
        NonFiniteWeightError: behind the last weight, if one of them is NaN or Inf.
    """
    stream = quantize_stream(weights, plans, options.scale_rule, options.rollout, kept_scales)
    stream = refuse_non_finite(stream)
    if metrics is not None:
        stream = metrics.watch(stream)
    if options.contract_check:
        operations = stated_operations(device, options.operations)
        if options.reduction == "ordered":
            operations |= stated_reduction(device, ranks)
        stream = with_contract(
            stream,
            scale_rule=options.scale_rule,
            probe=stated_probe(device, options.rollout, options.scale_rule),
            operations=operations,
            ranks=ranks,
        )
    return measured(packed(stream), statistics)
