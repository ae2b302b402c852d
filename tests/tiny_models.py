# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny decoders for tests: every shape is a multiple of 128, every bias is random."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
}
HYBRIDS = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
"""Families with delta nets, which only a part of the tests covers."""
OWN_FIELDS = {
    # A rollout has no dropout; this family's default has.
    "seed_oss": dict(attention_dropout=0.0, residual_dropout=0.0),
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True),
    "qwen3_5": dict(
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        mamba_ssm_dtype="float32",
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            mrope_section=[11, 11, 10],
            mrope_interleaved=True,
        ),
    ),
}
OWN_FIELDS["qwen3_5_moe"] = OWN_FIELDS["qwen3_5"] | dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=256
)
"""Fields of one family."""
TINY_TOWER = dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=2, num_position_embeddings=64)
"""A vision tower, which text does not use."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Configuration of two layers, two heads of 128 over one key/value head, for a hybrid of two linear layers and one
    full one; ``changes`` override single fields.

    vLLM's CPU engine runs a hybrid with ``language_model_only=True, block_size=64, max_num_batched_tokens=64``.
    """
    fields = dict(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    fields |= OWN_FIELDS.get(family, {}) | changes
    if family not in HYBRIDS:
        return FAMILIES[family][0](**fields)
    tower = TINY_TOWER | {"out_hidden_size": fields["hidden_size"]}
    tied = fields["tie_word_embeddings"]
    return HYBRIDS[family][0](text_config=fields, vision_config=tower, tie_word_embeddings=tied)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """FP32 model of :func:`tiny_config`. Biases are random: all are zero in transformers, which would hide a swap."""
    torch.manual_seed(seed)
    model = (FAMILIES | HYBRIDS)[family][1](tiny_config(family, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def with_preferences(model):
    """``model`` itself with random norms and larger projections, so that its policy is far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("proj.weight", "experts.gate_up_proj", "experts.down_proj")):
                parameter.mul_(3)
    return model


def save_policy(folder: Path, family: str, padding: int = 0, **changes: Any) -> Path:
    """Save a BF16 decoder of :func:`with_preferences` and the demo's tokenizer; of a hybrid a processor as well, as
    published ones have it, where torchvision is installed, which its class needs.

    Args:
        padding: entries of the vocabulary without a token. changes: of :func:`tiny_model`.
    """
    from jetrl_verl.tools.demo.policy import build_tokenizer

    tokenizer = build_tokenizer()
    if family in HYBRIDS and find_spec("torchvision"):
        save_processor(tokenizer, folder)
    model = with_preferences(tiny_model(family, 3, vocab_size=len(tokenizer) + padding, **changes))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_processor(tokenizer: Any, folder: Path) -> None:
    """Save the processor of a model with vision, whose placeholders become tokens."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    tokenizer.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    images, videos = Qwen2VLImageProcessor(patch_size=16), Qwen3VLVideoProcessor(patch_size=16)
    Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(folder)
