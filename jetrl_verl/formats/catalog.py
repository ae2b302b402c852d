# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which number formats exist and what a configuration has to know of each. Imports nothing, so that the command line
and vLLM's front end may read it.

A new format is one file beside this one (see format.py), one entry here, and its kernels.
"""

from dataclasses import dataclass

FLOW = "fp8"
"""The format of the flow: what trainer and rollout share under ``precision=jet_fp8``."""

UNQUANTIZED = "bf16"
"""What an option says where a model's linear layers, or keys and values in the cache, stay as they are."""


@dataclass(frozen=True)
class Traits:
    """What the options of a run can say of a format.

    Attributes:
        name: value of ``jetrl.rollout``, ``jetrl.train``, ``jetrl.ref`` and ``jetrl.critic``.
        label: as it is written in messages and tables.
        module: of this package, which holds the ``FORMAT`` object.
        scale_rules: values of ``jetrl.scale_rule`` that it knows.
        trains: whether forward and backward of the trainer may run in it.
        keeps_scales: whether scales of weights may be kept from the first weight sync (``jetrl.int8_scales=first``).
        measured: whether what its rounding loses is reported (metrics/quantization.py).
        exports: whether ``jetrl export`` writes folders of it that stock engines serve.
    """

    name: str
    label: str
    module: str
    scale_rules: tuple[str, ...]
    trains: bool = False
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
            trains=True,
            measured=True,
            exports=True,
        ),
        Traits(
            name="int8",
            label="INT8",
            module="channel_int8",
            scale_rules=("fp32",),
            keeps_scales=True,
        ),
    )
}

VLLM_METHODS = {name: f"jetrl_{name}" for name in (*FORMATS, UNQUANTIZED)}
"""Value of ``jetrl.rollout`` -> name of the quantization method in vLLM. That of :data:`UNQUANTIZED` quantizes nothing;
it is how an engine with shared operations alone is told its options."""

SCALE_RULES = tuple(dict.fromkeys(rule for traits in FORMATS.values() for rule in traits.scale_rules))
"""Values of ``jetrl.scale_rule`` that some format knows."""


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
    """What the options of a run can say of what a rollout's KV cache holds; the objects are in caches.py.

    Attributes:
        name: value of ``jetrl.kv_cache``.
        label: as it is written in messages and tables.
        element_bytes: of one number of a key or value. elements_per_scale: that share a scale of one byte; None: no
            scales.
        head_dim: the only one that it is for; None: every one.
        most_query_heads: most query heads of a KV head that its decode kernel computes; None: any number.
        page_tokens: of which a page holds a multiple.
        backend: first word of the attention backends in rollout/ that read it.
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
        """Whether it holds something else than it is given, and attention therefore sees something else."""
        return self.elements_per_scale is not None

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one token's key or value of one head, its scales included."""
        scales = 0 if self.elements_per_scale is None else head_dim // self.elements_per_scale
        return head_dim * self.element_bytes + scales


CACHES: dict[str, CacheTraits] = {
    traits.name: traits
    for traits in (
        CacheTraits(name=UNQUANTIZED, label="BF16", element_bytes=2),
        # E4M3 with a power of two a token and head (reference/kv_cache.py).
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
"""Value of ``jetrl.kv_cache`` -> its traits; the default first."""

QUANTIZED_CACHES = tuple(traits for traits in CACHES.values() if traits.quantized)


def cache_traits(name: str) -> CacheTraits:
    """Traits of the cache called ``name``.

    Raises:
        ValueError: there is no such cache.
    """
    if name not in CACHES:
        raise ValueError(f"{name!r} is not what a KV cache may hold. Set one of {', '.join(CACHES)}.")
    return CACHES[name]
