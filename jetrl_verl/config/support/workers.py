# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that only a worker sees, in the objects that verl, transformers or vLLM have built, as it builds the trainer's
model or the engine, or in its first forward; and rows about the commands of ``jetrl``.
"""

from .row import DRIVER, WORKER, Row, Scope
from .scopes import (
    ATTENTION,
    EVERY,
    EXPERTS,
    FOLDED,
    FP8_CACHE,
    OR_STOCK,
    ORDERED,
    SHARED,
    TENSOR_PARALLEL,
    UNCOMPOSED,
    VARLEN,
    VLLM,
)

_BF16 = "Set precision=bf16"
_SDPA = f"Set {ATTENTION}=sdpa"


def _row(name: str, feature: str, scope: Scope, reason: str, remedy: str, what: str = "") -> Row:
    return Row(name, feature, scope, reason, remedy=remedy, what=what, known=WORKER)


def _shared(name: str, feature: str, reason: str = "", what: str = "", remedy: str = f"Set {OR_STOCK}") -> Row:
    return _row(name, feature, SHARED, reason, remedy, what)


def _varlen(name: str, what: str, reason: str, remedy: str = _SDPA) -> Row:
    return _row(name, what, VARLEN, reason, remedy, what)


WORKER_ROWS: tuple[Row, ...] = (
    # --- attention of the engine ---
    _shared(
        "attention_kind",
        "attention with biases, sinks or caps, or across layers",
        what="attention other than plain causal",
    ),
    _shared("sliding_window_in_vllm", "sliding windows", what="sliding window attention"),
    _shared("flash_attention_version", "another FlashAttention, as of another GPU", "both sides call version 3"),
    _shared(
        "kv_cache_in_vllm",
        "vLLM's own quantized KV cache",
        "keys and values are BF16, or as jetrl.kv_cache says",
        remedy=f"Set {VLLM}.kv_cache_dtype=auto",
    ),
    _row(
        "fp8_kv_cache_in_vllm",
        "heads other than 128, more than 8 query heads a KV head, sliding windows, or FlashAttention other than 3",
        FP8_CACHE,
        "no kernel reads its pages",
        "Set jetrl.kv_cache=bf16",
    ),
    _shared(
        "attention_backend_in_vllm",
        "attention backends that vLLM chooses itself, or a plugin brings",
        "both sides call one attention",
        remedy=f"Set {VLLM}.attention_backend=null, or {OR_STOCK}",
    ),
    # --- other layers of the engine ---
    _shared("layer_class_in_vllm", "layers of classes other than vLLM's own", "what they compute is not known"),
    _shared(
        "norm_in_vllm",
        "norms without a weight, or over a part of a row",
        "the trainer's norms have a weight for each element of a row",
        "a norm without a weight, or over a part of a row,",
    ),
    _shared(
        "interleaved_rotary",
        "rotary of interleaved pairs",
        "the two halves of a head are the pairs",
        "rotary of interleaved pairs",
    ),
    _shared("sampler_in_vllm", "samplers other than vLLM's own", "how it draws is not known"),
    _shared(
        "mixture_split_by_sequence",
        "a mixture of experts that vLLM splits by sequence",
        "each rank has a part of every expert",
        "a mixture of experts split by sequence",
        _BF16,
    ),
    _row(
        "router_in_vllm",
        "routers other than softmax and top-k, and weights on the input of experts",
        EXPERTS,
        "the shared router has none of it",
        _BF16,
    ),
    _row(
        "routing_by_layer",
        "a mixture of experts whose layers choose differently",
        EXPERTS,
        "the weight sync states one choice for all layers",
        _BF16,
        "a mixture of experts whose layers choose differently",
    ),
    _row(
        "row_parallel_in_vllm",
        "row-parallel layers that do not add their ranks' products themselves",
        ORDERED,
        "the trainer repeats this sum",
        f"Set {TENSOR_PARALLEL}=2",
    ),
    # --- the trainer's model ---
    _row(
        "linear_of_no_family",
        "linear layers in a decoder that its family does not have",
        EVERY,
        "",
        _BF16,
        "the model",
    ),
    _shared("bias_on_lm_head", "a bias on lm_head", "vLLM's has none", "a bias on lm_head"),
    _shared("another_decoder", "decoders with other layers than their family's", "it is not a decoder of its family"),
    _row(
        "layer_without_scaling",
        "decoder layers without the norms and projections that the factor is folded into",
        FOLDED,
        "it would change what the model computes",
        "Set jetrl.invariant_scaling=1",
    ),
    _row(
        "checkpoint_of_another_factor",
        "a checkpoint of another factor",
        FOLDED,
        "its moments and later checkpoints would not fit the weights",
        "Set jetrl.invariant_scaling to the checkpoint's",
    ),
    _varlen("varlen_mask", "a mask other than the causal one", "it computes causal attention within each sequence"),
    _varlen("varlen_cache", "a cache of keys and values", "the trainer does not generate", "Set use_cache=False"),
    _varlen("varlen_scores", "soft-capped scores or attention sinks", "the backward has none"),
    _varlen("varlen_direction", "attention in both directions", "it computes causal attention"),
    _varlen("varlen_positions", "a model that does not pass its positions on", "they say where sequences begin"),
    _varlen("varlen_position_axes", "positions of more than one dimension", "they say where sequences begin"),
    _row(
        "varlen_operands",
        "heads that FlashAttention has no kernel for, and types other than BF16 and FP16",
        VARLEN,
        "FlashAttention has no kernel for it",
        _SDPA,
    ),
    # --- configuration objects that code builds, not Hydra ---
    _row(
        "auto_uncomposed",
        "`jetrl.operations=auto`",
        UNCOMPOSED,
        "the driver decides once what it is",
        "Set jetrl.operations=shared or jetrl.operations=stock",
        "jetrl.operations=auto",
    ),
    _row(
        "class_without_options",
        "a class of ours without the options",
        UNCOMPOSED,
        "the options come with the flag",
        "Set precision to a group of this package",
    ),
)

COMMAND_ROWS: tuple[Row, ...] = (
    Row(
        "model_of_a_command",
        "models of a type that has no family",
        Scope("this command", "`jetrl diff`, `jetrl memory`", lambda get: False),
        remedy="Set a model of one of these types",
        what="the model",
        known=DRIVER,
    ),
    Row(
        "reward_model_of_compare",
        "a reward model",
        Scope("jetrl compare", "`jetrl compare`", lambda get: False),
        "it scores with a reward function",
        remedy="Set reward.custom_reward_function, or use data with a rule",
        what="a reward model",
        known=DRIVER,
    ),
)
