# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a model family is: the names and shapes of a decoder layer on both sides, and what is supported of it.

The defaults are the dense decoder that Llama introduced: q/k/v/o, gate/up/down, a norm in front of each half. A family
states what differs, in a file of its own (families/, docs/families.md). No other module names a projection or a norm.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from jetrl_verl import kernels

SHARED_FIELDS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "layer_types",
    "logit_scale",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
)
"""Fields of a configuration that change what the operations between the linears compute on both sides."""


class Unsupported(ValueError):
    """A model, or a part of one, that this package cannot run. The text is why; the table of support (config/support),
    which lies above this package, has the sentence.

    Attributes:
        row: name of the table's row. words: what else the row's texts name.
    """

    def __init__(self, reason: str, row: str = "", **words: Any) -> None:
        super().__init__(reason)
        self.row, self.words = row, words


class UnsupportedLayer(Unsupported):
    """A model or one of its linear layers cannot take part in the FP8 flow."""


class UnsupportedOperation(Unsupported):
    """The shared operations do not cover a model."""


class Place(NamedTuple):
    """Where a module or parameter of a decoder layer is.

    Attributes:
        layer: name of the decoder layer, ``model.layers.3``. index: its number.
        module: name below the layer, ``self_attn.q_proj``. leaf: ``weight``, ``bias``, or empty for a module.
    """

    layer: str
    index: int
    module: str
    leaf: str


_PLACE = re.compile(r"((?:.*\.)?layers\.(\d+))\.(.+?)(?:\.(weight|bias))?")


@cache
def place(name: str) -> Place | None:
    """Take a module's or parameter's name apart; None for what is in no decoder layer."""
    match = _PLACE.fullmatch(name)
    return Place(match[1], int(match[2]), match[3], match[4] or "") if match else None


def leaf(name: str) -> str:
    """Last part of a module's name."""
    return name.rpartition(".")[2]


def read(config: Any, name: str, default: Any = None) -> Any:
    """Field of a Hugging Face configuration, object or mapping; ``default`` where it is absent or None."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


class Shape(NamedTuple):
    """Of one projection of the trainer: output (n) and input features (k), whole and per rank of the rollout."""

    n: int
    k: int
    shard_n: int
    shard_k: int


@dataclass(frozen=True)
class Linear:
    """One linear layer of vLLM's decoder layer.

    Attributes:
        name: vLLM's module below the layer.
        pieces: the trainer's modules that it is stacked from, in row order.
        kind: under which metrics and reports list it.
        row_parallel: tensor parallelism splits its input (K) dimension; otherwise its output (N).
        norm: the norm whose result these linears alone read, same name on both sides.
        activation: vLLM's activation whose result this linear alone reads.
        experts: whether it is one parameter of all experts of a mixture, ``[E, N, K]``, and no module of its own.
    """

    name: str
    pieces: tuple[str, ...]
    kind: str
    row_parallel: bool = False
    norm: str = ""
    activation: str = ""
    experts: bool = False


@dataclass(frozen=True)
class Routing:
    """How a mixture chooses a token's experts; trainer and rollout have to agree in all of it.

    Attributes:
        experts: how many there are. per_token: how many of them a token goes to.
        scoring: what makes probabilities of the router's logits. renormalize: whether a token's weights add up to 1.
    """

    experts: int
    per_token: int
    scoring: str
    renormalize: bool

    def __str__(self) -> str:
        weights = "renormalized" if self.renormalize else "not renormalized"
        return f"{self.per_token} of {self.experts} experts a token by {self.scoring}, weights {weights}"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in a decoder layer's second half; names are relative to the layer.

    Attributes:
        block: what the post norm feeds: router and experts, same name on both sides.
        router: its linear layer, same name on both sides. It is not quantized.
        module: the trainer's experts. gate_up, down: their parameters, ``[E, 2 I, H]`` and ``[E, H, I]``.
        held: vLLM's module that has the experts' parameters.
        parameters: the trainer's parameter -> vLLM's.
        each: gate, up and down of one expert in a published checkpoint, below ``<module>.<number>``.
        count: fields of the configuration of which one has E: the published one, and what transformers 5 writes.
        per_token, width, renormalize: fields with k, I, and whether the k weights of a token are made to add up to 1.
        scoring: what makes probabilities of the router's logits.
    """

    block: str = "mlp"
    router: str = "mlp.gate"
    module: str = "mlp.experts"
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    held: str = "mlp.experts.routed_experts"
    parameters: tuple[tuple[str, str], ...] = (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight"))
    each: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    per_token: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    renormalize: str = "norm_topk_prob"
    scoring: str = "softmax"

    def number(self, config: Any) -> int:
        """E of a Hugging Face configuration, object or mapping."""
        return next((count for name in self.count if (count := read(config, name)) is not None), 0)


@dataclass(frozen=True)
class Family:
    """A decoder. Fields are names of modules; those of a layer are relative to it.

    Attributes:
        model_type: as in ``config.json``.
        layers: the list of decoder layers in the whole model, same name on both sides.
        attention: the layer's first half. input_norm, post_norm: the norms in front of attention and MLP.
        q, k, v, o, gate, up, down: the trainer's projections. o and down have this name in vLLM, too.
        q_norm, k_norm: norms on each head of the queries and keys; empty where the family has none.
        qkv, gate_up: vLLM's merged projections. activation, rotary, core: its SiLU * up, rotary embedding, attention.
        dropouts: fields of the configuration with rates of dropout, which only the trainer reads.
        experts: of the second half, where it is a mixture instead of gate, up and down.
    """

    model_type: str

    layers: str = "model.layers"
    attention: str = "self_attn"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    q_norm: str = ""
    k_norm: str = ""

    qkv: str = "self_attn.qkv_proj"
    gate_up: str = "mlp.gate_up_proj"
    activation: str = "mlp.act_fn"
    rotary: str = "self_attn.rotary_emb"
    core: str = "self_attn.attn"
    dropouts: tuple[str, ...] = ("attention_dropout",)
    experts: Experts | None = None

    # --- what the linears are ----------------------------------------------------------------------------------------

    @property
    def linears(self) -> tuple[Linear, ...]:
        """vLLM's linear layers of a decoder layer, in the order in which they run."""
        attention = (
            Linear(self.qkv, (self.q, self.k, self.v), "qkv", norm=self.input_norm),
            Linear(self.o, (self.o,), "o", row_parallel=True),
        )
        if (mixture := self.experts) is not None:
            return (
                *attention,
                Linear(mixture.gate_up, (mixture.gate_up,), "gate_up", experts=True),
                Linear(mixture.down, (mixture.down,), "down", row_parallel=True, experts=True),
            )
        return (
            *attention,
            Linear(self.gate_up, (self.gate, self.up), "gate_up", norm=self.post_norm),
            Linear(self.down, (self.down,), "down", row_parallel=True, activation=self.activation),
        )

    @property
    def pieces(self) -> dict[str, tuple[str, ...]]:
        """vLLM's linear -> the trainer's, in row order."""
        return {linear.name: linear.pieces for linear in self.linears}

    @property
    def projections(self) -> tuple[str, ...]:
        """The trainer's projections of a decoder layer, in the order in which they run: q, k, v, o, gate, up, down."""
        return tuple(name for linear in self.linears for name in linear.pieces)

    @property
    def norms(self) -> tuple[str, ...]:
        """All norms of a decoder layer."""
        return tuple(name for name in (self.input_norm, self.q_norm, self.k_norm, self.post_norm) if name)

    @property
    def fed_by_norms(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(norm, the trainer's projections that it alone feeds and that nothing else does): a norm quantizes for them,
        and invariant scaling is folded in there. Experts are not among them, since the router reads their norm, too."""
        return tuple((linear.norm, linear.pieces) for linear in self.linears if linear.norm)

    @property
    def readers(self) -> dict[str, str]:
        """vLLM's norm or activation -> the linear that alone reads its result; both relative to the module that holds
        the norm or activation."""
        found = {}
        for linear in self.linears:
            if source := linear.norm or linear.activation:
                holder = source.removesuffix(leaf(source))
                found[leaf(source)] = linear.name.removeprefix(holder)
        return found

    def shapes(self, config: Any, tp: int = 1) -> dict[str, Shape]:
        """Projection of the trainer -> its shape, in the order of :attr:`linears`; of a mixture that of one expert.

        Args:
            config: Hugging Face configuration, object or mapping.
            tp: tensor-parallel size of the rollout.
        """
        mixture = self.experts
        inner = read(config, "intermediate_size" if mixture is None else mixture.width)
        hidden = read(config, "hidden_size")
        heads = read(config, "num_attention_heads")
        kv_heads = read(config, "num_key_value_heads", heads)
        head_dim = self.head_dim(config)
        q, kv = heads * head_dim, kv_heads * head_dim
        whole = {
            self.q: (q, hidden),
            self.k: (kv, hidden),
            self.v: (kv, hidden),
            self.o: (hidden, q),
        }
        if mixture is None:
            whole |= {self.gate: (inner, hidden), self.up: (inner, hidden), self.down: (hidden, inner)}
        else:
            whole |= {mixture.gate_up: (2 * inner, hidden), mixture.down: (hidden, inner)}
        # vLLM replicates key/value heads when there are fewer of them than ranks.
        kv_shard = max(kv_heads // tp, 1) * head_dim
        shapes = {}
        for linear in self.linears:
            for name in linear.pieces:
                n, k = whole[name]
                if linear.row_parallel:
                    shapes[name] = Shape(n, k, n, k // tp)
                else:
                    shapes[name] = Shape(n, k, kv_shard if name in (self.k, self.v) else n // tp, k)
        return shapes

    def head_dim(self, config: Any) -> int:
        """Features of one attention head."""
        return read(config, "head_dim", read(config, "hidden_size") // read(config, "num_attention_heads"))

    def deals_heads(self, config: Any, tp: int) -> bool:
        """Whether vLLM can deal the heads over ``tp`` ranks: as many each, key heads shared where there are fewer."""
        heads = read(config, "num_attention_heads")
        kv_heads = read(config, "num_key_value_heads", heads)
        return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)

    # --- what is supported -------------------------------------------------------------------------------------------

    def check(self, config: Any) -> None:
        """Raise ``UnsupportedLayer`` where vLLM's class computes something else than Hugging Face's."""

    def as_trained(self, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration with those of the trainer's ``overrides`` that the rollout need not share: the dropouts."""
        return {**config, **{name: overrides[name] for name in self.dropouts if name in overrides}}

    def slides(self, config: Any) -> bool:
        """Whether a layer of the model attends to a window of the tokens before it."""
        layer_types = read(config, "layer_types", [])
        return "sliding_attention" in layer_types or (not layer_types and read(config, "sliding_window") is not None)

    def check_operations(self, config: Any) -> None:
        """Raise ``UnsupportedOperation`` unless the shared operations cover a model of this family.

        Args:
            config: the trainer's Hugging Face configuration, object or mapping.
        """
        for uncovered in self.uncovered_operations(config):
            raise uncovered

    def uncovered_operations(self, config: Any) -> Iterator[UnsupportedOperation]:
        """All that the shared operations do not cover of a model of this family."""
        rope = read(config, "rope_parameters", {})
        kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
        scores = read(config, "attn_logit_softcapping") or read(config, "final_logit_softcapping")
        for row, wrong, what in (
            ("head_dim", self.head_dim(config) != kernels.HEAD_DIM, f"heads of {self.head_dim(config)}"),
            ("partial_rotary", part != 1.0, f"partial_rotary_factor={part}"),
            ("rope_type", kind not in kernels.ROPE_TYPES, f"rope_type={kind}"),
            ("activation", read(config, "hidden_act") != "silu", f"the activation {read(config, 'hidden_act')}"),
            ("sliding_window", self.slides(config), "sliding window attention"),
            ("soft_cap", scores, "soft-capped scores or logits"),
            ("logit_scale", read(config, "logit_scale", 1.0) != 1.0, "scaled logits"),
            *((name, read(config, name, 0.0) != 0.0, name.replace("_", " ")) for name in self.dropouts),
        ):
            if wrong:
                yield UnsupportedOperation(f"the shared operations do not cover {what}", row)
