# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given tokens from FP32 logits: temperature, log-softmax, one rounding to FP32.

On a GPU a row is read once: chunks of 4096 columns give their maximum and sum of exponentials, which are combined in
order, so neither batch nor padding changes a bit. The gradient recomputes the softmax from two numbers a row. On the
CPU sums are exact (reproducible.py).
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import dispatched, operator, require_shape
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.kernels.views import unit_stride
from jetrl_verl.reference.reproducible import exp, log, sum_of_fractions

__all__ = ["Normalized", "log_probs"]

_TERM_BITS = 32
"""Binary places of a term of the softmax denominator: sums of up to 2^21 entries are exact."""

ELEMENTS = 2**17
"""Logits processed at a time, so that passes over them stay in the cache."""

CHUNK, WARPS = 4096, 8
ROWS_TOGETHER = 256
"""Rows whose last chunks are read first: the GEMM leaves their last columns in L2."""
LANES = 256
"""Chunks added at a time."""
PICKED = 256
"""Results of a program of :func:`log_probs_of`."""


class Normalized(NamedTuple):
    """The normalizer of a softmax at a temperature. FP32 on a GPU, float64 on the CPU.

    Attributes:
        chunk_highest: ``[N, C]``, highest scaled logit of each chunk of ``CHUNK`` columns.
        chunk_sums: ``[N, C]``, sum of exponentials above it.
        highest, log_sum: ``[N, 1]``, of the whole row; ``log_sum`` is the logarithm.
    """

    chunk_highest: torch.Tensor
    chunk_sums: torch.Tensor
    highest: torch.Tensor
    log_sum: torch.Tensor


def reference_normalized(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maximum and log of the sum of exponentials above it, float64 ``[n, 1]`` each, of ``scaled [n, V]``."""
    highest = scaled.amax(dim=-1, keepdim=True)
    return highest, log(sum_of_fractions(exp(scaled - highest), _TERM_BITS))


@implements("log_probs", "reference")
def reference_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``[N, k]`` FP32 of logits ``[N, V]``, tokens ``[N, k]`` and temperatures ``[N]``."""
    rows, vocabulary = logits.shape
    out = torch.empty(tokens.shape, dtype=torch.float32)
    step = max(1, ELEMENTS // vocabulary)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        scaled = logits[piece].double().div_(temperature[piece, None].double())
        highest, log_sum = reference_normalized(scaled)
        out[piece] = (scaled.gather(1, tokens[piece]) - highest - log_sum).float()
    return out


@implements("log_probs_backward", "reference")
def reference_log_probs_backward(gradient, logits, tokens, temperature) -> torch.Tensor:
    """Gradient of the logits ``[N, V]`` FP32 from that of the log-probabilities ``[N, k]`` FP32."""
    scaled = gradient / temperature[:, None]
    dlogits = (logits / temperature[:, None]).softmax(dim=-1)
    return dlogits.mul_(-scaled.sum(dim=-1, keepdim=True)).scatter_add_(1, tokens, scaled)


@jit
def scaled_by(x, temperature):
    """``x / temperature``, correctly rounded; no division at temperature 1."""
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
    return x


@jit(do_not_specialize=["rows", "columns", "stride", "chunks"])
def _chunk_kernel(
    logits_ptr, temperature_ptr, chunk_highest_ptr, chunk_sums_ptr, rows, columns, stride, chunks,
    CHUNK: tl.constexpr, ROWS_TOGETHER: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) // (ROWS_TOGETHER * chunks) * ROWS_TOGETHER
    place, together = tl.program_id(0) - first * chunks, tl.minimum(rows - first, ROWS_TOGETHER)
    row, chunk = first + place % together, chunks - 1 - place // together
    temperature = tl.load(temperature_ptr + row)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=column < columns, other=float("-inf"))
    # The maximum may drop a NaN, the sum keeps it.
    highest = tl.div_rn(tl.max(x, axis=0), temperature)
    # Where every column is masked, each term is zero.
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    target = row.to(tl.int64) * chunks + chunk
    tl.store(chunk_highest_ptr + target, highest)
    tl.store(chunk_sums_ptr + target, tl.sum(tl.exp(scaled_by(x, temperature) - origin), axis=0))


@jit(do_not_specialize=["chunks"])
def _combine_kernel(chunk_highest_ptr, chunk_sums_ptr, highest_ptr, log_sum_ptr, chunks, LANES: tl.constexpr):
    row = tl.program_id(0)
    first = row.to(tl.int64) * chunks
    lane = tl.arange(0, LANES)
    lanes = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    for start in range(0, chunks, LANES):
        valid = start + lane < chunks
        lanes = tl.maximum(lanes, tl.load(chunk_highest_ptr + first + start + lane, mask=valid, other=float("-inf")))
    highest = tl.max(lanes, axis=0)
    sums = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, chunks, LANES):
        valid = start + lane < chunks
        above = tl.load(chunk_highest_ptr + first + start + lane, mask=valid, other=float("-inf"))
        sums += tl.load(chunk_sums_ptr + first + start + lane, mask=valid, other=0.0) * tl.exp(above - highest)
    tl.store(highest_ptr + row, highest)
    tl.store(log_sum_ptr + row, tl.log(tl.sum(sums, axis=0)))


@jit(do_not_specialize=["stride", "row_of_tokens", "next_token", "per_row", "count"])
def _pick_kernel(
    logits_ptr, tokens_ptr, temperature_ptr, highest_ptr, log_sum_ptr, out_ptr,
    stride, row_of_tokens, next_token, per_row, count, PICKED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * PICKED + tl.arange(0, PICKED)
    mask = place < count
    row = place // per_row
    token = tl.load(tokens_ptr + row * row_of_tokens + place % per_row * next_token, mask=mask, other=0)
    x = tl.load(logits_ptr + row * stride + token, mask=mask, other=0.0)
    scaled = tl.div_rn(x, tl.load(temperature_ptr + row, mask=mask, other=1.0))
    highest = tl.load(highest_ptr + row, mask=mask, other=0.0)
    tl.store(out_ptr + place, scaled - highest - tl.load(log_sum_ptr + row, mask=mask, other=0.0), mask=mask)


@jit(do_not_specialize=["columns", "stride"])
def _gradient_kernel(
    logits_ptr, temperature_ptr, highest_ptr, log_sum_ptr, total_ptr, out_ptr, columns, stride, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = column < columns
    x = tl.load(logits_ptr + row * stride + column, mask=mask, other=float("-inf"))
    scaled = tl.div_rn(x, tl.load(temperature_ptr + row))
    p = tl.exp(scaled - tl.load(highest_ptr + row) - tl.load(log_sum_ptr + row))
    tl.store(out_ptr + row * columns + column, -tl.load(total_ptr + row) * p, mask=mask)


def normalize(logits: torch.Tensor, temperature: torch.Tensor) -> Normalized:
    """For FP32 rows with contiguous columns on a GPU and contiguous temperatures ``[N]``."""
    rows, columns = logits.shape
    chunks = ceil_div(columns, CHUNK)
    sizes = (chunks, chunks, 1, 1)
    normalized = Normalized(*(torch.empty((rows, n), dtype=torch.float32, device=logits.device) for n in sizes))
    if rows:
        _chunk_kernel[(rows * chunks,)](
            logits,
            temperature,
            *normalized[:2],
            rows,
            columns,
            logits.stride(0),
            chunks,
            CHUNK=CHUNK,
            ROWS_TOGETHER=ROWS_TOGETHER,
            num_warps=WARPS,
        )
        _combine_kernel[(rows,)](*normalized, chunks, LANES=LANES, num_warps=4)
    return normalized


def log_probs_of(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, normalized: Normalized
) -> torch.Tensor:
    """``[N, k]`` log-probabilities of ``tokens [N, k]`` of normalized rows, for trainer and rollout."""
    out = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        _pick_kernel[(ceil_div(out.numel(), PICKED),)](
            logits,
            tokens,
            temperature,
            normalized.highest,
            normalized.log_sum,
            out,
            logits.stride(0),
            *tokens.stride(),
            tokens.shape[1],
            out.numel(),
            PICKED=PICKED,
            num_warps=4,
        )
    return out


@implements("log_probs", "triton")
def triton_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """As :func:`reference_log_probs`."""
    logits, temperature = unit_stride(logits), temperature.contiguous()
    return log_probs_of(logits, tokens, temperature, normalize(logits, temperature))


@implements("log_probs_backward", "triton")
def triton_log_probs_backward(gradient, logits, tokens, temperature) -> torch.Tensor:
    """As :func:`reference_log_probs_backward`. Allocates nothing else of size ``N V``: a step's memory peaks here."""
    logits = unit_stride(logits)
    rows, columns = logits.shape
    temperature = temperature.contiguous()
    scaled = gradient / temperature[:, None]
    out = torch.empty((rows, columns), dtype=torch.float32, device=logits.device)
    if rows:
        normalized = normalize(logits, temperature)
        _gradient_kernel[(rows, ceil_div(columns, CHUNK))](
            logits,
            temperature,
            normalized.highest,
            normalized.log_sum,
            scaled.sum(dim=1, keepdim=True),
            out,
            columns,
            logits.stride(0),
            CHUNK=CHUNK,
            num_warps=WARPS,
        )
    return out.scatter_add_(1, tokens, scaled)


@operator(
    "log_probs(Tensor logits, Tensor tokens, Tensor temperature) -> Tensor",
    fake=lambda logits, tokens, *_: logits.new_empty(tokens.shape),
    probe=lambda inputs: log_probs(inputs.logits, inputs.following, inputs.temperature),
)
def _log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    require_shape("log_probs", "temperature", temperature, logits.shape[:1])
    require_shape("log_probs", "tokens", tokens, (logits.shape[0], tokens.shape[-1]))
    return lookup("log_probs", logits.device)(logits, tokens, temperature)


_log_probs_backward = dispatched(
    "log_probs_backward(Tensor gradient, Tensor logits, Tensor tokens, Tensor temperature) -> Tensor",
    fake=lambda gradient, logits, tokens, temperature: logits.new_empty(logits.shape),
)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, tokens, temperature)
        return _log_probs(logits, tokens, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        logits, tokens, temperature = ctx.saved_tensors
        return _log_probs_backward(gradient, logits, tokens, temperature), None, None


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of given tokens; differentiable in ``logits``.

    Args:
        logits: ``[N, V]`` FP32. tokens: ``[N, k]`` int64, k tokens of each row.
        temperature: ``[N]`` FP32, positive.

    Returns:
        ``[N, k]`` FP32.

    Raises:
        TypeError: logits or temperatures that are not FP32.
    """
    if logits.dtype != torch.float32 or temperature.dtype != torch.float32:
        raise TypeError(
            f"log_probs: logits are {logits.dtype} and temperatures {temperature.dtype}, expected torch.float32"
        )
    if torch.is_grad_enabled():
        return _LogProbs.apply(logits, tokens, temperature)
    return _log_probs(logits, tokens, temperature)
