# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The rollout's KV cache, BF16 or FP8 (E4M3 with a power of two per token and head), one object each.

FP8 arithmetic and pages: reference/kv_cache.py; its kernels: kernels/kv_cache.py. BF16 pages are vLLM's.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from jetrl_verl import kernels, reference
from jetrl_verl.formats.catalog import CACHES
from jetrl_verl.formats.e4m3 import lost
from jetrl_verl.kernels import native
from jetrl_verl.reference.kv_cache import HEAD_DIM, saturated


class StoredHeads(NamedTuple):
    """Keys or values of some tokens in a quantized cache.

    Attributes:
        tensor: ``K`` or ``V``. values: the input, ``[T, H, D]``. qdata, restored: stored, and as attention sees it in
            BF16, same shape.
    """

    tensor: str
    values: torch.Tensor
    qdata: torch.Tensor
    restored: torch.Tensor


def _unwritten(device: torch.device, head_dim: int) -> float:
    """Fill of BF16 pages: our kernels read nothing after a request's last token, so NaN; FlashAttention 3, which
    decodes on a GPU without the native kernel, may multiply it by zero."""
    own_kernels = device.type == "cpu" or (head_dim == HEAD_DIM and native.unavailable() is None)
    return torch.nan if own_kernels else torch.finfo(torch.bfloat16).max


class KVCache:
    """The KV cache of a run: vLLM's own, BF16 in pages ``[pages, 2, block size, H, D]``, keys first. A quantized one is
    a subclass.

    Attributes:
        traits: see catalog.py.
        contract: name of its attention in the contract check.
        vllm_head: elements of one key or value of one head and their type for vLLM; None: vLLM's own.
    """

    traits = CACHES["bf16"]
    contract = "attention over a BF16 KV cache"
    vllm_head: tuple[int, torch.dtype] | None = None

    def __reduce__(self) -> str:
        return self.traits.name.upper()  # of this module: one object a process, also of a copied layer

    def attend(self, *call: Any, recomputed: bool = False) -> torch.Tensor:
        """The trainer's attention to keys and values as the cache returns them.

        Args:
            call: the arguments of ``kernels.attention``.
            recomputed: activation checkpointing runs this forward again right before its backward, so saving FP8
                instead of BF16 would save no memory.
        """
        return kernels.attention(*call)

    def seen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[T, H, D]`` BF16 as attention sees them."""
        return k, v

    # Pages of one layer, by the functions that the rollout's attention calls; for the contract check

    def new_pages(
        self, pages: int, block_size: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> torch.Tensor:
        """Unwritten pages, filled with NaN or what must not be read as a number.

        Raises:
            ValueError: a block size that is no multiple of ``traits.page_tokens``.
        """
        shape = (pages, 2, block_size, kv_heads, head_dim)
        return torch.full(shape, _unwritten(device, head_dim), dtype=torch.bfloat16, device=device)

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys and values ``[T, H, D]`` BF16 in ``slots`` of ``pages``, in place."""
        kernels.write_pages(k, v, *pages.unbind(1), slots)

    def norm_rotary_write(self, heads: tuple, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """:meth:`write` of values and of keys after QK norm and rotary, in the launch that returns the queries.

        Args:
            heads: the arguments of ``kernels.norm_rotary_write`` before the pages.
        """
        return kernels.norm_rotary_write(*heads, *pages.unbind(1), slots)

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[slots, H, D]`` BF16 of all slots."""
        keys, values = (part.flatten(0, 1) for part in pages.unbind(1))
        return keys, values

    def decode(
        self, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention ``[R, H, D]`` of one new token of each request to its tokens in ``pages``.

        Args:
            q, lengths, table, scale: as of ``kernels.decode_attention``.
        """
        # Falls back to FlashAttention 3, as vLLM's backend does.
        return kernels.decode_attention_bf16(q, *pages.unbind(1), lengths, table, scale)


class FP8Cache(KVCache):
    """E4M3 with a biased exponent for each head of a token."""

    traits = CACHES["fp8"]
    contract = "attention over an FP8 KV cache"
    vllm_head = traits.head_bytes(HEAD_DIM), torch.uint8

    def attend(self, *call: Any, recomputed: bool = False) -> torch.Tensor:
        return kernels.attention_fp8(*call, keep_fp8=not recomputed)

    def seen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.quantize_dequantize_kv(k, v)

    # What rounding lost

    def stored(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[StoredHeads]:
        """Keys, then values."""
        quantized, k_seen, v_seen = kernels.quantize_kv(k, v)
        yield StoredHeads("K", k, quantized.key, k_seen)
        yield StoredHeads("V", v, quantized.value, v_seen)

    def lost(self, qdata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(zero, subnormal) masks of ``qdata``, as ``Format.lost``."""
        return lost(qdata)

    def saturated(self, heads: StoredHeads) -> torch.Tensor:
        """FP64 number of elements that saturated."""
        return saturated(heads.values, heads.qdata, heads.restored)

    def new_pages(self, pages: int, block_size: int, kv_heads: int, head_dim: int, device) -> torch.Tensor:
        shape = reference.cache_shape(pages, block_size, kv_heads)
        return torch.full(shape, 255, dtype=torch.uint8, device=device)  # NaN, as data and as a scale

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        kernels.write_kv(k, v, pages, slots)

    def norm_rotary_write(self, heads: tuple, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return kernels.norm_rotary_write_fp8(*heads, pages, slots)

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As one request of all slots. Created on the device: a copy from the host would wait for it.
        count, slots = len(pages), len(pages) * pages.shape[2] * reference.UNIT_TOKENS
        table = torch.arange(count, dtype=torch.int32, device=pages.device)[None]
        starts = slots * torch.arange(2, dtype=torch.int32, device=pages.device)
        lengths = torch.full((1,), slots, dtype=torch.int32, device=pages.device)
        return kernels.read_kv(pages, table, lengths, starts, slots, slots)

    def decode(self, q, pages, lengths, table, scale: float) -> torch.Tensor:
        return kernels.decode_attention(q, pages, lengths, table, scale)


BF16, FP8 = KVCache(), FP8Cache()
OBJECTS: dict[str, KVCache] = {cache.traits.name: cache for cache in (BF16, FP8)}
"""``jetrl.kv_cache`` -> the cache."""
