# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration about the rollout and vLLM's arguments."""

from collections.abc import Mapping
from typing import Any

from jetrl_verl.formats.catalog import QUANTIZED_CACHES

from .row import NOT_EMPTY, NOT_FALSE, SET, TRUE, Row, Scope, Values, above, other_than
from .scopes import (
    ACTOR,
    CHECKPOINT_ENGINE,
    CORRECTION,
    FP8_CACHE,
    FP8_TRAINING,
    FUSIONS_OF_REDUCTIONS,
    REF,
    ROLLOUT,
    SEPARATE,
    TENSOR_PARALLEL,
    TOGETHER,
    VLLM,
)

_BF16 = ("bfloat16", "bf16", "torch.bfloat16")
_REPLAY = other_than("disabled")
(_CACHE,) = QUANTIZED_CACHES


def _no_mapping(value: Any) -> bool:
    return value is not None and not isinstance(value, Mapping)


ROLLOUT_ROWS: dict[str, Row] = {
    "correction_without_log_probs": Row(
        "a rollout correction without the rollout's log-probabilities",
        "verl then leaves the correction out without a word",
        {f"{CORRECTION}.rollout_is": SET, f"{CORRECTION}.rollout_rs": SET},
        scope=Scope(
            f"{ROLLOUT}.calculate_log_probs=false",
            lambda get: not get(f"{ROLLOUT}.calculate_log_probs"),
            f"{ROLLOUT}.calculate_log_probs=true",
        ),
    ),
    "rollout_engine": Row(
        "SGLang, TensorRT-LLM and Hugging Face rollouts",
        "the rollout runs in vLLM",
        {f"{ROLLOUT}.name": other_than("vllm")},
    ),
    "verls_quantization": Row(
        "verl's own quantization of the rollout",
        "the precision says what the rollout quantizes",
        {f"{ROLLOUT}.quantization": SET, f"{ROLLOUT}.quantization_config_file": SET},
    ),
    "rollout_dtype": Row(
        "FP16 or FP32 between the rollout's linear layers",
        "activations are BF16",
        {f"{ROLLOUT}.dtype": other_than(*_BF16, required=True), f"{VLLM}.dtype": other_than(*_BF16, "auto")},
    ),
    "load_format": Row(
        "a rollout that reads a checkpoint",
        "the trainer fills vLLM's weights before the first rollout",
        {f"{VLLM}.load_format": other_than("dummy")},
    ),
    "pipeline_parallel": Row(
        "pipeline parallel rollout",
        "the rollout is tensor and data parallel",
        {f"{ROLLOUT}.pipeline_model_parallel_size": above(1), f"{VLLM}.pipeline_parallel_size": other_than(1)},
    ),
    "expert_parallel": Row(
        "expert parallel rollout",
        "experts are whole on every rank",
        {f"{ROLLOUT}.expert_parallel_size": above(1), f"{VLLM}.enable_expert_parallel": NOT_FALSE},
    ),
    "tensor_parallel_of_vllm": Row(
        "a tensor-parallel size that only vLLM knows",
        "the trainer reads the rollout's, which says which layers fit",
        {f"{VLLM}.tensor_parallel_size": SET},
        scope=Scope(
            f"another {TENSOR_PARALLEL}",
            lambda get: get(f"{VLLM}.tensor_parallel_size") != get(TENSOR_PARALLEL),
            key=TENSOR_PARALLEL,
        ),
    ),
    "routing_replay": Row(
        "replay of a router",
        "trainer and rollout route with the same operator, so there is nothing to replay",
        {
            f"{ROLLOUT}.enable_rollout_routing_replay": TRUE,
            f"{VLLM}.enable_return_routed_experts": TRUE,
            f"{ACTOR}.fsdp_config.router_replay.mode": _REPLAY,
            f"{REF}.fsdp_config.router_replay.mode": _REPLAY,
            f"{ACTOR}.router_replay.mode": _REPLAY,
        },
    ),
    "disaggregation": Row("split prefill and decode servers", settings={f"{ROLLOUT}.disaggregation.enabled": TRUE}),
    "weight_sync": Row(
        "a weight sync other than the naive one",
        "weights travel through verl's naive sync",
        {f"{CHECKPOINT_ENGINE}.backend": other_than("naive", required=True)},
        scope=TOGETHER,
    ),
    "separate_weight_sync": Row(
        "a weight sync other than the backend jetrl",
        "no other one has sent FP8 data to GPUs of their own",
        {f"{CHECKPOINT_ENGINE}.backend": other_than("jetrl", required=True)},
        scope=SEPARATE,
    ),
    "checkpoint_manager": Row(
        "a manager of weight syncs of your own", settings={f"{ROLLOUT}.checkpoint_manager_class": SET}
    ),
    "kv_cache": Row(
        "vLLM's own quantized KV cache",
        "keys and values are BF16, or as jetrl.kv_cache says",
        {f"{VLLM}.kv_cache_dtype": other_than("auto", "bfloat16")},
    ),
    "delta_net_states": Row(
        "states of delta nets in other types",
        "the trainer's are FP32, and inputs of its convolution BF16",
        {
            f"{VLLM}.mamba_ssm_cache_dtype": other_than("float32", "auto"),
            f"{VLLM}.mamba_cache_dtype": other_than("auto", "bfloat16"),
        },
    ),
    "fusions_of_reductions": Row(
        "vLLM's fusions of the sums over ranks",
        "the trainer repeats these sums",
        {f"{VLLM}.compilation_config.pass_config.{name}": NOT_FALSE for name in FUSIONS_OF_REDUCTIONS},
        scope=FP8_TRAINING,
    ),
    "block_size_of_an_fp8_cache": Row(
        f"pages of other sizes than multiples of {_CACHE.page_tokens} tokens",
        f"its pages are made of {_CACHE.page_tokens} tokens each",
        {
            f"{VLLM}.block_size": Values(
                f"that is no multiple of {_CACHE.page_tokens}",
                lambda value: (value or 0) % _CACHE.page_tokens != 0,
                str(_CACHE.page_tokens),
            )
        },
        scope=FP8_CACHE,
    ),
    "speculation": Row("speculative decoding", settings={f"{VLLM}.speculative_config": NOT_EMPTY}),
    "configuration_of_vllm": Row(
        "a model configuration that only vLLM reads",
        "the trainer would compute another model",
        {
            f"{VLLM}.hf_config_path": SET,
            f"{VLLM}.config_format": other_than("auto", "hf"),
            f"{VLLM}.disable_sliding_window": NOT_FALSE,
        },
    ),
    "vllm_arguments": Row(
        "vLLM arguments that the precision sets",
        "the precision sets it",
        {
            f"{VLLM}.worker_extension_cls": SET,
            f"{VLLM}.quantization": SET,
            f"{VLLM}.hf_overrides.quantization_config": SET,
        },
    ),
    "hf_overrides": Row(
        "overrides that are no mapping",
        "it is no mapping",
        {f"{VLLM}.hf_overrides": Values("that is no mapping", _no_mapping, "{}")},
    ),
}
