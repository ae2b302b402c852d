# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What leaves the trainer at a weight sync: codes and scales for the quantised layers, BF16 for the rest.

Weights are quantised here, once, from the BF16 value of the gathered master weight, which is the value that the
trainer's own forward quantises. The rollout copies the codes and never sees a BF16 weight, so the two sides cannot
round differently (a trainer quantising its FP32 master against a rollout quantising the BF16 export has been reported
to cost a factor of 20 in k3_kl, xtuner #2044). The wire carries 1.0002 bytes per quantised weight, 1.0007 with the
contract check's sums; verl's stock wire carries FP32.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from jetrl_verl import kernels, numerics
from jetrl_verl.layers import LinearPlan, plan_of
from jetrl_verl.observe.contract import SCALE_SUFFIX


@dataclass
class SyncStatistics:
    """Size and duration of one weight sync as the sender saw it.

    Attributes:
        bytes: sent. stock_bytes: what the same tensors weigh on verl's own wire.
        seconds: from the first tensor asked for to the last one taken, transfer included.
    """

    bytes: int = 0
    stock_bytes: int = 0
    seconds: float = 0.0


def quantise_stream(
    weights: Iterable[tuple[str, torch.Tensor]],
    plans: Mapping[str, LinearPlan],
    scale_rule: str,
    rollout: str = "fp8",
    fixed_scales: dict[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace each planned weight by its codes followed by its scales; cast every other floating tensor to BF16.

    Args:
        weights: (Hugging Face name, full tensor) of any floating type.
        plans: from :func:`jetrl_verl.layers.plan_linears`.
        scale_rule: rule of the codes.
        rollout: format of the codes, ``fp8`` or ``int8``.
        fixed_scales: of INT8 weights, by name: those that are in it are used, others are made and put in. 0 stands
            for a row that had nothing but zero codes so far; its scale is made once it has others. None: all are made.

    Yields:
        ``<name>`` E4M3 [N, K] then ``<name>_scale_inv`` FP32 [N/128, K/128] for a planned weight, or INT8 [N, K] then
        FP32 [N, 1]; else ``<name>`` BF16.
    """
    for name, tensor in weights:
        tensor = tensor.detach()
        plan = plan_of(name, plans) if name.endswith(".weight") else None
        if plan is not None and plan.quantised:
            tensor = tensor.to(torch.bfloat16)
            if rollout != "int8":
                codes, scales = kernels.quantize_128x128(tensor, scale_rule)
            else:
                codes, scales = kernels.quantize_int8(tensor)
                if fixed_scales is not None:
                    made = torch.where(codes.any(dim=-1, keepdim=True), scales, 0.0)
                    kept = fixed_scales.get(name, made)
                    fixed_scales[name] = kept = torch.where(kept == 0, made, kept)
                    codes, scales = numerics.quantize_int8(tensor, torch.where(kept == 0, scales, kept))
            yield name, codes
            yield name + SCALE_SUFFIX, scales
        else:
            yield name, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def measured(
    weights: Iterable[tuple[str, torch.Tensor]], statistics: SyncStatistics
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a stream through and add its size and the time until it is drained to ``statistics``."""
    started = time.perf_counter()
    for name, tensor in weights:
        statistics.bytes += tensor.nbytes
        yield name, tensor
    statistics.seconds += time.perf_counter() - started


def counted_stock(
    weights: Iterable[tuple[str, torch.Tensor]], statistics: SyncStatistics
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass verl's own stream through and count its bytes."""
    for name, tensor in weights:
        statistics.stock_bytes += tensor.nbytes
        yield name, tensor
