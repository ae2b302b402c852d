# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of a mixture of experts: which experts a token goes to, in what order rows are multiplied and added.

A pair is a token and one of its k experts. The pairs of an expert are neighbours among R rows, its *segment*, in token
order; a segment begins at a multiple of ``align`` rows and is padded with zero rows. A row of a product depends on its
own operands alone, so the forward's bits do not depend on ``align`` or on other tokens. A weight gradient contracts
along rows in groups of 128, so there ``align`` is 128 and no group holds rows of two experts.

* A token's k experts are those with the largest logits, equal logits by expert number (``torch.topk`` promises no
  order). Weights are computed in FP32 from FP32 logits (kernels/route.py).
* The routing weight multiplies ``silu(gate) * up`` instead of the expert's output: then a token's output gradient is
  quantized once for all its experts, and no expert's output is saved.
* A token's output is the sum of its pairs' rows in FP32, in the order of its experts' logits, rounded once.
* Each tensor-parallel rank has a slice of every expert's inner dimension. It rounds its part of a row, adds a token's
  rows, rounds, and then the ranks are added, rank 0 first. Adding ranks before a token's rows gives other bits.
* A shared expert is an MLP that every token goes to, a row-parallel layer like any other. Its output, rounded and added
  over ranks, is multiplied by ``sigmoid`` of an FP32 logit and added to the other experts' in FP32, rounded once.

Every product is ``gemm_nt`` or ``wgrad`` of one expert's rows (gemm.py).
"""

from typing import NamedTuple

import torch

from jetrl_verl.reference.constants import BLOCK
from jetrl_verl.reference.gemm import gemm_nt, k_slices, sum_of_ranks, wgrad
from jetrl_verl.reference.reproducible import sigmoid
from jetrl_verl.reference.tensor import QuantizedTensor


class Segments(NamedTuple):
    """Rows of the pairs of T tokens, k experts each, among the R rows of E experts' segments.

    Attributes:
        row: ``[T, k]`` int32, the row of each pair.
        pair: ``[R]`` int32, the pair ``token * k + slot`` in each row; -1 where there is none.
        start: ``[E + 1]`` int32, the first row of each expert's segment; no kernel reads rows after the last.
    """

    row: torch.Tensor
    pair: torch.Tensor
    start: torch.Tensor


class UncombinedRows(NamedTuple):
    """The experts' rows of T tokens before ``combine(*rows)``; returned where the next norm adds them itself.

    Attributes:
        y: ``[R, H]`` BF16, a row a pair.
        row: ``[T, k]`` int32, of :class:`Segments`.
    """

    y: torch.Tensor
    row: torch.Tensor


def rows_of_segments(pairs: int, experts: int, align: int) -> int:
    """R of the worst case, a multiple of ``align``; independent of the routing."""
    if align == 1:
        return pairs
    worst = pairs + min(experts, pairs) * (align - 1)
    return worst // align * align


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """``[T, k]`` int32: the k largest of ``logits [T, E]``, largest first, equal ones by number, NaN above all."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :k].to(torch.int32)


def segments(experts_of: torch.Tensor, experts: int, align: int) -> Segments:
    """Segments of ``experts_of [T, k]`` int32, numbers below ``experts``."""
    pairs = experts_of.numel()
    flat = experts_of.flatten().long()
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    start = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    start[1:] = ((counts + align - 1) // align * align).cumsum(0)
    order = flat.argsort(stable=True)
    place = torch.arange(pairs, device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    row = torch.empty_like(flat)
    row[order] = start[flat[order]] + place
    pair = torch.full((rows_of_segments(pairs, experts, align),), -1, dtype=torch.int32, device=flat.device)
    pair[row] = torch.arange(pairs, dtype=torch.int32, device=flat.device)
    return Segments(row.to(torch.int32).view(experts_of.shape), pair, start.to(torch.int32))


def gather_rows(x: torch.Tensor, pair: torch.Tensor, k: int) -> torch.Tensor:
    """Rows ``[R, C]`` of segments from tokens ``x [T, C]``; zeros where there is no pair."""
    rows = x.view(torch.uint8) if x.element_size() == 1 else x
    return rows[(pair.clamp(min=0) // k).long()].masked_fill_((pair < 0)[:, None], 0).view(x.dtype)


def gather_quantized(x: QuantizedTensor, pair: torch.Tensor, k: int) -> QuantizedTensor:
    """:func:`gather_rows` of rowwise qdata ``[T, K]``; rows without a pair are zero and have scale 1."""
    scales = gather_rows(x.scales, pair, k).masked_fill_((pair < 0)[:, None], 1.0)
    return QuantizedTensor(gather_rows(x.qdata, pair, k), scales)


def grouped_gemm_nt(a: QuantizedTensor, b: QuantizedTensor, start: torch.Tensor) -> torch.Tensor:
    """Each expert's rows of A times its matrix of B (FProp, DGrad).

    Args:
        a: qdata ``[R, K]``, 1x128 scales ``[R, ceil(K/128)]``.
        b: qdata ``[E, N, K]``, 128x128 scales ``[E, N/128, K/128]``.
        start: of :class:`Segments`.

    Returns:
        ``[R, N]`` BF16; zeros after the last segment.
    """
    y = torch.zeros(a.qdata.shape[0], b.qdata.shape[1], dtype=torch.bfloat16, device=a.qdata.device)
    bounds = start.tolist()
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if last > first:
            rows = QuantizedTensor(a.qdata[first:last], a.scales[first:last])
            weight = QuantizedTensor(b.qdata[expert], b.scales[expert])
            y[first:last] = gemm_nt(rows, weight)
    return y


def grouped_gemm_nt_of_ranks(a: QuantizedTensor, b: QuantizedTensor, start: torch.Tensor, ranks: int) -> torch.Tensor:
    """:func:`grouped_gemm_nt` of ``ranks`` equal slices of K, ``[ranks, R, N]`` BF16.

    Raises:
        ValueError: slices of K that are no multiples of 128.
    """
    slices = zip(k_slices(a, ranks), k_slices(b, ranks), strict=True)
    return torch.stack([grouped_gemm_nt(x, w, start) for x, w in slices])


def grouped_wgrad(dy: QuantizedTensor, x: QuantizedTensor, start: torch.Tensor) -> torch.Tensor:
    """Each expert's weight gradient, contracted over its segment.

    Args:
        dy: colwise qdata ``[N, R]``, scales ``[N, ceil(R/128)]``. x: colwise qdata ``[K, R]``.
        start: of :class:`Segments` with ``align`` 128.

    Returns:
        ``[E, N, K]`` BF16; zeros for an expert without tokens.
    """
    n, k = dy.qdata.shape[0], x.qdata.shape[0]
    dw = torch.zeros(len(start) - 1, n, k, dtype=torch.bfloat16, device=dy.qdata.device)
    bounds = start.tolist()
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if last > first:
            groups = slice(first // BLOCK, last // BLOCK)
            operands = [QuantizedTensor(q.qdata[:, first:last], q.scales[:, groups]) for q in (dy, x)]
            dw[expert] = wgrad(*operands)
    return dw


def combine(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """``[T, H]`` BF16: the rows of each token's k pairs in ``y [R, H]`` BF16, added in FP32, slot 0 first."""
    acc = y[row[:, 0].long()].float()
    for slot in range(1, row.shape[1]):
        acc += y[row[:, slot].long()].float()
    return acc.to(torch.bfloat16)


def combine_of_ranks(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """``[T, H]`` BF16 of ranks' rows ``y [ranks, R, H]`` BF16: each rank's :func:`combine`, then ``sum_of_ranks``."""
    return sum_of_ranks([combine(part, row) for part in y])


def add_shared_expert(routed: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """``routed + sigmoid(logits) shared``, ``[T, H]`` BF16 from BF16 outputs and FP32 ``logits [T, 1]``."""
    return (routed.float() + sigmoid(logits) * shared.float()).to(torch.bfloat16)
