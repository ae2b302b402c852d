# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that no setting shows and the driver sees: its machine and the models before Ray starts, the cluster after.

``config/environment.py``, ``model.py`` and ``workers.py`` state what they see. ``models/`` raises ``Unsupported`` with
the name of a row.
"""

from functools import partial

from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from .limits import CUTS_AT_PAGES
from .row import Row, Scope
from .scopes import (
    ACTOR,
    ATTENTION,
    AUTO,
    BUCKET,
    EXACT,
    FOLDED,
    FP8_CACHE,
    MODEL,
    ROLLOUT,
    TENSOR_PARALLEL,
    VARLEN,
    VLLM,
    shared_row,
    where,
)

_NVIDIA = "FP8 runs on NVIDIA GPUs"
_PINNED = "Set up the pinned release, or precision=bf16"
_SMALLER = f"Set a smaller {TENSOR_PARALLEL}"
_SKIP = "jetrl.unfit_layers=skip, which keeps such layers BF16 on both sides and needs jet_fp8, not jet_fp8_exact"
_DROPOUT = f"{MODEL}.override_config.attention_dropout=0"
_RESIDUAL_DROPOUT = f"{MODEL}.override_config.residual_dropout=0"

_varlen = partial(Row, scope=VARLEN)

MACHINE_ROWS: dict[str, Row] = {
    "version": Row("a release of verl, vLLM, torch or transformers other than the pinned one", instead=_PINNED),
    "missing_package": Row("an environment without one of these packages", instead="Set up the pinned release"),
    "optimizer_package": Row("an optimizer of a package that is not installed", instead="Install its package"),
    "attention_package": Row(
        "flash-attn by name, or under Ulysses with sliding windows or attention dropout, where it is not installed",
        instead=f"Install flash-attn, or set {ATTENTION}={JETRL_ATTENTION}",
    ),
    "patch": Row("a modified verl or vLLM that a required patch cannot be applied to", instead=_PINNED),
    "npu": Row("an NPU", _NVIDIA),
    "rocm": Row("ROCm", _NVIDIA),
    "gpu_without_fp8": Row(
        "a GPU of compute capability below 8.9", "every precision but bf16 needs FP8 tensor cores, which begin at 8.9"
    ),
    "gpu_other_than_hopper": shared_row("a GPU of compute capability other than 9.0", "FlashAttention 3 needs 9.0"),
    "no_flash_attention_3": shared_row("vLLM without FlashAttention 3"),
    "vllm_plugins": shared_row(
        "plugins of other packages that replace layers, attention, platform or model class of vLLM",
        fix="VLLM_PLUGINS=jetrl",
    ),
    "cpu": Row(
        "a CPU",
        "the shared operations are slow there: exact sums in float64",
        scope=AUTO,
        instead="Set jetrl.operations=shared if that is what you want",
    ),
}
"""What the machine shows, and what makes ``jetrl.operations=auto`` ``stock`` without refusing ``shared``."""

MODEL_ROWS: dict[str, Row] = {
    "field_of_one_side": Row(
        "a field of the model's configuration that the trainer and the rollout have different",
        "they would compute different models",
        instead=f"Set it in config.json, or in {MODEL}.override_config, which both sides get",
    ),
    "models_own_code": Row(
        "a model with code of its own (`auto_map`) under trust_remote_code",
        "the trainer would run that code, and vLLM a class of its own",
        instead=f"Set {MODEL}.trust_remote_code=false",
    ),
    "quantized_checkpoint": Row(
        "a checkpoint that is quantized already",
        "it is quantized already (quantization_config)",
        instead=f"Set {MODEL}.path to the BF16 checkpoint",
    ),
    "model_type": Row(
        "a vision or audio model other than Qwen2.5-VL, Qwen3-VL and Qwen3.5, another mixture of experts, another "
        "architecture",
        instead=f"Set {MODEL}.path to a model of a type in docs/support.md, or precision=bf16",
    ),
    "no_layer_fits": Row("a model none of whose layers fits"),
    "layer_shape": Row("layers that are no multiples of 128", instead=f"Set {_SKIP}"),
    "layer_shard_shape": Row(
        "layers whose shards are no multiples of 128, as of Qwen2.5-72B over 2 GPUs", instead=f"{_SMALLER}, or {_SKIP}"
    ),
    "rollout_ranks_of_the_heads": Row("a tensor-parallel size that does not divide a model's heads", instead=_SMALLER),
    "ulysses_of_the_heads": Row(
        "Ulysses sequence parallelism that does not divide a model's heads",
        instead="Set it to a divisor of both, or of the heads and a multiple of the key heads",
    ),
    "tensor_of_the_bucket": Row(
        "an embedding, experts or layers larger than the weight sync's bucket",
        "where processes do not share a GPU's memory, each tensor travels whole",
        scope=Scope(f"VERL_PLATFORM=cpu and a smaller {BUCKET}"),
        instead=f"Set a larger {BUCKET}",
    ),
    "fields_of_vllm": Row(
        "a field of config.json that vLLM's class alone reads, as `is_causal=false` of an embedding model",
        instead=f"Set {MODEL}.path to a model without it, or precision=bf16",
    ),
    "linear_of_no_family": Row("a linear layer in a decoder that its family does not have"),
    "place_of_adapter": Row(
        "a LoRA adapter of anything but a linear layer of the decoder's layers",
        instead=f"Set {MODEL}.target_modules to some of those, or for a vision tower "
        f"{MODEL}.exclude_modules='.*visual.*'; of a saved adapter these fields of its adapter_config.json",
    ),
    "kind_of_adapter": Row(
        "a LoRA adapter with a dropout, a bias, weights that are trained whole, or of another kind",
        instead=f"Set {MODEL}.lora_adapter_path to a plain adapter, or null",
    ),
    "layer_without_scaling": Row(
        "a decoder layer without the norms and projections that the factor is folded into", scope=FOLDED
    ),
    "checkpoint_of_another_factor": Row(
        "a checkpoint of another factor",
        "its moments and later checkpoints would not fit the weights",
        scope=FOLDED,
        instead="Set jetrl.invariant_scaling to the checkpoint's",
    ),
    "qwen2_head_dim": Row("a Qwen2 model with a head_dim of its own"),
    "built_in_biases": Row("Seed-OSS with other biases than vLLM's"),
    "model_of_an_fp8_cache": Row(
        "heads other than 128, more than 8 query heads a KV head, sliding windows", scope=FP8_CACHE
    ),
    "gpu_of_an_fp8_cache": Row(
        "a GPU of compute capability other than 9.0", "its kernels are for Hopper", scope=FP8_CACHE
    ),
    "varlen_sliding_window": _varlen("sliding windows", "it attends to whole sequences"),
    "varlen_dropout": _varlen(
        "attention dropout", "its backward has none", instead=f"Set {_DROPOUT}, or {ATTENTION}=sdpa"
    ),
    "varlen_model": _varlen(
        "layers that attend to chunks, and heads that FlashAttention has no kernel for",
        "it attends to whole sequences in FlashAttention",
    ),
    "fused_kernels_of_a_padded_vocabulary": Row(
        f"{MODEL}.use_fused_kernels=true",
        scope=Scope("a vocabulary larger than the tokenizer, as Qwen's is"),
        instead=f"Set {MODEL}.use_fused_kernels=false",
    ),
    # --- samples with images ---
    "exact_images": Row(
        "samples with images",
        "each side has its own vision tower",
        scope=EXACT,
        fix="data.train_files and data.val_files to text",
        loses="sequences with an image are counted apart, and their k3_kl will be above 0",
    ),
    "vision_tower": Row(
        "a rollout without a vision tower",
        scope=Scope("samples with images"),
        instead=f"Set {VLLM}.language_model_only=false, or data.train_files and data.val_files to text",
    ),
    "images_of_text_models": Row(
        "samples with images",
        scope=Scope("a model without a vision tower"),
        instead=f"Set {MODEL}.path to a model with one, or data.train_files and data.val_files to text",
    ),
    "vision_package": Row(
        "images, and models of type qwen2_5_vl and qwen3_vl, without torchvision",
        "verl needs the model's processor, whose class imports it",
        instead="Set up torchvision",
    ),
    "image_package": Row(
        "samples with images without qwen-vl-utils",
        "verl reads them with it",
        instead="Set up qwen-vl-utils",
    ),
    "text_of_stock_operations": Row(
        "text alone in Qwen2.5-VL",
        "verl's forward of it stops at a micro-batch without an image",
        scope=where("jetrl.operations", "stock"),
        instead="Set jetrl.operations=shared, or data.train_files and data.val_files to samples with images",
    ),
    "videos": Row(
        "samples with videos",
        "no job with videos has run",
        instead="Set data.train_files and data.val_files to other samples, or precision=bf16",
    ),
    # --- mixtures of experts ---
    "mixture_of_another_format": Row(
        "a mixture of experts",
        scope=Scope("a jetrl.rollout other than fp8", key="jetrl.precision"),
        instead="Set precision=jet_fp8, fp8_rollout or bf16",
    ),
    "mixture_with_stock_operations": Row(
        "a mixture of experts in FP8 training",
        "the two sides would send tokens to different experts",
        scope=where("jetrl.operations", "stock"),
        instead="Set jetrl.operations=shared, or precision=fp8_rollout",
    ),
    "mixture_with_bf16_backward": Row(
        "a mixture of experts",
        "the gradients of experts are FP8 products",
        scope=where("jetrl.backward", "bf16", "jetrl.backward=fp8"),
    ),
    "mixture_over_replicas": Row(
        "a mixture of experts",
        "vLLM deals experts over the replicas of one server, and here they are whole on every rank",
        scope=Scope("rollout.data_parallel_size above 1"),
        instead="Set it to 1, which starts a server for each replica",
    ),
    "dense_layers_of_a_mixture": Row("a mixture of experts with a dense MLP in some layers"),
    "shared_expert": Row("a shared expert in a mixture other than Qwen3.5's, or none in Qwen3.5's"),
    "expert_activation": Row("experts with another activation than SiLU"),
    "expert_shape": Row("experts that are no multiples of 128"),
    "expert_shard_shape": Row("experts whose shards are no multiples of 128", instead=f"{_SMALLER}, or precision=bf16"),
    "experts_a_token": Row(
        "a mixture of experts whose tokens go to none, or to more than there are",
        instead="Set num_experts_per_tok of its config.json to a number of its experts",
    ),
    # --- hybrids of delta nets and attention ---
    "tied_in_one_part": Row(
        "a model with vision whose text_config has another tie_word_embeddings",
        instead="Set both fields in config.json of a copy of the model to the same value",
    ),
    "wrap_policy_of_a_tower": Row(
        "FSDP1 with a wrap policy of your own, of a model with vision",
        "its tower keeps its weights, and would lie in a vector of trained ones",
        instead=f"Set {ACTOR}.strategy=fsdp2",
    ),
    "page_of_states": Row(
        "steps of fewer tokens than a page of a delta net's states",
        "vLLM cuts prompts at the ends of pages alone",
        scope=Scope(f"{ROLLOUT}.enable_prefix_caching=true and vLLM {CUTS_AT_PAGES}"),
        instead=f"Set a larger {ROLLOUT}.max_num_batched_tokens",
    ),
    "delta_net_heads": Row("a delta net whose value heads are no multiple of its key heads"),
    # --- what the shared operations do not cover ---
    "another_decoder": shared_row("a decoder with other modules than its family's, or a bias on lm_head"),
    "head_dim": shared_row("heads other than 64, 128 and 256"),
    "delta_net_shape": shared_row(
        "a delta net with heads other than 128, or after a convolution of another width than 4"
    ),
    "delta_net_without_kernels": shared_row(
        "a delta net without the package's Hopper kernels",
        "its delta rule runs on a GPU in them alone; `make wheel` builds a package with them where there is an nvcc",
    ),
    "rope_type": shared_row("YaRN and other rotary types than default and llama3"),
    "partial_rotary": shared_row("partly rotated heads of other families than Qwen3.5"),
    "activation": shared_row("an activation other than SiLU"),
    "sliding_window": shared_row("sliding windows"),
    "soft_cap": shared_row("soft-capped scores or logits"),
    "logit_scale": shared_row("scaled logits"),
    "attention_dropout": shared_row("attention dropout", fix=_DROPOUT),
    "residual_dropout": shared_row("residual dropout", fix=_RESIDUAL_DROPOUT),
}
"""What the model's ``config.json`` shows."""
