# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that only a worker sees, in the objects that verl, transformers or vLLM have built; ``train/`` and ``rollout/``
look them up. What a configuration or a ``config.json`` decides is in the other files, and a worker asks those rows.
"""

from .row import WORKER, Row, Scope
from .scopes import ATTENTION, EVERY, EXPERTS, FOLDED, FP8_CACHE, ORDERED, ROLLOUT, SHARED, UNCOMPOSED, VARLEN, VLLM

_BF16 = "Set precision=bf16"
_OR_STOCK = "precision=jet_fp8 jetrl.operations=stock, or precision=bf16"
_STOCK = f"Set {_OR_STOCK}"
_SDPA = f"Set {ATTENTION}=sdpa"


def _row(name: str, feature: str, scope: Scope, reason: str, remedy: str, what: str) -> Row:
    return Row(name, feature, scope, reason, remedy, what=what, found=WORKER, listed=False)


WORKER_ROWS: tuple[Row, ...] = (
    # --- attention of the engine ---
    _row(
        "attention_kind",
        "attention with biases, sinks or caps, or across layers",
        SHARED,
        "",
        _STOCK,
        "attention other than plain causal",
    ),
    _row("sliding_window_in_vllm", "sliding windows", SHARED, "", _STOCK, "sliding window attention"),
    _row(
        "flash_attention_version",
        "a GPU on which vLLM runs another FlashAttention",
        SHARED,
        "both sides call version 3",
        _STOCK,
        "FlashAttention {version}, which this GPU runs,",
    ),
    _row(
        "kv_cache_in_vllm",
        "vLLM's own quantized KV cache",
        SHARED,
        "keys and values are BF16, or as jetrl.kv_cache says",
        f"Set {VLLM}.kv_cache_dtype=auto",
        "kv_cache_dtype={dtype}",
    ),
    Row(
        "fp8_kv_cache_in_vllm",
        "heads other than 128, more than 8 query heads a KV head, sliding windows, or FlashAttention other than 3",
        FP8_CACHE,
        "no kernel reads its pages",
        "Set jetrl.kv_cache=bf16",
        what="{what}",
        found=WORKER,
    ),
    _row(
        "attention_backend_in_vllm",
        "attention backends that vLLM chooses by itself, or a plugin brings",
        SHARED,
        "both sides call one attention",
        f"Set {VLLM}.attention_backend=null, or {_OR_STOCK}",
        "the attention backend {backend} ({module})",
    ),
    # --- other layers of the engine ---
    _row(
        "layer_class_in_vllm",
        "layers of other classes than vLLM's own, as of another plugin's models",
        SHARED,
        "what they compute is not known",
        _STOCK,
        "the layer {layer}",
    ),
    _row(
        "norm_in_vllm",
        "norms without a weight, or over a part of a row",
        SHARED,
        "the trainer's norms have a weight for each element of a row",
        _STOCK,
        "a norm without a weight, or over a part of a row,",
    ),
    _row(
        "interleaved_rotary",
        "rotary of interleaved pairs",
        SHARED,
        "the two halves of a head are the pairs",
        _STOCK,
        "rotary of interleaved pairs",
    ),
    _row(
        "sampler_in_vllm",
        "samplers other than vLLM's own",
        SHARED,
        "how it draws is not known",
        _STOCK,
        "the sampler {sampler}",
    ),
    _row(
        "mixture_split_by_sequence",
        "a mixture of experts that vLLM splits by sequence",
        SHARED,
        "each rank has a part of every expert",
        _BF16,
        "a mixture of experts split by sequence",
    ),
    _row(
        "router_in_vllm",
        "routers other than softmax and top-k, and weights on the input of experts",
        EXPERTS,
        "the shared router has none of it",
        _BF16,
        "{what}",
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
        f"Set {ROLLOUT}.tensor_model_parallel_size=2",
        "the row-parallel layer {layer} over {ranks} GPUs, which does not add its ranks' products itself,",
    ),
    # --- the trainer's model ---
    _row(
        "linear_of_no_family",
        "linear layers in a decoder that its family does not have",
        EVERY,
        "{error}",
        _BF16,
        "the model {path}",
    ),
    _row("bias_on_lm_head", "a bias on lm_head", SHARED, "vLLM's has none", _STOCK, "a bias on lm_head"),
    _row(
        "another_decoder",
        "decoders with other layers than their family's",
        SHARED,
        "it is not a decoder of its family",
        _STOCK,
        "a {decoder} with {norms} norms, {halves} times {half} and {attentions} attention modules in {layers} layers",
    ),
    _row(
        "layer_without_scaling",
        "decoder layers without the norms and projections that the factor is folded into",
        FOLDED,
        "it would change what the model computes",
        "Set jetrl.invariant_scaling=1",
        "{layer}, which has no {missing},",
    ),
    _row(
        "checkpoint_of_another_factor",
        "a checkpoint of another factor",
        FOLDED,
        "its moments and later checkpoints would not fit the weights",
        "Set jetrl.invariant_scaling={saved}",
        "the checkpoint {folder}, trained with jetrl.invariant_scaling={saved},",
    ),
    *(
        _row(name, what, VARLEN, reason, remedy, what)
        for name, what, reason, remedy in (
            (
                "varlen_mask",
                "a mask other than the causal one",
                "it computes causal attention within each sequence",
                _SDPA,
            ),
            ("varlen_cache", "a cache of keys and values", "the trainer does not generate", "Set use_cache=False"),
            ("varlen_scores", "soft-capped scores or attention sinks", "the backward has none", _SDPA),
            ("varlen_direction", "attention in both directions", "it computes causal attention", _SDPA),
            (
                "varlen_positions",
                "a model that does not pass its positions on",
                "they say where sequences begin",
                _SDPA,
            ),
            (
                "varlen_position_axes",
                "positions of more than one dimension",
                "they say where sequences begin",
                _SDPA,
            ),
        )
    ),
    _row(
        "varlen_operands",
        "heads that FlashAttention has no kernel for, and other types than BF16 and FP16",
        VARLEN,
        "FlashAttention has no kernel for it",
        _SDPA,
        "attention with {what}",
    ),
    # --- configuration objects that code builds, not Hydra ---
    _row(
        "auto_uncomposed",
        "`jetrl.operations=auto` in a configuration that Hydra did not compose",
        UNCOMPOSED,
        "the driver says once what it is",
        "Set jetrl.operations=shared or jetrl.operations=stock",
        "jetrl.operations=auto",
    ),
    _row(
        "class_without_options",
        "a class of ours without the options",
        UNCOMPOSED,
        "the options come with the flag",
        "Set precision to a group of this package",
        "a {name} without {field}",
    ),
)
"""Raised as the trainer's model or the engine is built, or in its first forward."""
