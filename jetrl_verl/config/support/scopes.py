# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""With what a setting may not be supported: the Y of a row's message. Also the keys that rows name."""

from collections.abc import Callable
from typing import Any

from jetrl_verl.formats.catalog import FLOW, QUANTIZED_CACHES
from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from .row import Get, Scope, shown

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
CORRECTION = "algorithm.rollout_correction"
POLICY_LOSS = f"{ACTOR}.policy_loss"
LOSS = f"{POLICY_LOSS}.loss_mode"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"

SMALLER = f"a smaller {TENSOR_PARALLEL}"
"""In a remedy, for the largest size that fits, which the caller knows."""

RATIO_LOSSES = ("qurl_decoupled", "qurl_acr")
"""Losses of this package that need pi_old / pi_rollout of every token."""

CALIBRATED_LOSSES = ("vanilla", *RATIO_LOSSES)
"""Losses that clip each token's ratio at ``clip_ratio_low`` and ``clip_ratio_high``, which calibration moves."""

OR_STOCK = "precision=jet_fp8 jetrl.operations=stock, or precision=bf16"
"""What runs where the shared operations do not."""

_STOCK = ("precision=jet_fp8", "jetrl.operations=stock")
_EXACT = ("precision=jet_fp8_exact", f"{TENSOR_PARALLEL}=1")


def value_of(key: str, name: str) -> Callable[[Get], str]:
    """``name=value`` of a key of the configuration."""
    return lambda get: f"{name}={shown(get(key))}"


def where(key: str, *values: Any, name: str = "", example: tuple[str, ...] = _STOCK) -> Scope:
    """A setting with one of ``values``, and ``name`` in place of its key."""
    name = name or key
    said = f"{name}={shown(values[0])}" if len(values) == 1 else value_of(key, name)
    doc = " or ".join(f"`{name}={shown(value)}`" for value in values)
    return Scope(said, doc, lambda get: get(key) in values, example)


PRECISION = value_of("jetrl.precision", "precision")

EVERY = Scope(PRECISION, "every precision but `bf16`", lambda get: True, _STOCK)

ORDERED = where("jetrl.train", FLOW)
"""A trainer that repeats the sums of the rollout's ranks."""

FP8_CRITIC = where("jetrl.critic", FLOW, example=(*_STOCK, f"jetrl.critic={FLOW}"))

SHARED = Scope(
    "jetrl.operations=shared",
    "`jetrl.operations=shared`",
    lambda get: get("jetrl.operations") == "shared",
    ("precision=jet_fp8", "jetrl.operations=shared"),
    stock=True,
)
"""What the shared operations cannot do."""

AUTO = Scope(
    "jetrl.operations=auto",
    "`jetrl.operations=auto`",
    lambda get: get("jetrl.operations") == "auto",
    ("precision=jet_fp8",),
    stock=True,
    refused=False,
)
"""What the driver cannot know, or the shared operations do slowly: ``jetrl.operations=shared`` is accepted."""

EXACT = where("jetrl.precision", "jet_fp8_exact", name="precision", example=_EXACT)
"""What makes the last bits of the two sides differ, and nothing else."""

VARLEN = where(
    ATTENTION, JETRL_ATTENTION, name="attn_implementation", example=(*_STOCK, f"+{ATTENTION}={JETRL_ATTENTION}")
)
"""What our attention of stock modules cannot do."""

MASKED = Scope(
    value_of(ATTENTION, "attn_implementation"),
    f"an `attn_implementation` other than `flash_attention_*` and `{JETRL_ATTENTION}`",
    lambda get: not str(get(ATTENTION) or "flash_attention_2").startswith(("flash_attention_", JETRL_ATTENTION)),
    (*_STOCK, f"+{ATTENTION}=sdpa"),
)
"""An attention of transformers for which verl does not exchange tokens and heads between ranks."""

_UNSAMPLED = f"{ROLLOUT}.calculate_log_probs=false"
UNSAMPLED = Scope(
    _UNSAMPLED, f"`{_UNSAMPLED}`", lambda get: not get(f"{ROLLOUT}.calculate_log_probs"), (*_STOCK, _UNSAMPLED)
)

RATIO_LOSS = where(LOSS, *RATIO_LOSSES, name="loss_mode", example=("precision=qurl_fp8",))

QURL = where("jetrl.precision", "qurl_fp8", "qurl_int8", name="precision", example=("precision=qurl_fp8",))

(_FP8_CACHE,) = QUANTIZED_CACHES
FP8_CACHE = where(
    "jetrl.kv_cache", _FP8_CACHE.name, example=("precision=fp8_rollout", f"jetrl.kv_cache={_FP8_CACHE.name}")
)

EXPERTS = Scope("experts in FP8", "experts in FP8", lambda get: get("jetrl.rollout") == FLOW)
"""What vLLM's experts in the flow's format cannot do."""

FOLDED = Scope(
    value_of("jetrl.invariant_scaling", "jetrl.invariant_scaling"),
    "another `jetrl.invariant_scaling` than 1",
    lambda get: get("jetrl.invariant_scaling") != 1,
)

GATHERED_ONCE = where(
    "jetrl.gathered",
    "batch",
    example=(*_STOCK, "jetrl.gathered=batch", f"{ACTOR}.strategy=fsdp2", f"{REF}.strategy=fsdp2"),
)
"""Weights that stay gathered for all micro-batches."""

UNCOMPOSED = Scope(
    "a configuration that Hydra did not compose", "a configuration that Hydra did not compose", lambda get: False
)

CALIBRATED = where("jetrl.clip", "calibrated", example=(*_STOCK, "clip=calibrated"))

ROLLOUT_LOG_PROBS = where("jetrl.old_log_probs", "rollout", example=(*_EXACT, "jetrl.old_log_probs=rollout"))
"""What would make the rollout's log-probabilities other than those of a forward, or needs that forward."""

ADAPTIVE = where("jetrl.correction", "adaptive", example=("precision=fp8_rollout", "correction=adaptive"))
