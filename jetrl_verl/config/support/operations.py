# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration that the shared operations cannot do, and those that only equality in every bit
excludes: the two classes of docs/architecture.md, "Zero mismatch".
"""

from .row import IS_NOT_TRUE, IS_SET, NOT_FALSE, Row, Wrong, other_than
from .scopes import ACTOR, EXACT, MODEL, OR_STOCK, ROLLOUT, SHARED, VLLM


def _row(name: str, feature: str, reason: str, settings: dict[str, Wrong]) -> Row:
    return Row(name, feature, SHARED, reason, settings, f", or {OR_STOCK}")


_PROCESSED = other_than("processed_logprobs", example="raw_logprobs")
_NO_POLICY = Wrong("0 or below", lambda value, get: value is not None and float(value) <= 0, "1", 0)

SHARED_ROWS: tuple[Row, ...] = (
    # Modules of the trainer's model, or its whole forward, that other code replaces.
    _row(
        "fused_kernels",
        "fused kernels",
        "they replace the logits and log-probabilities",
        {f"{MODEL}.use_fused_kernels": NOT_FALSE},
    ),
    _row(
        "hf_config_path",
        "a configuration from another folder",
        "the trainer's model would be another than vLLM's",
        {f"{MODEL}.hf_config_path": IS_SET},
    ),
    _row("liger", "Liger kernels", "they replace norms and MLPs", {f"{MODEL}.use_liger": NOT_FALSE}),
    _row("tiled_mlp", "tiled MLPs", "they replace the MLPs", {f"{MODEL}.tiled_mlp.enabled": NOT_FALSE}),
    _row(
        "prefix_grouper", "the prefix grouper", "it replaces the attention", {f"{ACTOR}.use_prefix_grouper": NOT_FALSE}
    ),
    _row("distillation", "distillation", "it needs other outputs of the model", {"distillation.enabled": NOT_FALSE}),
    # Kernels that are not the one both sides call.
    _row(
        "attention_backend",
        "attention backends other than FlashAttention 3",
        "both sides call FlashAttention 3 without splits",
        {
            f"{VLLM}.attention_backend": other_than("FLASH_ATTN", "flash_attn", example="FLASHINFER"),
            f"{VLLM}.attention_config": other_than({}, example={"flash_attn_version": 2}, use="null"),
        },
    ),
    _row(
        "context_parallel",
        "context parallel rollout",
        "it splits the attention",
        {f"{VLLM}.{phase}_context_parallel_size": other_than(1, example=2) for phase in ("decode", "prefill")},
    ),
    _row(
        "model_impl",
        "vLLM's Transformers backend",
        "its modules are not vLLM's",
        {f"{VLLM}.model_impl": other_than("auto", "vllm", example="transformers")},
    ),
    # The shared log-probability is that of the whole softmax at the sampling temperature. Under these the rollout
    # samples from, or reports, another distribution, and importance weights would be wrong without a word.
    _row(
        "truncated_sampling",
        "nucleus sampling (`top_p`) and `top_k` in training",
        "the trainer's softmax is whole",
        {f"{ROLLOUT}.top_p": other_than(1, example=0.95), f"{ROLLOUT}.top_k": other_than(-1, example=50)},
    ),
    _row(
        "repetition_penalty",
        "penalties in training",
        "the trainer's logits carry none",
        {f"{ROLLOUT}.repetition_penalty": other_than(1, example=1.1)},
    ),
    _row(
        "logprobs_mode",
        "raw log-probabilities",
        "they are not of the sampling distribution",
        {f"{ROLLOUT}.logprobs_mode": _PROCESSED, f"{VLLM}.logprobs_mode": _PROCESSED},
    ),
    _row(
        "logits_processors",
        "logits processors",
        "the trainer runs none",
        {f"{VLLM}.logits_processors": other_than([], example=["a.b"])},
    ),
    _row(
        "worker_cls",
        "a vLLM worker of your own",
        "the worker runs the operations",
        {f"{VLLM}.worker_cls": other_than("auto", example="my.Worker")},
    ),
    _row(
        "temperature",
        "a temperature of 0 in training",
        "there is no distribution",
        {f"{ROLLOUT}.temperature": _NO_POLICY},
    ),
)

EXACT_ROWS: tuple[Row, ...] = (
    Row(
        "exact_log_probs",
        "a rollout without log-probabilities",
        EXACT,
        "they are what is compared",
        {f"{ROLLOUT}.calculate_log_probs": IS_NOT_TRUE},
    ),
    Row(
        "exact_stale_samples",
        "samples of an older policy",
        EXACT,
        "it trains on samples of the current policy",
        {"trainer.v1.trainer_mode": other_than("sync", example="colocate_async")},
    ),
)
