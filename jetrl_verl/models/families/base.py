# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A model family: names and shapes of a decoder layer on both sides, and what of it is supported.

The defaults are Llama's dense decoder; a family states what differs, in a file of its own (docs/families.md). No other
module names a projection or a norm.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, prod
from typing import Any, NamedTuple

from jetrl_verl import kernels
from jetrl_verl.kernels.probe_inputs import Variant
from jetrl_verl.reference.delta_net import state_shape


class Unsupported(ValueError):
    """A model, or a part of one, that is not supported; the text is why, config/support has the full message.

    Attributes:
        row: of the table of support. largest: number of the rollout's ranks that would do, below the job's.
    """

    def __init__(self, reason: str, row: str = "", largest: int | None = None) -> None:
        super().__init__(reason)
        self.row, self.largest = row, largest


class UnsupportedLayer(Unsupported):
    """A model or one of its linear layers cannot be quantized."""


class UnsupportedOperation(Unsupported):
    """The shared operations do not cover a model."""


class Place(NamedTuple):
    """The parts of a name in a decoder layer.

    Attributes:
        layer: ``model.layers.3``. index: 3.
        module: name below the layer, ``self_attn.q_proj``. leaf: ``weight``, ``bias``, or empty for a module.
    """

    layer: str
    index: int
    module: str
    leaf: str


_VLLM_FIELDS = {"is_causal": True, "qk_norm": False, "bias": False, "ada_rms_norm_t_cond": False} | dict.fromkeys(
    ("qkv_bias", "dual_chunk_attention_config", "llama_4_scaling")
)
"""Fields of a configuration that vLLM's classes alone read -> the value that changes nothing."""

_PLACE = re.compile(r"((?:.*\.)?layers\.(\d+))\.(.+?)(?:\.(weight|bias))?")


@cache
def place(name: str) -> Place | None:
    """Split a module's or parameter's name; None if it is in no decoder layer."""
    match = _PLACE.fullmatch(name)
    return Place(match[1], int(match[2]), match[3], match[4] or "") if match else None


def check_vllm_fields(config: Any) -> None:
    """Raise ``UnsupportedLayer`` for a field that one of vLLM's classes reads and Hugging Face's does not."""
    for name, neutral in _VLLM_FIELDS.items():
        if (value := read(config, name, neutral)) != neutral:
            raise UnsupportedLayer(f"vLLM reads {name}={value}, and Hugging Face does not", "fields_of_vllm")


def leaf(name: str) -> str:
    """Last part of a module's name."""
    return name.rpartition(".")[2]


def read_whole(config: Any, name: str, default: Any = None) -> Any:
    """Field of a Hugging Face configuration, object or mapping; ``default`` if absent or None."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


def read(config: Any, name: str, default: Any = None) -> Any:
    """The same of its decoder: the part ``text_config`` of a model with vision."""
    return read_whole(read_whole(config, "text_config", config), name, default)


def norm_eps(norm: Any) -> float:
    """eps of an RMS norm of either side, whose classes call it one or the other."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


class Shape(NamedTuple):
    """Output (n) and input features (k) of a projection, whole and per rank of the rollout."""

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
        kind: metrics and reports group by it.
        row_parallel: tensor parallelism splits its input (K), otherwise its output (N).
        experts: it is a parameter ``[E, N, K]`` of a mixture's experts, not a module.
        bf16: it is BF16 in every format; it has too few rows to quantize.
    """

    name: str
    pieces: tuple[str, ...]
    kind: str
    row_parallel: bool = False
    experts: bool = False
    bf16: bool = False


class Handoff(NamedTuple):
    """A norm, activation or gate whose result is quantized in its own kernel, for the FP8 layers that read it.

    Attributes:
        source: the norm or the gated attention, same name on both sides, or vLLM's activation.
        readers: the trainer's modules. vllm_reader: vLLM's module.
        routed: a BF16 layer, such as a router, reads the rows as well, so they go along.
    """

    source: str
    readers: tuple[str, ...]
    vllm_reader: str
    routed: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in a decoder layer's second half; names are relative to the layer.

    Attributes:
        block: router and experts, same name on both sides.
        router: its linear layer, not quantized, same name on both sides.
        module: the trainer's experts. gate_up, down: their parameters ``[E, 2 I, H]`` and ``[E, H, I]``.
        vllm_module: vLLM's module with the experts' parameters.
        parameters: the trainer's parameter -> vLLM's.
        each: gate, up and down of one expert in a published checkpoint, below ``<module>.<number>``.
        count: fields of the configuration, one of which is E: the published one, and transformers 5's.
        per_token, width, renormalize: fields with k, I, and whether a token's weights are renormalized; empty if they
            always are.
        scoring: from the router's logits to probabilities.
        shared_gate: linear layer of one output, not quantized, same name on both sides, whose sigmoid scales the shared
            expert; empty if there is none. Its projections are the family's gate, up and down.
        shared_width: field with the shared expert's width.
    """

    block: str = "mlp"
    router: str = "mlp.gate"
    module: str = "mlp.experts"
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    vllm_module: str = "mlp.experts.routed_experts"
    parameters: tuple[tuple[str, str], ...] = (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight"))
    each: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    per_token: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    renormalize: str = "norm_topk_prob"
    scoring: str = "softmax"
    shared_gate: str = ""
    shared_width: str = "shared_expert_intermediate_size"

    def renormalizes(self, router: Any) -> bool:
        """Whether a token's weights add up to 1, by the trainer's router."""
        return not self.renormalize or getattr(router, self.renormalize)

    def number(self, config: Any) -> int:
        """E of a Hugging Face configuration, object or mapping."""
        return next((count for name in self.count if (count := read(config, name)) is not None), 0)

    def check(self, config: Any) -> None:
        """Raise ``UnsupportedLayer`` for experts that the FP8 flow does not compute."""
        if (activation := read(config, "hidden_act", "silu")) != "silu":
            raise UnsupportedLayer(f"experts multiply by SiLU, and its activation is {activation}", "expert_activation")
        experts, per_token = self.number(config), read(config, self.per_token, 0)
        if not 1 <= per_token <= experts:
            raise UnsupportedLayer(f"{per_token} of {experts} experts a token make no mixture", "experts_a_token")


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net in a decoder layer's first half; names are relative to the layer.

    Attributes:
        block: the layer's first half, same name on both sides.
        qkv, z, b, a: the trainer's input projections. out: the output projection, same name on both sides.
        conv, norm: the convolution and the gated norm before ``out``, same names on both sides.
        a_log, dt_bias: parameters of the decay, same names on both sides.
        qkvz, ba: vLLM's merged input projections.
        key_heads, value_heads, key_dim, value_dim, width: fields of the configuration with numbers and features of its
            heads, and taps of the convolution.
    """

    block: str = "linear_attn"
    qkv: str = "linear_attn.in_proj_qkv"
    z: str = "linear_attn.in_proj_z"
    b: str = "linear_attn.in_proj_b"
    a: str = "linear_attn.in_proj_a"
    out: str = "linear_attn.out_proj"
    conv: str = "linear_attn.conv1d"
    norm: str = "linear_attn.norm"
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    qkvz: str = "linear_attn.in_proj_qkvz"
    ba: str = "linear_attn.in_proj_ba"
    key_heads: str = "linear_num_key_heads"
    value_heads: str = "linear_num_value_heads"
    key_dim: str = "linear_key_head_dim"
    value_dim: str = "linear_value_head_dim"
    width: str = "linear_conv_kernel_dim"

    def heads(self, config: Any) -> tuple[int, int]:
        """Number of key and of value heads of a Hugging Face configuration, object or mapping."""
        return read(config, self.key_heads), read(config, self.value_heads)

    def features(self, config: Any) -> tuple[int, int]:
        """Features of all keys (as many as of all queries), and of all values."""
        keys, values = self.heads(config)
        return keys * read(config, self.key_dim), values * read(config, self.value_dim)

    def state_bytes(self, config: Any) -> tuple[int, int]:
        """Bytes of a request in one layer, whatever its length: the FP32 state and the convolution's BF16 inputs, and
        what shared operations add to them, rows of the open chunk."""
        keys, values = self.features(config)
        matrices = 4 * read(config, self.key_dim) * values
        inputs = 2 * (read(config, self.width) - 1) * (2 * keys + values)
        return matrices + inputs, 4 * prod(state_shape(self.heads(config)[1])) - matrices


def page_tokens(state_bytes: float, token_bytes: float, multiple: int = 16) -> int:
    """Tokens of a page of vLLM's cache of a hybrid: a ``multiple``, whose keys and values take a state's bytes.

    ``token_bytes``: of a token's keys and values in one layer.
    """
    return multiple * ceil(state_bytes / token_bytes / multiple)


@dataclass(frozen=True)
class Family:
    """A decoder. Fields are names of modules; those of a layer are relative to it.

    If it has several kinds of layers, :meth:`kinds` gives the names of each, and its own members are of all kinds.

    Attributes:
        model_type: as in ``config.json``.
        layers, final_norm, embedding, head: the list of decoder layers and what is outside of it, names in the
            trainer's model. rotary_embedding: the same.
        rollout_prefixes: (beginning of a name in the trainer's model, in vLLM's) where they differ.
        tower: of a model with vision, the trainer's module that text does not use; stock and BF16 on both sides.
        attention: the layer's first half. mlp: the trainer's module with gate, up and down, which is the second half or
            a mixture's shared expert. input_norm, post_norm: the norms before the halves.
        q, k, v, o, gate, up, down: the trainer's projections. o and down have the same name in vLLM.
        gated: q has, per head, the queries and then as many gates of the attention's output.
        q_norm, k_norm: norms of the heads of queries and keys; empty if there are none.
        unit_offset: all of these norms multiply by 1 + weight.
        partial_rotary: transformers' class rotates the part of a head that the configuration says.
        stock_text: verl's own forward runs text.
        qkv, gate_up: vLLM's merged projections. rotary, core: its rotary embedding, attention.
        activation: vLLM's SiLU * up, and the trainer's SiLU under the same name.
        dropouts: dropout rates in the configuration; only the trainer reads them.
        experts: of a mixture, whose shared expert, if it has one, has gate, up and down.
        delta_net: of linear layers, instead of the attention.
    """

    model_type: str

    layers: str = "model.layers"
    final_norm: str = "model.norm"
    rotary_embedding: str = "model.rotary_emb"
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    rollout_prefixes: tuple[tuple[str, str], ...] = ()
    tower: str = ""

    attention: str = "self_attn"
    mlp: str = "mlp"
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
    gated: bool = False
    unit_offset: bool = False
    partial_rotary: bool = False
    stock_text: bool = True

    qkv: str = "self_attn.qkv_proj"
    gate_up: str = "mlp.gate_up_proj"
    activation: str = "mlp.act_fn"
    rotary: str = "self_attn.rotary_emb"
    core: str = "self_attn.attn"
    dropouts: tuple[str, ...] = ("attention_dropout",)
    experts: Experts | None = None
    delta_net: DeltaNet | None = None

    @cached_property
    def full_layer(self) -> "Family":
        """Names of a layer with attention."""
        return replace(self, delta_net=None)

    @cached_property
    def linear_layer(self) -> "Family":
        """Names of a layer with a delta net, which is its first half, ``attention``."""
        absent = dict.fromkeys(("q", "k", "v", "o", "q_norm", "k_norm", "qkv", "rotary", "core"), "")
        return replace(self, attention=self.delta_net.block, gated=False, **absent)

    @property
    def has_mlp(self) -> bool:
        """Whether a layer has gate, up and down."""
        return self.experts is None or bool(self.experts.shared_gate)

    @property
    def second_half(self) -> str:
        """A layer's module after ``post_norm``, same name on both sides."""
        return self.mlp if self.experts is None else self.experts.block

    @property
    def distinct_kinds(self) -> tuple["Family", ...]:
        """Names of each kind of layer."""
        return (self,) if self.delta_net is None else (self.full_layer, self.linear_layer)

    def kinds(self, config: Any) -> tuple["Family", ...]:
        """Names of each decoder layer of a configuration, in order."""
        if self.delta_net is None:
            return (self,) * read(config, "num_hidden_layers")
        kinds = {"linear_attention": self.linear_layer, "full_attention": self.full_layer}
        types = read(config, "layer_types")
        if types is None:
            every = read(config, "full_attention_interval", 4)
            layers = range(1, read(config, "num_hidden_layers") + 1)
            types = ["linear_attention" if number % every else "full_attention" for number in layers]
        return tuple(kinds[kind] for kind in types)

    def rollout_name(self, name: str) -> str:
        """vLLM's name of a module or parameter outside of the layers, or of a layer, from the trainer's."""
        for trainers, vllms in self.rollout_prefixes:
            if name.startswith(trainers):
                return vllms + name.removeprefix(trainers)
        return name

    def trainer_name(self, name: str) -> str:
        """Inverse of :meth:`rollout_name`."""
        for trainers, vllms in self.rollout_prefixes:
            if name.startswith(vllms):
                return trainers + name.removeprefix(vllms)
        return name

    @property
    def rollout_layers(self) -> str:
        """vLLM's name of the list of decoder layers."""
        return self.rollout_name(self.layers)

    def module(self, model: Any, name: str) -> Any:
        """A module of a model of either side, by the trainer's name."""
        try:
            return model.get_submodule(self.rollout_name(name))
        except AttributeError:
            return model.get_submodule(name)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """vLLM's linear layers of a decoder layer, in execution order."""
        first: tuple[Linear, ...] = ()
        if self.q:
            first += (
                Linear(self.qkv, (self.q, self.k, self.v), "qkv"),
                Linear(self.o, (self.o,), "o", row_parallel=True),
            )
        if (delta := self.delta_net) is not None:
            first += (
                Linear(delta.qkvz, (delta.qkv, delta.z), "qkvz"),
                Linear(delta.ba, (delta.b, delta.a), "ba", bf16=True),
                Linear(delta.out, (delta.out,), "out", row_parallel=True),
            )
        second, of = (), ""
        if (mixture := self.experts) is not None:
            second = (
                Linear(mixture.gate_up, (mixture.gate_up,), "gate_up", experts=True),
                Linear(mixture.down, (mixture.down,), "down", row_parallel=True, experts=True),
            )
            of = "shared_"
        if mixture is not None and mixture.shared_gate:
            second += (Linear(mixture.shared_gate, (mixture.shared_gate,), "shared_gate", bf16=True),)
        if self.has_mlp:
            second += (
                Linear(self.gate_up, (self.gate, self.up), f"{of}gate_up"),
                Linear(self.down, (self.down,), f"{of}down", row_parallel=True),
            )
        return first + second

    @property
    def pieces(self) -> dict[str, tuple[str, ...]]:
        """vLLM's linear -> the trainer's, in row order."""
        return {linear.name: linear.pieces for linear in self.linears}

    @property
    def projections(self) -> tuple[str, ...]:
        """The trainer's projections in the order of :attr:`linears`: q, k, v, o, gate, up, down."""
        return tuple(name for linear in self.linears for name in linear.pieces)

    @property
    def norms(self) -> tuple[str, ...]:
        """All norms of a decoder layer but a delta net's gated one."""
        return tuple(name for name in (self.input_norm, self.q_norm, self.k_norm, self.post_norm) if name)

    @property
    def parts(self) -> tuple[str, ...]:
        """The trainer's modules of a decoder layer that it runs or reads parameters of, halves before their parts."""
        delta, mixture = self.delta_net, self.experts
        first = (self.attention, self.q, self.k, self.v, self.o)
        if delta is not None:
            first += (delta.block, delta.qkv, delta.z, delta.b, delta.a, delta.conv, delta.norm, delta.out)
        second = (self.second_half,)
        if mixture is not None:
            second += (mixture.router, mixture.module, mixture.shared_gate)
        if self.has_mlp:
            second += (self.mlp, self.gate, self.up, self.down)
        return tuple(dict.fromkeys(name for name in (*first, *self.norms, *second) if name))

    @property
    def handoffs(self) -> tuple[Handoff, ...]:
        """What hands quantized results over in a decoder layer, in execution order."""
        first: tuple[Handoff, ...] = ()
        if self.q:
            first += (Handoff(self.input_norm, (self.q, self.k, self.v), self.qkv),)
        if self.gated:
            first += (Handoff(self.attention, (self.o,), self.o),)
        if (delta := self.delta_net) is not None:
            first += (
                Handoff(self.input_norm, (delta.qkv, delta.z), delta.qkvz, routed=True),
                Handoff(delta.norm, (delta.out,), delta.out),
            )
        readers, mixture = (self.gate, self.up) if self.has_mlp else (), self.experts
        if mixture is None:
            second = (Handoff(self.post_norm, readers, self.gate_up),)
        else:
            second = (Handoff(self.post_norm, (mixture.module, *readers), mixture.block, routed=True),)
        if self.has_mlp:
            second += (Handoff(self.activation, (self.down,), self.down),)
        return first + second

    @property
    def fed_by_norms(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(norm, the projections that are its only readers), for norms that are stock, and for invariant scaling."""
        fed: dict[str, tuple[str, ...]] = {}
        for at in self.handoffs:
            if at.source == self.input_norm or (at.source == self.post_norm and not at.routed):
                fed[at.source] = (*fed.get(at.source, ()), *at.readers)
        if self.delta_net is not None:
            fed[self.input_norm] += (self.delta_net.b, self.delta_net.a)
        return tuple(fed.items())

    def named_layers(self, model: Any) -> Iterator[tuple[Any, "Family"]]:
        """(Decoder layer, names of its modules) of a model of either side."""
        return zip(self.module(model, self.layers), self.kinds(model.config), strict=True)

    def shapes(self, config: Any, tp: int = 1) -> dict[str, Shape]:
        """The trainer's projection -> its shape, in the order of :attr:`linears`; of one expert for a mixture.

        Args:
            config: Hugging Face configuration, object or mapping.
            tp: tensor-parallel size of the rollout.
        """
        mixture = self.experts
        hidden = read(config, "hidden_size")
        heads = read(config, "num_attention_heads")
        kv_heads = read(config, "num_key_value_heads", heads)
        head_dim = self.head_dim(config)
        q, kv = heads * head_dim, kv_heads * head_dim
        whole = {self.q: (2 * q if self.gated else q, hidden), self.k: (kv, hidden), self.v: (kv, hidden)}
        whole |= {self.o: (hidden, q)}
        if (delta := self.delta_net) is not None:
            keys, values = delta.features(config)
            whole |= {delta.qkv: (2 * keys + values, hidden), delta.z: (values, hidden), delta.out: (hidden, values)}
            whole |= dict.fromkeys((delta.b, delta.a), (delta.heads(config)[1], hidden))
        if self.has_mlp:
            inner = read(config, "intermediate_size" if mixture is None else mixture.shared_width)
            whole |= {self.gate: (inner, hidden), self.up: (inner, hidden), self.down: (hidden, inner)}
        if mixture is not None:
            inner = read(config, mixture.width)
            whole |= {mixture.gate_up: (2 * inner, hidden), mixture.down: (hidden, inner)}
            whole |= {mixture.shared_gate: (1, hidden)}
        # vLLM replicates key/value heads when there are fewer of them than ranks.
        kv_shard = max(kv_heads // tp, 1) * head_dim
        shapes = {}
        for linear in self.linears:
            for name in linear.pieces:
                n, k = whole[name]
                if linear.row_parallel:
                    shapes[name] = Shape(n, k, n, k // tp)
                elif mixture is not None and name == mixture.shared_gate:  # whole on every rank
                    shapes[name] = Shape(n, k, n, k)
                else:
                    shapes[name] = Shape(n, k, kv_shard if name in (self.k, self.v) else n // tp, k)
        return shapes

    def head_dim(self, config: Any) -> int:
        """Features of one attention head."""
        return read(config, "head_dim", read(config, "hidden_size") // read(config, "num_attention_heads"))

    def rotary_dim(self, config: Any) -> int:
        """Rotated features of one attention head."""
        return int(self.head_dim(config) * read(config, "rope_parameters", {}).get("partial_rotary_factor", 1.0))

    def variant(self, config: Any) -> Variant:
        """What the contract check's probes need to know of a model."""
        return Variant(
            self.head_dim(config), self.rotary_dim(config), self.unit_offset, delta_net=self.delta_net is not None
        )

    def divides_heads(self, config: Any, ranks: int) -> bool:
        """Whether the heads divide over ``ranks`` of vLLM or Ulysses, which share key heads if there are fewer."""
        heads = read(config, "num_attention_heads")
        kv_heads = read(config, "num_key_value_heads", heads)
        delta = self.delta_net.heads(config) if self.delta_net is not None else ()
        return not any(count % ranks for count in (heads, *delta)) and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    def heads_of(self, config: Any) -> str:
        """The heads that have to be divided, for messages."""
        heads = read(config, "num_attention_heads")
        text = f"{heads} heads over {read(config, 'num_key_value_heads', heads)} key heads"
        if self.delta_net is None:
            return text
        keys, values = self.delta_net.heads(config)
        return f"{text} and its delta net's {values} heads over {keys} key heads"

    def check(self, config: Any) -> None:
        """Raise ``UnsupportedLayer`` if vLLM's class computes something else than Hugging Face's."""

    def has_varlen_kernel(self, config: Any) -> bool:
        """Whether FlashAttention has kernels for its heads."""
        return kernels.has_varlen_kernel(self.head_dim(config))

    def slides(self, config: Any) -> bool:
        """Whether a layer has sliding window attention."""
        layer_types = read(config, "layer_types", [])
        return "sliding_attention" in layer_types or (not layer_types and read(config, "sliding_window") is not None)

    def check_operations(self, config: Any) -> None:
        """Raise ``UnsupportedOperation`` unless the shared operations cover the trainer's configuration."""
        for uncovered in self.uncovered_operations(config):
            raise uncovered

    def uncovered_operations(self, config: Any) -> Iterator[UnsupportedOperation]:
        """What the shared operations do not cover of a configuration."""
        rope = read(config, "rope_parameters", {})
        kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
        width = self.rotary_dim(config)
        rotated = part == 1.0 or (self.partial_rotary and width & (width - 1) == 0)
        scores = read(config, "attn_logit_softcapping") or read(config, "final_logit_softcapping")
        for row, wrong, what in (
            ("head_dim", self.head_dim(config) not in kernels.HEAD_DIMS, f"heads of {self.head_dim(config)}"),
            ("partial_rotary", not rotated, f"partial_rotary_factor={part}"),
            ("rope_type", kind not in kernels.ROPE_TYPES, f"rope_type={kind}"),
            ("activation", read(config, "hidden_act") != "silu", f"the activation {read(config, 'hidden_act')}"),
            ("sliding_window", self.slides(config), "sliding window attention"),
            ("soft_cap", scores, "soft-capped scores or logits"),
            ("logit_scale", read(config, "logit_scale", 1.0) != 1.0, "scaled logits"),
            *((name, read(config, name, 0.0) != 0.0, name.replace("_", " ")) for name in self.dropouts),
        ):
            if wrong:
                yield UnsupportedOperation(f"the shared operations do not cover {what}", row)
        if (delta := self.delta_net) is not None:
            *heads, width = (read(config, name) for name in (delta.key_dim, delta.value_dim, delta.width))
            if [*heads, width] != [128, 128, 4]:
                what = f"a delta net with heads of {heads[0]} and {heads[1]} after a convolution of width {width}"
                yield UnsupportedOperation(f"the shared operations do not cover {what}", "delta_net_shape")
