# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The number formats of quantized linear layers, one object each: block FP8 (the flow) and channel INT8 (a baseline);
and what a rollout's KV cache may hold, one object each (caches.py).

``get("fp8")`` is the object, ``traits_of("fp8")`` what a configuration knows of it without importing torch. What a
format is: format.py; its arithmetic: jetrl_verl/reference; its kernels: jetrl_verl/kernels.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from jetrl_verl.formats.catalog import (
    CACHES,
    FLOW,
    FORMATS,
    UNQUANTIZED,
    VLLM_METHODS,
    CacheTraits,
    Traits,
    cache_traits,
    traits_of,
)

if TYPE_CHECKING:
    import torch

    from jetrl_verl.formats.caches import KVCache
    from jetrl_verl.formats.format import Format

__all__ = [
    "CACHES",
    "FLOW",
    "FORMATS",
    "UNQUANTIZED",
    "VLLM_METHODS",
    "CacheTraits",
    "Traits",
    "cache_traits",
    "get",
    "kv_cache",
    "of",
    "traits_of",
]


@cache
def get(name: str) -> "Format":
    """The format called ``name``.

    Raises:
        ValueError: no format has this name.
    """
    traits = traits_of(name)
    if traits is None:
        raise ValueError(f"{name!r} is not a quantized format. Set one of {', '.join(FORMATS)}.")
    return import_module(f"{__name__}.{traits.module}").FORMAT


def kv_cache(name: str) -> "KVCache":
    """What a rollout's KV cache holds where ``jetrl.kv_cache`` is ``name``.

    Raises:
        ValueError: there is no such cache.
    """
    return import_module(f"{__name__}.caches").OBJECTS[cache_traits(name).name]


def of(tensor: "torch.Tensor") -> "Format | None":
    """The format whose qdata ``tensor`` is, by its type; None for a tensor that is not quantized."""
    return _by_dtype().get(tensor.dtype)


@cache
def _by_dtype() -> "dict[torch.dtype, Format]":
    return {get(name).dtype: get(name) for name in FORMATS}
