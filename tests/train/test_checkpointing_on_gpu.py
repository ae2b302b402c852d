# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Kept results on a GPU, with its kernels; and that a pass with them needs no more memory than ``auto`` counts on."""

from functools import partial

import pytest
import torch
from test_checkpointing_on_cpu import CASES, check_bits_products_and_memory, model_of_family

from jetrl_verl.kernels.recomputation import layer_contexts
from jetrl_verl.nn.checkpointing import Room, checkpoint


@pytest.fixture
def deterministic(monkeypatch):
    """torch's backward of attention otherwise adds in any order."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("family", "linears", "kv_cache"), CASES)
def test_kept_results_change_no_bit_and_repeat_no_product(deterministic, family, linears, kv_cache):
    check_bits_products_and_memory(family, linears, kv_cache, "cuda")


@pytest.mark.parametrize("linears", ["fp8", "bf16"])
def test_a_pass_needs_what_a_full_one_did_and_its_results(linears):
    model = model_of_family("qwen3", linears, device="cuda")
    ids = torch.randint(0, 64, (1, 16384), device="cuda")
    inputs = dict(input_ids=ids, position_ids=torch.arange(ids.shape[1], device="cuda")[None] % 128)

    def need() -> int:
        """Peak of a pass beyond what is allocated before it."""
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(**inputs, use_cache=False).logits.logsumexp(-1).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    checkpoint(model, partial(layer_contexts, False))
    need()  # compiles
    full, room = need(), Room()
    forwards, kept = [], []

    def contexts():
        pair = room.contexts()
        forwards.append(pair[0])
        return pair

    model.lm_head.register_forward_hook(lambda *_: kept.append(sum(forward.nbytes for forward in forwards)))
    checkpoint(model, contexts)
    model.zero_grad()
    room.start(ids.shape[1], gradients=False)
    need()
    assert not any(room.layers), "the need is measured"
    forwards.clear()
    room.layers.clear()
    room.start(ids.shape[1], gradients=False)
    selective = need()
    assert all(room.layers) and kept[-1] > ids.shape[1] * 2000
    assert selective <= 1.02 * full + kept[-1]
