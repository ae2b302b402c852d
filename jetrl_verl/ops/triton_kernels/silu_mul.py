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
"""SiLU-mul and its gradient: elementwise, so any tile gives the same bits."""

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def product_of(gate, up):
    """``silu(gate) * up`` in BF16 of BF16 tiles."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)


@triton.jit
def gradients_of(dy, gate, up):
    """Gradients of gate and up in BF16, of BF16 tiles."""
    dy, gate, up = dy.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return dgate.to(tl.bfloat16), (dy * gate * sigmoid).to(tl.bfloat16)


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, y_ptr, columns, stride_gate, stride_up, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * stride_up + column, mask=mask, other=0.0)
    tl.store(y_ptr + row * columns + column, product_of(gate, up), mask=mask)


@triton.jit
def _silu_mul_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, columns, stride_gate, stride_up, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * stride_up + column, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * columns + column, mask=mask, other=0.0)
    dgate, dup = gradients_of(dy, gate, up)
    tl.store(dgate_ptr + row * columns + column, dgate, mask=mask)
    tl.store(dup_ptr + row * columns + column, dup, mask=mask)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]``, contiguous in its last dimension; halves of one tensor stay views."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See :func:`jetrl_verl.ops.silu_mul`."""
    gate_rows, up_rows = rows_of(gate), rows_of(up)
    count, columns = gate_rows.shape
    y = torch.empty((count, columns), dtype=torch.bfloat16, device=gate.device)
    if y.numel():
        _silu_mul_kernel[(count, triton.cdiv(columns, _TILE))](
            gate_rows, up_rows, y, columns, gate_rows.stride(0), up_rows.stride(0), TILE=_TILE
        )
    return y.view(gate.shape)


def silu_mul_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, BF16."""
    gate_rows, up_rows = rows_of(gate), rows_of(up)
    count, columns = gate_rows.shape
    dgate, dup = (torch.empty((count, columns), dtype=torch.bfloat16, device=gate.device) for _ in range(2))
    if dgate.numel():
        _silu_mul_backward_kernel[(count, triton.cdiv(columns, _TILE))](
            dy.reshape(-1, columns).contiguous(),
            gate_rows,
            up_rows,
            dgate,
            dup,
            columns,
            gate_rows.stride(0),
            up_rows.stride(0),
            TILE=_TILE,
        )
    return dgate.view(gate.shape), dup.view(up.shape)
