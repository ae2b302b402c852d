# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""With what a setting may not be supported: the Y of a row's message."""

from jetrl_verl.formats.catalog import CACHES, FLOW, QUANTIZED_CACHES
from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from .row import Get, Scope

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
CORRECTION = "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss.loss_mode"

ATTENTION = f"{MODEL}.override_config.attn_implementation"

RATIO_LOSSES = ("qurl_decoupled", "qurl_acr")
"""Losses of this package that need pi_old / pi_rollout of every token."""

CALIBRATED_LOSSES = ("vanilla", *RATIO_LOSSES)
"""Losses that clip each token's ratio at ``clip_ratio_low`` and ``clip_ratio_high``, which calibration moves."""

_STOCK = ("precision=jet_fp8", "jetrl.operations=stock")


def _is(key: str, *values: object):
    return lambda get: get(key) in values


def _exact(get: Get) -> bool:
    return get("jetrl.precision") == "jet_fp8_exact"


def _shared(get: Get) -> bool:
    return get("jetrl.operations") == "shared"


EVERY = Scope("precision={jetrl.precision}", "every precision but `bf16`", lambda get: True, _STOCK)

ORDERED = Scope(
    f"jetrl.train={FLOW}",
    "`precision=jet_fp8` and `jet_fp8_exact`",
    _is("jetrl.train", FLOW),
    _STOCK,
)
"""A trainer that repeats the sums of the rollout's ranks."""

FP8_CRITIC = Scope(
    f"jetrl.critic={FLOW}", f"`jetrl.critic={FLOW}`", _is("jetrl.critic", FLOW), (*_STOCK, f"jetrl.critic={FLOW}")
)

SHARED = Scope(
    "jetrl.operations=shared",
    "`jetrl.operations=shared`; `auto` is `stock`",
    _shared,
    ("precision=jet_fp8", "jetrl.operations=shared"),
    stock=True,
)
"""What the shared operations cannot do."""

AUTO = Scope(
    "jetrl.operations=auto",
    "nothing; `jetrl.operations=auto` is `stock`",
    _is("jetrl.operations", "auto"),
    ("precision=jet_fp8",),
    stock=True,
    refused=False,
)
"""What the driver cannot know, or the shared operations can do slowly: ``jetrl.operations=shared`` is accepted."""

EXACT = Scope(
    "precision=jet_fp8_exact",
    "`precision=jet_fp8_exact`",
    _exact,
    ("precision=jet_fp8_exact", f"{ROLLOUT}.tensor_model_parallel_size=1"),
)
"""What makes the last bits of the two sides differ, and nothing else."""

VARLEN = Scope(
    f"attn_implementation={JETRL_ATTENTION}",
    f"`attn_implementation={JETRL_ATTENTION}`",
    _is(ATTENTION, JETRL_ATTENTION),
    (*_STOCK, f"+{ATTENTION}={JETRL_ATTENTION}"),
)
"""What our attention of stock modules cannot do."""

MASKED = Scope(
    "attn_implementation={" + ATTENTION + "}",
    "an `attn_implementation` other than `flash_attention_*` and `" + JETRL_ATTENTION + "`",
    lambda get: not str(get(ATTENTION) or "flash_attention_2").startswith(("flash_attention_", JETRL_ATTENTION)),
    (*_STOCK, f"+{ATTENTION}=sdpa"),
)
"""An attention of transformers for which verl does not exchange tokens and heads between ranks."""

UNSAMPLED = Scope(
    f"{ROLLOUT}.calculate_log_probs=false",
    f"`{ROLLOUT}.calculate_log_probs=false`",
    lambda get: not get(f"{ROLLOUT}.calculate_log_probs"),
    (*_STOCK, f"{ROLLOUT}.calculate_log_probs=false"),
)

RATIO_LOSS = Scope(
    "loss_mode={" + LOSS + "}",
    " or ".join(f"`loss_mode={loss}`" for loss in RATIO_LOSSES),
    _is(LOSS, *RATIO_LOSSES),
    ("precision=qurl_fp8",),
)

QURL = Scope(
    "precision={jetrl.precision}",
    "`precision=qurl_fp8` or `qurl_int8`",
    _is("jetrl.precision", "qurl_fp8", "qurl_int8"),
    ("precision=qurl_fp8",),
)

_KEPT = " or ".join(f"jetrl.kv_cache={held.name}" for held in QUANTIZED_CACHES)
FP8_CACHE = Scope(
    _KEPT,
    f"`{_KEPT}`",
    lambda get: (held := CACHES.get(get("jetrl.kv_cache"))) is not None and held.quantized,
    ("precision=fp8_rollout", f"jetrl.kv_cache={QUANTIZED_CACHES[0].name}"),
)

EXPERTS = Scope("experts in FP8", "experts in FP8", _is("jetrl.rollout", FLOW))
"""What vLLM's experts in the flow's format cannot do."""

FOLDED = Scope(
    "jetrl.invariant_scaling={factor}",
    "another `jetrl.invariant_scaling` than 1",
    lambda get: get("jetrl.invariant_scaling") != 1,
)

_ONCE = "jetrl.gathered=batch"
_FSDP2 = tuple(f"{role}.strategy=fsdp2" for role in (ACTOR, REF))  # FSDP1 is verl's default
GATHERED_ONCE = Scope(_ONCE, f"`{_ONCE}`", _is("jetrl.gathered", "batch"), (*_STOCK, _ONCE, *_FSDP2))
"""Weights that stay gathered for all micro-batches."""

UNCOMPOSED = Scope(
    "a configuration that Hydra did not compose", "a configuration that Hydra did not compose", lambda get: False
)

CALIBRATED = Scope(
    "jetrl.clip=calibrated",
    "`jetrl.clip=calibrated`",
    _is("jetrl.clip", "calibrated"),
    (*_STOCK, "clip=calibrated"),
)

ROLLOUT_LOG_PROBS = Scope(
    "jetrl.old_log_probs=rollout",
    "`jetrl.old_log_probs=rollout`",
    _is("jetrl.old_log_probs", "rollout"),
    ("precision=jet_fp8_exact", f"{ROLLOUT}.tensor_model_parallel_size=1", "jetrl.old_log_probs=rollout"),
)
"""What would make the rollout's log-probabilities other than those of a forward, or needs that forward."""

ADAPTIVE = Scope(
    "jetrl.correction=adaptive",
    "`jetrl.correction=adaptive`",
    _is("jetrl.correction", "adaptive"),
    ("precision=fp8_rollout", "correction=adaptive"),
)
