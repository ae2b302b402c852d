# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The keys that rows name, and the scopes that several rows share."""

from functools import partial
from typing import Any

from jetrl_verl.formats.catalog import QUANTIZED_CACHES, TRAINED
from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from .row import Row, Scope, shown


def attention_key(node: str) -> str:
    """The key that names the attention of the trainer's model at ``node``."""
    return f"{node}.override_config.attn_implementation"


ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CRITIC_MODEL = "critic.model"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
CORRECTION = "algorithm.rollout_correction"
POLICY_LOSS = f"{ACTOR}.policy_loss"
LOSS = f"{POLICY_LOSS}.loss_mode"
ATTENTION = attention_key(MODEL)
TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
CHECKPOINT_ENGINE = f"{ROLLOUT}.checkpoint_engine"
BUCKET = f"{CHECKPOINT_ENGINE}.update_weights_bucket_megabytes"
TRAINER_MODE = "trainer.v1.trainer_mode"

ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Fields of rotary embeddings."""

ULYSSES = tuple(
    f"{role}.{node}ulysses_sequence_parallel_size" for role in (ACTOR, REF) for node in ("", "fsdp_config.")
)
"""Over how many ranks the actor and the reference policy split a packed batch; verl has two keys for it."""

ULYSSES_OF_THE_CRITIC = tuple(f"critic.{node}ulysses_sequence_parallel_size" for node in ("", "fsdp."))

OPTIMIZERS = (f"{ACTOR}.optim.optimizer_impl", "critic.optim.optimizer_impl")
"""The module that an optimizer comes from."""

REPLICAS = (f"{ROLLOUT}.data_parallel_size", f"{VLLM}.data_parallel_size")
"""Data-parallel replicas of one vLLM server; verl's default is a server for each replica."""

FUSIONS_OF_REDUCTIONS = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
"""vLLM's passes that replace a sum over ranks: fused with the next norm, split for sequence parallelism, or fused with
the product before it."""

RATIO_LOSSES = ("qurl_decoupled", "qurl_acr")
"""Losses of this package that need pi_old / pi_rollout of every token."""

CALIBRATED_LOSSES = ("vanilla", "clip_cov", *RATIO_LOSSES)
"""Losses that clip each token's ratio at ``clip_ratio_low`` and ``clip_ratio_high``, which calibration moves."""

(_CACHE,) = QUANTIZED_CACHES


def where(key: str, value: Any, leave: str = "", name: str = "") -> Scope:
    """Jobs with a value of a key, under which messages know the key by ``name``."""
    return Scope(f"{name or key}={shown(value)}", lambda get: get(key) == value, leave)


SHARED = where("jetrl.operations", "shared", "precision=jet_fp8 jetrl.operations=stock, or precision=bf16")
"""What the shared operations cannot do: ``jetrl.operations=auto`` becomes ``stock``."""

shared_row = partial(Row, scope=SHARED)

AUTO = Scope("")
"""What makes ``jetrl.operations=auto`` ``stock`` where ``shared`` is accepted: it is slow, or may differ."""

EXACT = where("jetrl.precision", "jet_fp8_exact", "precision=jet_fp8", name="precision")
"""What makes the last bits of the two sides differ, and nothing else."""


EXACT_COMPUTED = Scope(
    "precision=jet_fp8_exact jetrl.old_log_probs=compute",
    lambda get: (get("jetrl.precision"), get("jetrl.old_log_probs")) == ("jet_fp8_exact", "compute"),
    "jetrl.old_log_probs=rollout",
)
"""What would leave no log-probabilities of the trainer to compare before an update."""


def _flow(key: str, leave: str = "") -> Scope:
    """Jobs with a format that trains as a value of a key."""
    return Scope(f"{key}={' or '.join(TRAINED)}", lambda get: get(key) in TRAINED, leave)


FP8_TRAINING = _flow("jetrl.train")
FP8_ROLLOUT = _flow("jetrl.rollout", "precision=bf16")
FP8_CRITIC = _flow("jetrl.critic", "jetrl.critic=bf16")
FP8_CACHE = where("jetrl.kv_cache", _CACHE.name, "jetrl.kv_cache=bf16")

VARLEN = where(ATTENTION, JETRL_ATTENTION, f"{ATTENTION}=sdpa", name="attn_implementation")
"""What our attention of stock modules cannot do."""

ADAPTERS = Scope(f"{MODEL}.lora_rank above 0", lambda get: (get(f"{MODEL}.lora_rank") or 0) > 0, f"{MODEL}.lora_rank=0")

RATIO_LOSS = Scope(
    f"loss_mode={' or '.join(RATIO_LOSSES)}", lambda get: get(LOSS) in RATIO_LOSSES, f"{LOSS}=vanilla", key=LOSS
)

CALIBRATED = where("jetrl.clip", "calibrated", "jetrl.clip=fixed")
ADAPTIVE = where("jetrl.correction", "adaptive", "jetrl.correction=fixed")

ROLLOUT_LOG_PROBS = where("jetrl.old_log_probs", "rollout", "jetrl.old_log_probs=compute")
"""What would make the rollout's log-probabilities other than those of a forward, or needs that forward."""

SELECTIVE = where("jetrl.checkpointing", "selective", "jetrl.checkpointing=auto")

SEPARATE = where(TRAINER_MODE, "separate_async", f"{TRAINER_MODE}=sync")
"""Trainer and rollout have GPUs of their own."""

TOGETHER = Scope(
    f"a {TRAINER_MODE} other than separate_async",
    lambda get: get(TRAINER_MODE) != "separate_async",
    f"{TRAINER_MODE}=separate_async",
    key=TRAINER_MODE,
)

FOLDED = Scope("a jetrl.invariant_scaling other than 1", leave="jetrl.invariant_scaling=1")
