# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""vLLM's attention backends with the shared attention in them; the stock ones where no run asked for it.

CPU: vLLM's CPU platform always takes the backend called ``CPU_ATTN``, so that name is registered anew. The cache keeps
vLLM's shape and is filled with :func:`jetrl_verl.ops.cache_form`.

CUDA: ``FLASH_ATTN`` with FlashAttention 3, one split and no cascade, which is the kernel that the trainer calls.
"""

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from jetrl_verl import ops
from jetrl_verl.rollout.method import shares_operations


def _check(impl: Any) -> None:
    """Refuse an attention layer that the trainer's could not equal."""
    ops.check_head_dim(impl.head_size)
    plain = impl.attn_type == AttentionType.DECODER and impl.alibi_slopes is None and impl.sinks is None
    if not plain or impl.logits_soft_cap or impl.kv_sharing_target_layer_name is not None:
        raise ValueError(
            "shared attention is plain causal attention, and this model asks for more; use precision=jet_fp8 "
            "jetrl.operations=stock"
        )
    if impl.sliding_window not in (None, -1, (-1, -1)):
        raise ValueError(
            "the shared operations do not cover sliding window attention; use precision=jet_fp8 jetrl.operations=stock"
        )
    if impl.kv_cache_dtype not in ("auto", "bfloat16"):
        raise ValueError(f"shared attention keeps a BF16 cache, not {impl.kv_cache_dtype}; use kv_cache_dtype=auto")


def _register_cpu() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    class SharedCPUAttention(CPUAttentionBackendImpl):
        """``ops.paged_attention`` on vLLM's cache."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _check(self)

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
            keys, values = _split(kv_cache)
            # Padding has no slot.
            tokens = (slot_mapping >= 0).nonzero().squeeze(1)
            slots = slot_mapping[tokens]
            block, offset = slots // keys.shape[2], slots % keys.shape[2]
            keys[block, :, offset] = ops.cache_form(key[tokens])
            values[block, :, offset] = ops.cache_form(value[tokens])

        def forward(
            self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
        ) -> torch.Tensor:
            if attn_metadata is None:  # vLLM's warm-up
                return output
            tokens = attn_metadata.num_actual_tokens
            output[:tokens] = ops.paged_attention(
                query[:tokens],
                *_split(kv_cache),
                attn_metadata.query_start_loc,
                attn_metadata.seq_lens,
                attn_metadata.block_table,
                self.scale,
            )
            return output

    class SharedCPUAttentionBackend(CPUAttentionBackend):
        """Chooses per engine, since one process may hold a stock engine too."""

        @staticmethod
        def get_impl_cls():
            return SharedCPUAttention if shares_operations() else CPUAttentionBackendImpl

    _publish(AttentionBackendEnum.CPU_ATTN, SharedCPUAttentionBackend)


def _split(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[blocks, Hkv, block size, D]`` of a cache ``[blocks, Hkv, block size, 2 D]``."""
    return kv_cache.chunk(2, dim=-1)


def _register_flash_attention() -> None:
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionBackend,
        FlashAttentionImpl,
        FlashAttentionMetadataBuilder,
    )

    class SharedFlashAttention(FlashAttentionImpl):
        """FlashAttention 3 and nothing else."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _check(self)
            if self.vllm_flash_attn_version != 3:
                raise ValueError(
                    "shared attention needs FlashAttention 3, and this GPU runs version "
                    f"{self.vllm_flash_attn_version}; use precision=jet_fp8 jetrl.operations=stock"
                )

    class SharedFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
        """One split in every call, planned by the kernel itself: a plan made ahead depends on the batch."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.aot_schedule = False

        def build(self, *args: Any, **kwargs: Any):
            metadata = super().build(*args, **kwargs)
            metadata.max_num_splits = 1
            return metadata

        def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
            return False

    class SharedFlashAttentionBackend(FlashAttentionBackend):
        """Chooses per engine, since one process may hold a stock engine too."""

        @staticmethod
        def get_impl_cls():
            return SharedFlashAttention if shares_operations() else FlashAttentionImpl

        @staticmethod
        def get_builder_cls():
            return SharedFlashAttentionMetadataBuilder if shares_operations() else FlashAttentionMetadataBuilder

    _publish(AttentionBackendEnum.FLASH_ATTN, SharedFlashAttentionBackend)


def _publish(name: AttentionBackendEnum, backend: type) -> None:
    """Register ``backend``, which vLLM looks up by module and qualified name, and hands on by both again."""
    backend.__qualname__ = backend.__name__
    globals()[backend.__name__] = backend
    register_backend(name, f"{__name__}.{backend.__name__}")


def register() -> None:
    """Register this platform's backend in the place of vLLM's; idempotent."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _register_cpu()
    elif current_platform.is_cuda():
        _register_flash_attention()
