# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Number formats of linear layers, block FP8 and channel INT8 (format.py), and KV caches (caches.py), one object each.

``get("fp8")`` is the object, ``traits_of("fp8")`` its traits without importing torch.
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
    from jetrl_verl.formats.caches import KVCache
    from jetrl_verl.formats.format import Format


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
    """The KV cache of ``jetrl.kv_cache=name``.

    Raises:
        ValueError: there is no such cache.
    """
    return import_module(f"{__name__}.caches").OBJECTS[cache_traits(name).name]
