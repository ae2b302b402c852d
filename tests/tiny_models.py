# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny decoders for tests: every shape is a multiple of 128, every bias is random."""

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
OWN_FIELDS = {
    # A rollout has no dropout; this family's default has.
    "seed_oss": dict(attention_dropout=0.0, residual_dropout=0.0),
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True),
}
"""Fields of one family."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Configuration of two layers, two heads of 128 over one key/value head; ``changes`` override single fields."""
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
    return FAMILIES[family][0](**(fields | OWN_FIELDS.get(family, {}) | changes))


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """FP32 model of :func:`tiny_config`. Biases are random: all are zero in transformers, which would hide a swap."""
    torch.manual_seed(seed)
    model = FAMILIES[family][1](tiny_config(family, **changes))
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
    """Save a two-layer BF16 decoder of :func:`with_preferences` and the demo's tokenizer.

    Args:
        padding: entries of the vocabulary without a token. changes: of :func:`tiny_model`.
    """
    from jetrl_verl.tools.demo.policy import build_tokenizer

    tokenizer = build_tokenizer()
    model = with_preferences(tiny_model(family, 3, vocab_size=len(tokenizer) + padding, **changes))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
