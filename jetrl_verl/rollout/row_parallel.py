# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How a rollout over several GPUs adds the products of its ranks, so that the trainer can round at the same places.

o and down are split along K: each rank multiplies its slice, rounds to BF16, and the ranks' products are added. vLLM
adds them by whichever of five all-reduces fits the size of the batch, and for more than two ranks those add in several
orders (the custom kernel's two-stage form begins at the rank that owns the row). Under ``jet_fp8`` a row must not
depend on the batch around it, and the trainer must be able to repeat it. So the layers of more than two ranks reduce in
one order here, rank 0 first (kernels/sum_of_ranks.py). With two ranks every order is this one, and vLLM's all-reduce
stays on a GPU. On a CPU without BF16 instructions vLLM's cuts the sum instead of rounding it, so there it is ours, too.

vLLM's passes that would put something else in the place of a sum are off (config/vllm_arguments.py): with the norm
behind it or cut in halves for sequence parallelism. Its several all-reduces may stay: with two ranks all of them have
these bits, by symmetric memory or not, and with more ours moves products by all-to-all and all-gather, which add
nothing. What else it adds over ranks, the embedding, has a single term that is not zero.

Three ways to move the data, the same bits.

- *vLLM's custom kernel in one stage*, up to its limit of 8 MiB, of 256 KiB with eight ranks and NVLink multicast: each
  rank reads the products of all over NVLink and adds them, rank 0 first, in FP32, rounded once. By itself it works so
  for small batches alone; an environment variable tells it to for all. Whether it then has these bits is not assumed:
  :func:`find_one_stage` asks it to add products whose sum rounds otherwise in any other order. Where it fails, or there
  is none (a CPU, PCIe, ranks of several hosts), the other two do all of it.
- *Gathered whole*, a small batch: each rank receives the products of all others and adds them itself, one collective
  and one kernel.
- *By rows*, a large one: each rank adds its share of the rows and hands the result round, two collectives, and
  2 / ranks of the bytes.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import RowParallelLinear

from jetrl_verl import kernels
from jetrl_verl.config.support.general import FUSIONS_OF_REDUCTIONS
from jetrl_verl.config.support.table import refuse
from jetrl_verl.kernels.operator import operator
from jetrl_verl.sync.operations_probe import products_of_ranks

EVERY_ORDER_IS_ONE = 2
"""Up to this many ranks any order of adding has the same bits, if it rounds to nearest."""

GATHERED_BYTES = 2**20
"""Products of a rank up to this size are gathered whole."""

ALGORITHM, IN_ONE_STAGE = "VLLM_CUSTOM_ALLREDUCE_ALGO", "1stage"
_ORDERED = "jetrl_adds_in_order"
"""Attribute of vLLM's custom all-reduce, by which :func:`find_one_stage` says that it has the bits."""


def keeps_vllms(ranks: int, on_gpu: bool) -> bool:
    """Whether vLLM's all-reduce of so many ranks has the bits of ``kernels.sum_of_ranks``."""
    return ranks == 1 or (on_gpu and ranks <= EVERY_ORDER_IS_ONE)


def custom_all_reduce() -> Any:
    """vLLM's custom all-reduce of this engine's ranks, None where there is none."""
    custom = getattr(get_tp_group().device_communicator, "ca_comm", None)
    return None if custom is None or custom.disabled else custom


def find_one_stage(device: torch.device) -> bool:
    """Let vLLM's custom kernel work in one stage in this process, unless the user has said how it is to work, and find
    out whether it has the bits of ``kernels.sum_of_ranks``, by asking it; then sums are its own.

    A collective: every rank calls it once, behind the start of vLLM's communicators and outside of a CUDA graph.
    """
    group, custom = get_tp_group(), custom_all_reduce()
    if custom is None:
        return False
    asked, ordered = ALGORITHM not in os.environ, True
    os.environ.setdefault(ALGORITHM, IN_ONE_STAGE)  # read at each call
    for products in products_of_ranks(device, group.world_size):
        found = custom.custom_all_reduce(products[group.rank_in_group])
        ordered &= found is None or torch.equal(found, kernels.sum_of_ranks(products))
    everywhere = torch.tensor(int(ordered))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group.cpu_group)
    setattr(custom, _ORDERED, bool(everywhere))
    if asked and not everywhere:
        del os.environ[ALGORITHM]
    return bool(everywhere)


def _in_one_stage(x: torch.Tensor) -> torch.Tensor | None:
    """None where vLLM's kernel has other bits, or does not take ``x``."""
    custom = custom_all_reduce()
    return custom.custom_all_reduce(x) if getattr(custom, _ORDERED, False) else None


def _gathered(x: torch.Tensor) -> torch.Tensor:
    group = get_tp_group()
    return kernels.sum_of_ranks(group.all_gather(x, 0).unflatten(0, (group.world_size, -1)).unbind(0))


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    group, rows = get_tp_group(), x.shape[0]
    x = F.pad(x, (0, 0, 0, -rows % group.world_size)).contiguous()
    mine = torch.empty_like(x)
    dist.all_to_all_single(mine, x, group=group.device_group)
    share = kernels.sum_of_ranks(mine.unflatten(0, (group.world_size, -1)).unbind(0))
    return group.all_gather(share, 0)[:rows]


@operator("ordered_all_reduce(Tensor x) -> Tensor", fake=torch.empty_like)
def _ordered_all_reduce(x: torch.Tensor) -> torch.Tensor:
    if (found := _in_one_stage(x)) is not None:
        return found
    # A graph is captured for few rows, and vLLM's own gather is made to be captured.
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    small = x.numel() * x.element_size() <= GATHERED_BYTES
    return _gathered(x) if small or captured else _by_rows(x).contiguous()


def ordered_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum of the tensor-parallel ranks' ``x [M, N]`` BF16, rank 0 first in FP32, rounded once; on every rank."""
    return _ordered_all_reduce(x)


class OrderedRowParallelLinear(RowParallelLinear):
    """vLLM's own, whose ranks' products are added in one order."""

    def forward(self, input_: torch.Tensor):
        bias = None if self.tp_rank > 0 or self.skip_bias_add else self.bias
        output = ordered_all_reduce(self.quant_method.apply(self, input_, bias))
        return (output, self.bias if self.skip_bias_add else None) if self.return_bias else output


def order_reduction(layer: torch.nn.Module) -> None:
    """Let ``layer`` add its ranks' products in one order, in place; other layers stay, and where vLLM's sum is that.

    Raises:
        UnsupportedConfiguration: a row-parallel layer that is handed whole rows, or does not reduce.
    """
    if type(layer) is not RowParallelLinear or keeps_vllms(layer.tp_size, layer.weight.is_cuda):
        return
    if not (layer.input_is_parallel and layer.reduce_results):
        refuse("row_parallel_in_vllm", layer=layer.prefix, ranks=layer.tp_size)
    layer.__class__ = OrderedRowParallelLinear


def fused_reductions(config: VllmConfig) -> list[str]:
    """The passes of an engine over several ranks that put something else in the place of a layer's sum."""
    if config.parallel_config.tensor_parallel_size == 1:
        return []
    return [name for name in FUSIONS_OF_REDUCTIONS if getattr(config.compilation_config.pass_config, name)]


def reduce_ranks(x: torch.Tensor) -> torch.Tensor:
    """The reduction that this engine's row-parallel layers run, for the contract's probe."""
    if keeps_vllms(get_tp_group().world_size, x.is_cuda):
        return tensor_model_parallel_all_reduce(x)
    return ordered_all_reduce(x)
