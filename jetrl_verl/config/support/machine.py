# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that no setting shows and the driver sees before Ray starts: the machine and the model folder.

Callers say the X and, where a row has no reason, why. ``models/`` raises ``Unsupported`` with the name of a row.
"""

from .row import DRIVER, Row, Scope
from .scopes import ATTENTION, AUTO, EVERY, FP8_CACHE, MODEL, OR_STOCK, PRECISION, SHARED, SMALLER, VARLEN, where

_BF16 = "Set precision=bf16"
_STOCK = f"Set {OR_STOCK}"
_BF16_CACHE = "Set jetrl.kv_cache=bf16"
_SKIP = "jetrl.unfit_layers=skip, which keeps such layers BF16 on both sides"
_MIXTURE = "the mixture of experts"


def _row(name: str, feature: str, scope: Scope, reason: str, remedy: str, what: str = "") -> Row:
    return Row(name, feature, scope, reason, remedy=remedy, what=what, known=DRIVER)


def _model(name: str, feature: str, remedy: str = _BF16, scope: Scope = EVERY, reason: str = "") -> Row:
    return _row(name, feature, scope, reason, remedy, "the model")


def _mixture(name: str, feature: str, remedy: str = _BF16, scope: Scope = EVERY, reason: str = "") -> Row:
    return _row(name, feature, scope, reason, remedy, _MIXTURE)


MACHINE_ROWS: tuple[Row, ...] = (
    _row(
        "version",
        "other releases of verl, vLLM, torch and transformers than the pinned ones",
        EVERY,
        "",
        "Set up the pinned release, or precision=bf16",
    ),
    _row("missing_package", "an environment without one of these packages", EVERY, "", "Set up the pinned release"),
    _row("optimizer_package", "an optimizer of a package that is not installed", EVERY, "", "Install its package"),
    _row(
        "patch",
        "a modified verl or vLLM that a required patch cannot be applied to",
        EVERY,
        "",
        "Set up the pinned release, or precision=bf16",
    ),
    _row("npu", "NPUs", EVERY, "FP8 runs on NVIDIA GPUs", _BF16, "an NPU"),
    _row("rocm", "ROCm", EVERY, "FP8 runs on NVIDIA GPUs", _BF16, "ROCm"),
    _row(
        "gpu_without_fp8",
        "GPUs of compute capability below 8.9",
        EVERY,
        "every precision but bf16 needs FP8 tensor cores, which begin at 8.9",
        _BF16,
    ),
    _row(
        "gpu_other_than_hopper",
        "GPUs of compute capability other than 9.0",
        SHARED,
        "FlashAttention 3 needs 9.0",
        _STOCK,
    ),
    _row(
        "gpu_of_an_fp8_cache",
        "GPUs of compute capability other than 9.0",
        FP8_CACHE,
        "its kernels are for Hopper",
        _BF16_CACHE,
    ),
    _model(
        "model_of_an_fp8_cache",
        "heads other than 128, more than 8 query heads a KV head, sliding windows",
        _BF16_CACHE,
        FP8_CACHE,
    ),
    _row(
        "no_flash_attention_3",
        "a vLLM without FlashAttention 3",
        SHARED,
        "",
        _STOCK,
        "the installed vLLM, which comes without FlashAttention 3,",
    ),
    _row(
        "cpu",
        "a CPU",
        AUTO,
        "the shared operations are slow on a CPU (exact sums in float64)",
        "Set jetrl.operations=shared if that is what you want",
    ),
    _row(
        "no_gpu_in_the_driver",
        "a driver that sees no GPU",
        AUTO,
        "this driver sees no GPU and so cannot know the workers'",
        "Set jetrl.operations=shared if all of them have compute capability 9.0",
    ),
    _row(
        "remote_model",
        "a model that the driver cannot read",
        AUTO,
        "",
        "Set jetrl.operations=shared if the shared operations cover it",
    ),
    _row(
        "overridden_model",
        "overrides of what decides in the model's configuration",
        AUTO,
        "",
        "Set jetrl.operations=shared if the shared operations cover that",
    ),
    _model(
        "quantized_checkpoint",
        "checkpoints that are quantized already",
        f"Set {MODEL}.path to the BF16 checkpoint",
        reason="it is quantized already (quantization_config)",
    ),
    _model(
        "model_type",
        "vision and audio models, other mixtures of experts, other architectures",
        f"Set {MODEL}.path to a model of a type in docs/support.md, or precision=bf16",
    ),
    _mixture(
        "mixture_of_another_format",
        "a mixture of experts",
        "Set precision=jet_fp8, fp8_rollout or bf16",
        Scope(PRECISION, "INT8 rollouts and `precision=bf16_shared`", EVERY.applies),
    ),
    _mixture("dense_layers_of_a_mixture", "a mixture of experts with a dense MLP in some layers"),
    _mixture("shared_expert", "a mixture of experts with a shared expert"),
    _mixture("expert_activation", "experts with another activation than SiLU"),
    _mixture("expert_shape", "experts that are no multiples of 128"),
    _mixture("expert_shard_shape", "experts whose shards are no multiples of 128", f"Set {SMALLER}, or precision=bf16"),
    _mixture(
        "experts_a_token",
        "a mixture of experts whose tokens go to none, or to more than there are",
        "Set num_experts_per_tok of its config.json to a number of its experts",
    ),
    _mixture(
        "mixture_with_stock_operations",
        "a mixture of experts in FP8 training",
        "Set jetrl.operations=shared, or precision=fp8_rollout",
        where("jetrl.operations", "stock"),
        "the two sides would send tokens to different experts",
    ),
    _mixture(
        "mixture_with_bf16_backward",
        "a mixture of experts",
        "Set jetrl.backward=fp8",
        where("jetrl.backward", "bf16"),
        "the gradients of experts are FP8 products",
    ),
    _mixture(
        "mixture_over_replicas",
        "a mixture of experts",
        "Set it to 1, which starts a server for each replica",
        Scope("", "`rollout.data_parallel_size` above 1", EVERY.applies),
        "vLLM deals experts over the replicas of one server, and here they are whole on every rank",
    ),
    _model("no_layer_fits", "models none of whose layers fits"),
    _model("rollout_ranks_of_the_heads", "tensor-parallel sizes that do not divide a model's heads", f"Set {SMALLER}"),
    _model(
        "layer_shard_shape",
        "layers whose shards are no multiples of 128, as of Qwen2.5-72B over 2 GPUs",
        f"Set {SMALLER}, or {_SKIP}",
    ),
    _model("layer_shape", "layers that are no multiples of 128", f"Set {_SKIP}"),
    _row(
        "ulysses_of_the_heads",
        "Ulysses sequence parallelism that does not divide a model's heads",
        EVERY,
        "",
        "Set it to a divisor of both, or of the heads and a multiple of the key heads",
    ),
    _model("qwen2_head_dim", "Qwen2 models with a head_dim of their own"),
    _model("built_in_biases", "Seed-OSS with other biases than vLLM's"),
    *(
        _model(name, feature, _STOCK, SHARED)
        for name, feature in (
            ("head_dim", "heads other than 128"),
            ("rope_type", "YaRN and other rotary types than default and llama3"),
            ("partial_rotary", "partly rotated heads"),
            ("activation", "activations other than SiLU"),
            ("sliding_window", "sliding windows"),
            ("soft_cap", "soft-capped scores or logits"),
            ("logit_scale", "scaled logits"),
        )
    ),
    *(
        _model(name, feature, f"Set {MODEL}.override_config.{name}=0, or {OR_STOCK}", SHARED)
        for name, feature in (
            ("attention_dropout", "attention dropout"),
            ("residual_dropout", "residual dropout"),
        )
    ),
    _row("varlen_sliding_window", "sliding windows", VARLEN, "it attends to whole sequences", f"Set {ATTENTION}=sdpa"),
    _row(
        "varlen_dropout",
        "attention dropout",
        VARLEN,
        "its backward has none",
        f"Set {MODEL}.override_config.attention_dropout=0, or {ATTENTION}=sdpa",
    ),
    _row(
        "fused_kernels_of_a_padded_vocabulary",
        "fused kernels where the vocabulary is larger than the tokenizer, as Qwen's is",
        Scope("", "a vocabulary larger than the tokenizer", EVERY.applies),
        "",
        f"Set {MODEL}.use_fused_kernels=false",
        f"{MODEL}.use_fused_kernels=true",
    ),
)
