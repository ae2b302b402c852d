# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chunks of rows compared with verl's loop over single rows, on any device."""

import torch
from patch_home import current, home

from jetrl_verl.patches.log_probs import LOG_PROBS


def stock_function():
    """verl's released function, patched or not."""
    import importlib.util
    from importlib import metadata

    path = metadata.distribution("verl").locate_file(LOG_PROBS.path)
    spec = importlib.util.spec_from_file_location(LOG_PROBS.module, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.logprobs_from_logits_v2


def check(device: str, dtype: torch.dtype, autocast: bool, shape: tuple[int, ...], monkeypatch) -> None:
    """Values, dtype and gradients over several chunks equal verl's in every bit."""
    vocabulary = shape[-1]
    monkeypatch.setattr(home(LOG_PROBS), "_CHUNK_ELEMENTS", 7 * vocabulary + 1)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(shape, generator=generator) * 6).to(device, dtype)
    labels = torch.randint(0, vocabulary, shape[:-1], generator=generator).to(device)
    upstream = torch.randn(shape[:-1], generator=generator).to(device)
    results = []
    for function in (stock_function(), current(LOG_PROBS)):
        leaf = logits.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            values = function(leaf, labels)
        (values * upstream).sum().backward()
        results.append((values.detach(), leaf.grad))
    (stock, stock_gradient), (patched, patched_gradient) = results
    assert patched.dtype == stock.dtype and patched.shape == stock.shape
    assert torch.equal(patched, stock)
    assert torch.equal(patched_gradient, stock_gradient)
