# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny decoders for tests: every shape is a multiple of 128, every bias is random."""

from collections.abc import Iterable
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
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
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
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
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
WITH_TOWER = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    **HYBRIDS,
}
"""Families whose decoder is a part of a model with a vision tower, which tests of names alone need not cover."""
ALL = FAMILIES | WITH_TOWER


def _mrope(sections: list[int], **others: float) -> dict:
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e7, mrope_section=sections) | others)


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
        **_mrope([11, 11, 10], mrope_interleaved=True, partial_rotary_factor=0.25),
    ),
    "qwen2_5_vl": _mrope([16, 24, 24]),
    # vLLM 0.29's CPU platform reads the text's architecture, which published ones do not name.
    "qwen3_vl": _mrope([24, 20, 20], mrope_interleaved=True) | dict(architectures=["Qwen3ForCausalLM"]),
}
OWN_FIELDS["qwen3_5_moe"] = OWN_FIELDS["qwen3_5"] | dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=256
)
"""Fields of one family."""
TINY_TOWER = dict(depth=2, hidden_size=64, intermediate_size=64, num_heads=2)
"""A vision tower, which text does not use."""
OWN_TOWER = {
    "qwen2_5_vl": dict(fullatt_block_indexes=[1], window_size=56),
    "qwen3_vl": dict(num_position_embeddings=64, deepstack_visual_indexes=[0]),
    **dict.fromkeys(HYBRIDS, dict(num_position_embeddings=64)),
}
"""Fields of one family's."""
PLACEHOLDERS = dict(vision_start_token_id=60, vision_end_token_id=61, image_token_id=62, video_token_id=63)
"""Tokens of :func:`tiny_config` that stand for an image, or are around it."""


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
    placeholders = {name: changes.pop(name, token) for name, token in PLACEHOLDERS.items()}
    fields |= OWN_FIELDS.get(family, {}) | changes
    if family not in WITH_TOWER:
        return FAMILIES[family][0](**fields)
    tower = TINY_TOWER | OWN_TOWER[family] | {"out_hidden_size": fields["hidden_size"]}
    parts = dict(text_config=fields, vision_config=tower, tie_word_embeddings=fields["tie_word_embeddings"])
    return WITH_TOWER[family][0](**parts, **placeholders)


def sequences_of(lengths: Iterable[int], seed: int = 0) -> list[torch.Tensor]:
    """Tokens of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (n,), generator=generator) for n in lengths]


def padded(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([len(s) for s in sequences])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64).masked_scatter_(mask, torch.cat(sequences))
    return dict(input_ids=ids, attention_mask=mask.long(), position_ids=torch.arange(mask.shape[1]) * mask)


def packed(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """As verl's engine packs a micro-batch."""
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return dict(input_ids=torch.cat(sequences)[None], position_ids=positions[None])


def with_image(model: PreTrainedModel, text: list[int], grid: tuple[int, int] = (4, 8), seed: int = 0) -> dict:
    """Inputs of a sequence: an image of ``grid`` patches after the first token of a text, and that text's rest.
    Position ids have the text's row first, as verl's."""
    config, (height, width) = model.config, grid
    start, end, image = (getattr(config, f"{name}_token_id") for name in ("vision_start", "vision_end", "image"))
    ids = torch.tensor([[text[0], start, *[image] * (height * width // 4), end, *text[1:]]])
    tower, grids = config.vision_config, torch.tensor([[1, height, width]])
    pixels = torch.randn(
        height * width,
        tower.in_channels * tower.temporal_patch_size * tower.patch_size**2,
        generator=torch.Generator().manual_seed(seed),
    )
    positions, _ = model.model.get_rope_index(
        ids, image_grid_thw=grids, mm_token_type_ids=(ids == image).int(), attention_mask=torch.ones_like(ids)
    )
    positions = torch.cat([torch.arange(ids.shape[1])[None, None], positions])
    return dict(input_ids=ids, position_ids=positions, pixel_values=pixels, image_grid_thw=grids)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """FP32 model of :func:`tiny_config`. Biases are random: all are zero in transformers, which would hide a swap."""
    torch.manual_seed(seed)
    model = ALL[family][1](tiny_config(family, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def with_preferences(model):
    """``model`` itself with random norms and larger projections, so that its policy is far from uniform, and small
    biases of a tower, next to which an image shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "visual" in name and name.endswith("bias"):
                parameter.mul_(0.02)
            elif name.endswith(("proj.weight", "experts.gate_up_proj", "experts.down_proj")):
                parameter.mul_(3)
    return model


IMAGE_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part is string %}{{ part }}"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
"""Chat template of messages whose content is a text, or a list of texts and images."""


def save_processor(folder: Path, family: str, tokenizer: Any) -> dict[str, int]:
    """Save the processor of a family with a tower, with images of at most 16 tokens; adds its tokens to ``tokenizer``.

    Returns:
        The configuration's fields of these tokens.
    """
    import transformers as hf

    tokens = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
    tokenizer.add_tokens(tokens, special_tokens=True)
    name = "Qwen2_5_VL" if family == "qwen2_5_vl" else "Qwen3VL"
    patch = 14 if family == "qwen2_5_vl" else 16
    sizes = dict(patch_size=patch, size={"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2})
    videos = hf.Qwen2VLVideoProcessor if family == "qwen2_5_vl" else hf.Qwen3VLVideoProcessor
    tokenizer.chat_template = IMAGE_TEMPLATE
    processor = getattr(hf, f"{name}Processor")(
        image_processor=hf.Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=videos(**sizes),
        chat_template=IMAGE_TEMPLATE,
    )
    processor.save_pretrained(folder)
    return dict(zip(PLACEHOLDERS, tokenizer.convert_tokens_to_ids(tokens), strict=True))


def save_policy(folder: Path, family: str, padding: int = 0, **changes: Any) -> Path:
    """Save a BF16 decoder of :func:`with_preferences` and the demo's tokenizer; of a family with a tower a processor as
    well, as published ones have it, where torchvision is installed, which its class needs.

    Args:
        padding: entries of the vocabulary without a token. changes: of :func:`tiny_model`.
    """
    from jetrl_verl.tools.demo.policy import build_tokenizer

    tokenizer = build_tokenizer()
    if family == "qwen2":
        # transformers loads Qwen2Tokenizer, which writes these in other characters unless they are added tokens.
        tokenizer.add_tokens(["\n", " "])
    if family in WITH_TOWER and find_spec("torchvision"):
        changes |= save_processor(folder, family, tokenizer)
    model = with_preferences(tiny_model(family, 3, vocab_size=len(tokenizer) + padding, **changes))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
