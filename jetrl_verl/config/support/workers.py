# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that only a worker sees, in the objects that verl, transformers or vLLM have built, as it builds the trainer's
model or the engine, or in its first forward; and rows about the commands of ``jetrl``.
"""

from .row import Row, Scope
from .scopes import FOLDED, FP8_CACHE, FP8_ROLLOUT, FP8_TRAINING, SHARED, TENSOR_PARALLEL, VARLEN, VLLM

WORKER_ROWS: dict[str, Row] = {
    # --- attention of the engine ---
    "attention_kind": Row(
        "attention with biases, sinks or caps, across layers, or other than plain causal", scope=SHARED
    ),
    "sliding_window_in_vllm": Row("sliding window attention", scope=SHARED),
    "flash_attention_version": Row(
        "another FlashAttention, as of another GPU", "both sides call version 3", scope=SHARED
    ),
    "kv_cache_in_vllm": Row(
        "vLLM's own quantized KV cache",
        "keys and values are BF16, or as jetrl.kv_cache says",
        scope=SHARED,
        instead=f"Set {VLLM}.kv_cache_dtype=auto",
    ),
    "fp8_kv_cache_in_vllm": Row(
        "heads other than 128, more than 8 query heads a KV head, sliding windows, or FlashAttention other than 3",
        "no kernel reads its pages",
        scope=FP8_CACHE,
    ),
    "attention_backend_in_vllm": Row(
        "an attention backend that vLLM chooses itself, or a plugin brings",
        "both sides call one attention",
        scope=SHARED,
        instead=f"Set {VLLM}.attention_backend=null, or {SHARED.leave}",
    ),
    # --- other layers of the engine ---
    "layer_class_in_vllm": Row(
        "a layer of a class other than vLLM's own", "what it computes is not known", scope=SHARED
    ),
    "norm_in_vllm": Row(
        "a norm without a weight or over a part of a row",
        "the trainer's norms have a weight for each element of a row",
        scope=SHARED,
    ),
    "interleaved_rotary": Row("rotary of interleaved pairs", "the two halves of a head are the pairs", scope=SHARED),
    "sampler_in_vllm": Row("a sampler other than vLLM's own", "how it draws is not known", scope=SHARED),
    "mixture_split_by_sequence": Row(
        "a mixture of experts split by sequence",
        "each rank has a part of every expert",
        scope=SHARED,
        instead="Set precision=bf16",
    ),
    "router_in_vllm": Row(
        "a router other than softmax and top-k, or weights on the input of experts",
        "the shared router has none of it",
        scope=FP8_ROLLOUT,
    ),
    "routing_by_layer": Row(
        "a mixture of experts whose layers choose differently",
        "the weight sync states one choice for all layers",
        scope=FP8_ROLLOUT,
    ),
    "row_parallel_in_vllm": Row(
        "a row-parallel layer that does not add its ranks' products itself",
        "the trainer repeats this sum",
        scope=FP8_TRAINING,
        instead=f"Set {TENSOR_PARALLEL}=2",
    ),
    # --- the trainer's model ---
    "linear_of_no_family": Row("a linear layer in a decoder that its family does not have"),
    "bias_on_lm_head": Row("a bias on lm_head", "vLLM's has none", scope=SHARED),
    "another_decoder": Row(
        "a decoder with other layers than its family's", "it is not a decoder of its family", scope=SHARED
    ),
    "layer_without_scaling": Row(
        "a decoder layer without the norms and projections that the factor is folded into",
        "it would change what the model computes",
        scope=FOLDED,
    ),
    "checkpoint_of_another_factor": Row(
        "a checkpoint of another factor",
        "its moments and later checkpoints would not fit the weights",
        scope=FOLDED,
        instead="Set jetrl.invariant_scaling to the checkpoint's",
    ),
    "varlen_mask": Row(
        "a mask other than the causal one", "it computes causal attention within each sequence", scope=VARLEN
    ),
    "varlen_cache": Row(
        "a cache of keys and values", "the trainer does not generate", scope=VARLEN, instead="Set use_cache=False"
    ),
    "varlen_scores": Row("soft-capped scores or attention sinks", "the backward has none", scope=VARLEN),
    "varlen_direction": Row("attention in both directions", "it computes causal attention", scope=VARLEN),
    "varlen_positions": Row(
        "a model that does not pass its positions on", "they say where sequences begin", scope=VARLEN
    ),
    "varlen_position_axes": Row("positions of more than one dimension", "they say where sequences begin", scope=VARLEN),
    "varlen_operands": Row(
        "heads that FlashAttention has no kernel for, and types other than BF16 and FP16",
        "FlashAttention has no kernel for it",
        scope=VARLEN,
    ),
    # --- configuration objects that code builds, not Hydra ---
    "class_without_options": Row(
        "a class of ours without the options",
        "the options come with the flag",
        scope=Scope("a configuration that Hydra did not compose"),
        instead="Set precision to a group of this package",
    ),
}

COMMAND_ROWS: dict[str, Row] = {
    "model_of_a_command": Row(
        "a model of a type that has no family",
        scope=Scope("jetrl diff and jetrl memory"),
        instead="Set a model of one of these types",
    ),
    "reward_model_of_compare": Row(
        "a reward model",
        "it scores with a reward function",
        scope=Scope("jetrl compare"),
        instead="Set reward.custom_reward_function, or use data with a rule",
    ),
}
