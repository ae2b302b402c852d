# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a rollout's KV cache may hold, one object each: keys and values in BF16, or in E4M3 with a power of two per
token and head.

The trainer's attention, the weight sync's contract, vLLM's layers, the metrics and ``jetrl diff`` ask a cache instead
of telling the values of ``jetrl.kv_cache`` apart; what a configuration knows of one is its ``CacheTraits``
(catalog.py). The arithmetic and the pages are reference/kv_cache.py's, the kernels kernels/kv_cache.py's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from jetrl_verl import kernels, reference
from jetrl_verl.formats.catalog import CACHES, CacheTraits
from jetrl_verl.formats.e4m3 import lost
from jetrl_verl.reference.kv_cache import HEAD_DIM, saturated


class Held(NamedTuple):
    """Keys or values of some tokens as a cache holds them.

    Attributes:
        tensor: ``K`` or ``V``. values: what was given, ``[T, H, D]``. qdata: same shape.
        restored: what attention sees, BF16.
    """

    tensor: str
    values: torch.Tensor
    qdata: torch.Tensor
    restored: torch.Tensor


class KVCache(ABC):
    """What the cache of a run holds.

    Attributes:
        traits: what a configuration knows of it.
        contract: under what name the two sides state how they attend to it; empty where attention over the cache is
            that of the operations themselves.
    """

    traits: CacheTraits
    contract: str = ""

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        """The trainer's attention: to keys and values as the cache gives them, of which it keeps for backward what the
        cache holds. Arguments, by position, and result of ``kernels.attention``."""

    @abstractmethod
    def seen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[T, H, D]`` BF16 as attention sees them."""

    # What rounding lost, of a cache that is quantized

    def held(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        """Keys, then values; nothing of a cache that holds what it is given."""
        yield from ()

    def lost(self, qdata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(zero, subnormal) masks of ``qdata``, as ``Format.lost``.

        Raises:
            NotImplementedError: a cache that is not quantized.
        """
        raise NotImplementedError(f"a cache in {self.traits.label} loses nothing")

    def saturated(self, held: Held) -> torch.Tensor:
        """FP64 number of elements that were cut off at the largest number.

        Raises:
            NotImplementedError: a cache that is not quantized.
        """
        raise NotImplementedError(f"a cache in {self.traits.label} loses nothing")

    # vLLM's pages, of a cache that is quantized; a BF16 cache has vLLM's own

    @property
    def vllm_head(self) -> tuple[int, torch.dtype] | None:
        """Elements of one key or value of one head, and their type, as vLLM is told; None where it is told nothing."""
        return None

    def page_shape(self, pages: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
        """Shape of all pages of a layer, uint8.

        Raises:
            ValueError: a block size that is no multiple of ``traits.page_tokens``.
            NotImplementedError: a cache that is not quantized.
        """
        raise NotImplementedError(f"a cache in {self.traits.label} has vLLM's pages")

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys and values ``[T, H, D]`` BF16 of tokens in ``slots`` of ``pages``, in place.

        Raises:
            NotImplementedError: a cache that is not quantized.
        """
        raise NotImplementedError(f"a cache in {self.traits.label} has vLLM's pages")

    def decode(
        self, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention ``[R, H, D]`` of one new token a request to its tokens in ``pages``; ``kernels.decode_attention``.

        Raises:
            NotImplementedError: a cache that is not quantized.
        """
        raise NotImplementedError(f"a cache in {self.traits.label} has vLLM's pages")


class BF16Cache(KVCache):
    """What vLLM keeps by itself."""

    traits = CACHES["bf16"]

    def attend(self, *call: Any) -> torch.Tensor:
        return kernels.attention(*call)

    def seen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v


class FP8Cache(KVCache):
    """E4M3, and a biased exponent for each head of a token."""

    traits = CACHES["fp8"]
    contract = "attention over an FP8 KV cache"

    def attend(self, *call: Any) -> torch.Tensor:
        return kernels.attention_fp8(*call)

    def seen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.quantize_kv(k, v)[1:]

    def held(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        quantized, k_seen, v_seen = kernels.quantize_kv(k, v)
        yield Held("K", k, quantized.key, k_seen)
        yield Held("V", v, quantized.value, v_seen)

    def lost(self, qdata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return lost(qdata)

    def saturated(self, held: Held) -> torch.Tensor:
        return saturated(held.values, held.qdata, held.restored)

    @property
    def vllm_head(self) -> tuple[int, torch.dtype] | None:
        return self.traits.head_bytes(HEAD_DIM), torch.uint8

    def page_shape(self, pages: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
        return reference.cache_shape(pages, block_size, kv_heads)

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        kernels.write_kv(k, v, pages, slots)

    def decode(
        self, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return kernels.decode_attention(q, pages, lengths, table, scale)


OBJECTS: dict[str, KVCache] = {cache.traits.name: cache for cache in (BF16Cache(), FP8Cache())}
"""Value of ``jetrl.kv_cache`` -> the cache."""
