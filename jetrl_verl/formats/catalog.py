# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The number formats and KV caches that a configuration may name. Imports no torch, for the command line and vLLM.

A new format is one file in this folder (format.py), one entry here, and its kernels.
"""

from dataclasses import dataclass

FLOW = "fp8"
"""The format that trainer and rollout share under ``precision=jet_fp8``."""

UNQUANTIZED = "bf16"
"""Value of an option whose linear layers or KV cache are not quantized."""


@dataclass(frozen=True)
class Traits:
    """What options and messages need of a format.

    Attributes:
        name: value of ``jetrl.rollout``, ``jetrl.train``, ``jetrl.ref`` and ``jetrl.critic``.
        label: its name in messages and tables.
        module: of this package, with the ``FORMAT`` object.
        scale_rules: supported values of ``jetrl.scale_rule``.
        block: side of the square of a weight that no shard cuts; the contract check has one sum of each.
        mixtures: whether it has the products of a mixture's experts.
        element_bytes: of an element's qdata.
        trains: whether the trainer may run forward and backward in it.
        native: whether csrc/ has Hopper kernels for it.
        keeps_scales: whether weights may keep the scales of the first weight sync (``jetrl.int8_scales=first``).
        measured: whether metrics report what rounding loses (metrics/quantization.py).
        exports: whether ``jetrl export`` writes it for stock engines.
    """

    name: str
    label: str
    module: str
    scale_rules: tuple[str, ...]
    block: int
    mixtures: bool = False
    element_bytes: float = 1.0
    trains: bool = False
    native: bool = False
    keeps_scales: bool = False
    measured: bool = False
    exports: bool = False


FORMATS: dict[str, Traits] = {
    traits.name: traits
    for traits in (
        Traits(
            name="fp8",
            label="FP8",
            module="block_fp8",
            scale_rules=("fp32", "pow2"),
            block=128,
            mixtures=True,
            trains=True,
            native=True,
            measured=True,
            exports=True,
        ),
        Traits(
            name="int8",
            label="INT8",
            module="channel_int8",
            scale_rules=("fp32",),
            block=128,
            keeps_scales=True,
        ),
    )
}

TRAINED = tuple(traits.name for traits in FORMATS.values() if traits.trains)
"""Formats that ``jetrl.train``, ``jetrl.ref`` and ``jetrl.critic`` may name."""

VLLM_METHODS = {name: f"jetrl_{name}" for name in (*FORMATS, UNQUANTIZED)}
"""``jetrl.rollout`` -> vLLM's quantization method. That of :data:`UNQUANTIZED` only carries an engine's options."""

SCALE_RULES = tuple(dict.fromkeys(rule for traits in FORMATS.values() for rule in traits.scale_rules))
"""Values of ``jetrl.scale_rule`` that some format supports."""


def traits_of(name: str) -> Traits | None:
    """Traits of the format called ``name``; None for :data:`UNQUANTIZED`.

    Raises:
        ValueError: a name that is neither.
    """
    if name != UNQUANTIZED and name not in FORMATS:
        raise ValueError(f"{name!r} is not a number format. Set one of {', '.join((UNQUANTIZED, *FORMATS))}.")
    return FORMATS.get(name)


@dataclass(frozen=True)
class CacheTraits:
    """What options and messages need of a KV cache; the objects are in caches.py.

    Attributes:
        name: value of ``jetrl.kv_cache``.
        label: its name in messages and tables.
        element_bytes: of one element. elements_per_scale: that share a one-byte scale; None: no scales.
        head_dim: the only one that is supported; None: any.
        most_query_heads: query heads of a KV head that its decode kernel supports; None: any number.
        page_tokens: a page holds a multiple of these.
        backend: first word of its attention backends in rollout/.
    """

    name: str
    label: str
    element_bytes: int
    elements_per_scale: int | None = None
    head_dim: int | None = None
    most_query_heads: int | None = None
    page_tokens: int = 1
    backend: str = "Shared"

    @property
    def quantized(self) -> bool:
        """Whether attention sees other values than were written."""
        return self.elements_per_scale is not None

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one token's key or value of one head, its scales included."""
        scales = 0 if self.elements_per_scale is None else head_dim // self.elements_per_scale
        return head_dim * self.element_bytes + scales


CACHES: dict[str, CacheTraits] = {
    traits.name: traits
    for traits in (
        CacheTraits(name=UNQUANTIZED, label="BF16", element_bytes=2),
        CacheTraits(
            name="fp8",
            label="FP8",
            element_bytes=1,
            elements_per_scale=128,
            head_dim=128,
            most_query_heads=8,
            page_tokens=16,
            backend="FP8",
        ),
    )
}
"""``jetrl.kv_cache`` -> its traits; the default first."""

QUANTIZED_CACHES = tuple(traits for traits in CACHES.values() if traits.quantized)


def cache_traits(name: str) -> CacheTraits:
    """Traits of the cache called ``name``.

    Raises:
        ValueError: there is no such cache.
    """
    if name not in CACHES:
        raise ValueError(f"{name!r} is not supported as a KV cache. Set one of {', '.join(CACHES)}.")
    return CACHES[name]
