# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The operator from the merged projection to the attention's output, in vLLM's forward context. Whole engines run it in
test_exact_rollout_on_cpu.py."""

from types import SimpleNamespace

import pytest
import torch
from tensors import normal
from vllm.config import CompilationConfig
from vllm.model_executor.layers.attention import attention as vllms

from jetrl_verl import kernels
from jetrl_verl.reference import cache_shape
from jetrl_verl.rollout import qk_norm
from jetrl_verl.rollout.cpu_attention import FP8CPUAttention, SharedCPUAttention
from jetrl_verl.rollout.flash_attention import FP8FlashAttention, SharedFlashAttention

TOKENS, HEADS, KV_HEADS, EPS, LAYER = 5, 4, 2, 1e-6, "model.layers.0.self_attn.attn"


def merged() -> tuple[torch.Tensor, tuple]:
    """A merged projection and the other operands up to the positions."""
    table = kernels.rotary_table(128, 64, {"rope_theta": 1e4})
    return normal(TOKENS, (HEADS + 2 * KV_HEADS) * 128), (
        *(normal(128, seed=2), normal(128, seed=3), EPS, table, torch.tensor([9, 0, 63, 1, 1]), True),
    )


@pytest.fixture
def layer(monkeypatch):
    """A vLLM layer that records the calls of its implementation, in the forward context of ``slots``."""
    attention = SimpleNamespace(head_size=128, num_heads=HEADS, num_kv_heads=KV_HEADS, slots=None, metadata=None)
    attention.kv_cache, attention.impl, attention.calls = torch.tensor([]), None, []
    context = SimpleNamespace(attn_metadata=None, no_compile_layers={LAYER: attention})
    monkeypatch.setattr(vllms, "get_forward_context", lambda: context)

    def use(impl: type, kv_cache: torch.Tensor, slots: torch.Tensor | None) -> list:
        def forward(layer, query, key, value, kv_cache, metadata, output, **scales):
            attention.calls.append((query.clone(), key, value, kv_cache.clone()))
            output.copy_(query + 1)

        attention.impl, attention.kv_cache = impl.__new__(impl), kv_cache
        attention.impl.forward = forward
        context.slot_mapping = {} if slots is None else {LAYER: slots}
        return attention.calls

    return use


def run(qkv: torch.Tensor, parameters: tuple) -> torch.Tensor:
    out = torch.zeros(TOKENS, HEADS * 128, dtype=torch.bfloat16)
    with torch.no_grad():
        qk_norm.qk_norm_attention(qkv, *parameters, out, LAYER)
    return out


def rotated(qkv: torch.Tensor, parameters: tuple) -> tuple[torch.Tensor, ...]:
    q, k, v = qkv.unflatten(-1, (-1, 128)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    with torch.no_grad():
        return *kernels.norm_rotary(q, k, *parameters), v


SLOTS = torch.tensor([33, -1, 2, 17])
"""The last token is padding without an entry."""


def cache_of(impl: type) -> torch.Tensor:
    if impl is SharedCPUAttention:
        return normal(3, KV_HEADS, 16, 256)
    if impl is SharedFlashAttention:
        return normal(3, 2, 16, KV_HEADS, 128)
    return torch.full(cache_shape(3, 16, KV_HEADS), 7, dtype=torch.uint8)


@pytest.mark.parametrize("impl", [SharedCPUAttention, FP8CPUAttention, SharedFlashAttention, FP8FlashAttention])
def test_attention_gets_rotated_queries_and_reads_keys_from_the_cache(layer, impl):
    (qkv, parameters), kv_cache = merged(), cache_of(impl)
    q, k, v = rotated(qkv, parameters)
    expected = kv_cache.clone()
    if impl is SharedFlashAttention:  # as vLLM's kernel writes, in this platform's cache format
        for part, x in zip(expected.unbind(1), (k, v), strict=True):
            for token, slot in enumerate(SLOTS.tolist()):
                if slot >= 0:
                    part[slot // 16, slot % 16] = kernels.cache_form(x[token])
    else:
        impl.__new__(impl).do_kv_cache_update(None, k, v, expected, SLOTS)
    assert not torch.equal(expected, kv_cache)
    calls = layer(impl, kv_cache, SLOTS)
    assert torch.equal(run(qkv, parameters), (q + 1).flatten(1))
    ((query, key, value, seen),) = calls
    assert torch.equal(query, q) and key is None and value is None
    assert torch.equal(seen, expected), "written before attention reads it"


@pytest.mark.parametrize("impl", [SharedCPUAttention, FP8CPUAttention, SharedFlashAttention, FP8FlashAttention])
@pytest.mark.parametrize("has_cache", [False, True])
def test_nothing_is_written_without_slots(layer, impl, has_cache):
    """vLLM's memory profiling has no cache either; an existing cache does not change."""
    qkv, parameters = merged()
    kv_cache = cache_of(impl) if has_cache else torch.tensor([])
    before = kv_cache.clone()
    calls = layer(impl, kv_cache, None)
    assert torch.equal(run(qkv, parameters), (rotated(qkv, parameters)[0] + 1).flatten(1))
    ((_, key, value, seen),) = calls
    assert key is None and value is None
    assert torch.equal(seen, before) and torch.equal(kv_cache, before)


def test_the_compiled_operator_stays_whole_and_mutates_its_output_alone(layer):
    qkv, parameters = merged()
    layer(SharedCPUAttention, cache_of(SharedCPUAttention), SLOTS)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def block(qkv, positions):
        out = qkv.new_empty(len(qkv), HEADS * 128)
        qk_norm.qk_norm_attention(qkv, *parameters[:-2], positions, True, out, LAYER)
        return out * 2

    with torch.no_grad():
        output = torch.compile(block, backend=keep, fullgraph=True, dynamic=True)(qkv, parameters[-2])
    assert torch.equal(output, run(qkv, parameters) * 2)
    (graph,) = graphs
    assert [str(n.target) for n in graph.graph.nodes if "jetrl" in str(n.target)] == ["jetrl.qk_norm_attention"]
    schema = torch.ops.jetrl.qk_norm_attention.default._schema
    assert [a.name for a in schema.arguments if a.is_write] == ["out"] and not schema.returns
    operands = qkv, *parameters, torch.empty(TOKENS, HEADS * 128, dtype=torch.bfloat16), LAYER
    torch.library.opcheck(torch.ops.jetrl.qk_norm_attention, operands, test_utils=("test_faketensor",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ([], []),
        (["vllm::other"], ["vllm::other"]),
        ([qk_norm.VLLMS_ATTENTION, "vllm::other"], [qk_norm.VLLMS_ATTENTION, "vllm::other", qk_norm.ATTENTION]),
        ([qk_norm.VLLMS_DELTA_NET], [qk_norm.VLLMS_DELTA_NET, qk_norm.DELTA_NET]),
    ],
)
def test_vllm_splits_at_this_operator_if_it_splits_at_attention(given, expected):
    config = CompilationConfig(splitting_ops=given)
    for _ in range(2):
        qk_norm.split_at_attention(config)
        assert config.splitting_ops == expected
    assert {qk_norm.VLLMS_ATTENTION, qk_norm.VLLMS_DELTA_NET} <= set(CompilationConfig._attention_ops)
    assert qk_norm.ATTENTION not in CompilationConfig._attention_ops
    assert torch.ops.jetrl.qk_norm_attention._qualified_op_name == qk_norm.ATTENTION
