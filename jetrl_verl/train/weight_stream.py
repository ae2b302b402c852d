# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An actor's part of a weight sync: its constants, its statement, and the parts in sending order."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from jetrl_verl.config.options import JetConfig
from jetrl_verl.kernels.probe_inputs import PLAIN, Variant
from jetrl_verl.metrics.quantization import QuantizationMetrics
from jetrl_verl.models import family
from jetrl_verl.models.families.base import Family, leaf, read
from jetrl_verl.models.plan import LinearPlan
from jetrl_verl.nn.chunked_logits import used_vocabulary
from jetrl_verl.sync.constants import constants_of
from jetrl_verl.sync.finite import FiniteCheck
from jetrl_verl.sync.operations_probe import stated_operations, stated_probe, stated_reduction
from jetrl_verl.sync.quantize import Weight
from jetrl_verl.sync.stacks import Name
from jetrl_verl.sync.statement import Statement, compare_ranks, statement_parts
from jetrl_verl.sync.wire import Part, parts_of_weight


def stated_constants(model: nn.Module) -> dict[str, Any]:
    """The trainer's constants (:func:`~jetrl_verl.sync.constants.constants_of`), before FSDP wraps its modules."""
    decoder = family(model.config)

    def experts(layer: nn.Module, names: Family) -> tuple[int, int, str, bool]:
        router, weights = (layer.get_submodule(name) for name in (names.experts.router, names.experts.module))
        count = getattr(weights, leaf(names.experts.down)).shape[0]
        return count, router.top_k, names.experts.scoring, names.experts.renormalizes(router)

    vocabulary, masked = used_vocabulary(model)
    table = getattr(model.get_submodule(decoder.rotary_embedding), "shared_table", None)
    return constants_of(
        model,
        decoder,
        scale=lambda layer, names: layer.get_submodule(names.attention).scaling,
        experts=experts,
        rotary=read(model.config, "rope_parameters") if table is None else table,
        vocabulary=vocabulary,
        masked=masked,
    )


def statement_of(
    options: JetConfig,
    plans: Mapping[str, LinearPlan],
    device: torch.device,
    *,
    ranks: int = 1,
    variant: Variant = PLAIN,
    **facts: Any,
) -> Statement | None:
    """The actor's statement about a sync; None without the contract check.

    Args:
        options: of the run. plans: of its linear layers. device: of the probes.
        ranks: tensor-parallel size of the rollout. variant: of the model (``Family.variant``).
        facts: constants and tied names of :class:`~jetrl_verl.sync.statement.Manifest`.
    """
    if not options.contract_check:
        return None
    mixture = options.rollout if any(plan.experts > 1 for plan in plans.values()) else None
    operations = stated_operations(device, options.operations, options.kv_cache, mixture=mixture, variant=variant)
    if options.reduction == "ordered":
        operations |= stated_reduction(device, ranks)
    probe = stated_probe(device, options.rollout, options.scale_rule)
    return Statement(ranks=ranks, scale_rule=options.scale_rule, probe=probe, operations=operations, **facts)


def sync_parts(
    weights: Iterable[tuple[Name, Weight]], statement: Statement | None, metrics: QuantizationMetrics | None = None
) -> Iterator[Part]:
    """A sync's parts in sending order: those of each weight, then the statement's.

    Raises:
        NonFiniteWeightError: after the last weight, if one is NaN or Inf.
        ContractViolation: before the statement, if the trainer's ranks have different weights.
    """
    finite = FiniteCheck()
    if metrics is not None:
        metrics.start_sync()
    for name, weight in weights:
        finite.add(name, weight)
        if metrics is not None:
            metrics.add(name, weight)
        if statement is not None:
            statement.add(name, weight)
        yield from parts_of_weight(name, weight)
    finite.finish()
    if statement is not None:
        manifest, sums = statement.finish()
        compare_ranks(manifest, sums)
        yield from statement_parts(manifest, sums)
