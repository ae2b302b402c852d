# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy per token without the logits of all tokens at once.

FP32 logits of 16,384 tokens of Qwen3's vocabulary are 9.3 GiB, and so is their gradient. Rows go by chunks of at most
``CHUNK_BYTES`` of logits, and only the BF16 gradient exists for all rows. Rows do not depend on each other and both
products of backward are over the whole micro-batch, so bits are those of unchunked calls. Forward keeps the first
``KEPT_BYTES`` of logits, backward computes the others again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl import kernels

CHUNK_BYTES = 2**30
"""FP32 logits of a chunk: 1,766 rows of 151,936, enough for each kernel to fill a GPU."""

KEPT_BYTES = 2**32
"""FP32 logits kept for backward: 7,067 rows of 151,936."""

UNUSED = torch.finfo(torch.float32).min * 2.0**-64
"""Logit of a vocabulary entry without a token: probability zero, as with minus infinity, but finite for entropy and
small enough that no division by a temperature overflows."""

Compute = Callable[[torch.Tensor, slice], Sequence[torch.Tensor]]


def mask_unused(logits: torch.Tensor, used: int | None, banned: Sequence[int] = ()) -> torch.Tensor:
    """``logits [..., V]`` with :data:`UNUSED` from column ``used`` on and in the columns ``banned``, in place."""
    if used is not None:
        logits[..., used:] = UNUSED
    for column in banned:  # one or two; a list as index would be copied to the GPU
        logits[..., column] = UNUSED
    return logits


def mask_unused_vocabulary(model: torch.nn.Module, used: int, banned: Sequence[int] = ()) -> None:
    """Mask what is never sampled in the logits that a decoder's output embedding yields.

    Args:
        used: first entries of the vocabulary, those with a token. banned: tokens among them.
    """
    head = model.get_output_embeddings()
    if not hasattr(head, "used_vocabulary"):  # the shared operation has it, and may not materialize logits
        head.register_forward_hook(_mask_logits)
    head.used_vocabulary, head.banned_tokens = used, tuple(banned)


def _mask_logits(module: torch.nn.Module, inputs: tuple, logits: torch.Tensor) -> torch.Tensor:
    """Forward hook of a stock output embedding."""
    return mask_unused(logits, module.used_vocabulary, module.banned_tokens)


def used_vocabulary(model: torch.nn.Module) -> tuple[int, tuple[int, ...]]:
    """``used`` and ``banned`` of :func:`mask_unused_vocabulary`."""
    head = model.get_output_embeddings()
    return getattr(head, "used_vocabulary", None) or head.weight.shape[0], getattr(head, "banned_tokens", ())


def per_token(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    compute: Compute,
    *,
    used: int | None = None,
    banned: Sequence[int] = (),
    kept_bytes: int = KEPT_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, ...]:
    """Numbers of each token from its logits; differentiable in ``hidden`` and ``weight``, once.

    Args:
        hidden: ``[N, K]`` BF16. weight: ``[V, K]`` of lm_head, used at its BF16 value.
        compute: from FP32 logits ``[n, V]`` and the slice of their rows to a few numbers of each row, ``[n]`` FP32
            each. Rows must be independent. Called again in backward.
        used, banned: as of :func:`mask_unused_vocabulary`; without ``used`` every entry has a token.
        kept_bytes: bytes of logits kept for backward, besides what autograd saves of ``compute``.
        chunk_bytes: of a chunk's logits, at least one row.

    Returns:
        ``compute``'s numbers of all rows, ``[N]`` FP32 each.

    Raises:
        TypeError: ``hidden`` is not BF16.
    """
    row_bytes = 4 * weight.shape[0]
    chunk = max(1, chunk_bytes // row_bytes)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _PerToken.apply(hidden, weight, compute, (used, banned), chunk, kept_bytes // row_bytes)
    rows = weight.to(torch.bfloat16)
    parts = [compute(_logits(hidden[piece], rows, used, banned), piece) for piece in _pieces(len(hidden), chunk)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _pieces(rows: int, chunk: int) -> Iterator[slice]:
    """Slices of at most ``chunk`` rows; one empty slice if there are none."""
    return (slice(start, min(start + chunk, rows)) for start in range(0, max(rows, 1), chunk))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, *mask: Any) -> torch.Tensor:
    with torch.no_grad():
        return mask_unused(kernels.logits(hidden, weight), *mask)


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, compute: Compute, mask: tuple, chunk: int, kept_rows):
        ctx.save_for_backward(hidden, weight)
        ctx.compute, ctx.mask, ctx.chunk = compute, mask, chunk
        ctx.set_materialize_grads(False)  # numbers that the loss does not read cost nothing
        # First row of a chunk -> logits and the numbers with their graph; no outputs, so there is no cycle.
        ctx.kept = {}
        rows, parts = weight.to(torch.bfloat16), []
        for piece in _pieces(len(hidden), chunk):
            logits = _logits(hidden[piece], rows, *mask)
            if piece.stop <= kept_rows:
                with torch.enable_grad():
                    numbers = compute(logits.requires_grad_(), piece)
                ctx.kept[piece.start] = logits, numbers
            else:
                numbers = compute(logits, piece)
            parts.append([part.detach() for part in numbers])
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor | None):
        hidden, weight = ctx.saved_tensors
        rows = weight.to(torch.bfloat16)
        of_logits = None
        for piece in _pieces(len(hidden), ctx.chunk):
            with torch.enable_grad():
                # A second backward through a retained graph has nothing kept.
                if piece.start in ctx.kept:
                    logits, numbers = ctx.kept.pop(piece.start)
                else:
                    logits = _logits(hidden[piece], rows, *ctx.mask).requires_grad_()
                    numbers = ctx.compute(logits, piece)
            pairs = [(part, g[piece]) for part, g in zip(numbers, gradients, strict=True) if g is not None]
            (gradient,) = torch.autograd.grad([part for part, _ in pairs], logits, [g for _, g in pairs])
            del logits, numbers, pairs
            if of_logits is None:
                # After the first chunk's logits are freed: memory peaks here.
                of_logits = gradient.new_empty((len(hidden), len(weight)), dtype=kernels.gradient_dtype(hidden.device))
            of_logits[piece] = gradient
            del gradient
        return *kernels.logits_backward(of_logits, hidden, weight, ctx.needs_input_grad), None, None, None, None
