# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An attention layer that vLLM has built gets the shared backend, or is refused.

vLLM's own implementations are stood in for by their attributes: those of FlashAttention are only built on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from jetrl_verl import formats, kernels
from jetrl_verl.kernels import native
from jetrl_verl.reference import cache_shape
from jetrl_verl.rollout import cpu_attention, flash_attention
from jetrl_verl.rollout.attention import share_attention
from jetrl_verl.rollout.flash_attention import Split, split_batch


class OtherFlashAttentionBackend(FlashAttentionBackend):
    """Another plugin's, under vLLM's name."""


def layer(backend, **changes):
    """vLLM's attention layer on a backend, as far as anyone looks."""
    impl = backend.get_impl_cls().__new__(backend.get_impl_cls())
    plain = dict(
        head_size=128,
        num_heads=16,
        num_kv_heads=2,
        attn_type=AttentionType.DECODER,
        alibi_slopes=None,
        sinks=None,
        logits_soft_cap=0,
        kv_sharing_target_layer_name=None,
        sliding_window=(-1, -1),
        kv_cache_dtype="auto",
    )
    if issubclass(backend, FlashAttentionBackend):
        plain["vllm_flash_attn_version"] = 3
    vars(impl).update(plain | changes)
    built = SimpleNamespace(attn_backend=backend, impl=impl, num_kv_heads=2)
    built.get_attn_backend = lambda: built.attn_backend
    return built


@pytest.mark.parametrize(
    ("stock", "shared", "impl"),
    [
        (CPUAttentionBackend, cpu_attention.SharedCPUAttentionBackend, cpu_attention.SharedCPUAttention),
        (FlashAttentionBackend, flash_attention.SharedFlashAttentionBackend, flash_attention.SharedFlashAttention),
    ],
)
def test_a_layer_gets_the_backend_and_its_implementation(stock, shared, impl):
    built = layer(stock)
    same = built.impl
    share_attention(built)
    assert built.get_attn_backend() is shared and built.impl is same and type(same) is impl
    # What vLLM asks of a backend before it is ours and after it must agree.
    assert shared.get_name() == stock.get_name()
    assert shared.get_required_kv_cache_layout() == stock.get_required_kv_cache_layout()
    assert shared.full_cls_name() == (shared.__module__, shared.__name__)
    assert not registry._ATTN_OVERRIDES


@pytest.mark.parametrize(
    ("full_graphs", "largest", "tokens", "planned"),
    [(True, 256, 256, True), (True, 256, 257, False), (True, None, 1, False), (False, 256, 1, False)],
)
def test_flash_attention_plans_for_one_split_where_it_captures_and_nowhere_else(
    monkeypatch, full_graphs, largest, tokens, planned
):
    """vLLM plans for ``max_num_splits`` where a batch is captured, and for any number of them elsewhere: such a plan
    names splits that the call does not make."""
    asked = []

    def stock(self) -> None:
        self.aot_schedule, self.max_num_splits = True, 32
        self.use_full_cuda_graph, self.max_cudagraph_size = full_graphs, largest

    def build(self, prefix, metadata, fast_build):
        asked.append((self.aot_schedule and not fast_build, self.max_num_splits))
        return SimpleNamespace(max_num_splits=32)

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", stock)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    builder = flash_attention.SharedFlashAttentionBackend.get_builder_cls()()
    batch = SimpleNamespace(num_actual_tokens=tokens)
    assert builder.build(0, batch).max_num_splits == 1 and asked == [(planned, 1)]
    assert builder.build(0, batch, fast_build=True).max_num_splits == 1 and asked[1:] == [(False, 1)]
    assert builder.use_cascade_attention() is False
    assert flash_attention.FP8FlashAttentionBackend.get_builder_cls()().aot_schedule is False


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"seq_lens": torch.tensor([20, 3, 0, 0])}, True),
        ({"num_actual_tokens": 6}, True),
        ({"max_query_len": 2}, False),
        ({"num_actual_tokens": 3}, False),
        ({"dcp_world_size": 2}, False),
        ({"native": False}, False),
        ({"output_scale": torch.ones(1)}, False),
        ({"output_block_scale": torch.ones(1)}, False),
    ],
)
def test_our_kernel_computes_batches_of_one_new_token_of_each_request(monkeypatch, changes, ours):
    """Padding of a CUDA graph, whose requests have length 0, among them; vLLM's FlashAttention computes the others."""
    asked = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self, *call: asked.append(("vLLM", call)) or call[6])
    monkeypatch.setattr(kernels, "decode_attention_bf16", lambda *call: asked.append(("ours", call)))
    monkeypatch.setattr(kernels, "decodes_natively", lambda *call: changes.get("native", True))
    lengths = changes.get("seq_lens", torch.tensor([20, 3, 7, 1]))
    metadata = SimpleNamespace(
        max_query_len=changes.get("max_query_len", 1),
        num_actual_tokens=changes.get("num_actual_tokens", 4),
        seq_lens=lengths,
        block_table=torch.zeros(4, 2, dtype=torch.int32),
    )
    impl = flash_attention.SharedFlashAttention.__new__(flash_attention.SharedFlashAttention)
    impl.scale, impl.dcp_world_size = 0.5, changes.get("dcp_world_size", 1)
    query, output, cache = torch.ones(6, 4, 128), torch.zeros(6, 4, 128), torch.zeros(3, 2, 16, 2, 128)
    call = (None, query, None, None, cache, metadata, output)
    assert impl.forward(*call, changes.get("output_scale"), changes.get("output_block_scale")) is output
    ((who, seen),) = asked
    assert who == ("ours" if ours else "vLLM")
    if ours:
        assert [tuple(x.shape) for x in (*seen[:3], seen[6])] == [(4, 4, 128), *[(3, 16, 2, 128)] * 2, (4, 4, 128)]
        assert seen[3] is lengths and seen[4] is metadata.block_table and seen[5] == 0.5
    else:
        assert seen[:7] == call
    assert impl.forward(*call[:5], None, output) is output and asked[-1][0] == "vLLM"


@pytest.mark.parametrize(("unavailable", "support"), [(None, "UNIFORM_BATCH"), ("no library", "ALWAYS")])
def test_graphs_of_any_batch_are_not_captured_with_our_kernel_in_them(monkeypatch, unavailable, support):
    monkeypatch.setattr(native, "unavailable", lambda: unavailable)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    builder = flash_attention.SharedFlashAttentionBackend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport[support]


@pytest.mark.parametrize(
    ("backend", "changes", "complaint"),
    [
        (
            TritonAttentionBackend,
            {},
            "attention backend TRITON_ATTN .* is not supported with jetrl.operations=shared",
        ),
        (OtherFlashAttentionBackend, {}, rf"the attention backend FLASH_ATTN \({__name__}\) is not supported"),
        (FlashAttentionBackend, {"vllm_flash_attn_version": 2}, "FlashAttention 2, which this GPU runs, is not"),
        (CPUAttentionBackend, {"attn_type": AttentionType.ENCODER_ONLY}, "other than plain causal is not supported"),
        (CPUAttentionBackend, {"logits_soft_cap": 30.0}, "other than plain causal is not supported"),
        (CPUAttentionBackend, {"sinks": object()}, "other than plain causal is not supported"),
        (CPUAttentionBackend, {"sliding_window": (127, 0)}, "sliding window attention is not supported"),
        (CPUAttentionBackend, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 is not supported"),
        (CPUAttentionBackend, {"head_size": 64}, "64"),
    ],
)
def test_what_is_not_covered_is_refused(backend, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        share_attention(layer(backend, **changes))


@pytest.mark.parametrize(
    ("stock", "shared", "impl"),
    [
        (CPUAttentionBackend, cpu_attention.FP8CPUAttentionBackend, cpu_attention.FP8CPUAttention),
        (FlashAttentionBackend, flash_attention.FP8FlashAttentionBackend, flash_attention.FP8FlashAttention),
    ],
)
def test_a_layer_with_an_fp8_cache_tells_vllm_of_bytes(stock, shared, impl):
    built = layer(stock)
    share_attention(built, formats.kv_cache("fp8"))
    assert built.get_attn_backend() is shared and type(built.impl) is impl and shared.get_name() == stock.get_name()
    spec = built.get_kv_cache_spec(SimpleNamespace(cache_config=SimpleNamespace(block_size=32)))
    shape = shared.get_kv_cache_shape(7, 32, spec.num_kv_heads, spec.head_size)
    assert shape == cache_shape(7, 32, 2) and spec.page_size_bytes == shape[1] * shape[2] * shape[3] == 2 * 32 * 2 * 129
    assert shared.get_kv_cache_block_dim(32, 2, spec.head_size) == 0


@pytest.mark.parametrize(
    ("backend", "changes", "what"),
    [
        (FlashAttentionBackend, {"vllm_flash_attn_version": 2}, "FlashAttention 2, which this GPU runs,"),
        (CPUAttentionBackend, {"head_size": 64}, "heads of 64"),
        (CPUAttentionBackend, {"num_heads": 32}, "16 query heads of a KV head"),
        (CPUAttentionBackend, {"sinks": object()}, "attention other than plain causal"),
        (CPUAttentionBackend, {"sliding_window": (127, 0)}, "sliding window attention"),
        (CPUAttentionBackend, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
    ],
)
def test_what_an_fp8_cache_has_no_kernel_for_is_refused(backend, changes, what):
    with pytest.raises(ValueError, match=f"^{what} is not supported with jetrl.kv_cache=fp8: no kernel reads"):
        share_attention(layer(backend, **changes), formats.kv_cache("fp8"))


def test_a_batch_is_split_into_decodes_and_chunks_that_are_dequantized_together():
    lengths = [900, 40, 100, 60, 300, 20]
    assert split_batch([0, 1, 2, 52, 112, 122, 142], lengths, 200) == Split(
        2, [(2, 4, 2, 112, 60), (4, 5, 112, 122, 10), (5, 6, 122, 142, 20)], lengths
    )
    assert split_batch([0, 1, 2, 3], [5, 6, 7]) == Split(3, [], [5, 6, 7])
    assert split_batch([0, 9], [9]) == Split(0, [(0, 1, 0, 9, 9)], [9])
    assert split_batch([0, 1, 9, 9, 9], [4, 8, 0, 0]) == Split(1, [(1, 2, 1, 9, 8)], [4, 8, 0, 0])


def test_graphs_of_decodes_alone_and_only_with_the_native_kernel(monkeypatch):
    builder = flash_attention.FP8FlashAttentionBackend.get_builder_cls()
    assert builder.reorder_batch_threshold == 1
    for reason, support in ((None, "UNIFORM_SINGLE_TOKEN_DECODE"), ("no library", "NEVER")):
        monkeypatch.setattr(flash_attention.kernels_native, "unavailable", lambda reason=reason: reason)
        assert builder.get_cudagraph_support(None, None).name == support
