# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration that every precision has: training, model, rollout, trainer, our own keys."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from jetrl_verl.formats.catalog import QUANTIZED_CACHES
from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from .row import IS_ABSENT, IS_FALSE, IS_SET, IS_TRUE, Get, Row, Scope, Wrong, above, other_than
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
    UNSAMPLED,
    VARLEN,
    VLLM,
)
from .target import target_row

BF16 = ("bfloat16", "bf16", "torch.bfloat16")

ULYSSES = tuple(
    f"{role}.{node}ulysses_sequence_parallel_size" for role in (ACTOR, REF) for node in ("", "fsdp_config.")
)
"""Over how many ranks the actor and the reference policy split a packed batch; verl has two keys for it."""

ULYSSES_OF_THE_CRITIC = tuple(f"critic.{node}ulysses_sequence_parallel_size" for node in ("", "fsdp."))

OPTIMIZERS = (f"{ACTOR}.optim.optimizer_impl", "critic.optim.optimizer_impl")
"""The module that an optimizer comes from."""

REPLICAS = (f"{ROLLOUT}.data_parallel_size", f"{VLLM}.data_parallel_size")
"""Over how many replicas one server of vLLM is data parallel; verl starts servers of one replica each by default."""

FUSIONS_OF_REDUCTIONS = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
"""vLLM's passes that put another computation in the place of a sum over ranks: with the norm behind it, cut into the
halves of sequence parallelism, or those with the product in front."""

_ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config")
_EITHER = ", or precision=bf16"
_PACKAGE = __name__.partition(".")[0]


def _training(suffix: str, scope: Scope, roles: tuple[str, ...], engines: tuple[str, ...]) -> tuple[Row, ...]:
    return (
        Row(
            f"engine{suffix}",
            "Megatron, VeOmni, TorchTitan and other engines",
            scope,
            "training runs under FSDP",
            "Set model_engine=dp, or {key}=fsdp2",
            tuple(f"{role}.strategy" for role in roles),
            other_than("fsdp", "fsdp2", absent=False),
            example="megatron",
        ),
        Row(
            f"qat{suffix}",
            "quantization-aware training",
            scope,
            "the precision says which linear layers are quantized",
            "Set {key}=false",
            tuple(f"{node}.qat.enable" for node in (*roles, *engines)),
            IS_TRUE,
            example=True,
        ),
        Row(
            f"compute_dtype{suffix}",
            "FP16 or FP32 between the linear layers of the trainer",
            scope,
            "weights and activations are cast to BF16",
            "Set {key}=bfloat16",
            tuple(f"{node}.{key}" for node in engines for key in ("dtype", "mixed_precision.param_dtype")),
            other_than(*BF16),
            example="float16",
        ),
        Row(
            f"master_dtype{suffix}",
            "FP16 master weights",
            scope,
            "master weights are FP32 or BF16",
            "Set {key}=fp32",
            tuple(f"{node}.model_dtype" for node in engines),
            Wrong("`fp16`", lambda value, get: value in ("fp16", "float16")),
            example="fp16",
        ),
    )


def _one_of_vllm(name: str, feature: str, reason: str, key: str, wrong: Wrong, use: str, example: Any) -> Row:
    return Row(name, feature, EVERY, reason, f"Set {{key}}={use}", (f"{VLLM}.{key}",), wrong, example=example)


def _sets_itself(name: str, key: str, wrong: Wrong | None, example: Any) -> Row:
    return Row(
        name,
        "vLLM arguments that the precision sets",
        EVERY,
        "the precision sets it",
        f"Set {{key}}=null{_EITHER}",
        (key,),
        wrong,
        what="{key}",
        example=example,
        listed=False,
    )


def overrides_of(value: Any) -> Mapping[str, Any] | None:
    """vLLM's ``hf_overrides`` as a mapping, whether it is one or its JSON; None where it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    value = {} if value is None else value
    return value if isinstance(value, Mapping) else None


def _another_extension(value: Any, get: Get) -> bool:
    return value is not None and str(value).partition(".")[0] != _PACKAGE


def _other_tensor_parallel(value: Any, get: Get) -> bool:
    return value not in (None, get(f"{ROLLOUT}.tensor_model_parallel_size"))


def _splits_padded(value: Any, get: Get) -> bool:
    return not value and any((get(key) or 1) > 1 for key in ULYSSES)


def _replicas_of_one(value: Any, get: Get) -> bool:
    gpus = (get("trainer.n_gpus_per_node") or 1) * (get("trainer.nnodes") or 1)
    return value == 1 and get(f"{ACTOR}.strategy") == "fsdp" and gpus > 1


def _cuts(tokens: int, value: Any, get: Get) -> bool:
    return (value or 0) % tokens != 0


GENERAL_ROWS: tuple[Row, ...] = (
    *_training("", EVERY, (ACTOR, REF), _ENGINES),
    *_training("_of_the_critic", FP8_CRITIC, ("critic",), ("critic.fsdp",)),
    Row(
        "replicas_of_one_rank",
        "FSDP1 with each GPU a replica of its own",
        EVERY,
        "torch's FSDP1 then adds no gradients over the replicas, and each trains a policy of its own",
        f"Set {ACTOR}.strategy=fsdp2, or {{key}}=-1",
        (f"{ACTOR}.fsdp_config.fsdp_size",),
        Wrong("`1` with `strategy=fsdp` and several GPUs", _replicas_of_one),
        what="{key}={value} with strategy=fsdp",
        example=1,
        beside={f"{ACTOR}.strategy": "fsdp"},
        listed=False,
    ),
    Row(
        "gathered_once_under_fsdp1",
        "FSDP1 with weights that stay gathered",
        GATHERED_ONCE,
        "FSDP1 frees them behind each pass",
        "Set {key}=fsdp2, or jetrl.gathered=pass",
        tuple(f"{role}.strategy" for role in (ACTOR, REF)),
        Wrong("`fsdp`", lambda value, get: value == "fsdp"),
        example="fsdp",
        listed=False,
    ),
    Row(
        "lora",
        "LoRA adapters",
        EVERY,
        "the full weights are trained",
        f"Set {{key}}=0{_EITHER}",
        (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"),
        above(0),
        example=32,
    ),
    Row(
        "lora_adapter",
        "LoRA adapters",
        EVERY,
        "the full weights are trained",
        f"Set {{key}}=null{_EITHER}",
        (f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path"),
        IS_SET,
        example="/adapter",
    ),
    Row(
        "mtp",
        "multi-token prediction",
        EVERY,
        "",
        f"Set {{key}}=false{_EITHER}",
        (f"{MODEL}.mtp.enable",),
        IS_TRUE,
        example=True,
    ),
    Row(
        "ulysses_of_padded_batches",
        "Ulysses sequence parallelism of padded batches",
        Scope("Ulysses sequence parallelism", "Ulysses sequence parallelism", lambda get: True, EVERY.example),
        "verl splits packed batches alone",
        f"Set {{key}}=true, or {ULYSSES[0]}=1",
        (f"{MODEL}.use_remove_padding",),
        Wrong("`false`", _splits_padded),
        example=False,
        beside={ULYSSES[0]: 2},
    ),
    Row(
        "ulysses_without_exchange",
        "Ulysses sequence parallelism",
        MASKED,
        "each rank would attend to its own tokens alone",
        f"Set {{key}}=1, or {ATTENTION}={JETRL_ATTENTION}",
        ULYSSES,
        above(1),
        example=2,
    ),
    Row(
        "correction_without_log_probs",
        "a rollout correction without the rollout's log-probabilities",
        UNSAMPLED,
        "verl then leaves the correction out without a word",
        f"Set {ROLLOUT}.calculate_log_probs=true",
        (f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"),
        IS_SET,
        example="token_k1",
    ),
    Row(
        "rollout_engine",
        "SGLang, TensorRT-LLM and Hugging Face rollouts",
        EVERY,
        "the rollout runs in vLLM",
        f"Set {{key}}=vllm{_EITHER}",
        (f"{ROLLOUT}.name",),
        other_than("vllm"),
        example="sglang",
    ),
    Row(
        "verls_quantization",
        "verl's own quantization of the rollout",
        EVERY,
        "the precision says what the rollout quantizes",
        f"Set {{key}}=null{_EITHER}",
        (f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_config_file"),
        IS_SET,
        example="torchao",
    ),
    Row(
        "rollout_qat",
        "quantization-aware training",
        EVERY,
        "the precision says which linear layers are quantized",
        "Set {key}=false",
        (f"{ROLLOUT}.qat.enable",),
        IS_TRUE,
        example=True,
    ),
    Row(
        "rollout_dtype",
        "FP16 or FP32 between the linear layers of the rollout",
        EVERY,
        "activations are BF16",
        "Set {key}=bfloat16",
        (f"{ROLLOUT}.dtype",),
        other_than(*BF16, absent=False),
        example="float16",
    ),
    Row(
        "load_format",
        "a rollout that reads a checkpoint",
        EVERY,
        "the trainer fills vLLM's weights before the first rollout",
        "Set {key}=dummy",
        (f"{ROLLOUT}.load_format",),
        other_than("dummy", absent=False),
        example="auto",
    ),
    Row(
        "pipeline_parallel",
        "pipeline parallel rollout",
        EVERY,
        "the rollout is tensor and data parallel",
        "Set {key}=1",
        (f"{ROLLOUT}.pipeline_model_parallel_size",),
        above(1),
        example=2,
    ),
    Row(
        "expert_parallel",
        "expert parallel rollout",
        EVERY,
        "experts are whole on every rank",
        "Set {key}=1",
        (f"{ROLLOUT}.expert_parallel_size",),
        above(1),
        example=2,
    ),
    Row(
        "tensor_parallel_of_vllm",
        "a tensor-parallel size that only vLLM is told",
        EVERY,
        f"the trainer reads {ROLLOUT}.tensor_model_parallel_size, which says which layers fit",
        f"Set {ROLLOUT}.tensor_model_parallel_size={{value}}",
        (f"{VLLM}.tensor_parallel_size",),
        Wrong("other than `tensor_model_parallel_size`", _other_tensor_parallel),
        example=4,
        listed=False,
    ),
    Row(
        "routing_replay",
        "replay of a router",
        EVERY,
        "trainer and rollout route with the same operator, so nothing is left to replay",
        "Set {key}=false",
        (f"{ROLLOUT}.enable_rollout_routing_replay", f"{VLLM}.enable_return_routed_experts"),
        IS_TRUE,
        example=True,
        listed=False,
    ),
    Row(
        "routing_replay_in_the_trainer",
        "replay of a router",
        EVERY,
        "trainer and rollout route with the same operator, so nothing is left to replay",
        "Set {key}=disabled",
        tuple(f"{node}.router_replay.mode" for node in (*_ENGINES, ACTOR)),
        other_than("disabled"),
        example="R2",
        listed=False,
    ),
    Row(
        "disaggregation",
        "split prefill and decode servers",
        EVERY,
        "",
        "Set {key}=false",
        (f"{ROLLOUT}.disaggregation.enabled",),
        IS_TRUE,
        example=True,
    ),
    Row(
        "weight_sync",
        "a weight sync other than the naive one",
        EVERY,
        "weights travel through verl's naive sync",
        "Set {key}=naive",
        (f"{ROLLOUT}.checkpoint_engine.backend",),
        other_than("naive", absent=False),
        example="nccl",
    ),
    Row(
        "checkpoint_manager",
        "a checkpoint manager of your own",
        EVERY,
        "weights travel through verl's",
        "Set {key}=null",
        (f"{ROLLOUT}.checkpoint_manager_class",),
        IS_SET,
        example="my.Manager",
        listed=False,
    ),
    _one_of_vllm(
        "vllm_dtype",
        "FP16 or FP32 between the linear layers of the rollout",
        "activations are BF16",
        "dtype",
        other_than("auto", *BF16),
        "bfloat16",
        "float16",
    ),
    _one_of_vllm(
        "vllm_load_format",
        "a rollout that reads a checkpoint",
        "the trainer fills vLLM's weights",
        "load_format",
        other_than("dummy"),
        "dummy",
        "safetensors",
    ),
    _one_of_vllm(
        "vllm_pipeline_parallel",
        "pipeline parallel rollout",
        "the rollout is tensor and data parallel",
        "pipeline_parallel_size",
        other_than(1),
        "1",
        2,
    ),
    _one_of_vllm(
        "vllm_expert_parallel",
        "expert parallel rollout",
        "experts are whole on every rank",
        "enable_expert_parallel",
        other_than(False),
        "false",
        True,
    ),
    _one_of_vllm(
        "vllm_lora", "LoRA adapters", "the full weights are trained", "enable_lora", other_than(False), "false", True
    ),
    _one_of_vllm(
        "kv_cache",
        "vLLM's own quantized KV cache",
        "keys and values are BF16, or as jetrl.kv_cache says",
        "kv_cache_dtype",
        other_than("auto", "bfloat16"),
        "auto",
        "fp8_e4m3",
    ),
    Row(
        "fusions_of_reductions",
        "vLLM's fusions of the sums over ranks",
        ORDERED,
        "the trainer repeats these sums",
        "Set {key}=false",
        tuple(f"{VLLM}.compilation_config.pass_config.{name}" for name in FUSIONS_OF_REDUCTIONS),
        other_than(False),
        example=True,
        listed=False,
    ),
    Row(
        "varlen_prefix_grouper",
        "the prefix grouper",
        VARLEN,
        "it needs an attention with masks",
        f"Set {{key}}=false, or {ATTENTION}=sdpa",
        (f"{ACTOR}.use_prefix_grouper",),
        IS_TRUE,
        example=True,
        listed=False,
    ),
    *(
        Row(
            f"block_size_of_an_{held.name}_cache",
            f"pages of other sizes than multiples of {held.page_tokens} tokens",
            FP8_CACHE,
            f"its pages are made of {held.page_tokens} tokens each",
            f"Set {{key}} to a multiple of {held.page_tokens}",
            (f"{VLLM}.block_size",),
            Wrong(f"no multiple of {held.page_tokens}", partial(_cuts, held.page_tokens)),
            example=held.page_tokens + 8,
            listed=False,
        )
        for held in QUANTIZED_CACHES
    ),
    _one_of_vllm(
        "speculation",
        "speculative decoding",
        "",
        "speculative_config",
        other_than({}),
        "null",
        {"method": "ngram"},
    ),
    Row(
        "old_trainer",
        "the trainer from before verl's v1",
        EVERY,
        "",
        "Set {key}=true",
        ("trainer.use_v1",),
        IS_FALSE,
        example=False,
    ),
    Row(
        "separate_gpus",
        "trainer and rollout on GPUs of their own",
        EVERY,
        "trainer and rollout share their GPUs",
        "Set {key}=sync",
        ("trainer.v1.trainer_mode",),
        other_than("sync", "colocate_async"),
        example="separate_async",
    ),
    Row(
        "hybrid_engine",
        "trainer and rollout on GPUs of their own",
        EVERY,
        "trainer and rollout share their GPUs",
        "Set {key}=true",
        ("actor_rollout_ref.hybrid_engine",),
        IS_FALSE,
        example=False,
    ),
    Row(
        "rollout_nodes",
        "trainer and rollout on GPUs of their own",
        EVERY,
        "trainer and rollout share their GPUs",
        "Set {key}=0",
        (f"{ROLLOUT}.nnodes",),
        above(0),
        example=1,
    ),
    Row(
        "device",
        "NPUs and other accelerators than NVIDIA's",
        EVERY,
        "FP8 runs on NVIDIA GPUs",
        f"Set {{key}}=cuda{_EITHER}",
        ("trainer.device",),
        other_than("cuda", "cpu"),
        example="npu",
    ),
    *(target_row(node, "fp8_rollout", EVERY) for node in (*_ENGINES, "critic.fsdp", ROLLOUT)),
    Row(
        "options_removed",
        "a node of ours without our options",
        EVERY,
        "the flag works through this key",
        "Set {key}=$" + "{{jetrl}}",
        tuple(f"{node}.jetrl" for node in (*_ENGINES, "critic.fsdp", f"{ROLLOUT}.custom")),
        IS_ABSENT,
        listed=False,
    ),
    _sets_itself(
        "vllm_worker_extension_cls",
        f"{VLLM}.worker_extension_cls",
        Wrong("another class", _another_extension),
        "my.Extension",
    ),
    Row(
        "hf_overrides",
        "overrides that are no mapping",
        EVERY,
        "it is no mapping",
        "Set {key} to a mapping, as in {{key: value}}",
        (f"{VLLM}.hf_overrides",),
        Wrong("no mapping", lambda value, get: overrides_of(value) is None),
        example="nonsense",
        listed=False,
    ),
    # Compared with what the precision says to vLLM where that is put together, in config/vllm_arguments.py.
    _sets_itself("vllm_quantization", f"{VLLM}.quantization", None, "gptq"),
    _sets_itself(
        "vllm_quantization_config", f"{VLLM}.hf_overrides.quantization_config", None, {"quant_method": "gptq"}
    ),
)
