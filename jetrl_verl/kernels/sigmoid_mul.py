# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``x * sigmoid(gate)``, the output gate of gated attention: FP32 inside, one rounding to BF16.

:func:`sigmoid_mul_quantize` also quantizes the result for the next FP8 linear, byte for byte as the quantizer does. On
the CPU the sigmoid of a BF16 value is a table.
"""

from functools import cache

import torch
import triton.language as tl

from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.e4m3 import GROUP, is_pow2, quantize_groups
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements
from jetrl_verl.kernels.operator import dispatched, require_bf16, require_shape
from jetrl_verl.kernels.quantizing import Quantizing
from jetrl_verl.kernels.results import empty_rowwise, require_groups
from jetrl_verl.kernels.silu_mul import look_up
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.kernels.views import unit_stride
from jetrl_verl.reference import BLOCK, QuantizedTensor

__all__ = ["sigmoid_mul", "sigmoid_mul_quantize"]

# --- reference: a table -----------------------------------------------------------------------------------------------


@cache
def _sigmoids(device: torch.device) -> torch.Tensor:
    """The sigmoid in FP32, indexed by the 16 bits of a BF16 value."""
    bits = torch.arange(2**16, dtype=torch.int32, device="cpu")
    return torch.sigmoid((bits << 16).view(torch.float32).double()).float().to(device)


@implements("sigmoid_mul", "reference")
def reference_sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The product ``[T, H D]`` BF16."""
    return look_up(_sigmoids(gate.device), gate).mul_(x.float()).to(torch.bfloat16).flatten(1)


@implements("sigmoid_mul_backward", "reference")
def reference_sigmoid_mul_backward(dy, x, gate) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and gate, ``[T, H, D]`` BF16."""
    dx = look_up(_sigmoids(gate.device), gate)
    # 1 - sigmoid(gate) as sigmoid(-gate), which is exact where the sigmoid is close to 1.
    dgate = look_up(_sigmoids(gate.device), -gate).mul_(dx).mul_(x.float())
    dy = dy.view(x.shape).float()
    return dx.mul_(dy).to(torch.bfloat16), dgate.mul_(dy).to(torch.bfloat16)


# --- Triton -----------------------------------------------------------------------------------------------------------

_GROUPS_PER_PROGRAM = 32


@jit
def _operands(x_ptr, gate_ptr, group, rows, groups_k, x_token, x_head, gate_token, gate_head, D: tl.constexpr):
    """Groups ``[GROUPS, 128]`` of x and gate in FP32, and the mask of those that exist."""
    row, group_k = (group // groups_k).to(tl.int64), group % groups_k
    head, feature = group_k // (D // GROUP), group_k % (D // GROUP) * GROUP
    column, mask = tl.arange(0, GROUP)[None, :], (row < rows)[:, None]
    x = tl.load(x_ptr + (row * x_token + head * x_head + feature)[:, None] + column, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + (row * gate_token + head * gate_head + feature)[:, None] + column, mask=mask, other=0.0)
    return x.to(tl.float32), gate.to(tl.float32), mask


@jit
def _sigmoid_mul_kernel(
    x_ptr, gate_ptr, y_ptr, qdata_ptr, scales_ptr, rows, groups_k, x_token, x_head, gate_token, gate_head,
    D: tl.constexpr, WITH_Y: tl.constexpr, QUANTIZE: tl.constexpr, POW2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    launch_dependents()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    x, gate, mask = _operands(x_ptr, gate_ptr, group, rows, groups_k, x_token, x_head, gate_token, gate_head, D)
    y = (x * (1.0 / (1.0 + tl.exp(-gate)))).to(tl.bfloat16)
    offsets = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if WITH_Y:
        tl.store(y_ptr + offsets, y, mask=mask)
    if QUANTIZE:
        qdata, scale = quantize_groups(y.to(tl.float32), POW2)
        tl.store(qdata_ptr + offsets, qdata, mask=mask)
        row, group_k = group // groups_k, group % groups_k
        tl.store(scales_ptr + group_k.to(tl.int64) * rows + row, scale, mask=row < rows)


@jit
def _sigmoid_mul_backward_kernel(
    dy_ptr, x_ptr, gate_ptr, dx_ptr, dgate_ptr, rows, groups_k, x_token, x_head, gate_token, gate_head,
    D: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    x, gate, mask = _operands(x_ptr, gate_ptr, group, rows, groups_k, x_token, x_head, gate_token, gate_head, D)
    offsets = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sigmoid, other = 1.0 / (1.0 + tl.exp(-gate)), 1.0 / (1.0 + tl.exp(gate))
    tl.store(dx_ptr + offsets, (dy * sigmoid).to(tl.bfloat16), mask=mask)
    tl.store(dgate_ptr + offsets, (dy * x * sigmoid * other).to(tl.bfloat16), mask=mask)


@implements("sigmoid_mul_quantize", "triton")
def triton_sigmoid_mul_quantize(
    x, gate, rule: str | None, with_product: bool
) -> tuple[torch.Tensor | None, QuantizedTensor | None]:
    """(product or None, its 1x128 qdata or, without a rule, None)."""
    x, gate = unit_stride(x), unit_stride(gate)
    tokens, heads, width = x.shape
    k = heads * width
    y = torch.empty(tokens, k, dtype=torch.bfloat16, device=x.device) if with_product else None
    rowwise = empty_rowwise(tokens, k, x.device) if rule else None
    if x.numel():
        groups = tokens * (k // BLOCK)
        _sigmoid_mul_kernel[(ceil_div(groups, _GROUPS_PER_PROGRAM),)](
            *(x, gate, y if with_product else x),
            *((rowwise.qdata.view(torch.uint8), rowwise.scales) if rule else (x, x)),
            tokens,
            k // BLOCK,
            *x.stride()[:2],
            *gate.stride()[:2],
            D=width,
            WITH_Y=with_product,
            QUANTIZE=rule is not None,
            POW2=rule is not None and is_pow2(rule),
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=4,
        )
    return y, rowwise


implements("sigmoid_mul", "triton")(lambda x, gate: triton_sigmoid_mul_quantize(x, gate, None, True)[0])


@implements("sigmoid_mul_backward", "triton")
def triton_sigmoid_mul_backward(dy, x, gate) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and gate, ``[T, H, D]`` BF16."""
    x, gate = unit_stride(x), unit_stride(gate)
    dx, dgate = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    if x.numel():
        groups_k = x.shape[1] * x.shape[2] // BLOCK
        _sigmoid_mul_backward_kernel[(ceil_div(len(x) * groups_k, _GROUPS_PER_PROGRAM),)](
            dy.contiguous(),
            x,
            gate,
            dx,
            dgate,
            len(x),
            groups_k,
            *x.stride()[:2],
            *gate.stride()[:2],
            D=x.shape[2],
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=4,
        )
    return dx, dgate


# --- torch operators --------------------------------------------------------------------------------------------------


def _check(operation: str, x: torch.Tensor, gate: torch.Tensor) -> None:
    require_bf16(operation, x=x, gate=gate)
    require_shape(operation, "gate", gate, x.shape)
    require_groups(operation, x)


_SIGMOID_MUL = Quantizing(
    "sigmoid_mul",
    "sigmoid_mul_quantize",
    "Tensor x, Tensor gate",
    fake=lambda x, gate: x.new_empty(x.shape[0], x.shape[1] * x.shape[2]),
    check=_check,
    backward=dispatched(
        "sigmoid_mul_backward(Tensor dy, Tensor x, Tensor gate) -> (Tensor, Tensor)",
        fake=lambda dy, x, gate: (x.new_empty(x.shape), x.new_empty(x.shape)),
    ),
    # [T, 1, 128], views of wider rows.
    probe=lambda inputs: inputs.x.unflatten(1, (1, 3, -1)).unbind(2)[::2],
)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``; differentiable in both.

    Args:
        x, gate: ``[T, H, D]`` BF16, D a multiple of 128; of any strides, as heads of a wider projection.

    Returns:
        ``[T, H D]`` BF16.

    Raises:
        TypeError: an operand is not BF16. ValueError: another shape of ``gate``, D not a multiple of 128.
    """
    return _SIGMOID_MUL(x, gate)


def sigmoid_mul_quantize(
    x: torch.Tensor, gate: torch.Tensor, rule: str, *, with_product: bool = True
) -> QuantizedTensor:
    """:func:`sigmoid_mul` and ``kernels.quantize_1x128`` of its result; differentiable in both.

    Args:
        x, gate: as of :func:`sigmoid_mul`. rule: scale rule, ``"fp32"`` or ``"pow2"``.
        with_product: whether to return the product in BF16 too; always, where a gradient is recorded.

    Returns:
        FP8 data ``[T, H D]`` E4M3 and scales ``[T, H D / 128]`` FP32; ``source`` the product BF16 or None.

    Raises:
        As :func:`sigmoid_mul`, and ValueError for an unknown rule.
    """
    return _SIGMOID_MUL.quantized(x, gate, rule=rule, requested=with_product)
