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
"""``silu(gate) * up``, the activation of a gated MLP: FP32 inside, one rounding to BF16.

Stock Hugging Face modules round ``silu(gate)`` to BF16 in between. On the CPU ``silu`` of a BF16 value is looked up
among its 65,536 results, see ops/reproducible.py.
"""

from functools import cache

import numpy as np
import torch

from jetrl_verl.ops._operator import operator, require_bf16, triton_kernels


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """silu and its derivative in FP32, by the 16 bits of a BF16 value read as an unsigned number."""
    bits = torch.arange(2**16, dtype=torch.int32)
    gate = (bits << 16).view(torch.float32).double()
    sigmoid = torch.sigmoid(gate)
    silu = torch.where(gate == -torch.inf, 0.0, gate * sigmoid)
    derivative = torch.where(gate.isinf(), (gate > 0).double(), sigmoid * (1 + gate * (1 - sigmoid)))
    return silu.float(), derivative.float()


def _look_up(table: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    # numpy reads 16-bit indices as they are, three times as fast as torch, which widens them to 32 or 64 first.
    bits = gate.detach().view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(table.numpy().take(bits))


def _fake(gate, up):
    return torch.empty_like(up, memory_format=torch.contiguous_format)


@operator("silu_mul(Tensor gate, Tensor up) -> Tensor", fake=_fake)
def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gate.is_cuda:
        return triton_kernels().silu_mul(gate, up)
    return _look_up(_tables()[0], gate).mul_(up.float()).to(torch.bfloat16)


class _SiLUMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_mul(gate, up)

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        gate, up = ctx.saved_tensors
        if gate.is_cuda:
            return triton_kernels().silu_mul_backward(dy, gate, up)
        dy = dy.float()
        silu, derivative = (_look_up(table, gate) for table in _tables())
        return derivative.mul_(up.float()).mul_(dy).to(torch.bfloat16), silu.mul_(dy).to(torch.bfloat16)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; differentiable in both.

    Args:
        gate, up: ``[..., I]`` BF16, possibly halves of one tensor.

    Returns:
        ``[..., I]`` BF16.

    Raises:
        TypeError: an operand is not BF16.
    """
    require_bf16("silu_mul", gate=gate, up=up)
    if torch.is_grad_enabled():
        return _SiLUMul.apply(gate, up)
    return _silu_mul(gate, up)
