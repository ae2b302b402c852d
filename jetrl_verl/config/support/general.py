# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration that every precision has: training, model, rollout, trainer, our own keys."""

import json
from collections.abc import Mapping
from typing import Any

from jetrl_verl.formats.catalog import QUANTIZED_CACHES
from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from ..precision import target_of
from .row import IS_FALSE, IS_SET, IS_TRUE, NOT_FALSE, Get, Row, Scope, Wrong, above, equal, other_than
from .scopes import (
    ACTOR,
    ATTENTION,
    CORRECTION,
    EVERY,
    FP8_CACHE,
    FP8_CRITIC,
    GATHERED_ONCE,
    MASKED,
    MODEL,
    ORDERED,
    REF,
    ROLLOUT,
    TENSOR_PARALLEL,
    UNSAMPLED,
    VARLEN,
    VLLM,
)

BF16 = ("bfloat16", "bf16", "torch.bfloat16")

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

_ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config")
_OR_BF16 = ", or precision=bf16"
_PACKAGE = __name__.partition(".")[0]
(_CACHE,) = QUANTIZED_CACHES


def target_row(node: str, precision: str, scope: Scope) -> Row:
    """A node whose ``_target_`` has to be the class that a precision's YAML names."""
    target = target_of(node, precision)
    wrong = Wrong("another class", lambda value, get: value != target, target, "my.Config")
    return Row(
        f"target_of_{node}",
        "another class instead of ours",
        scope,
        "the flag works through this key",
        {f"{node}._target_": wrong},
    )


def _training(suffix: str, scope: Scope, roles: tuple[str, ...], engines: tuple[str, ...], *qat: str) -> list[Row]:
    dtypes = [f"{node}.{key}" for node in engines for key in ("dtype", "mixed_precision.param_dtype")]
    return [
        Row(
            f"engine{suffix}",
            "Megatron, VeOmni, TorchTitan and other engines",
            scope,
            "training runs under FSDP",
            {f"{role}.strategy": other_than("fsdp2", "fsdp", example="megatron", required=True) for role in roles},
            " with model_engine=dp",
        ),
        Row(
            f"qat{suffix}",
            "quantization-aware training",
            scope,
            "the precision says which linear layers are quantized",
            {f"{node}.qat.enable": IS_TRUE for node in (*roles, *engines, *qat)},
        ),
        Row(
            f"compute_dtype{suffix}",
            "FP16 or FP32 between the trainer's linear layers",
            scope,
            "weights and activations are cast to BF16",
            dict.fromkeys(dtypes, other_than(*BF16, example="float16")),
        ),
        Row(
            f"master_dtype{suffix}",
            "FP16 master weights",
            scope,
            "master weights are FP32 or BF16",
            {f"{node}.model_dtype": equal("fp16", "float16", use="fp32") for node in engines},
        ),
    ]


def overrides_of(value: Any) -> Mapping[str, Any] | None:
    """vLLM's ``hf_overrides`` as a mapping, given as one or as its JSON; None where it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    value = {} if value is None else value
    return value if isinstance(value, Mapping) else None


def _splits_padded(value: Any, get: Get) -> bool:
    return not value and any((get(key) or 1) > 1 for key in ULYSSES)


def _several_gpus_under_fsdp1(get: Get) -> bool:
    gpus = (get("trainer.n_gpus_per_node") or 1) * (get("trainer.nnodes") or 1)
    return get(f"{ACTOR}.strategy") == "fsdp" and gpus > 1


GENERAL_ROWS: tuple[Row, ...] = (
    *_training("", EVERY, (ACTOR, REF), _ENGINES, ROLLOUT),
    *_training("_of_the_critic", FP8_CRITIC, ("critic",), ("critic.fsdp",)),
    Row(
        "replicas_of_one_rank",
        "FSDP1 with each GPU a replica of its own",
        Scope(
            "strategy=fsdp on several GPUs",
            "`strategy=fsdp` on several GPUs",
            _several_gpus_under_fsdp1,
            (*EVERY.example, f"{ACTOR}.strategy=fsdp"),
        ),
        "torch's FSDP1 then adds no gradients over the replicas, and each trains a policy of its own",
        {f"{ACTOR}.fsdp_config.fsdp_size": equal(1, use="-1")},
        f", or {ACTOR}.strategy=fsdp2",
    ),
    Row(
        "gathered_once_under_fsdp1",
        "FSDP1 with weights that stay gathered",
        GATHERED_ONCE,
        "FSDP1 frees them after each pass",
        {f"{role}.strategy": equal("fsdp", use="fsdp2") for role in (ACTOR, REF)},
        ", or jetrl.gathered=pass",
    ),
    Row(
        "lora",
        "LoRA adapters",
        EVERY,
        "the full weights are trained",
        {
            f"{MODEL}.lora_rank": above(0),
            f"{MODEL}.lora.rank": above(0),
            f"{MODEL}.lora_adapter_path": IS_SET,
            f"{MODEL}.lora.adapter_path": IS_SET,
            f"{VLLM}.enable_lora": NOT_FALSE,
        },
        _OR_BF16,
    ),
    Row("mtp", "multi-token prediction", EVERY, settings={f"{MODEL}.mtp.enable": IS_TRUE}, remedy=_OR_BF16),
    Row(
        "ulysses_of_padded_batches",
        "Ulysses sequence parallelism of padded batches",
        Scope("Ulysses sequence parallelism", "Ulysses sequence parallelism", lambda get: True, EVERY.example),
        "verl splits packed batches alone",
        {f"{MODEL}.use_remove_padding": Wrong("`false`", _splits_padded, "true", False)},
        f", or {ULYSSES[0]}=1",
        needs={ULYSSES[0]: 2},
    ),
    Row(
        "ulysses_without_exchange",
        "Ulysses sequence parallelism",
        MASKED,
        "each rank would attend to its own tokens alone",
        dict.fromkeys(ULYSSES, above(1)),
        f", or {ATTENTION}={JETRL_ATTENTION}",
    ),
    Row(
        "correction_without_log_probs",
        "a rollout correction without the rollout's log-probabilities",
        UNSAMPLED,
        "verl then leaves the correction out without a word",
        dict.fromkeys(
            (f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"), Wrong("set", IS_SET.test, example="token_k1")
        ),
        f"Set {ROLLOUT}.calculate_log_probs=true",
    ),
    Row(
        "rollout_engine",
        "SGLang, TensorRT-LLM and Hugging Face rollouts",
        EVERY,
        "the rollout runs in vLLM",
        {f"{ROLLOUT}.name": other_than("vllm", example="sglang")},
        _OR_BF16,
    ),
    Row(
        "verls_quantization",
        "verl's own quantization of the rollout",
        EVERY,
        "the precision says what the rollout quantizes",
        dict.fromkeys((f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_config_file"), IS_SET),
        _OR_BF16,
    ),
    Row(
        "rollout_dtype",
        "FP16 or FP32 between the rollout's linear layers",
        EVERY,
        "activations are BF16",
        {
            f"{ROLLOUT}.dtype": other_than(*BF16, example="float16", required=True),
            f"{VLLM}.dtype": other_than(*BF16, "auto", example="float16"),
        },
    ),
    Row(
        "load_format",
        "a rollout that reads a checkpoint",
        EVERY,
        "the trainer fills vLLM's weights before the first rollout",
        {
            f"{ROLLOUT}.load_format": other_than("dummy", example="auto", required=True),
            f"{VLLM}.load_format": other_than("dummy", example="safetensors"),
        },
    ),
    Row(
        "pipeline_parallel",
        "pipeline parallel rollout",
        EVERY,
        "the rollout is tensor and data parallel",
        {
            f"{ROLLOUT}.pipeline_model_parallel_size": above(1),
            f"{VLLM}.pipeline_parallel_size": other_than(1, example=2),
        },
    ),
    Row(
        "expert_parallel",
        "expert parallel rollout",
        EVERY,
        "experts are whole on every rank",
        {f"{ROLLOUT}.expert_parallel_size": above(1), f"{VLLM}.enable_expert_parallel": NOT_FALSE},
    ),
    Row(
        "tensor_parallel_of_vllm",
        "a tensor-parallel size that only vLLM knows",
        EVERY,
        "the trainer reads the rollout's, which says which layers fit",
        {
            f"{VLLM}.tensor_parallel_size": Wrong(
                "other than the rollout's",
                lambda value, get: value not in (None, get(TENSOR_PARALLEL)),
                example=4,
            )
        },
        f"Set {TENSOR_PARALLEL} instead",
    ),
    Row(
        "routing_replay",
        "replay of a router",
        EVERY,
        "trainer and rollout route with the same operator, so there is nothing to replay",
        {
            f"{ROLLOUT}.enable_rollout_routing_replay": IS_TRUE,
            f"{VLLM}.enable_return_routed_experts": IS_TRUE,
            **{f"{node}.router_replay.mode": other_than("disabled", example="R2") for node in (*_ENGINES, ACTOR)},
        },
    ),
    Row(
        "disaggregation",
        "split prefill and decode servers",
        EVERY,
        settings={f"{ROLLOUT}.disaggregation.enabled": IS_TRUE},
    ),
    Row(
        "weight_sync",
        "a weight sync other than the naive one",
        EVERY,
        "weights travel through verl's naive sync",
        {
            f"{ROLLOUT}.checkpoint_engine.backend": other_than("naive", example="nccl", required=True),
            f"{ROLLOUT}.checkpoint_manager_class": IS_SET,
        },
    ),
    Row(
        "kv_cache",
        "vLLM's own quantized KV cache",
        EVERY,
        "keys and values are BF16, or as jetrl.kv_cache says",
        {f"{VLLM}.kv_cache_dtype": other_than("auto", "bfloat16", example="fp8_e4m3")},
    ),
    Row(
        "fusions_of_reductions",
        "vLLM's fusions of the sums over ranks",
        ORDERED,
        "the trainer repeats these sums",
        {f"{VLLM}.compilation_config.pass_config.{name}": NOT_FALSE for name in FUSIONS_OF_REDUCTIONS},
    ),
    Row(
        "varlen_prefix_grouper",
        "the prefix grouper",
        VARLEN,
        "it needs an attention with masks",
        {f"{ACTOR}.use_prefix_grouper": IS_TRUE},
        f", or {ATTENTION}=sdpa",
    ),
    Row(
        "block_size_of_an_fp8_cache",
        f"pages of other sizes than multiples of {_CACHE.page_tokens} tokens",
        FP8_CACHE,
        f"its pages are made of {_CACHE.page_tokens} tokens each",
        {
            f"{VLLM}.block_size": Wrong(
                f"no multiple of {_CACHE.page_tokens}",
                lambda value, get: (value or 0) % _CACHE.page_tokens != 0,
                str(_CACHE.page_tokens),
                _CACHE.page_tokens + 8,
            )
        },
        " or a multiple of it",
    ),
    Row(
        "speculation",
        "speculative decoding",
        EVERY,
        settings={f"{VLLM}.speculative_config": other_than({}, example={"method": "ngram"}, use="null")},
    ),
    Row("old_trainer", "the trainer from before verl's v1", EVERY, settings={"trainer.use_v1": IS_FALSE}),
    Row(
        "separate_gpus",
        "trainer and rollout on GPUs of their own",
        EVERY,
        "trainer and rollout share their GPUs",
        {
            "trainer.v1.trainer_mode": other_than("sync", "colocate_async", example="separate_async"),
            "actor_rollout_ref.hybrid_engine": IS_FALSE,
            f"{ROLLOUT}.nnodes": above(0),
        },
    ),
    Row(
        "device",
        "NPUs and other accelerators than NVIDIA's",
        EVERY,
        "FP8 runs on NVIDIA GPUs",
        {"trainer.device": other_than("cuda", "cpu", example="npu")},
        _OR_BF16,
    ),
    *(target_row(node, "", EVERY) for node in (*_ENGINES, "critic.fsdp", ROLLOUT)),
    Row(
        "options_removed",
        "a node of ours without our options",
        EVERY,
        "the flag works through this key",
        {
            f"{node}.jetrl": Wrong("absent or `null`", lambda value, get: value is None, "${jetrl}")
            for node in (*_ENGINES, "critic.fsdp", f"{ROLLOUT}.custom")
        },
    ),
    Row(
        "vllm_arguments",
        "vLLM arguments that the precision sets",
        EVERY,
        "the precision sets it",
        {
            f"{VLLM}.worker_extension_cls": Wrong(
                "another class",
                lambda value, get: value is not None and str(value).partition(".")[0] != _PACKAGE,
                "null",
                "my.Extension",
            ),
            # Compared with the precision's where those are put together, in config/vllm_arguments.py.
            **{
                f"{VLLM}.{key}": Wrong("another", lambda value, get: False, "null", example)
                for key, example in (
                    ("quantization", "gptq"),
                    ("hf_overrides.quantization_config", {"quant_method": "gptq"}),
                )
            },
        },
        _OR_BF16,
    ),
    Row(
        "hf_overrides",
        "overrides that are no mapping",
        EVERY,
        "it is no mapping",
        {f"{VLLM}.hf_overrides": Wrong("no mapping", lambda value, get: overrides_of(value) is None, "{}", "nonsense")},
        " or a mapping",
    ),
)
