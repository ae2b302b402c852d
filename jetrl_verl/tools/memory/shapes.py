# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that memory depends on, from a Hugging Face configuration or a known name."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from jetrl_verl.config.built import build
from jetrl_verl.config.model import read_model
from jetrl_verl.config.support.table import refusal
from jetrl_verl.formats.catalog import UNQUANTIZED, cache_traits
from jetrl_verl.inputs import UserError, reading
from jetrl_verl.models import UnsupportedLayer, family
from jetrl_verl.models.families.base import page_tokens, read
from jetrl_verl.models.plan import plan_linears

BF16, FP32 = 2, 4  # bytes

_FIELDS = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
_SIZES = (
    ("qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 151936, True),
    ("qwen3-1.7b", "qwen3", 28, 2048, 6144, 16, 8, 151936, True),
    ("qwen3-4b", "qwen3", 36, 2560, 9728, 32, 8, 151936, True),
    ("qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 151936, False),
    ("qwen3-14b", "qwen3", 40, 5120, 17408, 40, 8, 151936, False),
    ("qwen3-32b", "qwen3", 64, 5120, 25600, 64, 8, 151936, False),
    ("qwen3-30b-a3b", "qwen3_moe", 48, 2048, 6144, 32, 4, 151936, False),
    ("qwen2.5-0.5b", "qwen2", 24, 896, 4864, 14, 2, 151936, True),
    ("qwen2.5-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 151936, True),
    ("qwen2.5-7b", "qwen2", 28, 3584, 18944, 28, 4, 152064, False),
    ("qwen2.5-32b", "qwen2", 64, 5120, 27648, 40, 8, 152064, False),
    ("deepseek-r1-distill-qwen-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 151936, False),
    ("llama-3.2-1b", "llama", 16, 2048, 8192, 32, 8, 128256, True),
    ("llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128256, False),
    ("qwen3.5-0.8b", "qwen3_5", 24, 1024, 3584, 8, 2, 248320, True),
    ("qwen3.5-2b", "qwen3_5", 24, 2048, 6144, 8, 2, 248320, True),
    ("qwen3.5-4b", "qwen3_5", 32, 2560, 9216, 16, 4, 248320, True),
    ("qwen3.5-9b", "qwen3_5", 32, 4096, 12288, 16, 4, 248320, False),
    ("qwen3.5-27b", "qwen3_5", 64, 5120, 17408, 24, 4, 248320, False),
    ("qwen3.5-35b-a3b", "qwen3_5_moe", 40, 2048, None, 16, 2, 248320, False),
    ("qwen3-vl-8b", "qwen3_vl", 36, 4096, 12288, 32, 8, 151936, False),
    ("qwen2.5-vl-7b", "qwen2_5_vl", 28, 3584, 18944, 28, 4, 152064, False),
)

_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_ROPE |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
_TURNS = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_HYBRID = {"rope_parameters": _ROPE, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
_HYBRID |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
_OF_35B = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
_OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID | _OF_35B | {"shared_expert_intermediate_size": 512},
    "qwen3_vl": {"rope_parameters": _TURNS},
    "qwen2_5_vl": {"rope_parameters": _SECTIONS},
    "qwen2.5-0.5b": {"head_dim": 64},
    "llama-3.2-1b": {"head_dim": 64},
    "qwen3.5-0.8b": {"linear_num_value_heads": 16},
    "qwen3.5-2b": {"linear_num_value_heads": 16},
    "qwen3.5-27b": {"linear_num_value_heads": 48},
}
"""Further fields of a type's decoder, or of one model's."""

_TOWER_FIELDS = ("depth", "hidden_size", "intermediate_size", "num_heads")
_TOWERS = {"qwen3.5-0.8b": (12, 768, 3072, 12), "qwen2.5-vl-7b": (32, 1280, 3420, 16)}
_TOWERS |= dict.fromkeys(("qwen3.5-2b", "qwen3.5-4b"), (24, 1024, 4096, 16))
_TOWERS |= dict.fromkeys(("qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-vl-8b"), (27, 1152, 4304, 16))


def _fields_of(name: str, model_type: str, *sizes: Any) -> dict[str, Any]:
    decoder = dict(zip(_FIELDS, (model_type, *sizes), strict=True)) | {"head_dim": 128, "hidden_act": "silu"}
    decoder |= _OTHERS.get(model_type, {}) | _OTHERS.get(name, {})
    if name not in _TOWERS:
        return decoder
    tower = dict(zip(_TOWER_FIELDS, _TOWERS[name], strict=True)) | {"out_hidden_size": decoder["hidden_size"]}
    whole = {field: decoder[field] for field in ("model_type", "tie_word_embeddings")}
    return whole | {"text_config": decoder | {"model_type": f"{model_type}_text"}, "vision_config": tower}


KNOWN: dict[str, dict[str, Any]] = {name: _fields_of(name, *sizes) for name, *sizes in _SIZES}
"""Name -> the fields of its configuration that memory depends on."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model.

    Attributes:
        inner: width of the MLP; of a mixture, of all experts of a token and the shared one together.
        mixing: features that the first half of a layer has between its projections, of the kind with most.
        keys: features of the key heads in a replica's caches; more ranks than heads have copies.
        caching, recurrent: layers with keys and values, with a delta net.
        layer, linears: parameters of the linears of the largest decoder layer, and of all.
        quantized: parameters, of all layers, that a quantized precision quantizes.
        edges: rows and columns of all linear layers but experts; times the rank, parameters of LoRA adapters.
        tied: whether lm_head is the embedding.
        experts, experts_per_token, expert_width: of a mixture; 0 of a dense model.
        results: bytes of a token that selective checkpointing keeps in all layers (kernels/recomputation.py), without
            experts: results of products, attention with its log-sum-exp, and delta rules.
        state_bytes: of a request in one delta net, whatever its length: the FP32 state, and three BF16 inputs of the
            convolution. chunk_bytes: what shared operations add to it, rows of the open chunk.
        tower: parameters of a vision tower, which no other number has.
    """

    name: str
    config: Mapping[str, Any]
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    mixing: int
    keys: int
    caching: int
    recurrent: int
    layer: int
    linears: int
    quantized: int
    edges: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    results: int = 0
    state_bytes: int = 0
    chunk_bytes: int = 0
    tower: int = 0

    @property
    def head(self) -> int:
        """Parameters of lm_head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters but norms and biases: ``linears + V H``, and ``V H`` again unless tied."""
        return self.linears + self.head * (1 if self.tied else 2)

    def kv_bytes(self, kv_cache: str = UNQUANTIZED) -> int:
        """Bytes of keys and values of one token, with their scales; ``kv_cache`` is a value of ``jetrl.kv_cache``."""
        return 2 * self.caching * cache_traits(kv_cache).head_bytes(self.keys)

    def delta_bytes(self, shared: bool) -> int:
        """Bytes of a request in one delta net; ``shared``: shared operations."""
        return self.state_bytes + (self.chunk_bytes if shared else 0)

    def request_bytes(
        self, tokens: int, kv_cache: str = UNQUANTIZED, prefix_caching: bool = True, shared: bool = False
    ) -> float:
        """Bytes of vLLM's cache that it counts for a request of that many tokens; ``shared``: shared operations.

        A hybrid's page has a state, or keys and values of as many tokens as fill one, a multiple of 16. With prefix
        caching a request has two states in each delta net: the current one, and the one at the last page's end.
        """
        of_token = self.kv_bytes(kv_cache)
        if not self.recurrent:
            return tokens * of_token
        of_layer = of_token / self.caching
        of_page = page_tokens(self.delta_bytes(shared), of_layer)
        states = self.recurrent * (2 if prefix_caching else 1)
        return (self.caching * ceil(tokens / of_page) + states) * of_page * of_layer


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
    per_token, of_expert = (0, 0) if mixture is None else (read(config, mixture.per_token), shapes[mixture.down].k)
    kinds, mixing, state_bytes, chunk_bytes = decoder.kinds(config), 0, 0, 0
    copies = max(1, tp // read(config, "num_key_value_heads", read(config, "num_attention_heads")))
    layer = linears = quantized = edges = results = 0
    for kind in decoder.distinct_kinds:
        counts = {
            piece: shapes[piece].n * shapes[piece].k * (experts if linear.experts else 1)
            for linear in kind.linears
            for piece in linear.pieces
        }
        parameters, number = experts * hidden + sum(counts.values()), kinds.count(kind)  # experts * hidden: the router
        between = kept = 0
        if kind.q:  # projected, and what attention and a gate make of it
            projected, core = shapes[kind.q].n + 2 * shapes[kind.k].n, shapes[kind.o].k
            between = projected + core * (2 if kind.gated else 1)
            kept = BF16 * (projected + core) + FP32 * read(config, "num_attention_heads")
        if (delta := kind.delta_net) is not None:
            (_, values), mixed = delta.features(config), shapes[delta.qkv].n
            parameters += read(config, delta.width) * mixed
            between = 2 * mixed + 3 * values
            kept = BF16 * (mixed + 2 * values) + 2 * FP32 * read(config, delta.value_heads)
            state_bytes, chunk_bytes = delta.state_bytes(config)
        kept += BF16 * hidden + FP32 * experts + (2 * BF16 * shapes[kind.down].k if kind.has_mlp else 0)
        kept += BF16 * hidden + FP32 if mixture is not None and mixture.shared_gate else 0
        results += number * kept
        layer, mixing = max(layer, parameters), max(mixing, between)
        linears += number * parameters
        quantized += number * sum(count for piece, count in counts.items() if piece in fits)
        adapted = (piece for linear in kind.linears if not linear.experts for piece in linear.pieces)
        edges += number * sum(shapes[piece].n + shapes[piece].k for piece in adapted)
    return Model(
        name,
        config,
        read(config, "num_hidden_layers"),
        hidden,
        per_token * of_expert + (shapes[decoder.down].k if decoder.has_mlp else 0),
        read(config, "vocab_size"),
        mixing,
        copies * shapes[decoder.k].n,
        sum(bool(kind.q) for kind in kinds),
        sum(kind.delta_net is not None for kind in kinds),
        layer,
        linears,
        quantized,
        edges,
        bool(read(config, "tie_word_embeddings", False)),
        experts,
        per_token,
        of_expert,
        results,
        state_bytes,
        chunk_bytes,
        _tower_of(name, config),
    )


def _tower_of(name: str, config: Mapping[str, Any]) -> int:
    """Parameters of a vision tower, counted on the meta device; 0 without one."""
    if not (tower := family(config).tower):
        return 0
    no_layers = {"text_config": {**config["text_config"], "num_hidden_layers": 0, "layer_types": []}}
    return sum(
        parameter.numel() for parameter in build(name, {**config, **no_layers}).get_submodule(tower).parameters()
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
