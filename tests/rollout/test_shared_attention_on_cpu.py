# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An attention layer that vLLM built gets the shared backend or is refused. FlashAttention's implementation exists only
on a GPU, so tests set its attributes on an object built without its constructor."""

from types import SimpleNamespace

import pytest
import torch
from vllm.utils.math_utils import round_up
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn as vllms
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
from jetrl_verl.patches.patch import installed_release
from jetrl_verl.reference import cache_shape
from jetrl_verl.reference.kv_cache import cache_units
from jetrl_verl.rollout import cpu_attention, flash_attention
from jetrl_verl.rollout.attention import share_attention
from jetrl_verl.rollout.flash_attention import Split, split_batch


class OtherFlashAttentionBackend(FlashAttentionBackend):
    """Another plugin's backend under vLLM's name."""


def layer(backend, **changes):
    """vLLM's attention layer on a backend, with the attributes that are read."""
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
def test_a_layer_gets_the_shared_backend_and_implementation(stock, shared, impl):
    built = layer(stock)
    stock_impl = built.impl
    share_attention(built)
    assert built.get_attn_backend() is shared and built.impl is stock_impl and type(stock_impl) is impl
    # vLLM asks both backends, so their answers must agree.
    assert shared.get_name() == stock.get_name()
    for layouts in ("get_required_kv_cache_layout", "supported_kv_cache_layouts"):  # vLLM 0.24, 0.29
        assert not hasattr(stock, layouts) or getattr(shared, layouts)() == getattr(stock, layouts)()
    assert shared.full_cls_name() == (shared.__module__, shared.__name__)
    assert not registry._ATTN_OVERRIDES


def batch(fresh: list[int], padded: int = 0) -> CommonAttentionMetadata:
    """Requests of 20 tokens and ``fresh`` new ones, and ``padded`` empty ones as in a full CUDA graph."""
    requests, tokens = len(fresh) + padded, sum(fresh) + padded
    starts = torch.tensor([0, *fresh, *[0] * padded], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([20 + n for n in fresh] + [0] * padded, dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=max(fresh),
        max_seq_len=20 + max(fresh),
        block_table_tensor=torch.zeros(requests, 4, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )


@pytest.fixture
def plans(monkeypatch) -> list[int]:
    """Batch sizes of the plans made, in order; every element of a plan is its batch size."""
    made = []

    def plan(*, batch_size: int, num_splits: int, headdim: int, max_seqlen_q: int, **_) -> torch.Tensor:
        assert num_splits == 1 and max_seqlen_q >= (1 if headdim == 128 else 65), "another plan than the call's"
        made.append(batch_size)
        return torch.full((1 + round_up(batch_size, 4) * 4,), batch_size, dtype=torch.int32)

    monkeypatch.setattr(vllms, "get_scheduler_metadata", plan, raising=False)
    monkeypatch.setattr(vllms, "_get_sliding_window_configs", lambda config: {(-1, -1)})
    monkeypatch.setattr(native, "unavailable", lambda: None)
    return made


def builder(backend=flash_attention.SharedFlashAttentionBackend, **changes) -> FlashAttentionMetadataBuilder:
    """A backend's builder with the attributes that ``build`` reads."""
    kind = backend.get_builder_cls()
    built = kind.__new__(kind)
    plain = dict(
        vllm_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        num_heads_q=32,
        num_heads_kv=8,
        headdim=128,
        block_size=16,
        kv_cache_dtype=torch.bfloat16,
        dcp_world_size=1,
        aot_schedule=True,
        aot_sliding_window=None,
        max_num_splits=1,
        use_full_cuda_graph=True,
        max_cudagraph_size=512,
        scheduler_metadata=torch.zeros(1 + 512 * 4, dtype=torch.int32),
        rswa_window=None,
        mm_prefix_query_ranges_np=None,
    )
    vars(built).update(plain | changes)
    return built


MANY = [1] * 257
"""With 8 KV heads, too many decodes for the native kernel."""


@pytest.mark.parametrize(
    ("changes", "fresh", "decodes", "planned"),
    [
        ({}, [1, 1, 1, 1], True, False),
        ({"use_full_cuda_graph": False}, [1, 1, 1, 1], True, False),
        ({"max_cudagraph_size": None}, [1, 1, 1, 1], True, False),
        ({"max_cudagraph_size": 2}, [1, 1, 1, 1], True, False),
        ({}, MANY, False, True),
        ({"num_heads_kv": 7}, MANY, False, True),
        ({"num_heads_q": 28, "num_heads_kv": 7}, MANY, True, False),
        ({"num_heads_q": 72}, [1, 1], False, True),
        ({"headdim": 64}, [1, 1], False, True),
        ({"kv_cache_dtype": torch.float16}, [1, 1], False, True),
        ({"block_size": 24}, [1, 1], False, True),
        ({}, [1, 3], False, True),
        ({}, [1, 0], False, True),
        ({}, [511, 1], False, True),
        ({}, [512, 1], False, False),
        ({"use_full_cuda_graph": False}, [1, 3], False, False),
        ({"max_cudagraph_size": None}, MANY, False, False),
    ],
)
def test_flash_attention_in_a_graph_is_planned_for_one_split(plans, changes, fresh, decodes, planned):
    """vLLM plans captured batches for ``max_num_splits``, and others for any number of splits, which the call does not
    make. The native kernel reads no plan."""
    for fast in (True, False):
        metadata = builder(**changes).build(0, batch(fresh), fast_build=fast)
        assert metadata.max_num_splits == 1 and metadata.jetrl_decodes is decodes
        assert plans == ([len(fresh)] if planned and not fast else [])
        assert (metadata.scheduler_metadata is not None) is (planned and not fast)
        # With heads of 64 few queries would get other blocks of keys than the trainer's sequences.
        assert metadata.max_query_len == max(65 if "headdim" in changes else 1, *fresh)


def test_without_the_native_library_decodes_are_planned_too(plans, monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "it is not built")
    metadata = builder().build(0, batch([1, 1]))
    assert not metadata.jetrl_decodes and metadata.scheduler_metadata is not None and plans == [2]


def test_a_replayed_graph_reads_the_plan_of_its_step(plans):
    """vLLM has one buffer for all graphs and chunks."""
    built = builder()

    def buffer_is_of(requests: int) -> bool:
        size = 1 + round_up(requests, 4) * 4
        return bool((built.scheduler_metadata[:size] == requests).all() and not built.scheduler_metadata[size:].any())

    captured = [built.build_for_cudagraph_capture(batch(fresh)) for fresh in ([1] * 4, MANY)]
    assert [x.jetrl_decodes for x in captured] == [True, False] and captured[0].scheduler_metadata is None
    for fresh, padded, decodes in (([1] * 3, 1, True), (MANY[:255], 2, False), ([9, 9], 0, False), (MANY, 0, False)):
        before = built.scheduler_metadata.clone()
        replayed = built.build(0, batch(fresh, padded))
        assert replayed.jetrl_decodes is decodes
        if decodes:
            assert replayed.scheduler_metadata is None and torch.equal(built.scheduler_metadata, before)
        else:
            assert replayed.scheduler_metadata.data_ptr() == captured[1].scheduler_metadata.data_ptr()
            assert buffer_is_of(len(fresh) + padded)
    # vLLM changes only the pages for another group of layers.
    assert built.update_block_table(captured[0], None, None).jetrl_decodes


def test_batches_over_an_fp8_cache_are_split_and_not_planned(plans):
    built = builder(flash_attention.FP8FlashAttentionBackend, kv_cache_dtype=torch.uint8, aot_schedule=False)
    decodes, chunks = built.build(0, batch([1, 1], 2)), built.build(0, batch([1, 5]))
    assert decodes.jetrl_split == Split(4, [], []) and chunks.jetrl_split == Split(1, [(1, 2, 1, 6, 5)], [21, 25])
    assert not plans and not decodes.jetrl_decodes


def test_context_parallel_decodes_stay_with_vllm(plans):
    assert not builder(dcp_world_size=2)._are_decodes(batch([1, 1])) and builder()._are_decodes(batch([1, 1]))


def test_builders_use_one_split_and_no_cascade_attention(monkeypatch):
    def stock(self) -> None:
        self.aot_schedule, self.max_num_splits = True, 32

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", stock)
    for backend in (flash_attention.SharedFlashAttentionBackend, flash_attention.FP8FlashAttentionBackend):
        built = backend.get_builder_cls()()
        assert built.max_num_splits == 1 and built.use_cascade_attention() is False
        assert built.aot_schedule is (backend is flash_attention.SharedFlashAttentionBackend)


KEYS, VALUES = torch.zeros(3, 16, 2, 128), torch.ones(3, 16, 2, 128)


@pytest.mark.parametrize(
    ("changes", "is_native"),
    [
        ({}, True),
        ({"seq_lens": torch.tensor([20, 3, 0, 0])}, True),
        ({"jetrl_decodes": False}, False),
        ({"output_scale": torch.ones(1)}, False),
        ({"output_block_scale": torch.ones(1)}, False),
        ({"cache": torch.cat([KEYS.transpose(1, 2), VALUES.transpose(1, 2)], -1)}, True),
    ],
)
def test_the_native_kernel_computes_batches_of_decodes(monkeypatch, changes, is_native):
    """Also with requests of length 0, a graph's padding, and vLLM 0.29's form of the cache; vLLM's FlashAttention
    computes other batches."""
    calls = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self, *call: calls.append(("vLLM", call)) or call[6])
    monkeypatch.setattr(kernels, "decode_attention_bf16", lambda *call: calls.append(("native", call)))
    lengths = changes.get("seq_lens", torch.tensor([20, 3, 7, 1]))
    metadata = SimpleNamespace(
        jetrl_decodes=changes.get("jetrl_decodes", True),
        seq_lens=lengths,
        block_table=torch.zeros(4, 2, dtype=torch.int32),
    )
    impl = flash_attention.SharedFlashAttention.__new__(flash_attention.SharedFlashAttention)
    impl.scale = 0.5
    query, output = torch.ones(6, 4, 128), torch.zeros(6, 4, 128)
    cache = changes.get("cache", torch.stack([KEYS, VALUES], 1))
    call = (None, query, None, None, cache, metadata, output)
    assert impl.forward(*call, changes.get("output_scale"), changes.get("output_block_scale")) is output
    ((kernel, seen),) = calls
    assert kernel == ("native" if is_native else "vLLM")
    if is_native:
        assert seen[0].shape == seen[6].shape == (4, 4, 128)
        assert torch.equal(seen[1], KEYS) and torch.equal(seen[2], VALUES)
        assert seen[3] is lengths and seen[4] is metadata.block_table and seen[5] == 0.5
    else:
        assert seen[:7] == call
    assert impl.forward(*call[:5], None, output) is output and calls[-1][0] == "vLLM"


@pytest.mark.parametrize(("unavailable", "support"), [(None, "UNIFORM_BATCH"), ("no library", "ALWAYS")])
def test_only_uniform_batches_are_captured_with_the_native_kernel(monkeypatch, unavailable, support):
    monkeypatch.setattr(native, "unavailable", lambda: unavailable)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    builder = flash_attention.SharedFlashAttentionBackend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport[support]


@pytest.mark.parametrize(
    ("backend", "changes", "complaint"),
    [
        (TritonAttentionBackend, {}, "attention backend TRITON_ATTN .* is not supported with jetrl.operations=shared"),
        (OtherFlashAttentionBackend, {}, rf"the attention backend FLASH_ATTN \({__name__}\) is not supported"),
        (FlashAttentionBackend, {"vllm_flash_attn_version": 2}, "FlashAttention 2, which this GPU runs, is not"),
        (CPUAttentionBackend, {"attn_type": AttentionType.ENCODER_ONLY}, "other than plain causal is not supported"),
        (CPUAttentionBackend, {"logits_soft_cap": 30.0}, "other than plain causal is not supported"),
        (CPUAttentionBackend, {"sinks": object()}, "other than plain causal is not supported"),
        (CPUAttentionBackend, {"sliding_window": (127, 0)}, "sliding window attention is not supported"),
        (CPUAttentionBackend, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 is not supported"),
        (CPUAttentionBackend, {"head_size": 96}, "do not cover heads of 96"),
    ],
)
def test_attention_that_is_not_covered_is_refused(backend, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        share_attention(layer(backend, **changes))


@pytest.mark.parametrize(
    ("stock", "shared", "impl"),
    [
        (CPUAttentionBackend, cpu_attention.FP8CPUAttentionBackend, cpu_attention.FP8CPUAttention),
        (FlashAttentionBackend, flash_attention.FP8FlashAttentionBackend, flash_attention.FP8FlashAttention),
    ],
)
def test_a_layer_with_an_fp8_cache_has_a_spec_in_bytes(stock, shared, impl):
    built = layer(stock)
    share_attention(built, formats.kv_cache("fp8"))
    assert built.get_attn_backend() is shared and type(built.impl) is impl and shared.get_name() == stock.get_name()
    spec = built.get_kv_cache_spec(SimpleNamespace(cache_config=SimpleNamespace(block_size=32)))
    assert spec.page_size_bytes == 2 * 32 * 2 * 129
    if installed_release("vllm") == "0.24.0":
        assert shared.get_kv_cache_shape(7, 32, spec.num_kv_heads, spec.head_size) == cache_shape(7, 32, 2)
        assert shared.get_kv_cache_block_dim(32, 2, spec.head_size) == 0
    else:
        from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes

        assert [layout.name for layout in shared.supported_kv_cache_layouts()] == ["LBHNC"]
        pages = torch.zeros(compute_layer_kv_cache_shape_bytes(spec, 7), dtype=torch.uint8)
        assert cache_units(pages).shape == cache_shape(7, 32, 2)


@pytest.mark.parametrize(
    ("backend", "changes", "why"),
    [
        (FlashAttentionBackend, {"vllm_flash_attn_version": 2}, "FlashAttention 2, which this GPU runs"),
        (CPUAttentionBackend, {"head_size": 64}, "heads are of 64"),
        (CPUAttentionBackend, {"num_heads": 32}, "16 query heads"),
        (CPUAttentionBackend, {"sinks": object()}, "attention with biases, sinks or caps"),
        (CPUAttentionBackend, {"sliding_window": (127, 0)}, "sliding window attention"),
        (CPUAttentionBackend, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
    ],
)
def test_attention_without_a_kernel_for_an_fp8_cache_is_refused(backend, changes, why):
    with pytest.raises(ValueError, match=f"of this engine is not supported with jetrl.kv_cache=fp8: .*{why}"):
        share_attention(layer(backend, **changes), formats.kv_cache("fp8"))


def test_a_batch_is_split_into_decodes_and_chunks_dequantized_together():
    lengths = [900, 40, 100, 60, 300, 20]
    assert split_batch([0, 1, 2, 52, 112, 122, 142], lengths, 200) == Split(
        2, [(2, 4, 2, 112, 60), (4, 5, 112, 122, 10), (5, 6, 122, 142, 20)], lengths
    )
    assert split_batch([0, 1, 2, 3], [5, 6, 7]) == Split(3, [], [5, 6, 7])
    assert split_batch([0, 9], [9]) == Split(0, [(0, 1, 0, 9, 9)], [9])
    assert split_batch([0, 1, 9, 9, 9], [4, 8, 0, 0]) == Split(1, [(1, 2, 1, 9, 8)], [4, 8, 0, 0])


def test_an_fp8_cache_captures_decodes_with_the_native_kernel_alone(monkeypatch):
    builder = flash_attention.FP8FlashAttentionBackend.get_builder_cls()
    assert builder.reorder_batch_threshold == 1
    for reason, support in ((None, "UNIFORM_SINGLE_TOKEN_DECODE"), ("no library", "NEVER")):
        monkeypatch.setattr(flash_attention.kernels_native, "unavailable", lambda reason=reason: reason)
        assert builder.get_cudagraph_support(None, None).name == support
