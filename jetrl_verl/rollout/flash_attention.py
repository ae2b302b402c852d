# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention backend as the shared attention: FlashAttention 3 with one split and no cascade.

Decode steps of heads of 128 run our kernel with the same bits (kernels/decode_attention.py), since one split leaves
most of a GPU idle when requests are few. With an FP8 cache prompts and chunks run FlashAttention 3 over dequantized
tokens.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from jetrl_verl import kernels
from jetrl_verl.kernels import native as kernels_native
from jetrl_verl.kernels.vllm_kernels import stated_queries
from jetrl_verl.reference import cache_shape
from jetrl_verl.reference.kv_cache import cache_units
from jetrl_verl.rollout import vllm_compat as vllm

_stock = vllm.flash_attention()

REACHES = (
    "vllm.v1.attention.backend:CommonAttentionMetadata",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata",
)
"""Argument and result (a ``FlashAttentionMetadata``) of ``build``; scripts/reach.py watches them."""


class SharedFlashAttention(_stock.FlashAttentionImpl):
    """vLLM's own, except for batches whose metadata says that they are decodes."""

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        scales = output_scale, output_block_scale  # vLLM's refuses them
        # vLLM's profiling run has no metadata.
        if attn_metadata is not None and attn_metadata.jetrl_decodes and scales == (None, None):
            # Requests that pad a CUDA graph have length 0; tokens after those of the requests are padding, too.
            lengths, table = attn_metadata.seq_lens, attn_metadata.block_table
            rows = slice(0, lengths.shape[0])
            kernels.decode_attention_bf16(
                query[rows], *vllm.flash_pages(kv_cache), lengths, table, self.scale, output[rows]
            )
            return output
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)

    def norm_rotary_write(self, heads: tuple, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        return kernels.norm_rotary_write(*heads, *vllm.flash_pages(kv_cache), slot_mapping)


class SharedFlashAttentionMetadataBuilder(_stock.FlashAttentionMetadataBuilder):
    """One split in every call; ``jetrl_decodes`` of the metadata says whether a batch is decodes.

    FlashAttention's plan of blocks is made ahead only for batches inside captured graphs that are not decodes:
    elsewhere vLLM would plan more splits, and our decode kernel reads no plan. A graph is captured and replayed with
    the same number of requests, so a batch is decodes both times or neither.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_splits = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> vllm.AttentionCGSupport:
        if kernels_native.unavailable() is not None:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        # A graph for batches of any kind is captured with one new token a request, and would replay our decode kernel
        # for chunks.
        return vllm.AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        most = self.max_cudagraph_size if self.use_full_cuda_graph else None
        captured = most is not None and common_attn_metadata.num_actual_tokens <= most
        decodes = self._are_decodes(common_attn_metadata)
        most_queries = stated_queries(self.headdim, common_attn_metadata.max_query_len)
        batch = replace(common_attn_metadata, max_query_len=most_queries)
        metadata = super().build(common_prefix_len, batch, fast_build or decodes or not captured)
        metadata.max_num_splits, metadata.jetrl_decodes = 1, decodes
        return metadata

    def _are_decodes(self, batch: vllm.CommonAttentionMetadata) -> bool:
        """Whether ``batch`` has one new token of each request, padding aside, and our kernel computes it in every
        layer."""
        if batch.max_query_len != 1 or batch.num_actual_tokens < batch.num_reqs or self.dcp_world_size != 1:
            return False
        form = self.num_heads_q, self.num_heads_kv, self.headdim, self.block_size, self.kv_cache_dtype
        return kernels.decodes_natively(batch.num_reqs, *form)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class SharedFlashAttentionBackend(_stock.FlashAttentionBackend):
    get_impl_cls = staticmethod(lambda: SharedFlashAttention)
    get_builder_cls = staticmethod(lambda: SharedFlashAttentionMetadataBuilder)


class FP8FlashAttention(_stock.FlashAttentionImpl):
    """Our decode kernel on FP8 pages; FlashAttention 3 on dequantized tokens for prompts and chunks."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        kernels.write_kv(key, value, cache_units(kv_cache), slot_mapping)

    def norm_rotary_write(self, heads: tuple, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        return kernels.norm_rotary_write_fp8(*heads, cache_units(kv_cache), slot_mapping)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "vLLM asks for a quantized attention output, and attention over an FP8 cache writes BF16. "
                "Set compilation_config.pass_config.fuse_attn_quant=false."
            )
        if attn_metadata is None:  # vLLM's profiling run
            return output.fill_(0)
        split, kv_cache = attn_metadata.jetrl_split, cache_units(kv_cache)
        lengths, table = attn_metadata.seq_lens, attn_metadata.block_table
        if split.decodes:
            rows = slice(0, split.decodes)
            kernels.decode_attention(query[rows], kv_cache, lengths[rows], table[rows], self.scale, output[rows])
        for first, last, begin, end, most_queries in split.chunks:
            kernels.chunk_attention(
                query[begin:end],
                kv_cache,
                attn_metadata.query_start_loc[first : last + 1] - begin,
                most_queries,
                lengths[first:last],
                split.lengths[first:last],
                table[first:last],
                self.scale,
                output[begin:end],
            )
        return output


class Split(NamedTuple):
    """A batch with decodes first.

    Attributes:
        decodes: number of requests with one new token.
        chunks: a FlashAttention call each: (first request, end of requests, first token, end of tokens, most new tokens
            of a request).
        lengths: tokens of each request, on the host; exact for those with more than one new token.
    """

    decodes: int
    chunks: list[tuple[int, int, int, int, int]]
    lengths: list[int]


MOST_DEQUANTIZED = 65536
"""Tokens dequantized at a time, unless one request has more: 256 MB of keys and values with 8 KV heads."""


def split_batch(starts: list[int], lengths: list[int], most: int = MOST_DEQUANTIZED) -> Split:
    """The :class:`Split` of requests with first tokens ``starts``, whose last entry is the number of tokens."""
    fresh = [end - begin for begin, end in zip(starts, starts[1:], strict=False)]
    while fresh and not fresh[-1]:  # padding
        fresh.pop()
    decodes = next((r for r, count in enumerate(fresh) if count > 1), len(fresh))
    chunks, first = [], decodes
    while first < len(fresh):
        last = first + 1
        while last < len(fresh) and sum(lengths[first : last + 1]) <= most:
            last += 1
        chunks.append((first, last, starts[first], starts[last], max(fresh[first:last])))
        first = last
    return Split(decodes, chunks, lengths)


class FP8FlashAttentionMetadataBuilder(SharedFlashAttentionMetadataBuilder):
    """Decodes first, and CUDA graphs of decodes alone, since the tokens that a chunk dequantizes vary."""

    reorder_batch_threshold = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False  # FlashAttention runs on chunks alone

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> vllm.AttentionCGSupport:
        # Without the native kernel a decode step reads lengths on the host.
        native = kernels_native.unavailable() is None
        return vllm.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if native else vllm.AttentionCGSupport.NEVER

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        requests = common_attn_metadata.num_reqs
        starts = common_attn_metadata.query_start_loc_cpu[: requests + 1].tolist()
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        if common_attn_metadata.max_query_len == 1:
            # Padding of a CUDA graph has no new token and length 0.
            metadata.jetrl_split = Split(requests, [], [])
        else:
            if lengths is None:
                lengths = common_attn_metadata.seq_lens[:requests].cpu()
            metadata.jetrl_split = split_batch(starts, lengths[:requests].tolist())
        return metadata


class FP8FlashAttentionBackend(_stock.FlashAttentionBackend):
    get_impl_cls = staticmethod(lambda: FP8FlashAttention)
    get_builder_cls = staticmethod(lambda: FP8FlashAttentionMetadataBuilder)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return cache_shape(num_blocks, block_size, num_kv_heads)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError  # tells vLLM that layers are not interleaved
        return (0, 1, 2, 3)

    supported_kv_cache_layouts = staticmethod(lambda: vllm.head_by_head_layouts())
