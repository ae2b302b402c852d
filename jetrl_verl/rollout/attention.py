# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes attention layers that vLLM has built run the shared attention, or keep an FP8 KV cache.

A backend registered under vLLM's name would be that of every engine in the process, so single layers get ours after
they are built; the worker asks each layer for its backend later, when it makes the cache. With an FP8 cache a layer
tells vLLM that its heads have 129 bytes (128 of data, one of scale), so vLLM counts twice the blocks; our backends lay
out the bytes (reference/kv_cache.py), and ``kv_cache_dtype`` stays ``auto``.
"""

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch

from jetrl_verl import formats, kernels
from jetrl_verl.config.support.table import refuse
from jetrl_verl.formats.caches import KVCache
from jetrl_verl.formats.catalog import CacheTraits
from jetrl_verl.rollout import vllm_compat as vllm

# Imported on their own platforms alone.
_CPU, _FLASH = "jetrl_verl.rollout.cpu_attention", "jetrl_verl.rollout.flash_attention"
_BACKENDS = {"CPU_ATTN": _CPU + ".{}CPUAttentionBackend", "FLASH_ATTN": _FLASH + ".{}FlashAttentionBackend"}
"""Name of vLLM's backend -> its subclass; ``{}`` is filled by the format of the cache."""


REACHES = (
    "vllm.model_executor.layers.attention.attention:Attention.attn_backend",
    "vllm.model_executor.layers.attention.attention:Attention.get_attn_backend",
    "vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec",
    "vllm.model_executor.layers.attention.attention:Attention.impl",
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
)
"""What this file uses of vLLM through values; scripts/reach.py watches it."""


def _check(impl: Any) -> None:
    """Refuse an attention layer that the trainer cannot reproduce."""
    if impl.head_size not in kernels.HEAD_DIMS:
        why = f"the shared operations do not cover heads of {impl.head_size}"
        refuse("head_dim", what="the model of this engine", why=why)
    for what in _changes(impl):
        refuse("operation_replaced_in_vllm", what=what)


def _changes(impl: Any) -> Iterator[str]:
    """What an attention layer does that no layer does of a model, GPU and arguments that the driver let pass."""
    plain = impl.attn_type == vllm.AttentionType.DECODER and impl.alibi_slopes is None and impl.sinks is None
    version = getattr(impl, "vllm_flash_attn_version", 3)  # the CPU backend has none
    for what, met in (
        (
            "attention with biases, sinks or caps, across layers, or other than plain causal",
            not plain or impl.logits_soft_cap or impl.kv_sharing_target_layer_name is not None,
        ),
        ("sliding window attention", impl.sliding_window not in (None, -1, (-1, -1))),
        (f"kv_cache_dtype={impl.kv_cache_dtype}", impl.kv_cache_dtype not in ("auto", "bfloat16")),
        (f"FlashAttention {version}, which this GPU runs,", version != 3),
    ):
        if met:
            yield what


def _check_for_cache(impl: Any, traits: CacheTraits) -> None:
    """Refuse an attention layer that cannot have a quantized KV cache."""
    group = impl.num_heads // impl.num_kv_heads
    for why, met in (
        (f"its heads are of {impl.head_size}", impl.head_size != traits.head_dim),
        (f"a KV head has {group} query heads", group > traits.most_query_heads),
        *((f"no kernel reads its pages in {what.removesuffix(',')}", True) for what in _changes(impl)),
    ):
        if met:
            refuse("model_of_an_fp8_cache", what="the model of this engine", why=why)


def _spec(layer: vllm.Attention, vllm_config: Any, *, head: tuple[int, torch.dtype]) -> vllm.FullAttentionSpec:
    """The layer's cache as vLLM counts it; ``head``: (elements of a head, their dtype)."""
    # It may have changed since the layer was built.
    block_size = vllm_config.cache_config.block_size
    return vllm.FullAttentionSpec(
        block_size=block_size, num_kv_heads=layer.num_kv_heads, head_size=head[0], dtype=head[1]
    )


def share_attention(layer: vllm.Attention, kv_cache: KVCache | None = None) -> None:
    """Give a layer the shared backend and implementation.

    Args:
        kv_cache: format of its cache; None for BF16.

    Raises:
        UnsupportedConfiguration: the layer runs on another backend, or asks for more than plain causal attention in
            BF16.
    """
    stock = layer.get_attn_backend()
    kv_cache = kv_cache or formats.kv_cache(formats.UNQUANTIZED)
    path = _BACKENDS.get(stock.get_name())
    shared = vllm.resolve_obj_by_qualname(path.format(kv_cache.traits.backend)) if path is not None else None
    if shared is None or shared.__base__ is not stock or type(layer.impl) is not stock.get_impl_cls():
        what = f"the attention backend {stock.get_name()} ({stock.__module__})"
        refuse("operation_replaced_in_vllm", what=what)
    if kv_cache.traits.quantized:
        _check_for_cache(layer.impl, kv_cache.traits)
        layer.get_kv_cache_spec = MethodType(partial(_spec, head=kv_cache.vllm_head), layer)
    else:
        _check(layer.impl)
    layer.attn_backend = shared
    layer.impl.__class__ = shared.get_impl_cls()


def share_attention_layers(model: torch.nn.Module, kv_cache: KVCache | None = None) -> None:
    """:func:`share_attention` of every attention layer of a model."""
    for module in model.modules():
        if isinstance(module, vllm.Attention):
            share_attention(module, kv_cache)
