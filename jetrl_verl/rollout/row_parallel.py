# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Adds the products of tensor-parallel ranks in one order, rank 0 first in FP32, which the trainer repeats.

o and down are split along K, and for more than two ranks vLLM's all-reduces add in several orders, by the size of the
batch. So row-parallel layers of more than two ranks reduce here (contract: kernels/sum_of_ranks.py). With two ranks all
orders agree and vLLM's all-reduce stays, but on a CPU without BF16 instructions, where it truncates. The data moves in
one of three ways with the same bits: vLLM's custom kernel in its one-stage form, if :func:`find_one_stage` has verified
its bits; an all-gather of small batches; all-to-all by rows and an all-gather of large ones.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from jetrl_verl import kernels
from jetrl_verl.config.support.scopes import FUSIONS_OF_REDUCTIONS
from jetrl_verl.config.support.table import refuse
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sum_of_ranks import products_of_ranks
from jetrl_verl.rollout import vllm_compat as vllm

MAX_ORDER_INVARIANT_RANKS = 2
"""Up to this many ranks any order of addition has the same bits, if it rounds to nearest."""

GATHERED_BYTES = 2**20
"""Products of a rank up to this size are all-gathered."""

ALGORITHM, IN_ONE_STAGE = "VLLM_CUSTOM_ALLREDUCE_ALGO", "1stage"
_ORDERED = "jetrl_adds_in_order"
"""Attribute that :func:`find_one_stage` sets on vLLM's custom all-reduce: whether its bits are right."""


def stock_all_reduce_matches(ranks: int, on_gpu: bool) -> bool:
    """Whether vLLM's own all-reduce over ``ranks`` has the bits of ``kernels.sum_of_ranks``."""
    return ranks == 1 or (on_gpu and ranks <= MAX_ORDER_INVARIANT_RANKS)


def custom_all_reduce() -> Any:
    """vLLM's custom all-reduce of this engine's ranks, None if there is none."""
    custom = getattr(vllm.get_tp_group().device_communicator, "ca_comm", None)
    return None if custom is None or custom.disabled else custom


def find_one_stage(device: torch.device) -> bool:
    """Set vLLM's custom kernel to one stage, unless the user chose an algorithm, and verify its bits on fixed products.

    A collective: every rank calls it once, after vLLM's communicators start and outside of CUDA graphs. Returns whether
    all ranks have the bits of ``kernels.sum_of_ranks``; the kernel is then used.
    """
    group, custom = vllm.get_tp_group(), custom_all_reduce()
    if custom is None:
        return False
    asked, ordered = ALGORITHM not in os.environ, True
    os.environ.setdefault(ALGORITHM, IN_ONE_STAGE)  # read at each call
    for products in products_of_ranks(device, group.world_size):
        total = custom.custom_all_reduce(products[group.rank_in_group])
        ordered &= total is None or torch.equal(total, kernels.sum_of_ranks(products))
    everywhere = torch.tensor(int(ordered))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group.cpu_group)
    setattr(custom, _ORDERED, bool(everywhere))
    if asked and not everywhere:
        del os.environ[ALGORITHM]
    return bool(everywhere)


def _in_one_stage(x: torch.Tensor) -> torch.Tensor | None:
    """None if vLLM's kernel has other bits, or does not support ``x``."""
    custom = custom_all_reduce()
    return custom.custom_all_reduce(x) if getattr(custom, _ORDERED, False) else None


def _gathered(x: torch.Tensor) -> torch.Tensor:
    group = vllm.get_tp_group()
    return kernels.sum_of_ranks(group.all_gather(x, 0).unflatten(0, (group.world_size, -1)).unbind(0))


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    group, rows = vllm.get_tp_group(), x.shape[0]
    x = F.pad(x, (0, 0, 0, -rows % group.world_size)).contiguous()
    mine = torch.empty_like(x)
    dist.all_to_all_single(mine, x, group=group.device_group)
    share = kernels.sum_of_ranks(mine.unflatten(0, (group.world_size, -1)).unbind(0))
    return group.all_gather(share, 0)[:rows]


@operator("ordered_all_reduce(Tensor x) -> Tensor", fake=torch.empty_like, backends=None)
def _ordered_all_reduce(x: torch.Tensor) -> torch.Tensor:
    if (total := _in_one_stage(x)) is not None:
        return total
    # Graphs are captured for few rows, and vLLM's all-gather supports capture.
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    small = x.numel() * x.element_size() <= GATHERED_BYTES
    return _gathered(x) if small or captured else _by_rows(x).contiguous()


def ordered_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum of the tensor-parallel ranks' ``x [M, N]`` BF16, rank 0 first in FP32, rounded once; on every rank."""
    return _ordered_all_reduce(x)


class OrderedRowParallelLinear(vllm.RowParallelLinear):
    """vLLM's own, with the products of ranks added in the trainer's order."""

    def forward(self, input_: torch.Tensor):
        bias = None if self.tp_rank > 0 or self.skip_bias_add else self.bias
        output = ordered_all_reduce(self.quant_method.apply(self, input_, bias))
        return (output, self.bias if self.skip_bias_add else None) if self.return_bias else output


def order_reduction(layer: torch.nn.Module) -> None:
    """Make a row-parallel layer add in the trainer's order, in place, unless vLLM's all-reduce does.

    Raises:
        UnsupportedConfiguration: a row-parallel layer that gets whole rows, or does not reduce.
    """
    if not isinstance(layer, vllm.RowParallelLinear) or isinstance(layer, OrderedRowParallelLinear):
        return
    if stock_all_reduce_matches(layer.tp_size, layer.weight.is_cuda):
        return
    if type(layer) is not vllm.RowParallelLinear or not (layer.input_is_parallel and layer.reduce_results):
        over = f"the row-parallel layer {layer.prefix} over {layer.tp_size} GPUs"
        what = f"{over}, a {type(layer).__name__} which does not add its ranks' products as vLLM's does,"
        refuse("layer_replaced_in_vllm", what=what)
    layer.__class__ = OrderedRowParallelLinear


def fused_reductions(config: vllm.VllmConfig) -> list[str]:
    """The enabled passes of an engine over several ranks that replace a layer's all-reduce."""
    if config.parallel_config.tensor_parallel_size == 1:
        return []
    return [name for name in FUSIONS_OF_REDUCTIONS if getattr(config.compilation_config.pass_config, name)]


def reduce_ranks(x: torch.Tensor) -> torch.Tensor:
    """The reduction of this engine's row-parallel layers."""
    if stock_all_reduce_matches(vllm.get_tp_group().world_size, x.is_cuda):
        return vllm.tensor_model_parallel_all_reduce(x)
    return ordered_all_reduce(x)
