# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration that the shared operations cannot do, and those that only equality in every bit
excludes: the two classes of docs/architecture.md, "Zero mismatch".
"""

from .row import IS_SET, Row, Wrong, other_than
from .scopes import ACTOR, EXACT, MODEL, ROLLOUT, SHARED, VLLM

_STOCK = ", or precision=jet_fp8 jetrl.operations=stock, or precision=bf16"

SHARED_ROWS: tuple[Row, ...] = tuple(
    Row(name, feature, SHARED, reason, f"Set {{key}}={use}{_STOCK}", (key,), wrong, example=example)
    for name, feature, reason, key, wrong, use, example in (
        # Modules of the trainer's model, or its whole forward, that other code takes over.
        (
            "fused_kernels",
            "fused kernels",
            "they replace the logits and log-probabilities",
            f"{MODEL}.use_fused_kernels",
            other_than(False),
            "false",
            True,
        ),
        (
            "hf_config_path",
            "a configuration from another folder",
            "the trainer's model would be another than vLLM's",
            f"{MODEL}.hf_config_path",
            IS_SET,
            "null",
            "elsewhere",
        ),
        (
            "liger",
            "Liger kernels",
            "they replace norms and MLPs",
            f"{MODEL}.use_liger",
            other_than(False),
            "false",
            True,
        ),
        (
            "tiled_mlp",
            "tiled MLPs",
            "they replace the MLPs",
            f"{MODEL}.tiled_mlp.enabled",
            other_than(False),
            "false",
            True,
        ),
        (
            "prefix_grouper",
            "the prefix grouper",
            "it replaces the attention",
            f"{ACTOR}.use_prefix_grouper",
            other_than(False),
            "false",
            True,
        ),
        (
            "distillation",
            "distillation",
            "it needs other outputs of the model",
            "distillation.enabled",
            other_than(False),
            "false",
            True,
        ),
        # Kernels that are not the one both sides call.
        (
            "attention_backend",
            "attention backends other than FlashAttention 3",
            "both sides call FlashAttention 3",
            f"{VLLM}.attention_backend",
            other_than("FLASH_ATTN", "flash_attn"),
            "FLASH_ATTN",
            "FLASHINFER",
        ),
        (
            "attention_config",
            "attention backends other than FlashAttention 3",
            "both sides call FlashAttention 3 without splits",
            f"{VLLM}.attention_config",
            other_than({}),
            "null",
            {"flash_attn_version": 2},
        ),
        (
            "decode_context_parallel",
            "context parallel rollout",
            "it splits the attention",
            f"{VLLM}.decode_context_parallel_size",
            other_than(1),
            "1",
            2,
        ),
        (
            "prefill_context_parallel",
            "context parallel rollout",
            "it splits the attention",
            f"{VLLM}.prefill_context_parallel_size",
            other_than(1),
            "1",
            2,
        ),
        (
            "model_impl",
            "vLLM's Transformers backend",
            "its modules are not vLLM's",
            f"{VLLM}.model_impl",
            other_than("auto", "vllm"),
            "auto",
            "transformers",
        ),
        # The shared log-probability is that of the whole softmax at the sampling temperature. Under these the rollout
        # samples from, or is to report, another distribution, and importance weights would be wrong without a word.
        (
            "top_p",
            "nucleus sampling (`top_p`)",
            "the trainer's softmax is whole",
            f"{ROLLOUT}.top_p",
            other_than(1),
            "1",
            0.95,
        ),
        ("top_k", "`top_k` sampling", "the trainer's softmax is whole", f"{ROLLOUT}.top_k", other_than(-1), "-1", 50),
        (
            "repetition_penalty",
            "penalties in training",
            "the trainer's logits carry none",
            f"{ROLLOUT}.repetition_penalty",
            other_than(1),
            "1",
            1.1,
        ),
        (
            "logprobs_mode",
            "raw log-probabilities",
            "they are not of the sampling distribution",
            f"{ROLLOUT}.logprobs_mode",
            other_than("processed_logprobs"),
            "processed_logprobs",
            "raw_logprobs",
        ),
        (
            "vllm_logprobs_mode",
            "raw log-probabilities",
            "they are not of the sampling distribution",
            f"{VLLM}.logprobs_mode",
            other_than("processed_logprobs"),
            "processed_logprobs",
            "raw_logits",
        ),
        (
            "logits_processors",
            "logits processors",
            "the trainer runs none",
            f"{VLLM}.logits_processors",
            other_than([]),
            "[]",
            ["a.b"],
        ),
        (
            "worker_cls",
            "a vLLM worker of your own",
            "the worker runs the operations",
            f"{VLLM}.worker_cls",
            other_than("auto"),
            "auto",
            "my.Worker",
        ),
        (
            "temperature",
            "a temperature of 0 in training",
            "there is no distribution",
            f"{ROLLOUT}.temperature",
            Wrong("0 or below", lambda value, get: value is not None and float(value) <= 0),
            "1",
            0,
        ),
    )
)

EXACT_ROWS: tuple[Row, ...] = (
    Row(
        "exact_log_probs",
        "a rollout without log-probabilities",
        EXACT,
        "they are what is compared",
        "Set {key}=true",
        (f"{ROLLOUT}.calculate_log_probs",),
        Wrong("`false`", lambda value, get: not value),
        example=False,
    ),
    Row(
        "exact_stale_samples",
        "samples of an older policy",
        EXACT,
        "it trains on samples of the current policy",
        "Set {key}=sync",
        ("trainer.v1.trainer_mode",),
        other_than("sync"),
        example="colocate_async",
    ),
)
