# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention backend as the shared attention: version 3, one split, no cascade, as the trainer calls it."""

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)


class SharedFlashAttention(FlashAttentionImpl):
    """vLLM's own; the class says in a listing whose metadata it gets."""


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
    @staticmethod
    def get_impl_cls() -> type[SharedFlashAttention]:
        return SharedFlashAttention

    @staticmethod
    def get_builder_cls() -> type[SharedFlashAttentionMetadataBuilder]:
        return SharedFlashAttentionMetadataBuilder
