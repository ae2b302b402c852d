# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy from chunks of logits equal unchunked calls in every bit."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_verl import kernels
from jetrl_verl.nn import chunked_logits
from jetrl_verl.nn.chunked_logits import mask_unused, per_token

ROWS, WIDTH, VOCABULARY, USED = 23, 64, 97, 90


def operands(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(torch.bfloat16).requires_grad_()
    return hidden, (torch.randn(VOCABULARY, WIDTH, generator=generator) / 4).to(dtype).requires_grad_()


TOKENS = torch.arange(ROWS) * 7 % USED
TEMPERATURES = torch.linspace(0.6, 1.4, ROWS)
GRADIENT = torch.linspace(-1, 1, ROWS)


def log_probs(logits: torch.Tensor, piece: slice) -> list[torch.Tensor]:
    return [kernels.log_probs(logits, TOKENS[piece, None], TEMPERATURES[piece]).squeeze(1)]


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


def both(logits: torch.Tensor, piece: slice) -> list[torch.Tensor]:
    return [*log_probs(logits, piece), entropy(logits / TEMPERATURES[piece, None])]


def bytes_of(rows: int) -> int:
    return 4 * VOCABULARY * rows


def whole(compute, read: int, used: int | None, dtype=torch.float32, banned=()) -> list[torch.Tensor]:
    """Numbers and both gradients without chunks; the first ``read`` numbers are in the loss."""
    hidden, weight = operands(dtype)
    numbers = compute(mask_unused(kernels.logits(hidden, weight), used, banned), slice(0, ROWS))
    sum((GRADIENT * part).sum() for part in numbers[:read]).backward()
    return [*numbers, hidden.grad, weight.grad]


@pytest.mark.parametrize("used, banned", [(None, ()), (USED, ()), (USED, (3, 10))])
@pytest.mark.parametrize("chunk, kept", [(1, 0), (5, 0), (5, 12), (5, ROWS), (ROWS, 0), (ROWS, ROWS), (100, 100)])
@pytest.mark.parametrize("compute, read", [(log_probs, 1), (both, 1), (both, 2)])
def test_every_bit_equals_the_unchunked_result(compute, read, chunk, kept, used, banned):
    expected = whole(compute, read, used, banned=banned)
    hidden, weight = operands()
    limits = dict(used=used, banned=banned, kept_bytes=bytes_of(kept), chunk_bytes=bytes_of(chunk))
    numbers = per_token(hidden, weight, compute, **limits)
    sum((GRADIENT * part).sum() for part in numbers[:read]).backward()
    with torch.no_grad():
        again = per_token(hidden, weight, compute, **limits)
    got, want = [*numbers, hidden.grad, weight.grad, *again], [*expected, *expected[: len(numbers)]]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_bf16_weight_has_a_bf16_gradient():
    expected = whole(log_probs, 1, None, torch.bfloat16)
    hidden, weight = operands(torch.bfloat16)
    per_token(hidden, weight, log_probs, chunk_bytes=bytes_of(4), kept_bytes=0)[0].backward(GRADIENT)
    assert torch.equal(hidden.grad, expected[1]) and torch.equal(weight.grad, expected[2])
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_operand_gets_no_gradient(frozen):
    expected = whole(log_probs, 1, None)
    operand = dict(zip(("hidden", "weight"), operands(), strict=True))
    operand[frozen].requires_grad_(False)
    per_token(**operand, compute=log_probs, chunk_bytes=bytes_of(5))[0].backward(GRADIENT)
    assert operand[frozen].grad is None
    other = "weight" if frozen == "hidden" else "hidden"
    assert torch.equal(operand[other].grad, expected[1 if other == "hidden" else 2])


def test_a_second_backward_of_a_retained_graph_is_equal():
    hidden, weight = operands()
    (numbers,) = per_token(hidden, weight, log_probs, chunk_bytes=bytes_of(5), kept_bytes=bytes_of(12))
    first = torch.autograd.grad(numbers, (hidden, weight), GRADIENT, retain_graph=True)
    again = torch.autograd.grad(numbers, (hidden, weight), GRADIENT)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_an_empty_batch_gives_empty_results():
    hidden, weight = operands()
    empty = hidden.detach()[:0].requires_grad_()
    numbers = per_token(empty, weight, both)
    assert [part.shape for part in numbers] == [(0,), (0,)]
    sum(part.sum() for part in numbers).backward()
    assert empty.grad.shape == (0, WIDTH) and not weight.grad.any()


@pytest.mark.parametrize("kept, again", [(0, 5), (4, 5), (12, 3), (ROWS, 0)])
def test_backward_recomputes_only_chunks_that_were_not_kept(kept, again, monkeypatch):
    calls = []
    stock = kernels.logits
    monkeypatch.setattr(chunked_logits.kernels, "logits", lambda *operands: calls.append(1) or stock(*operands))
    hidden, weight = operands()
    (numbers,) = per_token(hidden, weight, log_probs, chunk_bytes=bytes_of(5), kept_bytes=bytes_of(kept))
    assert len(calls) == 5
    numbers.sum().backward()
    assert len(calls) == 5 + again


class Sizes(TorchDispatchMode):
    """Shapes of new storages of at least ``least`` bytes that operators return."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.shapes = least, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if storage is not None and storage._cdata not in before and storage.nbytes() >= self.least:
            self.shapes.append(tuple(result.shape))
        return result


def test_only_the_gradient_has_the_size_of_all_logits():
    hidden, weight = operands()
    least = bytes_of(ROWS)  # a weight in BF16, and hidden rows, are smaller
    with Sizes(least) as forward:
        numbers = per_token(hidden, weight, both, chunk_bytes=bytes_of(5), kept_bytes=0)
    with Sizes(least) as backward:
        sum((GRADIENT * part).sum() for part in numbers).backward()
    products = {(VOCABULARY, WIDTH), (WIDTH, VOCABULARY)}
    assert [shape for shape in forward.shapes if shape not in products] == []
    assert [shape for shape in backward.shapes if shape not in products] == [(ROWS, VOCABULARY)]
    with Sizes(least) as unchunked:
        whole(both, 2, None)
    assert unchunked.shapes.count((ROWS, VOCABULARY)) > 4, "the counter works"
