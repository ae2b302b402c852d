# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``routed + sigmoid(logit) shared``, a token's experts and its shared expert: FP32 inside, one rounding to BF16."""

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl import reference
from jetrl_verl.kernels.device.elementary import sigmoid
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import dispatched, operator, require_bf16, require_fp32, require_shape
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2

__all__ = ["add_shared_expert"]

_TILE = 1024
"""Elements of a row in a program of four warps."""

implements("add_shared_expert", "reference")(reference.add_shared_expert)


@implements("add_shared_expert_backward", "reference")
def reference_add_shared_expert_backward(
    dy: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``shared`` in BF16 and of ``logits`` in FP32; that of ``routed`` is ``dy``."""
    dy, factor = dy.float(), logits.sigmoid()
    inner = (dy * shared.float()).sum(dim=1, keepdim=True)
    return (dy * factor).to(torch.bfloat16), inner * factor * (-logits).sigmoid()


@jit
def _add_kernel(routed_ptr, shared_ptr, logits_ptr, out_ptr, columns, TILE: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask, offsets = column < columns, token * columns + column
    routed = tl.load(routed_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    out = routed + sigmoid(tl.load(logits_ptr + token)) * shared
    tl.store(out_ptr + offsets, out.to(tl.bfloat16), mask=mask)


@jit
def _backward_kernel(dy_ptr, shared_ptr, logits_ptr, dshared_ptr, dlogits_ptr, columns, WIDTH: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask, offsets = column < columns, token * columns + column
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    logit = tl.load(logits_ptr + token)
    factor = sigmoid(logit)
    tl.store(dshared_ptr + offsets, (dy * factor).to(tl.bfloat16), mask=mask)
    tl.store(dlogits_ptr + token, tl.sum(dy * shared, axis=0) * factor * sigmoid(-logit))


@implements("add_shared_expert", "triton")
def triton_add_shared_expert(routed: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.add_shared_expert`."""
    out = torch.empty(routed.shape, dtype=torch.bfloat16, device=routed.device)
    if out.numel():
        operands = routed.contiguous(), shared.contiguous(), logits.contiguous(), out
        columns = out.shape[1]
        _add_kernel[(len(out), ceil_div(columns, _TILE))](*operands, columns, TILE=_TILE, num_warps=4)
    return out


@implements("add_shared_expert_backward", "triton")
def triton_add_shared_expert_backward(
    dy: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_add_shared_expert_backward`; one program a token."""
    dshared, dlogits = torch.empty(shared.shape, dtype=torch.bfloat16, device=dy.device), torch.empty_like(logits)
    if dshared.numel():
        operands = dy.contiguous(), shared.contiguous(), logits.contiguous(), dshared, dlogits
        columns = shared.shape[1]
        _backward_kernel[(len(dy),)](*operands, columns, WIDTH=next_power_of_2(columns), num_warps=4)
    return dshared, dlogits


@operator(
    "add_shared_expert(Tensor routed, Tensor shared, Tensor logits) -> Tensor",
    fake=lambda routed, *_: routed.new_empty(routed.shape),
    mixture_probe=lambda inputs: add_shared_expert(inputs.x, inputs.residual, inputs.logits[:, :1]),
)
def _add_shared_expert(routed: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    require_bf16("add_shared_expert", routed=routed, shared=shared)
    require_fp32("add_shared_expert", logits=logits)
    require_shape("add_shared_expert", "shared", shared, routed.shape)
    require_shape("add_shared_expert", "logits", logits, (len(routed), 1))
    return lookup("add_shared_expert", routed.device)(routed, shared, logits)


_backward = dispatched(
    "add_shared_expert_backward(Tensor dy, Tensor shared, Tensor logits) -> (Tensor, Tensor)",
    fake=lambda dy, shared, logits: (shared.new_empty(shared.shape), logits.new_empty(logits.shape)),
)


class _AddSharedExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, routed: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(shared, logits)
        return _add_shared_expert(routed, shared, logits)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        return dy, *_backward(dy, *ctx.saved_tensors)


def add_shared_expert(routed: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A mixture's output with its shared expert; differentiable in all.

    Args:
        routed, shared: outputs of a token's experts and of the shared one, ``[T, H]`` BF16.
        logits: ``[T, 1]`` FP32, of the gate whose sigmoid scales ``shared``.

    Returns:
        ``[T, H]`` BF16.

    Raises:
        TypeError: an operand of another type. ValueError: another shape.
    """
    if torch.is_grad_enabled():
        return _AddSharedExpert.apply(routed, shared, logits)
    return _add_shared_expert(routed, shared, logits)
