# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the predictions need of a model: sizes of its parts, from a Hugging Face configuration or by a known name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_verl.config.support.table import refusal
from jetrl_verl.formats.catalog import UNQUANTIZED, cache_traits
from jetrl_verl.models import UnsupportedLayer, family
from jetrl_verl.models.families.base import read
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.tools.advise import AdviseError

BF16 = 2
"""Bytes of an element."""


def _config(
    model_type: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool = False,
    head_dim: int = 128,
    rope: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {
        **more,
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 1e6},
    }


_LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

KNOWN: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _config("qwen3", 28, 1024, 3072, 16, 8, 151936, True),
    "qwen3-1.7b": _config("qwen3", 28, 2048, 6144, 16, 8, 151936, True),
    "qwen3-4b": _config("qwen3", 36, 2560, 9728, 32, 8, 151936, True),
    "qwen3-8b": _config("qwen3", 36, 4096, 12288, 32, 8, 151936),
    "qwen3-14b": _config("qwen3", 40, 5120, 17408, 40, 8, 151936),
    "qwen3-32b": _config("qwen3", 64, 5120, 25600, 64, 8, 151936),
    "qwen3-30b-a3b": _config(
        *("qwen3_moe", 48, 2048, 6144, 32, 4, 151936),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen2.5-1.5b": _config("qwen2", 28, 1536, 8960, 12, 2, 151936, True),
    "qwen2.5-7b": _config("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-32b": _config("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "deepseek-r1-distill-qwen-1.5b": _config("qwen2", 28, 1536, 8960, 12, 2, 151936),
    "llama-3.1-8b": _config("llama", 32, 4096, 14336, 32, 8, 128256, rope=_LLAMA_3_1),
}
"""Configurations by name, for a machine that has no folder of the model: the fields that a prediction reads."""


@dataclass(frozen=True)
class ExpertSizes:
    """Of a layer's mixture of experts.

    Attributes:
        count, per_token: experts, and how many of them a token goes to.
        linears: (out, in, quantized) of each linear of one expert, gate and up fused.
    """

    count: int
    per_token: int
    linears: tuple[tuple[int, int, bool], ...]

    def hit(self, tokens: float) -> float:
        """How many experts at least one of ``tokens`` tokens goes to, in the mean, where each expert is as likely."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    Attributes:
        name: for the report. config: Hugging Face's.
        linears: (out, in, quantized) of each linear of a decoder layer as vLLM runs it, q/k/v and gate/up fused; of a
            mixture those that every token goes through, the router among them.
        layers, hidden, inner, vocabulary: counts; of a mixture, ``inner`` is that of all experts of a token.
        queries, keys: features of all heads, of q and of k.
        head_norms: whether each head of q and k has a norm. tied: whether lm_head is the embedding.
        experts: of a mixture, else None.
    """

    name: str
    config: Mapping[str, Any]
    linears: tuple[tuple[int, int, bool], ...]
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    queries: int
    keys: int
    head_norms: bool
    tied: bool
    experts: ExpertSizes | None = None

    def _of_layers(self, experts: int, quantized: bool = False) -> int:
        """Parameters of the decoder layers' linears, and of so many experts; all, or those that are quantized."""
        every = [*((1, each) for each in self.linears)]
        every += [(experts, each) for each in (() if self.experts is None else self.experts.linears)]
        return self.layers * sum(count * n * k for count, (n, k, fits) in every if fits or not quantized)

    @property
    def in_layers(self) -> int:
        """Parameters of all linears of the decoder layers."""
        return self._of_layers(0 if self.experts is None else self.experts.count)

    @property
    def quantized(self) -> int:
        """Those of them that a quantized precision quantizes."""
        return self._of_layers(0 if self.experts is None else self.experts.count, quantized=True)

    @property
    def active(self) -> int:
        """Those that one token is multiplied with."""
        return self._of_layers(0 if self.experts is None else self.experts.per_token)

    @property
    def active_quantized(self) -> int:
        """Those of them that are quantized."""
        return self._of_layers(0 if self.experts is None else self.experts.per_token, quantized=True)

    @property
    def head(self) -> int:
        """Parameters of lm_head, which is read at every token whether it is tied or not."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters but norms and biases."""
        return self.in_layers + self.head * (1 if self.tied else 2)

    @property
    def tensors_of_verl(self) -> int:
        """Tensors that verl's own weight sync sends: projections, norms and biases of each layer, embedding, last norm
        and head, one that is the embedding too. It takes experts apart, into three each."""
        ours = family(self.config)
        projections = len(ours.projections)
        if self.experts is not None:
            projections += 1 - 2 + 3 * self.experts.count  # the router; experts are two of the projections
        return self.layers * (projections + len(ours.norms) + (3 if ours.biased else 0)) + 3

    def kv_bytes(self, kv_cache: str = UNQUANTIZED) -> int:
        """Bytes of keys and values of one token, all layers.

        Args:
            kv_cache: what the cache holds, a value of ``jetrl.kv_cache``.
        """
        return 2 * self.layers * cache_traits(kv_cache).head_bytes(self.keys)


def model_of(name: str, config: Mapping[str, Any], tp: int = 1) -> Model:
    """The sizes of a Hugging Face configuration.

    Args:
        tp: tensor-parallel size of the rollout, which says which layers fit.

    Raises:
        AdviseError: an architecture that this package does not know, or a size that is not there.
    """
    try:
        ours = family(config)
        shapes = ours.shapes(config, tp)
        vocabulary, layers = config["vocab_size"], config["num_hidden_layers"]
    except UnsupportedLayer as unknown:
        raise AdviseError(refusal("model_of_a_command", path=name, command="advise", error=unknown)) from None
    except (KeyError, TypeError) as missing:
        raise AdviseError(f"{name} has no complete configuration ({missing}); name a Hugging Face folder.") from None
    try:
        plans = plan_linears(config, tp, unfit_layers="skip")
        fits = {suffix: plan.quantized for suffix, plan in plans.items()}
    except UnsupportedLayer:
        fits = dict.fromkeys(shapes, False)
    by_token, by_expert = (
        tuple(
            (sum(shapes[piece].n for piece in linear.pieces), shapes[linear.pieces[0]].k, fits[linear.pieces[0]])
            for linear in ours.linears
            if linear.experts == of_experts
        )
        for of_experts in (False, True)
    )
    q, k = shapes[ours.q].n, shapes[ours.k].n
    mixture, experts, inner = ours.experts, None, 0
    if mixture is not None:
        experts = ExpertSizes(mixture.number(config), read(config, mixture.per_token), by_expert)
        by_token += ((experts.count, shapes[ours.q].k, False),)
        inner = experts.per_token * shapes[mixture.down].k
    return Model(
        name,
        config,
        by_token,
        layers,
        shapes[ours.q].k,
        inner or shapes[ours.down].k,
        vocabulary,
        q,
        k,
        bool(ours.q_norm),
        bool(read(config, "tie_word_embeddings", False)),
        experts,
    )


def find_config(name: str) -> dict[str, Any]:
    """Configuration of a model folder, or of a known name with or without its owner (``Qwen/Qwen3-8B``).

    Raises:
        AdviseError: neither.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        try:
            model = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise AdviseError(f"{folder}/config.json is not readable ({error}); copy the folder again.") from None
        return _with_defaults(model, folder)
    known = known_name(name)
    if known is None:
        raise AdviseError(
            f"{name} is neither a folder with a config.json nor a known model ({', '.join(KNOWN)}); "
            "name a local folder of the model."
        )
    return KNOWN[known]


def known_name(name: str) -> str | None:
    """The key of ``KNOWN`` that a name, a hub name or the last part of a path is; a ``-base`` or ``-instruct`` has the
    shape of its model."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    for suffix in ("", "-base", "-instruct", "-thinking-2507", "-instruct-2507"):
        if last.endswith(suffix) and (short := last.removesuffix(suffix)) in KNOWN:
            return short
    return None


def _with_defaults(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What config.json leaves out takes the default of its class (Qwen3's head_dim, for one)."""
    from jetrl_verl.config.environment import read_model
    from jetrl_verl.config.options import UnsupportedConfiguration

    try:
        return read_model(str(folder)) or model
    except UnsupportedConfiguration as unreadable:
        raise AdviseError(str(unreadable)) from None
