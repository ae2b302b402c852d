# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""RMSNorm over the last dimension, with and without a residual sum before it; the QK norm is the same function.

    y = (x * rstd) * w        rstd = 1 / sqrt(mean(x^2) + eps)        with a unit offset: y = (x * rstd) * (1 + w)

FP32 inside, 1 + w too, one rounding to BF16 at the end; the residual sum is rounded to BF16 before it is normalized.
On a GPU all forms are one kernel with compile-time K and tile: one program per row, one order of the sum whatever the
batch.
"""

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl import reference
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.combine import sum_of_rows
from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.e4m3 import GROUP, is_pow2, quantize_groups
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import dispatched, operator, require_bf16, require_shape
from jetrl_verl.kernels.results import empty_rowwise, fake_rowwise, require_groups
from jetrl_verl.kernels.sizes import ceil_div, next_power_of_2
from jetrl_verl.kernels.views import as_rows, as_type
from jetrl_verl.reference import QuantizedTensor

__all__ = ["add_rms_norm", "add_rms_norm_quantize_1x128", "rms_norm", "rms_norm_quantize_1x128"]

# --- reference: exact sums on the CPU ---------------------------------------------------------------------------------

implements("rms_norm", "reference")(reference.rms_norm)
implements("rms_norm_backward", "reference")(reference.rms_norm_backward)


@implements("add_rms_norm", "reference")
def reference_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and ``x + residual``, both BF16."""
    total = (x + residual).contiguous()
    return reference.rms_norm(total, weight, eps, unit_offset)[0], total


@implements("rms_norm_quantize_1x128", "reference")
def reference_rms_norm_quantize_1x128(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rule: str, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
    """y, rstd, 1x128 qdata of y."""
    y, rstd = reference.rms_norm(x, weight, eps, unit_offset)
    return y, rstd, reference.quantize_1x128(y.reshape(-1, y.shape[-1]), rule)


@implements("add_rms_norm_quantize_1x128", "reference")
def reference_add_rms_norm_quantize_1x128(
    x, residual, weight, eps: float, rule: str, with_normed: bool, unit_offset: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor, QuantizedTensor]:
    """y or None, ``x + residual``, 1x128 qdata of y."""
    y, total = reference_add_rms_norm(x, residual, weight, eps, unit_offset)
    return y if with_normed else None, total, reference.quantize_1x128(y.reshape(-1, y.shape[-1]), rule)


# --- Triton -----------------------------------------------------------------------------------------------------------

_BACKWARD_PROGRAMS = 528
"""Programs of a gradient: four per multiprocessor of an H200."""
_BACKWARD_ELEMENTS = 2048
"""Elements that a program of the gradient loads at a time, at least one row."""
_VECTOR = 8
"""Elements of a 16-byte load."""
_ROWS_IN_FLIGHT = {"maxnreg": 128}
"""For a program that adds experts' rows: without a register bound the assembler loads three rows at a time."""


# Maxima are taken from the row folded to [groups, 128], which moves nothing between threads and keeps the layout of the
# sum of squares (tests/kernels/test_fused_for_hopper.py).
@jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr, row_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, qdata_ptr, scales_ptr, eps, rows,
    K: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    SLOTS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr, WITH_Y: tl.constexpr,
    QUANTIZE: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    if QUANTIZE:  # a linear reads it next
        launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < K
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)  # loaded before the sum is needed
    if UNIT_OFFSET:
        weight += 1.0
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * K + column, mask=mask, other=0.0)
    if SLOTS:  # rows of experts, added as in combine.py
        tl.debug_barrier()  # else the assembler moves the loads of weight and residual after the sum
        x = sum_of_rows(x_ptr, row_ptr + row * SLOTS, column, mask, K, SLOTS).to(tl.bfloat16)
    else:
        x = tl.load(x_ptr + row // HEADS * STRIDE_TOKEN + row % HEADS * STRIDE_HEAD + column, mask=mask, other=0.0)
    if RESIDUAL:
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(tl.bfloat16)
        tl.store(total_ptr + row * K + column, x, mask=mask)
    values = x.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / K
    rstd = 1.0 / tl.sqrt_rn(mean + eps)
    tl.store(rstd_ptr + row, rstd)
    y = (values * rstd * weight).to(tl.bfloat16)
    if WITH_Y:
        tl.store(y_ptr + row * K + column, y, mask=mask)
    if QUANTIZE:
        qdata, scale = quantize_groups(tl.reshape(y, (TILE // GROUP, GROUP)).to(tl.float32), POW2)
        group = tl.arange(0, TILE // GROUP)
        offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(qdata_ptr + row * K + offsets, qdata, mask=offsets < K)
        tl.store(scales_ptr + group.to(tl.int64) * rows + row, scale, mask=group < K // GROUP)


# One pass: a program writes dx of its rows and keeps their share of dw in registers. The bits depend on the number of
# rows, which the contract allows for a gradient.
@jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr, count, rows_each,
    K: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, TILE)[None, :]
    inside = column < K
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    dw = tl.zeros((ROWS, TILE), dtype=tl.float32)
    first = tl.program_id(0) * rows_each
    for start in range(first, tl.minimum(first + rows_each, count), ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = inside & (row < count)
        place = row.to(tl.int64) * K + column
        rstd = tl.load(rstd_ptr + row, mask=row < count, other=0.0)
        dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        normalized = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) * rstd
        scaled = dy * weight
        mean = tl.sum(scaled * normalized, axis=1)[:, None] / K
        dx = rstd * (scaled - normalized * mean)
        tl.store(dx_ptr + place, dx.to(tl.bfloat16), mask=mask)
        dw += dy * normalized
    total = tl.sum(dw, axis=0)[None, :]
    tl.store(dw_ptr + tl.program_id(0) * K + column, total, mask=inside)


def tile_and_warps(k: int) -> tuple[int, int]:
    """Tile and warps of a program that sums a row of ``k``; they fix the order of the sum."""
    tile = next_power_of_2(k)
    return tile, min(max(tile // 512, 1), 16)


def _aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as ``[rows, K]``, contiguous from a 16-byte boundary, copied only where it is not."""
    rows = as_rows(x).contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _are_heads_in_place(x: torch.Tensor) -> bool:
    """Whether ``x`` is heads ``[N, H, K]`` of a wider tensor, each of which loads as a separate row does."""
    if x.ndim != 3 or x.is_contiguous() or x.stride(2) != 1:
        return False
    return x.data_ptr() % 16 == 0 and all(step % _VECTOR == 0 for step in (*x.shape[2:], *x.stride()[:2]))


def heads_in_place(x: torch.Tensor) -> torch.Tensor:
    """Heads ``[N, H, K]`` that load as separate rows do, copied where they would not."""
    if _are_heads_in_place(x) or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    return _aligned_rows(x).view(x.shape)


def launch_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    rule: str | None,
    with_y: bool,
    row: torch.Tensor | None = None,
    unit_offset: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, QuantizedTensor | None]:
    """The one launch of all forms: (y or None, ``x + residual`` or ``x``, rstd, qdata of y under ``rule`` or None).

    With ``row [T, k]`` and a residual ``[T, K]``, ``combine(x, row)`` is added to it.
    """
    k = x.shape[-1]
    shape = x.shape if row is None else residual.shape
    if row is None and _are_heads_in_place(x):
        source, layout = x, {"HEADS": x.shape[1], "STRIDE_TOKEN": x.stride(0), "STRIDE_HEAD": x.stride(1)}
    else:
        source, layout = _aligned_rows(x), {"HEADS": 1, "STRIDE_TOKEN": k, "STRIDE_HEAD": k}
    # Sizes as separate arguments: torch takes 2 us more to parse a shape, which is needed where there are none.
    lead = shape[:-1] or ((),)
    rstd = torch.empty(*lead, dtype=torch.float32, device=x.device)
    y = torch.empty(*shape, dtype=torch.bfloat16, device=x.device) if with_y else None
    total = torch.empty(*shape, dtype=torch.bfloat16, device=x.device) if residual is not None else x
    count = rstd.numel()
    quantized = empty_rowwise(count, k, x.device) if rule is not None else None
    pow2 = rule is not None and is_pow2(rule)
    tile, warps = tile_and_warps(k)
    if count:
        # Pointers of what is absent are never dereferenced.
        _rms_norm_kernel[(count,)](
            source,
            row.contiguous() if row is not None else source,
            _aligned_rows(residual) if residual is not None else source,
            weight.contiguous(),
            y if with_y else source,
            total,
            rstd,
            quantized.qdata.view(torch.uint8) if rule is not None else source,
            quantized.scales if rule is not None else rstd,
            eps,
            count,
            K=k,
            TILE=tile,
            **layout,
            SLOTS=row.shape[1] if row is not None else 0,
            RESIDUAL=residual is not None,
            UNIT_OFFSET=unit_offset,
            WITH_Y=with_y,
            QUANTIZE=rule is not None,
            POW2=pow2,
            num_warps=warps,
            **(_ROWS_IN_FLIGHT if row is not None else {}),
        )
    return y, total, rstd, quantized


@implements("rms_norm", "triton")
def triton_rms_norm(x, weight, eps: float, unit_offset: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.rms_norm``."""
    y, _, rstd, _ = launch_rms_norm(x, None, weight, eps, None, True, unit_offset=unit_offset)
    return y, rstd


@implements("add_rms_norm", "triton")
def triton_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_add_rms_norm`."""
    y, total, _, _ = launch_rms_norm(x, residual, weight, eps, None, True, unit_offset=unit_offset)
    return y, total


@implements("rms_norm_quantize_1x128", "triton")
def triton_rms_norm_quantize_1x128(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rule: str, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
    """As :func:`reference_rms_norm_quantize_1x128`."""
    y, _, rstd, quantized = launch_rms_norm(x, None, weight, eps, rule, True, unit_offset=unit_offset)
    return y, rstd, quantized


@implements("add_rms_norm_quantize_1x128", "triton")
def triton_add_rms_norm_quantize_1x128(
    x, residual, weight, eps: float, rule: str, with_normed: bool, unit_offset: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor, QuantizedTensor]:
    """As :func:`reference_add_rms_norm_quantize_1x128`."""
    y, total, _, quantized = launch_rms_norm(x, residual, weight, eps, rule, with_normed, unit_offset=unit_offset)
    return y, total, quantized


@implements("rms_norm_backward", "triton")
def triton_rms_norm_backward(dy, x, weight, rstd, unit_offset: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """dx ``[..., K]`` BF16 and dw ``[K]`` FP32 from dy and x ``[..., K]`` and rstd ``[...]`` FP32."""
    rows, gradients = _aligned_rows(x), _aligned_rows(as_type(dy, torch.bfloat16))
    count, k = rows.shape
    dx = torch.empty_like(rows)
    tile = next_power_of_2(k)
    at_once = max(_BACKWARD_ELEMENTS // tile, 1)
    rows_each = ceil_div(ceil_div(count, _BACKWARD_PROGRAMS), at_once) * at_once
    programs = ceil_div(count, rows_each) if count else 0
    partial = torch.empty(programs, k, dtype=torch.float32, device=x.device)
    if count:
        _backward_kernel[(programs,)](
            gradients,
            rows,
            weight.contiguous(),
            rstd.contiguous(),
            dx,
            partial,
            count,
            rows_each,
            K=k,
            TILE=tile,
            ROWS=at_once,
            UNIT_OFFSET=unit_offset,
            num_warps=min(max(tile * at_once // 512, 1), 16),
        )
    return dx if x.ndim == 2 else dx.view(x.shape), partial.sum(dim=0)


# --- torch operators --------------------------------------------------------------------------------------------------


def _fake(x, *_):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator(
    "rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset=False) -> (Tensor, Tensor)",
    fake=_fake,
    probe=lambda inputs: rms_norm(inputs.x, inputs.weight, 1e-6, inputs.unit_offset),
)
def _rms_norm(x, weight, eps: float, unit_offset: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """y BF16 and rstd FP32 of x [..., K]."""
    require_shape("rms_norm", "weight", weight, x.shape[-1:])
    return lookup("rms_norm", x.device)(x, weight, eps, unit_offset)


@operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool unit_offset=False) -> (Tensor, Tensor)",
    fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
    probe=lambda inputs: add_rms_norm(inputs.x, inputs.residual, inputs.weight, 1e-6, inputs.unit_offset),
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm`` of ``x + residual``, for inference; the bits of a trainer's BF16 addition and :func:`rms_norm`.

    Args:
        x, residual: ``[..., K]`` BF16. weight: ``[K]``.
        unit_offset: whether the factor of a normalized row is ``1 + weight``.

    Returns:
        (normalized, ``x + residual`` rounded to BF16), both ``[..., K]`` BF16.

    Raises:
        TypeError: ``x`` or ``residual`` is not BF16.
    """
    require_bf16("add_rms_norm", x=x, residual=residual)
    require_shape("add_rms_norm", "weight", weight, x.shape[-1:])
    require_shape("add_rms_norm", "residual", residual, x.shape)
    return lookup("add_rms_norm", x.device)(x, residual, weight, eps, unit_offset)


@operator(
    "rms_norm_quantize_1x128(Tensor x, Tensor weight, float eps, str rule, bool unit_offset=False)"
    " -> (Tensor, Tensor, Quantized)",
    fake=lambda x, *_: (*_fake(x), fake_rowwise(x)),
    probe=lambda inputs: rms_norm_quantize_1x128(inputs.x, inputs.weight, 1e-6, "fp32", inputs.unit_offset),
)
def _rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rule: str, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
    """y, rstd, 1x128 qdata of y."""
    require_shape("rms_norm_quantize_1x128", "weight", weight, x.shape[-1:])
    return lookup("rms_norm_quantize_1x128", x.device)(x, weight, eps, rule, unit_offset)


@operator(
    "add_rms_norm_quantize_1x128(Tensor x, Tensor residual, Tensor weight, float eps, str rule, bool with_normed,"
    " bool unit_offset=False) -> (Tensor, Tensor, Quantized)",
    fake=lambda x, residual, weight, eps, rule, with_normed, *_: (
        x.new_empty(x.shape if with_normed else 0),
        x.new_empty(x.shape),
        fake_rowwise(x),
    ),
    probe=lambda inputs: add_rms_norm_quantize_1x128(
        inputs.x, inputs.residual, inputs.weight, 1e-6, "fp32", with_normed=False, unit_offset=inputs.unit_offset
    ),
)
def _add_rms_norm_quantize(
    x, residual, weight, eps: float, rule: str, with_normed: bool, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
    """y (empty without ``with_normed``), the residual sum, 1x128 qdata of y."""
    require_shape("add_rms_norm_quantize_1x128", "weight", weight, x.shape[-1:])
    require_shape("add_rms_norm_quantize_1x128", "residual", residual, x.shape)
    run = lookup("add_rms_norm_quantize_1x128", x.device)
    y, total, quantized = run(x, residual, weight, eps, rule, with_normed, unit_offset)
    return y if with_normed else x.new_empty(0), total, quantized


rms_norm_backward = dispatched(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool unit_offset=False) -> (Tensor, Tensor)",
    fake=lambda dy, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)),
)
"""dx BF16 and dw FP32."""


# --- functions --------------------------------------------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float, rule: str | None, unit_offset: bool):
        if rule is None:
            y, rstd = _rms_norm(x, weight, eps, unit_offset)
            results = y
        else:
            y, rstd, quantized = _rms_norm_quantize(x, weight, eps, rule, unit_offset)
            ctx.mark_non_differentiable(*quantized)
            ctx.set_materialize_grads(False)  # no zeros for the gradients of qdata
            results = (y, *quantized)
        ctx.save_for_backward(x, rstd)
        ctx.unit_offset = unit_offset
        keep(ctx, weight)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor, *_):
        (x, rstd), (weight,) = ctx.saved_tensors, kept(ctx)
        dx, dw = rms_norm_backward(dy, x, weight, rstd, ctx.unit_offset)
        return dx, as_type(dw, weight.dtype), None, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """Normalize the rows of ``x``; differentiable in ``x`` and ``weight``.

    Args:
        x: ``[..., K]`` BF16; heads ``[N, H, K]`` of a merged projection are read in place. weight: ``[K]``.
        eps: added to the mean of squares. unit_offset: whether the factor of a normalized row is ``1 + weight``.

    Returns:
        ``[..., K]`` BF16, contiguous. A row with Inf or NaN has NaN in it.

    Raises:
        TypeError: ``x`` is not BF16.
    """
    require_bf16("rms_norm", x=x)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps, None, unit_offset)
    return _rms_norm(x, weight, eps, unit_offset)[0]


def rms_norm_quantize_1x128(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rule: str, unit_offset: bool = False
) -> QuantizedTensor:
    """:func:`rms_norm` and ``kernels.quantize_1x128`` of its result; differentiable in ``x`` and ``weight``.

    Args:
        x: ``[..., K]`` BF16, K a multiple of 128. weight: ``[K]``. eps: added to the mean of squares.
        rule: scale rule, ``"fp32"`` or ``"pow2"``. unit_offset: as of :func:`rms_norm`.

    Returns:
        FP8 data ``[M, K]`` E4M3 and scales ``[M, K/128]`` FP32 of the M normalized rows; ``source`` is these rows
        ``[..., K]`` BF16.

    Raises:
        TypeError: ``x`` is not BF16. ValueError: K is not a multiple of 128, an unknown rule.
    """
    require_bf16("rms_norm_quantize_1x128", x=x)
    require_groups("rms_norm_quantize_1x128", x)
    if torch.is_grad_enabled():
        y, qdata, scales = _RMSNorm.apply(x, weight, eps, rule, unit_offset)
    else:
        y, _, quantized = _rms_norm_quantize(x, weight, eps, rule, unit_offset)
        qdata, scales = quantized.qdata, quantized.scales
    return QuantizedTensor(qdata, scales, y)


def add_rms_norm_quantize_1x128(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rule: str,
    *,
    with_normed: bool,
    unit_offset: bool = False,
) -> tuple[QuantizedTensor, torch.Tensor]:
    """:func:`add_rms_norm` and ``kernels.quantize_1x128`` of its first result, for inference.

    Args:
        x, residual: ``[..., K]`` BF16, K a multiple of 128. weight: ``[K]``.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.
        with_normed: whether to return the normalized rows in BF16 too. unit_offset: as of :func:`rms_norm`.

    Returns:
        (FP8 data ``[M, K]`` and scales ``[M, K/128]`` of the normalized rows, ``source`` these rows ``[..., K]`` BF16
        or None; ``x + residual`` rounded to BF16).

    Raises:
        TypeError: ``x`` or ``residual`` is not BF16. ValueError: K is not a multiple of 128, an unknown rule.
    """
    require_bf16("add_rms_norm_quantize_1x128", x=x, residual=residual)
    require_groups("add_rms_norm_quantize_1x128", x)
    y, total, quantized = _add_rms_norm_quantize(x, residual, weight, eps, rule, with_normed, unit_offset)
    return QuantizedTensor(quantized.qdata, quantized.scales, y if with_normed else None), total
