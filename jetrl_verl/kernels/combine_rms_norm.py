# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sum of a token's rows of experts, residual addition and RMSNorm in one launch of the norm's kernel, for a rollout.
The bits are those of :func:`combine` and :func:`add_rms_norm` or ``add_rms_norm_quantize_1x128``."""

import torch

from jetrl_verl import reference
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import operator, require_bf16, require_shape
from jetrl_verl.kernels.results import fake_rowwise, require_groups
from jetrl_verl.kernels.rms_norm import launch_rms_norm, reference_add_rms_norm, reference_add_rms_norm_quantize_1x128
from jetrl_verl.reference import QuantizedTensor

__all__ = ["combine_add_rms_norm", "combine_add_rms_norm_quantize_1x128"]


@implements("combine_add_rms_norm", "reference")
def reference_combine_add_rms_norm(
    y, row, residual, weight, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two operations one after the other."""
    return reference_add_rms_norm(reference.combine(y, row), residual, weight, eps, unit_offset)


@implements("combine_add_rms_norm_quantize_1x128", "reference")
def reference_combine_add_rms_norm_quantize_1x128(
    y, row, residual, weight, eps: float, rule: str, with_normed: bool, unit_offset: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor, QuantizedTensor]:
    """The two operations one after the other."""
    x = reference.combine(y, row)
    return reference_add_rms_norm_quantize_1x128(x, residual, weight, eps, rule, with_normed, unit_offset)


@implements("combine_add_rms_norm", "triton")
def triton_combine_add_rms_norm(
    y, row, residual, weight, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_combine_add_rms_norm`."""
    normed, total, _, _ = launch_rms_norm(y, residual, weight, eps, None, True, row, unit_offset)
    return normed, total


@implements("combine_add_rms_norm_quantize_1x128", "triton")
def triton_combine_add_rms_norm_quantize_1x128(
    y, row, residual, weight, eps: float, rule: str, with_normed: bool, unit_offset: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor, QuantizedTensor]:
    """As :func:`reference_combine_add_rms_norm_quantize_1x128`."""
    normed, total, _, quantized = launch_rms_norm(y, residual, weight, eps, rule, with_normed, row, unit_offset)
    return normed, total, quantized


def _check(operation: str, y: torch.Tensor, row: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    if row.dtype != torch.int32 or row.ndim != 2:
        raise ValueError(f"{operation}: row is {row.dtype} {tuple(row.shape)}, not int32 [T, k] of segments")
    require_shape(operation, "weight", weight, y.shape[-1:])
    require_shape(operation, "residual", residual, (row.shape[0], y.shape[-1]))


def _fake_quantize(y, row, residual, weight, eps, rule, with_normed, *_):
    normed = residual.new_empty(residual.shape if with_normed else 0)
    return normed, residual.new_empty(residual.shape), fake_rowwise(residual)


@operator(
    "combine_add_rms_norm_quantize_1x128(Tensor y, Tensor row, Tensor residual, Tensor weight, float eps, str rule,"
    " bool with_normed, bool unit_offset=False) -> (Tensor, Tensor, Quantized)",
    fake=_fake_quantize,
    mixture_probe=lambda inputs: combine_add_rms_norm_quantize_1x128(*inputs.normed_sum, "fp32", with_normed=False),
)
def _combine_add_rms_norm_quantize(
    y, row, residual, weight, eps: float, rule: str, with_normed: bool, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
    """Normalized rows (empty without ``with_normed``), the residual sum, 1x128 qdata of the rows."""
    _check("combine_add_rms_norm_quantize_1x128", y, row, residual, weight)
    run = lookup("combine_add_rms_norm_quantize_1x128", y.device)
    normed, total, quantized = run(y, row, residual, weight, eps, rule, with_normed, unit_offset)
    return normed if with_normed else y.new_empty(0), total, quantized


@operator(
    "combine_add_rms_norm(Tensor y, Tensor row, Tensor residual, Tensor weight, float eps, bool unit_offset=False)"
    " -> (Tensor, Tensor)",
    fake=lambda y, row, residual, *_: (residual.new_empty(residual.shape), residual.new_empty(residual.shape)),
    mixture_probe=lambda inputs: combine_add_rms_norm(*inputs.normed_sum),
)
def combine_add_rms_norm(
    y: torch.Tensor,
    row: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rms_norm(combine(y, row), residual)`` in one launch, for inference.

    Args:
        y: ``[R, H]`` BF16. row: ``[T, k]`` int32 (:class:`jetrl_verl.reference.Segments`).
        residual: ``[T, H]`` BF16. weight: ``[H]``. eps: added to the mean of squares.
        unit_offset: as of :func:`rms_norm`.

    Returns:
        (normalized, residual sum rounded to BF16), both ``[T, H]`` BF16.

    Raises:
        TypeError: ``y`` or ``residual`` is not BF16. ValueError: shapes that do not fit.
    """
    require_bf16("combine_add_rms_norm", y=y, residual=residual)
    _check("combine_add_rms_norm", y, row, residual, weight)
    return lookup("combine_add_rms_norm", y.device)(y, row, residual, weight, eps, unit_offset)


def combine_add_rms_norm_quantize_1x128(
    y: torch.Tensor,
    row: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rule: str,
    *,
    with_normed: bool,
    unit_offset: bool = False,
) -> tuple[QuantizedTensor, torch.Tensor]:
    """:func:`combine_add_rms_norm` and ``kernels.quantize_1x128`` of its first result, for inference.

    Args:
        y: ``[R, H]`` BF16, H a multiple of 128. row: ``[T, k]`` int32. residual: ``[T, H]`` BF16. weight: ``[H]``.
        rule: scale rule, ``"fp32"`` or ``"pow2"``. with_normed: whether to return the normalized rows in BF16 too.
        unit_offset: as of :func:`rms_norm`.

    Returns:
        (FP8 data ``[T, H]`` and scales ``[T, H/128]`` of the normalized rows, ``source`` these rows in BF16 or None;
        residual sum rounded to BF16).

    Raises:
        TypeError: ``y`` or ``residual`` is not BF16. ValueError: shapes that do not fit, H is not a multiple of 128, an
            unknown rule.
    """
    require_bf16("combine_add_rms_norm_quantize_1x128", y=y, residual=residual)
    require_groups("combine_add_rms_norm_quantize_1x128", y)
    call = y, row, residual, weight, eps, rule, with_normed, unit_offset
    normed, total, quantized = _combine_add_rms_norm_quantize(*call)
    return QuantizedTensor(quantized.qdata, quantized.scales, normed if with_normed else None), total
