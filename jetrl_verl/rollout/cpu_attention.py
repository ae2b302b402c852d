# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention backend with the shared attention, over a BF16 or an FP8 cache.

A BF16 cache keeps vLLM's shape and holds :func:`jetrl_verl.kernels.cache_form`; an FP8 one has the pages of
reference/kv_cache.py.
"""

from dataclasses import replace

import torch

from jetrl_verl import kernels
from jetrl_verl.reference import cache_shape
from jetrl_verl.reference.kv_cache import HEAD_DIM, UNIT_TOKENS, cache_units
from jetrl_verl.rollout import vllm_compat as vllm


class _PagedAttention(vllm.CPUAttentionBackendImpl):
    """``_attend(query, cache, ...)`` instead of vLLM's kernel."""

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        if attn_metadata is None:  # vLLM's warm-up
            return output
        tokens = attn_metadata.num_actual_tokens
        batch = attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table
        output[:tokens] = self._attend(query[:tokens], kv_cache, *batch, self.scale)
        return output


class SharedCPUAttention(_PagedAttention):
    """``kernels.paged_attention`` on vLLM's cache."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        kernels.write_pages(key, value, *_pages(kv_cache), slot_mapping)

    def norm_rotary_write(self, heads: tuple, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        return kernels.norm_rotary_write(*heads, *_pages(kv_cache), slot_mapping)

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, *batch) -> torch.Tensor:
        return kernels.paged_attention(query, *_split(kv_cache), *batch)


class SharedCPUAttentionBackend(vllm.CPUAttentionBackend):
    get_impl_cls = staticmethod(lambda: SharedCPUAttention)
    # The attention of newer vLLM needs pages of 32; ours takes 16.
    get_supported_kernel_block_sizes = staticmethod(lambda: [vllm.MultipleOf(UNIT_TOKENS)])


def _split(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[blocks, Hkv, block size, D]`` of a cache ``[blocks, Hkv, block size, 2 D]``."""
    return kv_cache.chunk(2, dim=-1)


def _pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same as ``[blocks, block size, Hkv, D]``."""
    return tuple(part.transpose(1, 2) for part in _split(kv_cache))


class FP8CPUAttention(_PagedAttention):
    """``kernels.paged_attention_fp8`` on pages of FP8 data."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        kernels.write_kv(key, value, cache_units(kv_cache), slot_mapping)

    def norm_rotary_write(self, heads: tuple, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        return kernels.norm_rotary_write_fp8(*heads, cache_units(kv_cache), slot_mapping)

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, *batch) -> torch.Tensor:
        return kernels.paged_attention_fp8(query, cache_units(kv_cache), *batch)


class FP8CPUAttentionMetadataBuilder(vllm.CPUAttentionMetadataBuilder):
    """vLLM's builder plans for its own kernel, so it gets the model's head size, not that of the cache."""

    def __init__(self, kv_cache_spec, *args, **kwargs) -> None:
        super().__init__(replace(kv_cache_spec, head_size=HEAD_DIM, head_size_v=HEAD_DIM), *args, **kwargs)


class FP8CPUAttentionBackend(vllm.CPUAttentionBackend):
    get_impl_cls = staticmethod(lambda: FP8CPUAttention)
    get_supported_kernel_block_sizes = SharedCPUAttentionBackend.get_supported_kernel_block_sizes
    get_builder_cls = staticmethod(lambda: FP8CPUAttentionMetadataBuilder)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return cache_shape(num_blocks, block_size, num_kv_heads)
