# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given tokens from FP32 logits: temperature, log-softmax, one rounding to FP32.

Stock verl and vLLM reduce the softmax in kernels of their own.

On a GPU one program reduces a row. Each lane adds its own columns in ascending order, the lanes are added once at the
end. Two reads of a row and no write but two numbers: the softmax itself never exists. Its gradient recomputes it from
the two numbers, once, where the result is written. On the CPU sums are exact (reproducible.py).
"""

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.launch import jit
from jetrl_verl.kernels.operator import operator, require_shape
from jetrl_verl.kernels.reproducible import exp, log, sum_of_fractions
from jetrl_verl.kernels.sizes import ceil_div

_TERM_BITS = 32
"""Binary places of a term of the softmax denominator: sums of up to 2^21 entries are exact."""

_ELEMENTS = 2**17
"""Logits worked on at a time, so that the passes over them stay in the cache."""

TILE, WARPS = 4096, 8


def _normalised(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maximum and log of the sum of exponentials above it, float64 ``[n, 1]`` each, of ``scaled [n, V]``."""
    highest = scaled.amax(dim=-1, keepdim=True)
    return highest, log(sum_of_fractions(exp(scaled - highest), _TERM_BITS))


@implements("log_probs", "reference")
def reference_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``[N, k]`` FP32 of logits ``[N, V]``, tokens ``[N, k]`` and temperatures ``[N]``."""
    rows, vocabulary = logits.shape
    out = torch.empty(tokens.shape, dtype=torch.float32)
    step = max(1, _ELEMENTS // vocabulary)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        scaled = logits[piece].double().div_(temperature[piece, None].double())
        highest, log_sum = _normalised(scaled)
        out[piece] = (scaled.gather(1, tokens[piece]) - highest - log_sum).float()
    return out


@implements("log_probs_backward", "reference")
def reference_log_probs_backward(
    gradient: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Gradient of the logits ``[N, V]`` FP32 from that of the log-probabilities ``[N, k]`` FP32."""
    scaled = gradient / temperature[:, None]
    dlogits = (logits / temperature[:, None]).softmax(dim=-1)
    return dlogits.mul_(-scaled.sum(dim=-1, keepdim=True)).scatter_add_(1, tokens, scaled)


@jit(do_not_specialize=["columns", "stride"])
def _normaliser_kernel(logits_ptr, temperature_ptr, highest_ptr, log_sum_ptr, columns, stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    source = logits_ptr + row * stride
    column = tl.arange(0, TILE)
    lanes = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    for start in range(0, columns, TILE):
        x = tl.load(source + start + column, mask=start + column < columns, other=float("-inf"))
        # A comparison with NaN is false either way; addition below carries it on.
        lanes = tl.maximum(lanes, x)
    highest = tl.div_rn(tl.max(lanes, axis=0), temperature)
    sums = tl.zeros((TILE,), dtype=tl.float32)
    for start in range(0, columns, TILE):
        x = tl.load(source + start + column, mask=start + column < columns, other=float("-inf"))
        sums += tl.exp(tl.div_rn(x, temperature) - highest)
    tl.store(highest_ptr + row, highest)
    tl.store(log_sum_ptr + row, tl.log(tl.sum(sums, axis=0)))


@jit(do_not_specialize=["columns", "stride"])
def _gradient_kernel(
    logits_ptr, temperature_ptr, highest_ptr, log_sum_ptr, total_ptr, out_ptr, columns, stride, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    x = tl.load(logits_ptr + row * stride + column, mask=mask, other=float("-inf"))
    scaled = tl.div_rn(x, tl.load(temperature_ptr + row))
    p = tl.exp(scaled - tl.load(highest_ptr + row) - tl.load(log_sum_ptr + row))
    tl.store(out_ptr + row * columns + column, -tl.load(total_ptr + row) * p, mask=mask)


def _normalisers(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest scaled logit and log of the sum of exponentials above it, FP32 ``[N, 1]`` each."""
    rows, columns = logits.shape
    highest, log_sum = (torch.empty((rows, 1), dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _normaliser_kernel[(rows,)](
            logits, temperature, highest, log_sum, columns, logits.stride(0), TILE=TILE, num_warps=WARPS
        )
    return highest, log_sum


def _whole_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@implements("log_probs", "triton")
def triton_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """As :func:`reference_log_probs`."""
    logits = _whole_rows(logits)
    highest, log_sum = _normalisers(logits, temperature.contiguous())
    return logits.gather(1, tokens) / temperature[:, None] - highest - log_sum


@implements("log_probs_backward", "triton")
def triton_log_probs_backward(
    gradient: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """As :func:`reference_log_probs_backward`.

    One read and one write of ``N V`` numbers and nothing of that size beside them: with a large vocabulary a step's
    memory peaks here.
    """
    logits = _whole_rows(logits)
    rows, columns = logits.shape
    temperature = temperature.contiguous()
    scaled = gradient / temperature[:, None]
    out = torch.empty((rows, columns), dtype=torch.float32, device=logits.device)
    if rows:
        _gradient_kernel[(rows, ceil_div(columns, TILE))](
            logits,
            temperature,
            *_normalisers(logits, temperature),
            scaled.sum(dim=1, keepdim=True),
            out,
            columns,
            logits.stride(0),
            TILE=TILE,
            num_warps=WARPS,
        )
    return out.scatter_add_(1, tokens, scaled)


def _fake(logits, tokens, temperature):
    return logits.new_empty(tokens.shape)


@operator("log_probs(Tensor logits, Tensor tokens, Tensor temperature) -> Tensor", fake=_fake)
def _log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    require_shape("log_probs", "temperature", temperature, logits.shape[:1])
    require_shape("log_probs", "tokens", tokens, (logits.shape[0], tokens.shape[-1]))
    return lookup("log_probs", logits.device)(logits, tokens, temperature)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, tokens, temperature)
        return _log_probs(logits, tokens, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        logits, tokens, temperature = ctx.saved_tensors
        run = lookup("log_probs_backward", logits.device)
        return run(gradient, logits, tokens, temperature), None, None


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of given tokens; differentiable in ``logits``.

    Args:
        logits: ``[N, V]`` FP32. tokens: ``[N, k]`` int64, tokens asked for in each row.
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
