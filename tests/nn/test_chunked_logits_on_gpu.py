# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Chunked logits of a published vocabulary equal unchunked calls in every bit, in less memory."""

import pytest
import torch

from jetrl_verl import kernels
from jetrl_verl.nn.chunked_logits import CHUNK_BYTES, KEPT_BYTES, mask_unused, per_token

VOCABULARY, USED, WIDTH = 151936, 151669, 1024
GIB = 2**30


def run(rows: int, chunked: bool, entropy: bool) -> tuple[list[torch.Tensor], int]:
    """Numbers and gradients of one backward, and the bytes of its peak above operands and gradients."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    made = dict(device="cuda", dtype=torch.bfloat16, generator=generator)
    hidden = torch.randn(rows, WIDTH, **made).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, **made) / 8).requires_grad_()
    tokens = torch.randint(0, USED, (rows, 1), device="cuda", generator=generator)
    temperature = torch.full((rows,), 0.8, device="cuda")

    def compute(logits: torch.Tensor, piece: slice) -> list[torch.Tensor]:
        numbers = [kernels.log_probs(logits, tokens[piece], temperature[piece]).squeeze(1)]
        if entropy:
            numbers.append(torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1))
        return numbers

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if chunked:
        numbers = per_token(hidden, weight, compute, used=USED, kept_bytes=0 if entropy else KEPT_BYTES)
    else:
        numbers = compute(mask_unused(kernels.logits(hidden, weight), USED), slice(0, rows))
    sum((part * torch.linspace(-1, 1, rows, device="cuda")).sum() for part in numbers).backward()
    peak = torch.cuda.max_memory_allocated() - before
    results = [*(part.detach() for part in numbers), hidden.grad, weight.grad]
    return results, peak - hidden.grad.nbytes - weight.grad.nbytes


@pytest.mark.parametrize("rows, entropy", [(700, False), (3000, False), (9000, False), (3000, True)])
def test_every_bit_equals_the_unchunked_result(rows, entropy):
    chunked, peak = run(rows, True, entropy)
    unchunked, stock_peak = run(rows, False, entropy)
    assert all(torch.equal(a, b) for a, b in zip(chunked, unchunked, strict=True))
    logits = 4 * rows * VOCABULARY
    print(f"{rows} rows, entropy {entropy}: {peak / GIB:.2f} GiB, all at once {stock_peak / GIB:.2f}")
    if not entropy:
        # BF16 gradient, kept logits, one chunk's logits and their gradient.
        assert peak <= logits / 2 + min(logits, KEPT_BYTES) + 2 * min(logits, CHUNK_BYTES) + GIB / 4
        assert peak < stock_peak
