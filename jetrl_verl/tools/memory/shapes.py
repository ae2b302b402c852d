# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that memory depends on, from a Hugging Face configuration or a known name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_verl.config.model import read_model
from jetrl_verl.config.support.table import refusal
from jetrl_verl.formats.catalog import UNQUANTIZED, cache_traits
from jetrl_verl.inputs import UserError, reading
from jetrl_verl.models import UnsupportedLayer, family
from jetrl_verl.models.families.base import read
from jetrl_verl.models.plan import plan_linears

_FIELDS = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
_SHARED = {"head_dim": 128, "hidden_act": "silu"}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}

KNOWN: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, sizes, strict=True)) | _SHARED | (_EXPERTS if sizes[0] == "qwen3_moe" else {})
    for name, *sizes in (
        ("qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 151936, True),
        ("qwen3-1.7b", "qwen3", 28, 2048, 6144, 16, 8, 151936, True),
        ("qwen3-4b", "qwen3", 36, 2560, 9728, 32, 8, 151936, True),
        ("qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 151936, False),
        ("qwen3-14b", "qwen3", 40, 5120, 17408, 40, 8, 151936, False),
        ("qwen3-32b", "qwen3", 64, 5120, 25600, 64, 8, 151936, False),
        ("qwen3-30b-a3b", "qwen3_moe", 48, 2048, 6144, 32, 4, 151936, False),
        ("qwen2.5-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 151936, True),
        ("qwen2.5-7b", "qwen2", 28, 3584, 18944, 28, 4, 152064, False),
        ("qwen2.5-32b", "qwen2", 64, 5120, 27648, 40, 8, 152064, False),
        ("deepseek-r1-distill-qwen-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 151936, False),
        ("llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128256, False),
    )
}
"""Name -> the fields of its configuration that memory depends on."""


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    Attributes:
        inner: width of the MLP; of a mixture, of all experts of a token together.
        queries, keys: features of all query heads, and of all key heads.
        layer: parameters of the linears of one decoder layer.
        quantized: parameters, of all layers, that a quantized precision quantizes.
        tied: whether lm_head is the embedding.
        experts, experts_per_token: of a mixture; 0 of a dense model.
    """

    name: str
    config: Mapping[str, Any]
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    queries: int
    keys: int
    layer: int
    quantized: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def head(self) -> int:
        """Parameters of lm_head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters but norms and biases: ``layers * layer + V H``, and ``V H`` again unless tied."""
        return self.layers * self.layer + self.head * (1 if self.tied else 2)

    def kv_bytes(self, kv_cache: str = UNQUANTIZED) -> int:
        """Bytes of keys and values of one token, with their scales; ``kv_cache`` is a value of ``jetrl.kv_cache``."""
        return 2 * self.layers * cache_traits(kv_cache).head_bytes(self.keys)


def model_of(name: str, config: Mapping[str, Any], tp: int = 1) -> Model:
    """The sizes of a Hugging Face configuration; ``tp``, of the rollout, decides which layers can be quantized."""
    try:
        decoder = family(config)
    except UnsupportedLayer as error:
        words = {"what": f"the model {name}", "scope": "jetrl memory", "why": str(error)}
        raise UserError(refusal("model_of_a_command", **words)) from None
    try:
        fits = {piece for piece, plan in plan_linears(config, tp, unfit_layers="skip").items() if plan.quantized}
    except UnsupportedLayer:
        fits = set()
    shapes, mixture = decoder.shapes(config, tp), decoder.experts
    hidden = shapes[decoder.q].k
    experts = 0 if mixture is None else mixture.number(config)
    per_token = 0 if mixture is None else read(config, mixture.per_token)
    layer, quantized = experts * hidden, 0  # the router
    for linear in decoder.linears:
        for piece in linear.pieces:
            count = shapes[piece].n * shapes[piece].k * (experts if linear.experts else 1)
            layer += count
            quantized += count if piece in fits else 0
    return Model(
        name,
        config,
        read(config, "num_hidden_layers"),
        hidden,
        shapes[decoder.down].k if mixture is None else per_token * shapes[mixture.down].k,
        read(config, "vocab_size"),
        shapes[decoder.q].n,
        shapes[decoder.k].n,
        layer,
        read(config, "num_hidden_layers") * quantized,
        bool(read(config, "tie_word_embeddings", False)),
        experts,
        per_token,
    )


def find_config(name: str) -> Mapping[str, Any]:
    """Configuration of a model folder, or of a known name with or without its owner; ``-base`` and ``-instruct`` have
    the sizes of their model."""
    with reading(name, "name of a model", "Set a local folder"):
        exists = Path(name).expanduser().exists()
    if exists:
        return read_model(str(Path(name).expanduser().absolute())).config
    short = name.rstrip("/").rpartition("/")[2].lower().removesuffix("-2507")
    for suffix in ("-base", "-instruct", "-thinking"):
        short = short.removesuffix(suffix)
    if short not in KNOWN:
        raise UserError(f"the model {name} is not known here. Set a local folder, or one of {', '.join(KNOWN)}.")
    return KNOWN[short]
