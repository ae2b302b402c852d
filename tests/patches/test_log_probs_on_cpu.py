# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chunks of rows compared with verl's loop over single rows."""

import pytest
import torch
from patch_home import current, home, released

from jetrl_verl.patches.log_probs import LOG_PROBS


def check(device: str, dtype: torch.dtype, autocast: bool, shape: tuple[int, ...], monkeypatch) -> None:
    """Values, dtype and gradients over several chunks equal verl's in every bit."""
    vocabulary = shape[-1]
    monkeypatch.setattr(home(LOG_PROBS), "_CHUNK_ELEMENTS", 7 * vocabulary + 1)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(shape, generator=generator) * 6).to(device, dtype)
    labels = torch.randint(0, vocabulary, shape[:-1], generator=generator).to(device)
    upstream = torch.randn(shape[:-1], generator=generator).to(device)
    results = []
    for function in (released(LOG_PROBS), current(LOG_PROBS)):
        leaf = logits.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            values = function(leaf, labels)
        (values * upstream).sum().backward()
        results.append((values.detach(), leaf.grad))
    (stock, stock_gradient), (patched, patched_gradient) = results
    assert patched.dtype == stock.dtype and patched.shape == stock.shape
    assert torch.equal(patched, stock)
    assert torch.equal(patched_gradient, stock_gradient)


@pytest.mark.parametrize("shape", [(40, 104), (23, 512), (9, 151936), (3, 5, 97)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_give_the_bits_of_single_rows(dtype, autocast, shape, monkeypatch):
    check("cpu", dtype, autocast, shape, monkeypatch)


def test_verl_calls_the_patched_function():
    from verl.utils import torch_functional

    home(LOG_PROBS)
    assert "_CHUNK_ELEMENTS" in torch_functional.logprobs_from_logits_v2.__code__.co_names


def test_no_tokens_give_no_log_probabilities():
    empty = current(LOG_PROBS)(torch.empty(0, 8), torch.empty(0, dtype=torch.long))
    assert empty.shape == (0,)
