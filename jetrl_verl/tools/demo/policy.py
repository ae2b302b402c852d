# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's policies, a Qwen3, a Qwen3 mixture of experts and a Qwen3.5 of one to three million parameters, and their
tokenizer, whose vocabulary is theirs.

All sizes are multiples of 128, so every linear layer is quantized but those of a delta net's gates."""

import string
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jetrl_verl.formats.catalog import FLOW, FORMATS

PAD, UNKNOWN, TURN_START, TURN_END = "<|endoftext|>", "<|unknown|>", "<|im_start|>", "<|im_end|>"
_BLOCK = FORMATS[FLOW].block
SPECIAL_TOKENS = (PAD, UNKNOWN, TURN_START, TURN_END)
WHOLE_TOKENS = ("user", "assistant", "system", "####")
CHARACTERS = "\n" + "".join(c for c in string.printable if c.isprintable())

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class PolicyConfig:
    """Shape of the policy; with ``experts`` a mixture whose experts are ``intermediate_size`` wide, with
    ``delta_heads`` a hybrid of that many linear layers' value heads, whose last layer has attention.

    Raises ``ValueError`` for a size that is not a multiple of the FP8 block.
    """

    hidden_size: int = 256
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = _BLOCK
    intermediate_size: int = 512
    max_positions: int = 256
    seed: int = 7
    experts: int = 0
    experts_per_token: int = 2
    delta_heads: int = 0

    def __post_init__(self):
        for name in ("hidden_size", "head_dim", "intermediate_size"):
            size = getattr(self, name)
            if size <= 0 or size % _BLOCK:
                raise ValueError(f"{name}={size} is not a multiple of {_BLOCK}, the FP8 block; choose a multiple")


_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_ROPE |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
"""Of Qwen3.5 as it is published."""

POLICIES = {
    "dense": PolicyConfig(),
    "moe": PolicyConfig(intermediate_size=_BLOCK, experts=8),
    "hybrid": PolicyConfig(layers=3, heads=4, kv_heads=4, head_dim=2 * _BLOCK, delta_heads=2),
}
"""What ``--policy`` names."""


def build_tokenizer():
    """The tokenizer as a ``PreTrainedTokenizerFast``; ``len(tokenizer)`` is the policy's vocabulary size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # normalized=False: matched on the raw text, before characters are split.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in WHOLE_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(config: PolicyConfig, tokenizer):
    """The untrained policy with FP32 weights from ``config.seed``; the global random state does not change."""
    import torch
    import transformers as hf

    config_class, model_class, fields = hf.Qwen3Config, hf.Qwen3ForCausalLM, {}
    if config.experts:
        config_class, model_class = hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM
        fields = {
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.intermediate_size,
            "norm_topk_prob": True,
        }
    if config.delta_heads:
        model_class, config_class = hf.Qwen3_5ForConditionalGeneration, partial(_hybrid_config, hf.Qwen3_5Config)
        fields = {
            "layer_types": ["linear_attention"] * (config.layers - 1) + ["full_attention"],
            "linear_num_key_heads": config.delta_heads // 2,
            "linear_num_value_heads": config.delta_heads,
            "rope_parameters": _ROPE,
        }
    model_config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return model_class(model_config)


def _hybrid_config(config_class, *, tie_word_embeddings: bool, **fields):
    """A text decoder of ``fields`` under a small vision tower, as the family is published."""
    tower = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 64}
    return config_class(
        text_config=fields | {"tie_word_embeddings": tie_word_embeddings},
        vision_config=tower | {"out_hidden_size": fields["hidden_size"]},
        tie_word_embeddings=tie_word_embeddings,
    )


def save_policy(model, tokenizer, folder: Path) -> None:
    """Write model (in BF16, as published checkpoints) and tokenizer to ``folder``."""
    import torch

    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
