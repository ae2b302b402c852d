# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a rollout's KV cache may hold, one object each: keys and values in BF16, or in E4M3 with a power of two per
token and head.

The trainer's attention, the weight sync's contract, vLLM's layers, the metrics and ``jetrl diff`` ask a cache instead
of telling the values of ``jetrl.kv_cache`` apart; what a configuration knows of one is its ``CacheTraits``
(catalog.py). An FP8 cache's arithmetic and pages are reference/kv_cache.py's, its kernels kernels/kv_cache.py's; BF16
pages are vLLM's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from jetrl_verl import kernels, reference
from jetrl_verl.formats.catalog import CACHES, CacheTraits
from jetrl_verl.formats.e4m3 import lost
from jetrl_verl.kernels import native
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
        contract: under what name the two sides state how they attend to it.
    """

    traits: CacheTraits
    contract: str

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
        recomputed: bool = False,
    ) -> torch.Tensor:
        """The trainer's attention: to keys and values as the cache gives them, of which it keeps for backward what the
        cache holds. Arguments, by position, and result of ``kernels.attention``.

        Args:
            recomputed: activation checkpointing runs this forward again right before its backward, so what it keeps
                lives for one layer, and its bytes do not count.
        """

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

    @property
    def vllm_head(self) -> tuple[int, torch.dtype] | None:
        """Elements of one key or value of one head, and their type, as vLLM is told; None where it is told nothing."""
        return None

    # A rollout's pages of one layer, by the functions that its attention calls (rollout/): for the contract check

    @abstractmethod
    def new_pages(self, pages: int, block_size: int, kv_heads: int, device: torch.device) -> torch.Tensor:
        """So many pages that nobody has written, of heads of 128. What they hold is not to be read as a number.

        Raises:
            ValueError: a block size that is no multiple of ``traits.page_tokens``.
        """

    @abstractmethod
    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys and values ``[T, H, D]`` BF16 of tokens in ``slots`` of ``pages``, in place."""

    @abstractmethod
    def norm_rotary_write(self, heads: tuple, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """:meth:`write` of keys behind QK norm and rotary, and of values, in the launch that returns the queries.

        Args:
            heads: the arguments of ``kernels.norm_rotary_write`` in front of the pages.
        """

    @abstractmethod
    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[slots, H, D]`` BF16 of all slots."""

    @abstractmethod
    def decode(
        self, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention ``[R, H, D]`` of one new token of each request to its tokens in ``pages``.

        Args:
            q, lengths, table, scale: as of ``kernels.decode_attention``.
        """


def _unwritten(device: torch.device) -> float:
    """What a BF16 page holds where nobody has written: our kernels read nothing behind a request's last token;
    FlashAttention 3, which decodes on a GPU without the native kernel, may multiply it by zero."""
    ours = device.type == "cpu" or native.unavailable() is None
    return torch.nan if ours else torch.finfo(torch.bfloat16).max


class BF16Cache(KVCache):
    """What vLLM keeps by itself: pages ``[pages, 2, block size, H, D]``, keys first."""

    traits = CACHES["bf16"]
    contract = "attention over a BF16 KV cache"

    def attend(self, *call: Any, recomputed: bool = False) -> torch.Tensor:
        return kernels.attention(*call)

    def seen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v

    def new_pages(self, pages: int, block_size: int, kv_heads: int, device: torch.device) -> torch.Tensor:
        shape = (pages, 2, block_size, kv_heads, HEAD_DIM)
        return torch.full(shape, _unwritten(device), dtype=torch.bfloat16, device=device)

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        kernels.write_pages(k, v, *pages.unbind(1), slots)

    def norm_rotary_write(self, heads: tuple, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return kernels.norm_rotary_write(*heads, *pages.unbind(1), slots)

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (part.flatten(0, 1) for part in pages.unbind(1))
        return keys, values

    def decode(
        self, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        # FlashAttention 3 where the native kernel does not: what vLLM's backend runs there.
        return kernels.decode_attention_bf16(q, *pages.unbind(1), lengths, table, scale)


class FP8Cache(KVCache):
    """E4M3, and a biased exponent for each head of a token."""

    traits = CACHES["fp8"]
    contract = "attention over an FP8 KV cache"

    def attend(self, *call: Any, recomputed: bool = False) -> torch.Tensor:
        return kernels.attention_fp8(*call, keep_fp8=not recomputed)

    def seen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.quantize_dequantize_kv(k, v)

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

    def new_pages(self, pages: int, block_size: int, kv_heads: int, device: torch.device) -> torch.Tensor:
        # NaN, as data and as a scale.
        shape = reference.cache_shape(pages, block_size, kv_heads)
        return torch.full(shape, 255, dtype=torch.uint8, device=device)

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        kernels.write_kv(k, v, pages, slots)

    def norm_rotary_write(self, heads: tuple, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return kernels.norm_rotary_write_fp8(*heads, pages, slots)

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As one request that holds every slot. Made on the device: a copy from the host would wait for it.
        count, slots = len(pages), len(pages) * pages.shape[2] * reference.UNIT_TOKENS
        table = torch.arange(count, dtype=torch.int32, device=pages.device)[None]
        starts = slots * torch.arange(2, dtype=torch.int32, device=pages.device)
        lengths = torch.full((1,), slots, dtype=torch.int32, device=pages.device)
        return kernels.read_kv(pages, table, lengths, starts, slots, slots)

    def decode(
        self, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return kernels.decode_attention(q, pages, lengths, table, scale)


OBJECTS: dict[str, KVCache] = {cache.traits.name: cache for cache in (BF16Cache(), FP8Cache())}
"""Value of ``jetrl.kv_cache`` -> the cache."""
