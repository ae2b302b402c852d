# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a token's logits say, its log-probability and entropy, without the logits of all tokens at once.

FP32 logits of 16,384 tokens of Qwen3's vocabulary are 9.3 GiB, their gradient as much, and it is cast to BF16 for the
products of backward: 10 bytes a logit, the largest tensors of a long micro-batch. Here rows go by chunks of at most
``CHUNK_BYTES`` of logits, and 2 bytes a logit are alive at once, the gradient in BF16. Nothing else changes: a row's
logits and its log-probability do not depend on the rows beside it (kernels/logits.py, kernels/log_probs.py), and the
two products of backward are those of the whole micro-batch, so every bit is that of the calls one after another.

Forward keeps the first ``KEPT_BYTES`` of logits for backward, which computes the others again: one more product of
lm_head for them, of the three that it has.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl import kernels

CHUNK_BYTES = 2**30
"""Of the FP32 logits of a chunk: 1,766 rows of 151,936, enough for each kernel to fill a GPU."""

KEPT_BYTES = 2**32
"""As many FP32 logits are kept for backward: 7,067 rows of 151,936."""

UNUSED = torch.finfo(torch.float32).min * 2.0**-64
"""Logit of a vocabulary entry without a token: its probability is zero, as minus infinity's in the rollout. It is
finite, because an entropy multiplies probabilities with logits, and so far from the lowest finite number that no
division by a temperature overflows."""

Compute = Callable[[torch.Tensor, slice], Sequence[torch.Tensor]]


def mask_unused(logits: torch.Tensor, used: int | None) -> torch.Tensor:
    """``logits [..., V]``, from column ``used`` on overwritten with :data:`UNUSED` in place; as they are for None."""
    if used is not None:
        logits[..., used:] = UNUSED
    return logits


def per_token(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    compute: Compute,
    *,
    used: int | None = None,
    kept_bytes: int = KEPT_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, ...]:
    """Numbers of each token from its logits; differentiable in ``hidden`` and ``weight``, once.

    Args:
        hidden: ``[N, K]`` BF16. weight: ``[V, K]`` of lm_head, taken at its BF16 value.
        compute: from the FP32 logits ``[n, V]`` of the rows that a slice names to some numbers of each, ``[n]`` FP32
            each, as many for every slice; a row's may not depend on other rows. Called again in backward.
        used: vocabulary entries with a token; all of them where it is None.
        kept_bytes: bytes of logits that stay for backward, with what autograd saved of ``compute`` beside them.
        chunk_bytes: at most so many of a chunk's logits, at least one row.

    Returns:
        ``compute``'s numbers of all rows, ``[N]`` FP32 each.

    Raises:
        TypeError: ``hidden`` is not BF16.
    """
    row_bytes = 4 * weight.shape[0]
    chunk = max(1, chunk_bytes // row_bytes)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _PerToken.apply(hidden, weight, compute, used, chunk, kept_bytes // row_bytes)
    rows = weight.to(torch.bfloat16)
    parts = [compute(_logits(hidden[piece], rows, used), piece) for piece in _pieces(len(hidden), chunk)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _pieces(rows: int, chunk: int) -> Iterator[slice]:
    """Slices of at most ``chunk`` rows; one, which is empty, of none."""
    return (slice(start, min(start + chunk, rows)) for start in range(0, max(rows, 1), chunk))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, used: int | None) -> torch.Tensor:
    with torch.no_grad():
        return mask_unused(kernels.logits(hidden, weight), used)


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, compute: Compute, used: int | None, chunk, kept_rows):
        ctx.save_for_backward(hidden, weight)
        ctx.compute, ctx.used, ctx.chunk = compute, used, chunk
        ctx.set_materialize_grads(False)  # numbers that the loss does not read cost nothing
        # By first row: logits, and the numbers as autograd knows them. Neither is an output, so there is no cycle.
        ctx.kept = {}
        rows, parts = weight.to(torch.bfloat16), []
        for piece in _pieces(len(hidden), chunk):
            logits = _logits(hidden[piece], rows, used)
            if piece.stop <= kept_rows:
                with torch.enable_grad():
                    found = compute(logits.requires_grad_(), piece)
                ctx.kept[piece.start] = logits, found
            else:
                found = compute(logits, piece)
            parts.append([part.detach() for part in found])
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor | None):
        hidden, weight = ctx.saved_tensors
        rows = weight.to(torch.bfloat16)
        of_logits = None
        for piece in _pieces(len(hidden), ctx.chunk):
            with torch.enable_grad():
                # A second pass through a graph that the caller retained finds nothing kept.
                if piece.start in ctx.kept:
                    logits, found = ctx.kept.pop(piece.start)
                else:
                    logits = _logits(hidden[piece], rows, ctx.used).requires_grad_()
                    found = ctx.compute(logits, piece)
            read = [(part, g[piece]) for part, g in zip(found, gradients, strict=True) if g is not None]
            (gradient,) = torch.autograd.grad([part for part, _ in read], logits, [g for _, g in read])
            del logits, found, read
            if of_logits is None:
                # Not before the first chunk's logits are free: with all of them kept, memory peaks here.
                of_logits = gradient.new_empty((len(hidden), len(weight)), dtype=kernels.gradient_dtype(hidden.device))
            of_logits[piece] = gradient
            del gradient
        return *kernels.logits_backward(of_logits, hidden, weight, ctx.needs_input_grad), None, None, None, None
