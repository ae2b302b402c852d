# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that no setting shows and the driver sees before Ray starts: the machine, the model folder.

Modules below this package raise ``Unsupported`` with the name of a row and why (``{error}``).
"""

from .row import DRIVER, Row, Scope
from .scopes import ATTENTION, AUTO, EVERY, FP8_CACHE, MODEL, ROLLOUT, SHARED, VARLEN

_BF16 = "Set precision=bf16"
_OR_STOCK = "precision=jet_fp8 jetrl.operations=stock, or precision=bf16"
_STOCK = f"Set {_OR_STOCK}"
_PATH = f"Set {MODEL}.path"

_UNMASKED = Scope(
    "the {entries} entries of its vocabulary without a token", "a vocabulary larger than the tokenizer", EVERY.applies
)

_MODEL = "the model {path}"
_MIXTURE = "the mixture of experts {path}"
_TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
_SKIP = "jetrl.unfit_layers=skip, which keeps such layers BF16 on both sides"
_GPU = "{gpu}, of compute capability {capability},"

MACHINE_ROWS: tuple[Row, ...] = (
    Row(
        "version",
        "other releases of verl, vLLM, torch and transformers than the pinned ones",
        EVERY,
        "it works with {package} {pin}",
        "Set up {package} {pin}, or precision=bf16",
        what="{package} {found}",
        found=DRIVER,
    ),
    Row(
        "missing_package",
        "an environment without verl, vLLM, torch or transformers",
        EVERY,
        "",
        "Set up {package} {pin}",
        what="an environment without {package}",
        found=DRIVER,
        listed=False,
    ),
    Row(
        "optimizer_package",
        "an optimizer of a package that is not installed",
        EVERY,
        "{package} is not installed",
        "Install {package}",
        found=DRIVER,
        listed=False,
    ),
    Row(
        "patch",
        "a fork of verl or vLLM into which a patch does not fit that the results depend on",
        EVERY,
        "{mismatch}",
        "Set up {project} {version}, or precision=bf16",
        what="the installed {project}",
        found=DRIVER,
        listed=False,
    ),
    Row("npu", "NPUs", EVERY, "FP8 runs on NVIDIA GPUs", _BF16, what="an NPU", found=DRIVER),
    Row("rocm", "ROCm", EVERY, "FP8 runs on NVIDIA GPUs", _BF16, what="ROCm", found=DRIVER),
    Row(
        "gpu_without_fp8",
        "GPUs of compute capability below 8.9",
        EVERY,
        "every precision but bf16 is for GPUs with FP8 tensor cores, which begin at 8.9",
        _BF16,
        what=_GPU,
        found=DRIVER,
    ),
    Row(
        "gpu_other_than_hopper",
        "GPUs of compute capability other than 9.0",
        SHARED,
        "FlashAttention 3 needs 9.0",
        _STOCK,
        what=_GPU,
        found=DRIVER,
    ),
    Row(
        "gpu_of_an_fp8_cache",
        "GPUs of compute capability other than 9.0",
        FP8_CACHE,
        "its kernels are for Hopper",
        "Set jetrl.kv_cache=bf16",
        what=_GPU,
        found=DRIVER,
    ),
    Row(
        "model_of_an_fp8_cache",
        "heads other than 128, more than 8 query heads a KV head, sliding windows",
        FP8_CACHE,
        "{error}",
        "Set jetrl.kv_cache=bf16",
        what=_MODEL,
        found=DRIVER,
    ),
    Row(
        "no_flash_attention_3",
        "a vLLM without FlashAttention 3",
        SHARED,
        "",
        _STOCK,
        what="the installed vLLM, which comes without FlashAttention 3,",
        found=DRIVER,
    ),
    Row(
        "cpu",
        "a CPU",
        AUTO,
        "the shared operations are slow on a CPU (exact sums in float64)",
        "Set jetrl.operations=shared if that is what you want",
        found=DRIVER,
    ),
    Row(
        "no_gpu_in_the_driver",
        "a driver that sees no GPU",
        AUTO,
        "this driver sees no GPU and so cannot know the workers'",
        "Set jetrl.operations=shared if all of them have compute capability 9.0",
        found=DRIVER,
    ),
    Row(
        "remote_model",
        "a model that the driver cannot read",
        AUTO,
        "the configuration of the model {path} cannot be read from here",
        "Set jetrl.operations=shared if the shared operations cover it",
        found=DRIVER,
    ),
    Row(
        "overridden_model",
        "overrides of what decides in the model's configuration",
        AUTO,
        "{where} overrides {field} of the model",
        "Set jetrl.operations=shared if the shared operations cover that",
        found=DRIVER,
    ),
    Row(
        "quantized_checkpoint",
        "checkpoints that are quantized already",
        EVERY,
        "it is quantized already (quantization_config)",
        f"{_PATH} to the BF16 checkpoint",
        what=_MODEL,
        found=DRIVER,
    ),
    Row(
        "model_type",
        "vision and audio models, other mixtures of experts, other architectures",
        EVERY,
        "{error}",
        f"{_PATH} to a model of a type in docs/support.md, or precision=bf16",
        what=_MODEL,
        found=DRIVER,
    ),
    Row(
        "mixture_of_another_format",
        "a mixture of experts",
        Scope("precision={jetrl.precision}", "INT8 rollouts and `precision=bf16_shared`", EVERY.applies),
        "{error}",
        "Set precision=jet_fp8, fp8_rollout or bf16",
        what=_MODEL,
        found=DRIVER,
    ),
    *(
        Row(name, feature, EVERY, "{error}", _BF16, what=_MIXTURE, found=DRIVER, listed=False)
        for name, feature in (
            ("dense_layers_of_a_mixture", "a mixture of experts with a dense MLP in some layers"),
            ("shared_expert", "a mixture of experts with a shared expert"),
            ("expert_activation", "experts with another activation than SiLU"),
            ("expert_shape", "experts that are no multiples of 128"),
        )
    ),
    Row(
        "expert_shard_shape",
        "experts whose shards are no multiples of 128",
        EVERY,
        "{error}",
        f"Set {_TENSOR_PARALLEL}={{largest}}, the largest that fits, or precision=bf16",
        what=_MIXTURE,
        found=DRIVER,
        listed=False,
    ),
    Row(
        "experts_a_token",
        "a mixture of experts whose tokens go to none, or to more than there are",
        EVERY,
        "{error}",
        "Set num_experts_per_tok of its config.json to a number of its experts",
        what=_MIXTURE,
        found=DRIVER,
        listed=False,
    ),
    Row(
        "mixture_with_stock_operations",
        "a mixture of experts",
        Scope("jetrl.operations=stock", "`jetrl.operations=stock`, where training is FP8", EVERY.applies),
        "the two sides would send tokens to different experts",
        "Set jetrl.operations=shared, or precision=fp8_rollout",
        what=_MIXTURE,
        found=DRIVER,
    ),
    Row(
        "mixture_with_bf16_backward",
        "a mixture of experts",
        Scope("jetrl.backward=bf16", "`jetrl.backward=bf16`", EVERY.applies),
        "the gradients of experts are FP8 products",
        "Set jetrl.backward=fp8",
        what=_MIXTURE,
        found=DRIVER,
    ),
    Row(
        "mixture_over_replicas",
        "a mixture of experts",
        Scope("{key}={value}", "`rollout.data_parallel_size` above 1", EVERY.applies),
        "vLLM deals experts over the replicas of one server, and here they are whole on every rank",
        "Set {key}=1, which starts a server for each replica",
        what=_MIXTURE,
        found=DRIVER,
    ),
    Row(
        "no_layer_fits",
        "models none of whose layers fits",
        EVERY,
        "{error}",
        _BF16,
        what=_MODEL,
        found=DRIVER,
        listed=False,
    ),
    Row(
        "rollout_ranks_of_the_heads",
        "tensor-parallel sizes that do not divide a model's heads",
        EVERY,
        "{error}",
        f"Set {_TENSOR_PARALLEL}={{largest}}, the largest that fits",
        what=_MODEL,
        found=DRIVER,
        listed=False,
    ),
    Row(
        "layer_shard_shape",
        "layers whose shards are no multiples of 128, as of Qwen2.5-72B over 2 GPUs",
        EVERY,
        "{error}",
        f"Set {_TENSOR_PARALLEL}={{largest}}, the largest that fits, or {_SKIP}",
        what=_MODEL,
        found=DRIVER,
    ),
    Row(
        "layer_shape",
        "layers that are no multiples of 128",
        EVERY,
        "{error}",
        f"Set {_SKIP}",
        what=_MODEL,
        found=DRIVER,
        listed=False,
    ),
    Row(
        "ulysses_of_the_heads",
        "Ulysses sequence parallelism that does not divide a model's heads",
        EVERY,
        "its {heads} heads over {kv_heads} key heads are not divided by that many ranks",
        "Set {key} to a divisor of both, or of the heads and a multiple of the key heads",
        found=DRIVER,
        what="{key}={value} with the model {path}",
    ),
    Row(
        "qwen2_head_dim",
        "Qwen2 models with a head_dim of their own",
        EVERY,
        "{error}",
        _BF16,
        what=_MODEL,
        found=DRIVER,
        listed=False,
    ),
    Row(
        "built_in_biases",
        "Seed-OSS with other biases than vLLM's",
        EVERY,
        "{error}",
        _BF16,
        what=_MODEL,
        found=DRIVER,
        listed=False,
    ),
    *(
        Row(name, feature, SHARED, "{error}", _STOCK, what=_MODEL, found=DRIVER)
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
        Row(
            dropout,
            dropout.replace("_", " "),
            SHARED,
            "{error}",
            f"Set {MODEL}.override_config.{dropout}=0, or {_OR_STOCK}",
            what=_MODEL,
            found=DRIVER,
        )
        for dropout in ("attention_dropout", "residual_dropout")
    ),
    Row(
        "varlen_sliding_window",
        "sliding windows",
        VARLEN,
        "it attends to whole sequences",
        f"Set {ATTENTION}=sdpa",
        what="the model {path}, whose layers attend to windows,",
        found=DRIVER,
        listed=False,
    ),
    Row(
        "varlen_dropout",
        "attention dropout",
        VARLEN,
        "its backward has none",
        f"Set {MODEL}.override_config.attention_dropout=0, or {ATTENTION}=sdpa",
        what="the model {path} with attention_dropout={rate}",
        found=DRIVER,
        listed=False,
    ),
    Row(
        "fused_kernels_of_a_padded_vocabulary",
        "fused kernels where the vocabulary is larger than the tokenizer, as Qwen's is",
        _UNMASKED,
        "{path} would leave them unmasked in the trainer alone",
        "Set {key}=false",
        keys=(f"{MODEL}.use_fused_kernels",),
        found=DRIVER,
        what="{key}=true",
    ),
)
