# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shared logits of a tensor-parallel rollout: gathered shards of the vocabulary have the bits of one rank's logits.
Both ranks run in this process with vLLM's own ``lm_head``; the gather is simulated."""

import pytest
import torch
from tensors import normal
from tiny_models import tiny_config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import logits_processor, vocab_parallel_embedding
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from jetrl_verl import kernels
from jetrl_verl.rollout import shared_operations

VOCABULARY, K = 100, 256


@pytest.fixture
def processor():
    """vLLM's logits processor, replaced by the shared one as in a model."""
    with set_current_vllm_config(VllmConfig()):
        layer, norm = LogitsProcessor(VOCABULARY), RMSNorm(K)
    layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(), "norm": norm})
    model = torch.nn.ModuleDict({"model": layers, "logits_processor": layer})
    model.config = tiny_config("llama", num_hidden_layers=0)
    shared_operations.share_operations(model, model.config)
    assert type(layer) is shared_operations.SharedLogitsProcessor
    return layer


def head_of(rank: int, ranks: int, weight: torch.Tensor, monkeypatch) -> ParallelLMHead:
    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_world_size", lambda: ranks)
    with set_current_vllm_config(VllmConfig()):
        head = ParallelLMHead(len(weight), weight.shape[1], params_dtype=torch.bfloat16)
    head.weight_loader(head.weight, weight)
    return head


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathered_logits_equal_those_of_one_rank(processor, monkeypatch, ranks):
    hidden, weight = normal(9, K, seed=0), normal(VOCABULARY, K, seed=1)
    heads = [head_of(rank, ranks, weight, monkeypatch) for rank in range(ranks)]
    for head in heads:
        assert len(head.weight) == 128 // ranks
        head.weight.data[head.shard_indices.num_org_elements :] = torch.nan  # padding that must not be read
    shards = []
    monkeypatch.setattr(logits_processor, "tensor_model_parallel_all_gather", lambda x: shards.append(x) or x)
    for head in heads:
        processor(head, hidden)
    monkeypatch.setattr(logits_processor, "tensor_model_parallel_all_gather", lambda x: torch.cat(shards, dim=-1))
    logits = processor(heads[0], hidden)
    assert logits.dtype == torch.float32 and torch.equal(logits, kernels.logits(hidden, weight))


def test_a_rank_without_the_gathered_result_has_no_logits(processor, monkeypatch):
    processor.use_all_gather = False
    monkeypatch.setattr(logits_processor, "tensor_model_parallel_gather", lambda x: None)
    head = head_of(1, 2, normal(VOCABULARY, K, seed=1), monkeypatch)
    assert processor(head, normal(3, K, seed=0)) is None
