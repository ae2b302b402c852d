# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Turns attention layers that vLLM has built into ones that run the shared attention.

vLLM chooses a backend per platform and keeps the choice for the process, so a backend of ours under its name would be
every engine's. Here a layer of one engine is given ours after it was built: the worker asks each layer for its backend
when it makes the KV cache and the metadata builders, which comes later.
"""

from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionType

from jetrl_verl import kernels
from jetrl_verl.config.support.table import refusal

# Each is imported only where its platform runs.
_BACKENDS = {
    "CPU_ATTN": "jetrl_verl.rollout.cpu_attention.SharedCPUAttentionBackend",
    "FLASH_ATTN": "jetrl_verl.rollout.flash_attention.SharedFlashAttentionBackend",
}
"""Name of vLLM's backend -> its subclass with the shared attention."""


def _check(impl: Any) -> None:
    """Refuse an attention layer that the trainer's could not equal."""
    kernels.check_head_dim(impl.head_size)
    plain = impl.attn_type == AttentionType.DECODER and impl.alibi_slopes is None and impl.sinks is None
    if not plain or impl.logits_soft_cap or impl.kv_sharing_target_layer_name is not None:
        raise ValueError(refusal("attention_kind"))
    if impl.sliding_window not in (None, -1, (-1, -1)):
        raise ValueError(refusal("sliding_window_in_vllm"))
    if impl.kv_cache_dtype not in ("auto", "bfloat16"):
        raise ValueError(refusal("kv_cache_in_vllm", dtype=impl.kv_cache_dtype))
    # The CPU's has no version.
    version = getattr(impl, "vllm_flash_attn_version", 3)
    if version != 3:
        raise ValueError(refusal("flash_attention_version", version=version))


def share_attention(layer: Attention) -> None:
    """Give a layer the shared backend in the place of vLLM's, and turn its implementation into the shared one.

    Raises:
        ValueError: the layer runs on another backend, or asks for more than plain causal attention in BF16.
    """
    stock = layer.get_attn_backend()
    path = _BACKENDS.get(stock.get_name())
    shared = resolve_obj_by_qualname(path) if path is not None else None
    if shared is None or shared.__base__ is not stock or type(layer.impl) is not stock.get_impl_cls():
        raise ValueError(refusal("attention_backend_in_vllm", backend=stock.get_name(), module=stock.__module__))
    _check(layer.impl)
    layer.attn_backend = shared
    layer.impl.__class__ = shared.get_impl_cls()
