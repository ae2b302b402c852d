# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``w * silu(gate) * up`` of the rows of experts' segments, quantized to 1x128 groups, and its gradients.

FP32 inside, one rounding to BF16; w is applied here, not to the expert's output (reference/experts.py). The gradient
of w is an inner product over the row in FP32, which a second kernel adds over 128-column tiles in order.
"""

import torch
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.e4m3 import GROUP, halves_of, high_half, is_pow2, low_half, quantize_groups, store_both
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.results import (
    empty_colwise,
    empty_rowwise,
    fake_colwise,
    fake_rowwise,
    require_groups,
    require_groups_of_rows,
)
from jetrl_verl.kernels.silu_mul import silu_and_derivative
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.reference import BLOCK, QuantizedTensor

__all__ = ["weighted_silu_mul_backward_quantize", "weighted_silu_mul_quantize"]

Gradients = tuple[QuantizedTensor, QuantizedTensor, torch.Tensor]

_WARPS = 4
_GROUPS_OF_MANY, _GROUPS_OF_FEW, _MANY_GROUPS = 32, 8, 8192
"""Groups per program: 32 from 8192 groups on (256 programs, two per multiprocessor of an H200), fewer below."""
_TILE = 1024
# As silu_mul.py's.
_LAUNCH_BACKWARD = {"num_warps": 8, "maxnreg": 128}


def _weight_of_rows(weights: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """``[R, 1]`` FP32; 0 where there is no pair."""
    return weights.flatten()[pair.clamp(min=0).long()].masked_fill_(pair < 0, 0.0)[:, None]


@implements("weighted_silu_mul_quantize", "reference")
def reference_weighted_silu_mul_quantize(gate_up, weights, pair, rule: str) -> QuantizedTensor:
    """See :func:`weighted_silu_mul_quantize`."""
    gate, up = gate_up.chunk(2, dim=1)
    product = silu_and_derivative(gate.contiguous())[0].mul_(up.float())
    return reference.quantize_1x128(product.mul_(_weight_of_rows(weights, pair)).to(torch.bfloat16), rule)


def gradients_of_rows(
    dy: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unquantized gradient of ``gate_up [R, 2 I]`` BF16 and the inner product of each row ``[R]`` FP32.

    Arguments as of :func:`weighted_silu_mul_backward_quantize`, with any number of rows on any device.
    """
    gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=1))
    silu, derivative = silu_and_derivative(gate)
    up, dy = up.float(), dy.float()
    products = (dy * (silu * up)).sum(dim=1)
    dy = dy * _weight_of_rows(weights, pair)
    return torch.cat([derivative * up * dy, silu * dy], dim=1).to(torch.bfloat16), products


@implements("weighted_silu_mul_backward_quantize", "reference")
def reference_weighted_silu_mul_backward_quantize(dy, gate_up, weights, pair, rule: str) -> Gradients:
    """See :func:`weighted_silu_mul_backward_quantize`."""
    dgate_up, products = gradients_of_rows(dy, gate_up, weights, pair)
    dweights = torch.zeros_like(weights).flatten()
    valid = pair >= 0
    dweights[pair[valid].long()] = products[valid]
    return *reference.quantize_1x128_and_128x1(dgate_up, rule), dweights.view(weights.shape)


@jit
def _quantize_kernel(
    gate_up_ptr, weights_ptr, pair_ptr, qdata_ptr, scales_ptr, rows, groups_k,
    POW2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    launch_dependents()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group_k = (group // groups_k).to(tl.int64), group % groups_k
    valid = row < rows
    pair = tl.load(pair_ptr + row, mask=valid, other=-1)
    weight = tl.load(weights_ptr + pair, mask=pair >= 0, other=0.0)
    column = group_k[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = gate_up_ptr + row[:, None] * (2 * groups_k * GROUP) + column
    gate = tl.load(source, mask=valid[:, None], other=0.0).to(tl.float32)
    up = tl.load(source + groups_k * GROUP, mask=valid[:, None], other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    qdata, scale = quantize_groups(product.to(tl.bfloat16).to(tl.float32), POW2)
    offsets = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(qdata_ptr + offsets, qdata, mask=valid[:, None])
    tl.store(scales_ptr + group_k.to(tl.int64) * rows + row, scale, mask=valid)


@implements("weighted_silu_mul_quantize", "triton")
def triton_weighted_silu_mul_quantize(gate_up, weights, pair, rule: str) -> QuantizedTensor:
    """See :func:`weighted_silu_mul_quantize`."""
    pow2 = is_pow2(rule)
    rows, k = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rowwise(rows, k, gate_up.device)
    groups_k = k // BLOCK
    at_once = _GROUPS_OF_MANY if rows * groups_k >= _MANY_GROUPS else _GROUPS_OF_FEW
    if rows:
        _quantize_kernel[(ceil_div(rows * groups_k, at_once),)](
            gate_up.contiguous(),
            weights.contiguous(),
            pair,
            out.qdata.view(torch.uint8),
            out.scales,
            rows,
            groups_k,
            POW2=pow2,
            GROUPS=at_once,
            num_warps=_WARPS,
        )
    return out


@jit
def _gradients(dy, gate, up, weight):
    """(gradient of gate, of up in BF16, terms of the inner product) for FP32 tiles."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    weighted = dy * weight
    dgate = sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up * weighted
    return dgate.to(tl.bfloat16), (silu * weighted).to(tl.bfloat16), dy * (silu * up)


@jit
def _gradient_words(dy, gate, up, weight):
    """Words of the gradients of gate and up, and the inner product of each row, from words of two BF16 numbers."""
    dgate_low, dup_low, low = _gradients(low_half(dy), low_half(gate), low_half(up), weight)
    dgate_high, dup_high, high = _gradients(high_half(dy), high_half(gate), high_half(up), weight)
    dgate = halves_of(dgate_low.to(tl.int16, bitcast=True), dgate_high.to(tl.int16, bitcast=True))
    dup = halves_of(dup_low.to(tl.int16, bitcast=True), dup_high.to(tl.int16, bitcast=True))
    return dgate, dup, tl.sum(low + high, axis=1)


@jit
def _rows_backward(dy_ptr, gate_ptr, weights_ptr, part_ptr, pair, row, words, word):
    """Load some rows of a tile, store their parts of the inner products, return :func:`_gradient_words`."""
    weight = tl.load(weights_ptr + pair, mask=pair >= 0, other=0.0)
    place = row.to(tl.int64)[:, None] * words + word[None, :]
    dy = tl.load(dy_ptr + place)
    gate_place = place + row.to(tl.int64)[:, None] * words
    gate, up = tl.load(gate_ptr + gate_place), tl.load(gate_ptr + words + gate_place)
    dgate, dup, part = _gradient_words(dy, gate, up, weight[:, None])
    tl.store(part_ptr + row, part)
    return dgate, dup


@jit
def _backward_quantize_kernel(
    dy_words_ptr, gate_up_words_ptr, weights_ptr, pair_ptr, parts_ptr, rowwise_pairs_ptr, rowwise_scales_ptr,
    colwise_qdata_ptr, colwise_scales_ptr, rows, columns, words_per_row, POW2: tl.constexpr,
):  # fmt: skip
    tile_k, tile_row = tl.program_id(0), tl.program_id(1)
    row = tile_row * GROUP + 4 * tl.arange(0, GROUP // 4)
    pair_ptr += row
    p0, p1, p2, p3 = tl.load(pair_ptr), tl.load(pair_ptr + 1), tl.load(pair_ptr + 2), tl.load(pair_ptr + 3)
    if tl.max(tl.maximum(tl.maximum(p0, p1), tl.maximum(p2, p3)), axis=0) >= 0:
        words, word = columns // 2, tile_k * (GROUP // 2) + tl.arange(0, GROUP // 2)
        part_ptr = parts_ptr + tile_k.to(tl.int64) * rows
        dgate0, dup0 = _rows_backward(dy_words_ptr, gate_up_words_ptr, weights_ptr, part_ptr, p0, row, words, word)
        dgate1, dup1 = _rows_backward(dy_words_ptr, gate_up_words_ptr, weights_ptr, part_ptr, p1, row + 1, words, word)
        dgate2, dup2 = _rows_backward(dy_words_ptr, gate_up_words_ptr, weights_ptr, part_ptr, p2, row + 2, words, word)
        dgate3, dup3 = _rows_backward(dy_words_ptr, gate_up_words_ptr, weights_ptr, part_ptr, p3, row + 3, words, word)
        store_both(
            dgate0, dgate1, dgate2, dgate3, rowwise_pairs_ptr, rowwise_scales_ptr, colwise_qdata_ptr,
            colwise_scales_ptr, tile_row, tile_k, rows, 2 * columns, words_per_row, True, POW2,
        )  # fmt: skip
        store_both(
            dup0, dup1, dup2, dup3, rowwise_pairs_ptr, rowwise_scales_ptr, colwise_qdata_ptr, colwise_scales_ptr,
            tile_row, tile_k + columns // GROUP, rows, 2 * columns, words_per_row, True, POW2,
        )  # fmt: skip


@jit
def _add_parts_kernel(parts_ptr, pair_ptr, dweights_ptr, rows, parts, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    pair = tl.load(pair_ptr + row, mask=row < rows, other=-1)
    valid = pair >= 0
    total = tl.zeros((TILE,), dtype=tl.float32)
    places = parts_ptr + row
    for _ in range(0, parts):
        total += tl.load(places, mask=valid, other=0.0)
        places += rows
    tl.store(dweights_ptr + pair, total, mask=valid)


@implements("weighted_silu_mul_backward_quantize", "triton")
def triton_weighted_silu_mul_backward_quantize(dy, gate_up, weights, pair, rule: str) -> Gradients:
    """See :func:`weighted_silu_mul_backward_quantize`."""
    pow2, (rows, columns), device = is_pow2(rule), dy.shape, dy.device
    rowwise = empty_rowwise(rows, 2 * columns, device)
    colwise, words = empty_colwise(rows, 2 * columns, device)
    dweights = torch.empty(weights.shape, dtype=torch.float32, device=device)
    if rows:
        tiles = columns // BLOCK
        parts = torch.empty((tiles, rows), dtype=torch.float32, device=device)
        _backward_quantize_kernel[(tiles, rows // BLOCK)](
            dy.contiguous().view(torch.int32),
            gate_up.contiguous().view(torch.int32),
            weights.contiguous(),
            pair,
            parts,
            rowwise.qdata.view(torch.int16),
            rowwise.scales,
            words,
            colwise.scales,
            rows,
            columns,
            words.shape[1],
            POW2=pow2,
            **_LAUNCH_BACKWARD,
        )
        _add_parts_kernel[(ceil_div(rows, _TILE),)](parts, pair, dweights, rows, tiles, TILE=_TILE, num_warps=_WARPS)
    return rowwise, colwise, dweights


def _check(gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor) -> None:
    require_bf16("weighted_silu_mul", gate_up=gate_up)
    if weights.dtype != torch.float32 or pair.dtype != torch.int32 or pair.shape != gate_up.shape[:1]:
        raise ValueError(
            f"weighted_silu_mul: weights {weights.dtype} and pairs {tuple(pair.shape)} {pair.dtype} do not fit rows "
            f"{tuple(gate_up.shape)}; expected FP32 and one int32 per row"
        )


@operator(
    "weighted_silu_mul_quantize(Tensor gate_up, Tensor weights, Tensor pair, str rule) -> Quantized",
    fake=lambda gate_up, weights, pair, rule: fake_rowwise(gate_up[:, : gate_up.shape[1] // 2]),
)
def weighted_silu_mul_quantize(
    gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor, rule: str
) -> QuantizedTensor:
    """``w * silu(gate) * up`` of each row, rounded to BF16, as ``kernels.quantize_1x128`` quantizes it.

    Args:
        gate_up: ``[R, 2 I]`` BF16, gate first; I a multiple of 128. weights: ``[T, k]`` FP32.
        pair: ``[R]`` int32 (:class:`jetrl_verl.reference.Segments`); a row without a pair is zero.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.

    Returns:
        qdata ``[R, I]`` E4M3 and scales ``[R, I/128]`` FP32. No autograd.

    Raises:
        TypeError: ``gate_up`` is not BF16. ValueError: I is no multiple of 128, operands that do not fit, the rule.
    """
    require_groups("weighted_silu_mul_quantize", gate_up[:, : gate_up.shape[1] // 2])
    _check(gate_up, weights, pair)
    return lookup("weighted_silu_mul_quantize", gate_up.device)(gate_up, weights, pair, rule)


@operator(
    "weighted_silu_mul_backward_quantize(Tensor dy, Tensor gate_up, Tensor weights, Tensor pair, str rule)"
    " -> (Quantized, Quantized, Tensor)",
    fake=lambda dy, gate_up, weights, *_: (
        fake_rowwise(gate_up),
        fake_colwise(gate_up),
        weights.new_empty(weights.shape),
    ),
)
def weighted_silu_mul_backward_quantize(
    dy: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, pair: torch.Tensor, rule: str
) -> Gradients:
    """Gradients of what :func:`weighted_silu_mul_quantize` quantizes, straight through the rounding, as FP8 data.

    Args:
        dy: ``[R, I]`` BF16; the others as there, of segments that begin at multiples of 128.

    Returns:
        (``kernels.quantize_1x128_and_128x1`` of the BF16 gradient of ``gate_up``: rowwise ``[R, 2 I]`` and colwise
        ``[2 I, R]``; the gradient of ``weights [T, k]`` in FP32). Rows after the last segment are
        undefined. No autograd.

    Raises:
        TypeError: ``dy`` or ``gate_up`` is not BF16. ValueError: I or R is no multiple of 128, operands that do not
            fit, an unknown rule.
    """
    require_groups("weighted_silu_mul_backward_quantize", dy)
    require_groups_of_rows("weighted_silu_mul_backward_quantize", pair)
    require_bf16("weighted_silu_mul_backward_quantize", dy=dy)
    _check(gate_up, weights, pair)
    require_shape("weighted_silu_mul_backward_quantize", "dy", dy, (gate_up.shape[0], gate_up.shape[1] // 2))
    return lookup("weighted_silu_mul_backward_quantize", dy.device)(dy, gate_up, weights, pair, rule)
