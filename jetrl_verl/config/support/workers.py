# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that only a worker sees, in the objects that verl, transformers or vLLM have built, as it builds the trainer's
model or the engine, or in its first forward; and rows about the commands of ``jetrl``.
"""

from .row import Row, Scope
from .scopes import (
    EVERY,
    FOLDED,
    FP8_CACHE,
    FP8_ROLLOUT,
    FP8_TRAINING,
    SHARED,
    TENSOR_PARALLEL,
    UNCOMPOSED,
    VARLEN,
    VLLM,
)

WORKER_ROWS: dict[str, Row] = {
    # --- attention of the engine ---
    "attention_kind": Row("attention with biases, sinks or caps, across layers, or other than plain causal", SHARED),
    "sliding_window_in_vllm": Row("sliding window attention", SHARED),
    "flash_attention_version": Row("another FlashAttention, as of another GPU", SHARED, "both sides call version 3"),
    "kv_cache_in_vllm": Row(
        "vLLM's own quantized KV cache",
        SHARED,
        "keys and values are BF16, or as jetrl.kv_cache says",
        instead=f"Set {VLLM}.kv_cache_dtype=auto",
    ),
    "fp8_kv_cache_in_vllm": Row(
        "heads other than 128, more than 8 query heads a KV head, sliding windows, or FlashAttention other than 3",
        FP8_CACHE,
        "no kernel reads its pages",
    ),
    "attention_backend_in_vllm": Row(
        "an attention backend that vLLM chooses itself, or a plugin brings",
        SHARED,
        "both sides call one attention",
        instead=f"Set {VLLM}.attention_backend=null, or {SHARED.leave}",
    ),
    # --- other layers of the engine ---
    "layer_class_in_vllm": Row("a layer of a class other than vLLM's own", SHARED, "what it computes is not known"),
    "norm_in_vllm": Row(
        "a norm without a weight or over a part of a row",
        SHARED,
        "the trainer's norms have a weight for each element of a row",
    ),
    "interleaved_rotary": Row("rotary of interleaved pairs", SHARED, "the two halves of a head are the pairs"),
    "sampler_in_vllm": Row("a sampler other than vLLM's own", SHARED, "how it draws is not known"),
    "mixture_split_by_sequence": Row(
        "a mixture of experts split by sequence",
        SHARED,
        "each rank has a part of every expert",
        instead="Set precision=bf16",
    ),
    "router_in_vllm": Row(
        "a router other than softmax and top-k, or weights on the input of experts",
        FP8_ROLLOUT,
        "the shared router has none of it",
    ),
    "routing_by_layer": Row(
        "a mixture of experts whose layers choose differently",
        FP8_ROLLOUT,
        "the weight sync states one choice for all layers",
    ),
    "row_parallel_in_vllm": Row(
        "a row-parallel layer that does not add its ranks' products itself",
        FP8_TRAINING,
        "the trainer repeats this sum",
        instead=f"Set {TENSOR_PARALLEL}=2",
    ),
    # --- the trainer's model ---
    "linear_of_no_family": Row("a linear layer in a decoder that its family does not have", EVERY),
    "bias_on_lm_head": Row("a bias on lm_head", SHARED, "vLLM's has none"),
    "another_decoder": Row(
        "a decoder with other layers than its family's", SHARED, "it is not a decoder of its family"
    ),
    "layer_without_scaling": Row(
        "a decoder layer without the norms and projections that the factor is folded into",
        FOLDED,
        "it would change what the model computes",
    ),
    "checkpoint_of_another_factor": Row(
        "a checkpoint of another factor",
        FOLDED,
        "its moments and later checkpoints would not fit the weights",
        instead="Set jetrl.invariant_scaling to the checkpoint's",
    ),
    "varlen_mask": Row("a mask other than the causal one", VARLEN, "it computes causal attention within each sequence"),
    "varlen_cache": Row(
        "a cache of keys and values", VARLEN, "the trainer does not generate", instead="Set use_cache=False"
    ),
    "varlen_scores": Row("soft-capped scores or attention sinks", VARLEN, "the backward has none"),
    "varlen_direction": Row("attention in both directions", VARLEN, "it computes causal attention"),
    "varlen_positions": Row("a model that does not pass its positions on", VARLEN, "they say where sequences begin"),
    "varlen_position_axes": Row("positions of more than one dimension", VARLEN, "they say where sequences begin"),
    "varlen_operands": Row(
        "heads that FlashAttention has no kernel for, and types other than BF16 and FP16",
        VARLEN,
        "FlashAttention has no kernel for it",
    ),
    # --- configuration objects that code builds, not Hydra ---
    "class_without_options": Row(
        "a class of ours without the options",
        UNCOMPOSED,
        "the options come with the flag",
        instead="Set precision to a group of this package",
    ),
}

COMMAND_ROWS: dict[str, Row] = {
    "model_of_a_command": Row(
        "a model of a type that has no family",
        Scope("jetrl diff and jetrl memory", lambda get: False),
        instead="Set a model of one of these types",
    ),
    "reward_model_of_compare": Row(
        "a reward model",
        Scope("jetrl compare", lambda get: False),
        "it scores with a reward function",
        instead="Set reward.custom_reward_function, or use data with a rule",
    ),
}
