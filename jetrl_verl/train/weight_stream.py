# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An actor's weight sync, from gathered weights to pieces of the wire (sync/wire.py, sync/contract.py)."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.support.table import refuse
from jetrl_verl.formats.sums import odd_constants
from jetrl_verl.metrics.quantization import QuantizationMetrics, refuse_non_finite
from jetrl_verl.models import family
from jetrl_verl.models.families.base import Routing, leaf
from jetrl_verl.models.plan import LinearPlan
from jetrl_verl.sync.contract import SUM_PREFIX, ContractViolation, with_contract
from jetrl_verl.sync.operations_probe import stated_operations, stated_probe, stated_reduction
from jetrl_verl.sync.stacks import Name, names_of
from jetrl_verl.sync.wire import SyncStatistics, measured, packed, quantize_stream


def same_on_every_rank(stream: Iterable[tuple[Name, torch.Tensor]]) -> Iterator[tuple[Name, torch.Tensor]]:
    """Pass a sync's stream through; at its end, compare the contract's sums over the trainer's ranks.

    A rollout worker compares itself with its own rank alone, so it cannot see that ranks have drifted apart.

    Args:
        stream: from :func:`~jetrl_verl.sync.contract.with_contract`; every rank of the default group iterates it.

    Raises:
        ContractViolation: after the last tensor, on every rank, naming the first tensor that differs.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    names: list[str] = []
    lengths: list[int] = []
    sums: list[torch.Tensor] = []
    for name, tensor in stream:
        if not alone and names_of(name)[0].startswith(SUM_PREFIX):
            sums.append(tensor.flatten())
            names += names_of(name)
            lengths += [tensor.numel()] if isinstance(name, str) else name.lengths(tensor.numel())
        yield name, tensor
    if not sums:
        return
    together = torch.cat(sums)
    # Running sums at the end of each tensor, modulo 2^64: few words to gather, and the first that differs names the
    # first tensor that does.
    ends = torch.tensor(lengths).cumsum(0).to(together.device) - 1
    mine = (together * odd_constants(len(together), together.device)).cumsum(0)[ends]
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    differing = (torch.stack(ranks) != ranks[0]).nonzero().tolist()
    if differing:
        tensor, rank = min((tensor, rank) for rank, tensor in differing)
        raise ContractViolation(
            f"contract check: {names[tensor].removeprefix(SUM_PREFIX)} of the trainer's rank {rank} differs from that "
            "of rank 0: the ranks train different policies. Set actor_rollout_ref.actor.strategy=fsdp2, and look for "
            "code that changes weights or gradients on one rank alone."
        )


def stated_routing(model: nn.Module) -> Routing | None:
    """How the trainer's mixture chooses experts, read from its modules before FSDP wraps them; None for a dense model.

    Raises:
        UnsupportedConfiguration: its layers choose differently.
    """
    mixture = family(model.config).experts
    if mixture is None:
        return None
    routings = set()
    for layer in model.get_decoder().layers:
        router, experts = layer.get_submodule(mixture.router), layer.get_submodule(mixture.module)
        count = getattr(experts, leaf(mixture.down)).shape[0]
        routings.add(Routing(count, router.top_k, mixture.scoring, bool(router.norm_topk_prob)))
    if len(routings) != 1:
        refuse("routing_by_layer")
    return routings.pop()


def weight_stream(
    weights: Iterable[tuple[Name, torch.Tensor]],
    options: JetConfig,
    plans: Mapping[str, LinearPlan],
    device: torch.device,
    statistics: SyncStatistics,
    kept_scales: dict[str, torch.Tensor] | None = None,
    metrics: QuantizationMetrics | None = None,
    ranks: int = 1,
    routing: Routing | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str, torch.Tensor]]:
    """The pieces (:func:`~jetrl_verl.sync.wire.packed`) that an actor sends at a weight sync.

    Args:
        weights: (Hugging Face name or stack of them, gathered tensor). options: of the run.
        plans: from :func:`jetrl_verl.models.plan.plan_linears`. device: of the probes.
        statistics: gets sizes and duration. kept_scales: see :func:`~jetrl_verl.sync.wire.quantize_stream`.
        metrics: watches the qdata, if given. ranks: tensor-parallel size of the rollout.
        routing: from :func:`stated_routing`. tied: see :func:`~jetrl_verl.sync.contract.with_contract`.

    Raises:
        NonFiniteWeightError: after the last weight, if one is NaN or Inf.
        ContractViolation: after the contract, if it is checked and the trainer's ranks have different weights.
    """
    stream = quantize_stream(weights, plans, options.scale_rule, options.rollout, kept_scales)
    stream = refuse_non_finite(stream)
    if metrics is not None:
        stream = metrics.watch(stream)
    if options.contract_check:
        operations = stated_operations(device, options.operations, options.kv_cache, mixture=routing is not None)
        if options.reduction == "ordered":
            operations |= stated_reduction(device, ranks)
        stream = with_contract(
            stream,
            scale_rule=options.scale_rule,
            probe=stated_probe(device, options.rollout, options.scale_rule),
            operations=operations,
            routing=routing,
            ranks=ranks,
            tied=tied,
        )
        stream = same_on_every_rank(stream)
    return measured(packed(stream), statistics)
