# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration about the trainer, the model, and the nodes through which the flag works."""

from collections.abc import Mapping
from typing import Any

from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from ..precision import target_of
from .row import FALSE, NOT_FALSE, SET, TRUE, Get, Row, Scope, Values, above, one_of, other_than
from .scopes import (
    ACTOR,
    ADAPTERS,
    ATTENTION,
    CALIBRATED,
    FOLDED,
    FP8_CRITIC,
    MODEL,
    POLICY_LOSS,
    REF,
    ROLLOUT,
    ROTARY,
    SELECTIVE,
    TOGETHER,
    TRAINER_MODE,
    ULYSSES,
    VLLM,
    where,
)

_FSDP = other_than("fsdp2", "fsdp", required=True)
_BF16 = other_than("bfloat16", "bf16", "torch.bfloat16")
_NO_FP16 = one_of("fp16", "float16", use="fp32")
_ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config")


def _several_gpus_under_fsdp1(get: Get) -> bool:
    gpus = (get("trainer.n_gpus_per_node") or 1) * (get("trainer.nnodes") or 1)
    return get(f"{ACTOR}.strategy") == "fsdp" and gpus > 1


def _masked(get: Get) -> bool:
    """An attention of transformers for which verl does not exchange tokens and heads between ranks."""
    return not str(get(ATTENTION) or "flash_attention_2").startswith(("flash_attention_", JETRL_ATTENTION))


def _unread(overrides: Any) -> bool:
    """Whether one of them is of rotary embeddings, whose fields transformers 5 reads from a mapping, or a mapping."""
    overrides = overrides or {}
    fields = overrides.get("model_config", overrides)
    return any(name in ROTARY or isinstance(value, Mapping) for name, value in fields.items())


TRAINING_ROWS: dict[str, Row] = {
    "engine": Row(
        "Megatron, VeOmni, TorchTitan, FSDP-Turbo and other engines",
        "training runs under FSDP",
        {"model_engine": other_than("dp"), f"{ACTOR}.strategy": _FSDP, f"{REF}.strategy": _FSDP},
    ),
    "qat": Row(
        "quantization-aware training",
        "the precision says which linear layers are quantized",
        {f"{node}.qat.enable": TRUE for node in (ACTOR, REF, *_ENGINES, ROLLOUT)},
    ),
    "compute_dtype": Row(
        "FP16 or FP32 between the trainer's linear layers",
        "weights and activations are cast to BF16",
        {f"{node}.{key}": _BF16 for node in _ENGINES for key in ("dtype", "mixed_precision.param_dtype")},
    ),
    "master_dtype": Row(
        "FP16 master weights", "master weights are FP32 or BF16", {f"{node}.model_dtype": _NO_FP16 for node in _ENGINES}
    ),
    "critic": Row(
        "a critic under another engine, in FP16 or FP32, with quantization-aware training or LoRA",
        "an FP8 critic trains under FSDP, with BF16 activations and its full weights in FP32 or BF16",
        {
            "critic.strategy": _FSDP,
            "critic.qat.enable": TRUE,
            "critic.fsdp.qat.enable": TRUE,
            "critic.fsdp.dtype": _BF16,
            "critic.fsdp.mixed_precision.param_dtype": _BF16,
            "critic.fsdp.model_dtype": _NO_FP16,
            "critic.model.lora_rank": above(0),
        },
        scope=FP8_CRITIC,
    ),
    "replicas_of_one_rank": Row(
        "FSDP1 with each GPU a replica of its own",
        "torch's FSDP1 then adds no gradients over the replicas, and each trains a policy of its own",
        {f"{ACTOR}.fsdp_config.fsdp_size": one_of(1, use="-1")},
        scope=Scope("strategy=fsdp on several GPUs", _several_gpus_under_fsdp1, f"{ACTOR}.strategy=fsdp2"),
    ),
    "gathered_once_under_fsdp1": Row(
        "FSDP1 with weights that stay gathered",
        "FSDP1 frees them after each pass",
        dict.fromkeys((f"{ACTOR}.strategy", f"{REF}.strategy"), one_of("fsdp", use="fsdp2")),
        scope=where("jetrl.gathered", "batch", "jetrl.gathered=pass"),
    ),
    "selective_checkpointing_of_verl": Row(
        "training without gradient checkpointing, or with activation offload, which checkpoints on its own",
        "no layer is recomputed from results that it kept",
        {f"{MODEL}.enable_gradient_checkpointing": FALSE, f"{MODEL}.enable_activation_offload": TRUE},
        scope=SELECTIVE,
    ),
    "adapter_without_a_rank": Row(
        "a LoRA adapter without a rank",
        "verl then leaves the adapter out and trains the full weights",
        {f"{MODEL}.lora_adapter_path": SET},
        scope=Scope(f"{MODEL}.lora_rank=0", lambda get: not ADAPTERS.applies(get)),
        instead=f"Set {MODEL}.lora_rank to the adapter's r",
    ),
    "adapter_of_another_factor": Row(
        "a LoRA adapter of the weights before QuRL's factor",
        "it was trained on other weights",
        {f"{MODEL}.lora_adapter_path": SET},
        scope=Scope(FOLDED.text, lambda get: (get("jetrl.invariant_scaling") or 1) != 1, FOLDED.leave),
    ),
    "adapters_of_megatron": Row(
        "LoRA by the keys of verl's Megatron engine",
        "the FSDP engine reads lora_rank, lora_alpha and lora_adapter_path",
        {f"{MODEL}.lora.rank": above(0), f"{MODEL}.lora.adapter_path": SET},
    ),
    "adapters_of_parameters": Row(
        "LoRA adapters of experts and other parameters",
        "linear layers alone have adapters",
        {f"{MODEL}.target_parameters": SET},
    ),
    "adapters_and_calibration": Row(
        "calibrated clipping of a model with LoRA adapters",
        "its BF16 forward would leave the adapters out",
        {f"{MODEL}.lora_rank": above(0)},
        scope=CALIBRATED,
    ),
    "adapters_of_vllm": Row(
        "vLLM's own LoRA", "the weight sync merges the adapters", {f"{VLLM}.enable_lora": NOT_FALSE}
    ),
    "unread_overrides": Row(
        "overrides of rotary fields, and mappings among the overrides",
        "in verl such an override changes nothing in the trainer, or raises in a worker",
        {f"{MODEL}.override_config": Values("with one of these", _unread, "{}")},
        instead="Set the field in config.json of a copy of the model",
    ),
    "mtp": Row("multi-token prediction", settings={f"{MODEL}.mtp.enable": TRUE}),
    "ulysses_of_padded_batches": Row(
        "Ulysses sequence parallelism of padded batches",
        "verl splits packed batches alone",
        dict.fromkeys(ULYSSES, above(1)),
        scope=Scope(
            f"{MODEL}.use_remove_padding=false",
            lambda get: not get(f"{MODEL}.use_remove_padding"),
            f"{MODEL}.use_remove_padding=true",
        ),
    ),
    "ulysses_without_exchange": Row(
        "Ulysses sequence parallelism of other attention than FlashAttention",
        "each rank would attend to its own tokens alone",
        dict.fromkeys(ULYSSES, above(1)),
        scope=Scope(
            f"an attn_implementation other than flash_attention_* and {JETRL_ATTENTION}",
            _masked,
            f"{ATTENTION}={JETRL_ATTENTION}",
            key=ATTENTION,
        ),
    ),
    "estimators_of_the_old_trainer": Row(
        "ReMax, GDPO and optimal token baselines",
        "verl's v1 trainer has no greedy baselines, parts of rewards or sums of squares for them, and stops in a step",
        {
            "algorithm.adv_estimator": one_of(
                "remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline", use="grpo"
            )
        },
        instead="Set algorithm.adv_estimator=grpo, or precision=bf16 trainer.use_v1=False",
    ),
    "temperatures_of_sapo": Row(
        "SAPO's temperatures next to its loss_mode",
        "verl reads the actor's, and a worker stops at these",
        {f"{POLICY_LOSS}.tau_pos": SET, f"{POLICY_LOSS}.tau_neg": SET},
        instead=f"Set {ACTOR}.tau_pos and {ACTOR}.tau_neg instead",
    ),
    "old_trainer": Row("the trainer from before verl's v1", settings={"trainer.use_v1": FALSE}),
    "trainer_mode": Row(
        "a trainer of your own", settings={TRAINER_MODE: other_than("sync", "colocate_async", "separate_async")}
    ),
    "separate_gpus": Row(
        "a rollout on GPUs of its own",
        "trainer and rollout share their GPUs",
        {"actor_rollout_ref.hybrid_engine": FALSE, f"{ROLLOUT}.nnodes": above(0)},
        scope=TOGETHER,
    ),
    "device": Row(
        "NPUs and other accelerators than NVIDIA's",
        "FP8 runs on NVIDIA GPUs",
        {"trainer.device": other_than("cuda", "cpu")},
    ),
    "targets": Row(
        "another class instead of ours",
        "the flag works through this key",
        {
            f"{node}._target_": other_than(target_of(node), required=True)
            for node in (*_ENGINES, "critic.fsdp", ROLLOUT)
        },
    ),
    "options_removed": Row(
        "a node of ours without our options",
        "the flag works through this key",
        {
            f"{node}.jetrl": Values("absent or `null`", lambda value: value is None, "${jetrl}")
            for node in (*_ENGINES, "critic.fsdp", f"{ROLLOUT}.custom")
        },
    ),
}
