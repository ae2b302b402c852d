# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``silu(gate) * up``, the activation of a gated MLP: FP32 inside, one rounding to BF16.

``*_quantize`` also quantize the result for the next FP8 linears, byte for byte as the quantizers do. On the CPU
``silu`` of a BF16 value is a table.
"""

from functools import cache

import numpy as np
import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels import native
from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.e4m3 import (
    GROUP,
    halves_of,
    high_half,
    is_pow2,
    load_four_rows,
    low_half,
    quantize_groups,
    store_both,
)
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import NATIVE, implements, lookup
from jetrl_verl.kernels.operator import dispatched, operator, require_bf16, require_shape
from jetrl_verl.kernels.quantizing import Quantizing
from jetrl_verl.kernels.results import empty_colwise, empty_rowwise, fake_colwise, fake_rowwise, require_groups
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.kernels.views import as_rows, unit_stride
from jetrl_verl.reference import BLOCK, QuantizedTensor, check_rule

__all__ = ["silu_mul", "silu_mul_backward_quantize", "silu_mul_quantize"]

Four = tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor, QuantizedTensor]

# --- reference: tables ------------------------------------------------------------------------------------------------


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """silu and its derivative in FP32, indexed by the 16 bits of a BF16 value."""
    bits = torch.arange(2**16, dtype=torch.int32, device="cpu")
    gate = (bits << 16).view(torch.float32).double()
    sigmoid = torch.sigmoid(gate)
    silu = torch.where(gate == -torch.inf, 0.0, gate * sigmoid)
    derivative = torch.where(gate.isinf(), (gate > 0).double(), sigmoid * (1 + gate * (1 - sigmoid)))
    return silu.float().to(device), derivative.float().to(device)


def look_up(table: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Entries of a table of 2^16 numbers for BF16 ``gate``."""
    if gate.device.type != "cpu":
        return table[gate.detach().view(torch.int16).int() & 0xFFFF]
    # numpy indexes by 16-bit integers directly, three times as fast as torch.
    bits = gate.detach().view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(table.numpy().take(bits))


def silu_and_derivative(gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu of BF16 ``gate`` on any device and its derivative, each rounded once to FP32."""
    silu, derivative = (look_up(table, gate) for table in _tables(gate.device))
    return silu, derivative


@implements("silu_mul", "reference")
def reference_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The product ``[..., I]`` BF16."""
    return look_up(_tables(gate.device)[0], gate).mul_(up.float()).to(torch.bfloat16)


@implements("silu_mul_backward", "reference")
def reference_silu_mul_backward(dy, gate, up) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, BF16."""
    dy = dy.float()
    silu, derivative = silu_and_derivative(gate)
    return derivative.mul_(up.float()).mul_(dy).to(torch.bfloat16), silu.mul_(dy).to(torch.bfloat16)


@implements("silu_mul_backward_quantize", "reference")
def reference_silu_mul_backward_quantize(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str) -> Four:
    """1x128 and 128x1 qdata of the gradient of gate, then of up; operands ``[M, I]``."""
    gradients = reference_silu_mul_backward(dy, gate, up)
    return tuple(q for gradient in gradients for q in reference.quantize_1x128_and_128x1(gradient, rule))


# --- Triton -----------------------------------------------------------------------------------------------------------

_TILE = 1024
_GROUPS_PER_PROGRAM = 32
_WARPS = 4
# Two programs, with 344 bytes a thread spilled.
_LAUNCH_BACKWARD = {"num_warps": 8, "maxnreg": 128}


@jit
def product_of(gate, up):
    """``silu(gate) * up`` in BF16 for BF16 tiles."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)


@jit
def gradients_of(dy, gate, up):
    """Gradients of gate and up in BF16 for BF16 tiles."""
    dy, gate, up = dy.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return dgate.to(tl.bfloat16), (dy * gate * sigmoid).to(tl.bfloat16)


@jit
def _silu_mul_kernel(gate_ptr, up_ptr, y_ptr, columns, stride_gate, stride_up, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * stride_up + column, mask=mask, other=0.0)
    tl.store(y_ptr + row * columns + column, product_of(gate, up), mask=mask)


@jit
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


@jit
def _silu_mul_quantize_kernel(
    gate_ptr, up_ptr, y_ptr, qdata_ptr, scales_ptr, rows, groups_k, stride_gate, stride_up,
    WITH_Y: tl.constexpr, POW2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    launch_dependents()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group_k = (group // groups_k).to(tl.int64), group % groups_k
    column = group_k[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_range = row < rows
    gate = tl.load(gate_ptr + row[:, None] * stride_gate + column, mask=in_range[:, None], other=0.0)
    up = tl.load(up_ptr + row[:, None] * stride_up + column, mask=in_range[:, None], other=0.0)
    y = product_of(gate, up)
    offsets = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if WITH_Y:
        tl.store(y_ptr + offsets, y, mask=in_range[:, None])
    qdata, scale = quantize_groups(y.to(tl.float32), POW2)
    tl.store(qdata_ptr + offsets, qdata, mask=in_range[:, None])
    tl.store(scales_ptr + group_k.to(tl.int64) * rows + row, scale, mask=in_range)


@jit
def _words(low, high):
    return halves_of(low.to(tl.int16, bitcast=True), high.to(tl.int16, bitcast=True))


@jit
def _gradient_words(dy, gate, up):
    """Words of the gradients of gate and up, from words of two BF16 numbers."""
    dgate_low, dup_low = gradients_of(low_half(dy), low_half(gate), low_half(up))
    dgate_high, dup_high = gradients_of(high_half(dy), high_half(gate), high_half(up))
    return _words(dgate_low, dgate_high), _words(dup_low, dup_high)


@jit
def _silu_mul_backward_quantize_kernel(
    dy_words_ptr, gate_words_ptr, up_words_ptr,
    dgate_pairs_ptr, dgate_scales_ptr, dgate_colwise_qdata_ptr, dgate_colwise_scales_ptr,
    dup_pairs_ptr, dup_scales_ptr, dup_colwise_qdata_ptr, dup_colwise_scales_ptr,
    rows, k, words_per_row, stride_dy, stride_gate, stride_up, POW2: tl.constexpr,
):  # fmt: skip
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    start, left = tile_row.to(tl.int64) * GROUP, rows - tile_row * GROUP
    dy_words_ptr += start * stride_dy + tile_k * (GROUP // 2)
    gate_words_ptr += start * stride_gate + tile_k * (GROUP // 2)
    up_words_ptr += start * stride_up + tile_k * (GROUP // 2)
    dy0, dy1, dy2, dy3 = load_four_rows(dy_words_ptr, stride_dy, left, GROUP // 2, GROUP // 2)
    gate0, gate1, gate2, gate3 = load_four_rows(gate_words_ptr, stride_gate, left, GROUP // 2, GROUP // 2)
    up0, up1, up2, up3 = load_four_rows(up_words_ptr, stride_up, left, GROUP // 2, GROUP // 2)
    dgate0, dup0 = _gradient_words(dy0, gate0, up0)
    dgate1, dup1 = _gradient_words(dy1, gate1, up1)
    dgate2, dup2 = _gradient_words(dy2, gate2, up2)
    dgate3, dup3 = _gradient_words(dy3, gate3, up3)
    store_both(
        dgate0, dgate1, dgate2, dgate3, dgate_pairs_ptr, dgate_scales_ptr, dgate_colwise_qdata_ptr,
        dgate_colwise_scales_ptr, tile_row, tile_k, rows, k, words_per_row, True, POW2,
    )  # fmt: skip
    store_both(
        dup0, dup1, dup2, dup3, dup_pairs_ptr, dup_scales_ptr, dup_colwise_qdata_ptr, dup_colwise_scales_ptr,
        tile_row, tile_k, rows, k, words_per_row, True, POW2,
    )  # fmt: skip


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]``, contiguous in its last dimension; halves of one tensor stay views."""
    return unit_stride(as_rows(x))


def _words_of(rows: torch.Tensor) -> torch.Tensor:
    """BF16 rows as int32 words of two neighbors; copied only where rows start at odd elements."""
    if rows.stride(0) % 2 or rows.storage_offset() % 2 or rows.data_ptr() % 4:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int32)


@implements("silu_mul", "triton")
def triton_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See :func:`jetrl_verl.kernels.silu_mul`."""
    gate_rows, up_rows = rows_of(gate), rows_of(up)
    count, columns = gate_rows.shape
    y = torch.empty(count, columns, dtype=torch.bfloat16, device=gate.device)
    if y.numel():
        _silu_mul_kernel[(count, ceil_div(columns, _TILE))](
            gate_rows, up_rows, y, columns, gate_rows.stride(0), up_rows.stride(0), TILE=_TILE
        )
    return y.view(gate.shape)


@implements("silu_mul_backward", "triton")
def triton_silu_mul_backward(dy, gate, up) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, BF16."""
    gate_rows, up_rows = rows_of(gate), rows_of(up)
    count, columns = gate_rows.shape
    dgate, dup = (torch.empty(count, columns, dtype=torch.bfloat16, device=gate.device) for _ in range(2))
    if dgate.numel():
        _silu_mul_backward_kernel[(count, ceil_div(columns, _TILE))](
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


@implements("silu_mul_quantize", "triton")
def triton_silu_mul_quantize(gate, up, rule: str, with_product: bool) -> tuple[torch.Tensor | None, QuantizedTensor]:
    """(product or None, its 1x128 qdata)."""
    pow2 = is_pow2(rule)
    gate_rows, up_rows = rows_of(gate), rows_of(up)
    count, k = gate_rows.shape
    y = torch.empty(count, k, dtype=torch.bfloat16, device=gate.device) if with_product else None
    rowwise = empty_rowwise(count, k, gate.device)
    if count:
        _silu_mul_quantize_kernel[(ceil_div(count * (k // BLOCK), _GROUPS_PER_PROGRAM),)](
            gate_rows,
            up_rows,
            y if with_product else gate_rows,
            rowwise.qdata.view(torch.uint8),
            rowwise.scales,
            count,
            k // BLOCK,
            gate_rows.stride(0),
            up_rows.stride(0),
            WITH_Y=with_product,
            POW2=pow2,
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=_WARPS,
        )
    if with_product and gate.ndim != 2:
        y = y.view(gate.shape)
    return y, rowwise


@implements("silu_mul_backward_quantize", "triton")
def triton_silu_mul_backward_quantize(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str) -> Four:
    """1x128 and 128x1 qdata of the gradient of gate, then of up."""
    pow2 = is_pow2(rule)
    count, k = rows_of(gate).shape
    results, arguments = [], []
    for _ in range(2):
        rowwise, (colwise, words) = empty_rowwise(count, k, gate.device), empty_colwise(count, k, gate.device)
        results += [rowwise, colwise]
        arguments += [rowwise.qdata.view(torch.int16), rowwise.scales, words, colwise.scales]
    if count:
        dy_words, gate_words, up_words = (_words_of(rows_of(x)) for x in (dy, gate, up))
        _silu_mul_backward_quantize_kernel[(k // BLOCK, ceil_div(count, BLOCK))](
            dy_words,
            gate_words,
            up_words,
            *arguments,
            count,
            k,
            words.shape[1],
            dy_words.stride(0),
            gate_words.stride(0),
            up_words.stride(0),
            POW2=pow2,
            **_LAUNCH_BACKWARD,
        )
    return tuple(results)


# --- native -----------------------------------------------------------------------------------------------------------


def native_supports_silu_mul_backward(dy, gate, up, rule: str = "fp32") -> bool:
    """Whether :func:`native_silu_mul_backward_quantize` accepts these: whole groups of 128, rows start on 16 bytes."""
    (rows, k), operands = dy.shape, (dy, gate, up)
    fits = rows <= native.MOST_COLUMNS and k < native.MOST and max(x.stride(0) for x in operands) < native.MOST
    whole = min(rows, k) > 0 and k % BLOCK == 0
    return all(map(native.aligned, operands)) and whole and fits and native.unavailable() is None


@implements("silu_mul_backward_quantize", "native", supports=native_supports_silu_mul_backward)
def native_silu_mul_backward_quantize(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str) -> Four:
    """As :func:`reference_silu_mul_backward_quantize`."""
    check_rule(rule)
    results, memory = [], []
    for _ in range(2):
        rowwise, (colwise, words) = empty_rowwise(*gate.shape, gate.device), empty_colwise(*gate.shape, gate.device)
        results += [rowwise, colwise]
        memory += [rowwise.qdata.view(torch.uint8), rowwise.scales.t(), words.view(torch.uint8), colwise.scales.t()]
    native.operators().silu_mul_backward(dy, gate, up, *memory, rule == "pow2")
    return tuple(results)


# --- torch operators --------------------------------------------------------------------------------------------------


_silu_mul_backward = dispatched(
    "silu_mul_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    fake=lambda dy, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)
_SILU_MUL = Quantizing(
    "silu_mul",
    "silu_mul_quantize",
    "Tensor gate, Tensor up",
    fake=lambda gate, up: torch.empty_like(up, memory_format=torch.contiguous_format),
    check=lambda operation, gate, up: require_shape(operation, "up", up, gate.shape),
    backward=_silu_mul_backward,
    probe=lambda inputs: (inputs.x, inputs.residual),
)


@operator(
    "silu_mul_backward_quantize(Tensor dy, Tensor gate, Tensor up, str rule)"
    " -> (Quantized, Quantized, Quantized, Quantized)",
    fake=lambda dy, gate, up, rule: (fake_rowwise(gate), fake_colwise(gate), fake_rowwise(up), fake_colwise(up)),
    backends=NATIVE,
)
def _silu_mul_backward_quantize(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str) -> Four:
    """1x128 and 128x1 qdata of gate's gradient, then of up's."""
    require_shape("silu_mul_backward_quantize", "up", up, gate.shape)
    require_shape("silu_mul_backward_quantize", "dy", dy, gate.shape)
    call = as_rows(dy), as_rows(gate), as_rows(up), rule
    return lookup("silu_mul_backward_quantize", gate.device, *call)(*call)


# --- functions --------------------------------------------------------------------------------------------------------


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
    return _SILU_MUL(gate, up)


def silu_mul_quantize(gate: torch.Tensor, up: torch.Tensor, rule: str, *, with_product: bool = True) -> QuantizedTensor:
    """:func:`silu_mul` and ``kernels.quantize_1x128`` of its result; differentiable in both.

    Args:
        gate, up: ``[..., I]`` BF16, possibly halves of one tensor, I a multiple of 128.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.
        with_product: whether to return the product in BF16 too; always, where a gradient is recorded.

    Returns:
        FP8 data ``[M, I]`` E4M3 and scales ``[M, I/128]`` FP32 of the M rows of the product; ``source`` is the product
        ``[..., I]`` BF16 or None.

    Raises:
        TypeError: an operand is not BF16. ValueError: I is not a multiple of 128, an unknown rule.
    """
    require_bf16("silu_mul_quantize", gate=gate, up=up)
    require_groups("silu_mul_quantize", up)
    return _SILU_MUL.quantized(gate, up, rule=rule, requested=with_product)


def silu_mul_backward_quantize(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str) -> Four:
    """FP8 data of the BF16 gradients of :func:`silu_mul`, in both layouts that the backward of a linear reads.

    Args:
        dy: gradient of the product, ``[..., I]`` BF16. gate, up: its operands, I a multiple of 128.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.

    Returns:
        ``kernels.quantize_1x128_and_128x1`` of gate's gradient as ``[M, I]``, then of up's.

    Raises:
        TypeError: an operand is not BF16. ValueError: I is not a multiple of 128, an unknown rule.
    """
    require_bf16("silu_mul_backward_quantize", dy=dy, gate=gate, up=up)
    require_groups("silu_mul_backward_quantize", up)
    return _silu_mul_backward_quantize(dy, gate, up, rule)
