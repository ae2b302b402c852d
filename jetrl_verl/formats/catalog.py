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

QUANTIZED_CACHE = "fp8"
"""The other value of ``jetrl.kv_cache``: E4M3 with a power of two a token and head (reference/kv_cache.py)."""


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
