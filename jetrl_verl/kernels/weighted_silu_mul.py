# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``w * silu(gate) * up`` of the rows of experts' segments, quantized on the way out, and its gradients.

The routing weight w of a row is multiplied in here and not into the expert's output (reference/experts.py says why).
FP32 inside, one rounding to BF16, then 1x128 groups: what the down projection reads. The gradient of a weight is an
inner product over the row, in FP32.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.e4m3 import GROUP, encode, is_pow2, magnitude_bits, reciprocal_of, scale_of
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.launch import jit
from jetrl_verl.kernels.operator import operator, require_bf16
from jetrl_verl.kernels.results import empty_rowwise, fake_rowwise, require_groups
from jetrl_verl.kernels.silu_mul import silu_and_derivative
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.reference import BLOCK, QuantizedTensor

_GROUPS_PER_PROGRAM = 32
_TILE, _WARPS = 1024, 4


def _weight_of_rows(weights: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """``[R, 1]`` FP32; 0 where there is no pair."""
    return weights.flatten()[pair.clamp(min=0).long()].masked_fill_(pair < 0, 0.0)[:, None]


@implements("weighted_silu_mul_quantize", "reference")
def reference_weighted_silu_mul_quantize(
    gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor, rule: str
) -> QuantizedTensor:
    """See :func:`weighted_silu_mul_quantize`."""
    gate, up = gate_up.chunk(2, dim=1)
    product = silu_and_derivative(gate.contiguous())[0].mul_(up.float())
    return reference.quantize_1x128(product.mul_(_weight_of_rows(weights, pair)).to(torch.bfloat16), rule)


@implements("weighted_silu_mul_backward", "reference")
def reference_weighted_silu_mul_backward(
    dy: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`weighted_silu_mul_backward`."""
    gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=1))
    silu, derivative = silu_and_derivative(gate)
    up, dy = up.float(), dy.float()
    dweights = torch.zeros_like(weights).flatten()
    held = pair >= 0
    dweights[pair[held].long()] = (dy * (silu * up)).sum(dim=1)[held]
    dy = dy * _weight_of_rows(weights, pair)
    return torch.cat([derivative * up * dy, silu * dy], dim=1).to(torch.bfloat16), dweights.view(weights.shape)


@jit
def _quantize_kernel(
    gate_up_ptr, weights_ptr, pair_ptr, qdata_ptr, scales_ptr, rows, groups_k,
    POW2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    launch_dependents()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group_k = (group // groups_k).to(tl.int64), group % groups_k
    held = row < rows
    pair = tl.load(pair_ptr + row, mask=held, other=-1)
    weight = tl.load(weights_ptr + pair, mask=pair >= 0, other=0.0)
    column = group_k[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = gate_up_ptr + row[:, None] * (2 * groups_k * GROUP) + column
    gate = tl.load(source, mask=held[:, None], other=0.0).to(tl.float32)
    up = tl.load(source + groups_k * GROUP, mask=held[:, None], other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    values = product.to(tl.bfloat16).to(tl.float32)
    bits = tl.max(magnitude_bits(values), axis=1)
    scale = scale_of(bits, POW2)
    qdata = encode(values, scale[:, None], reciprocal_of(scale, bits, POW2)[:, None], POW2)
    offsets = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(qdata_ptr + offsets, qdata, mask=held[:, None])
    tl.store(scales_ptr + group_k.to(tl.int64) * rows + row, scale, mask=held)


@implements("weighted_silu_mul_quantize", "triton")
def triton_weighted_silu_mul_quantize(
    gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor, rule: str
) -> QuantizedTensor:
    """See :func:`weighted_silu_mul_quantize`."""
    pow2 = is_pow2(rule)
    rows, k = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rowwise(rows, k, gate_up.device)
    groups_k = k // BLOCK
    if rows:
        _quantize_kernel[(ceil_div(rows * groups_k, _GROUPS_PER_PROGRAM),)](
            gate_up.contiguous(),
            weights.contiguous(),
            pair,
            out.qdata.view(torch.uint8),
            out.scales,
            rows,
            groups_k,
            POW2=pow2,
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=_WARPS,
        )
    return out


@jit
def _backward_kernel(
    dy_ptr, gate_up_ptr, weights_ptr, pair_ptr, dgate_up_ptr, dweights_ptr, columns, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_ptr + row)
    weight = tl.load(weights_ptr + pair, mask=pair >= 0, other=0.0)
    lane = tl.arange(0, TILE)
    lanes = tl.zeros((TILE,), dtype=tl.float32)
    for first in range(0, columns, TILE):
        column = first + lane
        mask = column < columns
        dy = tl.load(dy_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + row * 2 * columns + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + (row * 2 + 1) * columns + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        lanes += dy * (gate * sigmoid * up)
        dy *= weight
        dgate = sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up * dy
        tl.store(dgate_up_ptr + row * 2 * columns + column, dgate.to(tl.bfloat16), mask=mask)
        tl.store(dgate_up_ptr + (row * 2 + 1) * columns + column, (gate * sigmoid * dy).to(tl.bfloat16), mask=mask)
    tl.store(dweights_ptr + pair, tl.sum(lanes, axis=0), mask=pair >= 0)


@implements("weighted_silu_mul_backward", "triton")
def triton_weighted_silu_mul_backward(
    dy: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`weighted_silu_mul_backward`."""
    dgate_up, dweights = torch.empty_like(gate_up), torch.empty_like(weights)
    if len(pair):
        _backward_kernel[(len(pair),)](
            dy.contiguous(),
            gate_up.contiguous(),
            weights.contiguous(),
            pair,
            dgate_up,
            dweights,
            dy.shape[1],
            TILE=_TILE,
            num_warps=_WARPS,
        )
    return dgate_up, dweights


def _check(gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor) -> None:
    require_bf16("weighted_silu_mul", gate_up=gate_up)
    if weights.dtype != torch.float32 or pair.dtype != torch.int32 or pair.shape != gate_up.shape[:1]:
        raise ValueError(
            f"weighted_silu_mul: weights {weights.dtype} and pairs {tuple(pair.shape)} {pair.dtype} do not fit rows "
            f"{tuple(gate_up.shape)}; expected FP32 and one int32 a row"
        )


@operator(
    "weighted_silu_mul_quantize(Tensor gate_up, Tensor weights, Tensor pair, str rule) -> (Tensor, Tensor)",
    fake=lambda gate_up, weights, pair, rule: fake_rowwise(gate_up[:, : gate_up.shape[1] // 2]),
)
def _weighted_silu_mul_quantize(gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor, rule: str):
    _check(gate_up, weights, pair)
    quantized = lookup("weighted_silu_mul_quantize", gate_up.device)(gate_up, weights, pair, rule)
    return quantized.qdata, quantized.scales


def weighted_silu_mul_quantize(
    gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor, rule: str
) -> QuantizedTensor:
    """``w * silu(gate) * up`` of each row, rounded to BF16, as ``kernels.quantize_1x128`` quantizes it.

    Args:
        gate_up: ``[R, 2 I]`` BF16, gate first; I a multiple of 128. weights: ``[T, k]`` FP32.
        pair: ``[R]`` int32 (:class:`jetrl_verl.reference.Segments`); a row without a pair is zero.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.

    Returns:
        qdata ``[R, I]`` E4M3 and scales ``[R, I/128]`` FP32. No gradient of its own.

    Raises:
        TypeError: ``gate_up`` is not BF16. ValueError: I is no multiple of 128, operands that do not fit, the rule.
    """
    require_groups("weighted_silu_mul_quantize", gate_up[:, : gate_up.shape[1] // 2])
    return QuantizedTensor(*_weighted_silu_mul_quantize(gate_up, weights, pair, rule))


def weighted_silu_mul_backward(
    dy: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of what :func:`weighted_silu_mul_quantize` quantizes, straight through the rounding.

    Args:
        dy: ``[R, I]`` BF16; the others as there.

    Returns:
        (of ``gate_up [R, 2 I]`` BF16, of ``weights [T, k]`` FP32).

    Raises:
        TypeError: ``gate_up`` is not BF16. ValueError: operands that do not fit.
    """
    _check(gate_up, weights, pair)
    return lookup("weighted_silu_mul_backward", dy.device)(dy, gate_up, weights, pair)
